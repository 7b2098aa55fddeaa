"""The program: its commands, one module for each or for a few that belong together."""

from __future__ import annotations

from typing import Final

import click

from jobq import __version__
from jobq.cli.bench import bench
from jobq.cli.completion import completion
from jobq.cli.demo import demo
from jobq.cli.doctor import doctor
from jobq.cli.enqueue import enqueue
from jobq.cli.listing import list_
from jobq.cli.log import log
from jobq.cli.migrate import migrate
from jobq.cli.periodic import periodic
from jobq.cli.queues import pause, pauses, resume, retention
from jobq.cli.redacting import redact
from jobq.cli.show import show
from jobq.cli.stats import stats
from jobq.cli.steering import cancel, delete, move, reschedule, retry
from jobq.cli.worker import worker
from jobq.cli.workers import workers

_COMMANDS: Final = (
    bench, cancel, completion, delete, demo, doctor, enqueue, list_, log, migrate, move, pause, pauses,
    periodic, redact, reschedule, resume, retention, retry, show, stats, worker, workers,
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="jobqctl")
def app() -> None:
    """Background jobs in PostgreSQL: run workers, look at queues, and steer them.

    Exit codes: 0 fine, 1 failed or something is wrong, 2 wrong usage, 3 migrations are pending
    (migrate --check).
    """


for _command in _COMMANDS:
    app.add_command(_command)
