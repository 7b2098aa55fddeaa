"""What a worker's process writes to standard error, and in which form."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal, TypeAlias

from jobq._logging import JobContextFilter
from jobq.cli.escapes import safe

LogFormat: TypeAlias = Literal["text", "json"]
LOG_FORMATS: Final = ("text", "json")

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s[%(process)d] %(message)s"
_NEXT_LINE: Final = "\n    "
# The stable names of the JSON form, and what they are called in a log record.
_JSON: Final = {"levelname": "level", "name": "logger", "message": "message", "process": "process"}


class _Text(logging.Formatter):
    """Lines for people. jobq's own name the job that they are about; a handler's get it behind.

    An error's message may quote what a stranger sent: it can neither look like a line of ours, for what
    follows the first line is indented, nor steer the terminal that shows it.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record), keep_lines=True).replace("\n", _NEXT_LINE)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        line = super().formatMessage(record)
        job: dict[str, Any] = record.__dict__
        if "job_id" not in job or record.name.startswith("jobq."):
            return line
        return f"{line} [job {job['job_id']} {job.get('kind')} attempt {job.get('attempt')}]"


def make_handler(log_format: LogFormat) -> logging.Handler:
    """Return a handler that writes to standard error, with the running job's fields.

    Raises:
        ImportError: JSON was asked for, and python-json-logger is not installed.
    """
    handler = logging.StreamHandler()
    handler.addFilter(JobContextFilter())
    handler.setFormatter(_Text() if log_format == "text" else _json_formatter())
    return handler


def _json_formatter() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415 - only when it is asked for

    class Lines(JsonFormatter):
        def add_fields(
            self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
        ) -> None:
            log_data["timestamp"] = datetime.fromtimestamp(record.created, UTC).isoformat(
                timespec="milliseconds"
            )
            super().add_fields(log_data, record, message_dict)
            if "job_id" in log_data and isinstance(log_data.get("worker"), int):
                log_data["worker"] = str(log_data["worker"])  # of 62 bits: JavaScript would round it

    return Lines(
        " ".join(f"%({name})s" for name in _JSON),
        rename_fields={**_JSON, "exc_info": "exception", "stack_info": "stack"},
    )
