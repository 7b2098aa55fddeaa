"""``jobqctl worker``: run an application's workers under a supervisor."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import click

from jobq._errors import ConfigError
from jobq._sessions import SyncSession
from jobq._statements.schema import check_schema, validate_schema_name
from jobq._supervisor.supervisor import Supervisor
from jobq._worker.config import DEFAULT_SLOTS
from jobq.cli.application import split_application
from jobq.cli.common import DSN_OPTION, SCHEMA_OPTION, explain_errors, require_dsn
from jobq.cli.logs import LOG_FORMATS, LogFormat
from jobq.cli.settings import ProcessSettings

_LEVELS: Final = ("debug", "info", "warning", "error")
_MOST_PROCESSES: Final = 256
_LAST_PORT: Final = 65_535
_SETTING: Final = re.compile(r"^WorkerConfig\.(\w+)")
_MOST_DIGITS: Final = 6  # of a number of slots; how many there may be is the worker's to say


class _Seconds(click.FloatRange):
    """A length of time; NaN, which no comparison refuses, is refused by name."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = float(super().convert(value, param, ctx))
        if seconds != seconds:  # noqa: PLR0124 - only NaN is unlike itself
            self.fail("nan is no length of time", param, ctx)
        return seconds


_SECONDS: Final = _Seconds(0, 10_000_000)


def parse_queues(
    _context: click.Context, _option: click.Parameter, values: tuple[str, ...]
) -> dict[str, int]:
    """Return the slots of each queue; a name alone has the default number."""
    queues: dict[str, int] = {}
    for value in values:
        queue, equals, slots = value.rpartition("=")
        if not equals:
            queue, slots = value, str(DEFAULT_SLOTS)
        if not (queue and slots.isdecimal() and len(slots) <= _MOST_DIGITS):
            raise click.BadParameter(f"{value!r}: write NAME=SLOTS, such as default=20")
        if queue in queues:
            raise click.BadParameter(f"queue {queue!r} is given twice")
        queues[queue] = int(slots)
    return queues


def parse_address(
    _context: click.Context, _option: click.Parameter, value: str | None
) -> tuple[str, int] | None:
    """Return where to listen: a port alone is for all addresses."""
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= _LAST_PORT):
        raise click.BadParameter(f"{value!r}: write [HOST:]PORT, such as 9000 or 127.0.0.1:9000")
    return host.strip("[]") or "0.0.0.0", int(port)  # noqa: S104 - probes come from outside


@click.command()
@click.argument("application", metavar="MODULE:ATTRIBUTE")
@DSN_OPTION
@SCHEMA_OPTION
@click.option(
    "--queue",
    "queues",
    multiple=True,
    default=[f"default={DEFAULT_SLOTS}"],
    callback=parse_queues,
    show_default=True,
    metavar="NAME=SLOTS",
    help="A queue, and how many of its jobs run at once in each process:"
    f" {DEFAULT_SLOTS} for a NAME alone; may be repeated.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, _MOST_PROCESSES),
    default=1,
    show_default=True,
    help="How many worker processes; one uses one CPU core.",
)
@click.option(
    "--lease",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="Without a heartbeat for so long: dead.",
)
@click.option(
    "--heartbeat",
    type=_SECONDS,
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="At most a third of the lease.",
)
@click.option(
    "--grace",
    type=_SECONDS,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="For running handlers, at a stop.",
)
@click.option(
    "--crash-limit",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="A job whose process died with it so often is discarded.",
)
@click.option(
    "--log-level",
    type=click.Choice(_LEVELS),
    default="info",
    show_default=True,
    help="What goes to standard error.",
)
@click.option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default="text",
    show_default=True,
    help="Lines for people, or one JSON object each.",
)
@click.option(
    "--http",
    callback=parse_address,
    metavar="[HOST:]PORT",
    help="Serve /livez, /readyz and /metrics there; the second process on the next port, and so on.",
)
@explain_errors
def worker(
    application: str,
    dsn: str | None,
    schema: str,
    queues: dict[str, int],
    processes: int,
    lease: float,
    heartbeat: float,
    grace: float,
    crash_limit: int,
    log_level: str,
    log_format: LogFormat,
    http: tuple[str, int] | None,
) -> None:
    """Run the jobs of MODULE:ATTRIBUTE, a jobq.Jobs, until SIGTERM or Ctrl-C.

    Then handlers get the grace to end, and the whole stop takes at most 5 seconds more. A second signal
    ends it at once. Processes that die are started again. Exit codes: 0 stopped, and every job recorded or
    handed back, also where handlers would not stop; 1 failed; 2 the application, an option or a setting
    cannot work; 128 plus the signal's number after a second signal.
    """
    split_application(application)
    settings = ProcessSettings(
        application=application,
        dsn=require_dsn(dsn),
        schema=validate_schema_name(schema),
        queues=queues,
        lease_s=lease,
        heartbeat_s=heartbeat,
        grace_s=grace,
        crash_limit=crash_limit,
        log_level=log_level,
        log_format=log_format,
        http_host=http[0] if http else "",
        http_port=http[1] if http else None,
    )
    if http is not None and http[1] + processes - 1 > _LAST_PORT:
        raise click.UsageError(f"--http: {processes} processes need as many ports from {http[1]} on")
    _check(settings)
    check_database(settings.dsn, schema)
    settings.configure_logging()
    supervisor = Supervisor(
        [sys.executable, "-m", "jobq.cli.process"],
        [settings.of_process(number).to_line() for number in range(processes)],
        grace_s=grace,
        conninfo=settings.dsn,
        schema=schema,
        crash_limit=crash_limit,
    )
    sys.exit(supervisor.run())


def _check(settings: ProcessSettings) -> None:
    """Make sure that a worker could be configured so; what cannot work is named as it was given."""
    try:
        settings.worker_config()
    except ConfigError as error:
        told = _SETTING.sub(lambda match: f"--{match[1].replace('queues', 'queue')}", str(error))
        raise ConfigError(told) from error


def check_database(dsn: str, schema: str) -> None:
    """Make sure that workers could start.

    Raises:
        Error: no database, no schema, or one that this code cannot serve.
    """
    session = SyncSession.open(dsn, schema=schema, name="jobqctl")
    try:
        session.run(check_schema(schema))
    finally:
        session.close()
