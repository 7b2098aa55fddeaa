"""``jobqctl workers``: who works."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final

import click

from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, print_json, print_table
from jobq.cli.parsing import parse_length

if TYPE_CHECKING:
    from jobq._clients.client import Client
    from jobq._statements.stats import WorkerInfo
    from jobq.cli.output import Cell

_COLUMNS: Final = ("id", "name", "state", "version", "queues", "kinds", "running", "heartbeat", "started")


@click.command()
@click.option(
    "--ended-within",
    callback=parse_length,
    default="1h",
    show_default=True,
    metavar="TIME",
    help="Show those, too, that ended so recently: 10m, 2h, 7d.",
)
@JSON_OPTION
@with_client
def workers(client: Client, *, ended_within: timedelta, as_json: bool) -> None:
    """Show the worker processes that live, and those that ended a short while ago."""
    found = client.workers(ended_within=ended_within)
    if as_json:
        print_json(found)
        return
    print_table(_COLUMNS, [_row(worker) for worker in found], right=("id", "kinds", "running"), empty="none")


def _row(worker: WorkerInfo) -> list[Cell]:
    state = "live" if worker.is_live else worker.end_reason or "lease over"
    running = f"{'~' if worker.is_running_estimated else ''}{worker.running:,}"
    heartbeat = timedelta(seconds=worker.heartbeat_age_s)
    queues, kinds = ", ".join(worker.queues), len(worker.kinds)
    about: list[Cell] = [str(worker.id), worker.name, state, worker.version, queues, kinds]
    return [*about, running, heartbeat, worker.started_at]
