"""The job that code is running for, so that its log lines can say so.

It is a context variable: a handler's own lines have it, those of what it calls and awaits, and those of
the tasks and threads that take its context along. Nothing global is replaced: an application attaches
the filter to the log handlers where it wants the fields, and `jobqctl worker` does.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from jobq._types import Job

FIELDS: Final = ("job_id", "kind", "queue", "attempt", "worker")
"""What log records about a job carry as ``extra``; ``worker`` is the worker's id."""

_current: ContextVar[Job | None] = ContextVar("jobq_current_job", default=None)


def current_job() -> Job | None:
    """Return the job whose handler is running here, ``None`` outside of one."""
    return _current.get()


set_current_job: Final = _current.set


def fields_of(job: Job) -> dict[str, Any]:
    """Return a job's fields for the ``extra`` of a log line."""
    return {
        "job_id": job.id,
        "kind": job.kind,
        "queue": job.queue,
        "attempt": job.attempt,
        "worker": job.worker_id,
    }


class JobContextFilter(logging.Filter):
    """Adds the running job's fields to each record: ``job_id, kind, queue, attempt, worker``.

    For a log handler, not for a logger, whose children would not have it::

        handler = logging.StreamHandler()
        handler.addFilter(jobq.JobContextFilter())

    Records that name a job themselves, as jobq's own do, keep what they have. Nothing is filtered out.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields, if a job runs here and the record names none."""
        job = _current.get()
        if job is not None and "job_id" not in record.__dict__:
            record.__dict__.update(fields_of(job))
        return True
