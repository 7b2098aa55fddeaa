"""``jobqctl stats``: the queues at a glance."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import click
from rich.live import Live

from jobq._units import duration
from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, cell, console, make_table, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._clients.client import Client
    from jobq._statements.stats import QueueStats
    from jobq.cli.output import Cell

_COUNTS: Final = (
    ("ready", "ready"),
    ("scheduled", "scheduled"),
    ("running", "running"),
    ("completed", "completed"),
    ("discarded", "discarded"),
    ("cancelled", "cancelled"),
    ("done/h", "completed_last_hour"),
    ("lost/h", "discarded_last_hour"),
)
_COLUMNS: Final = ("queue", "lag", *(name for name, _ in _COUNTS), "workers", "remarks")
_RIGHT: Final = ("lag", *(name for name, _ in _COUNTS), "workers")


@click.command()
@click.option("--watch", is_flag=True, help="Show it anew again and again, until Ctrl-C.")
@click.option(
    "--every",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@JSON_OPTION
@with_client
def stats(client: Client, *, watch: bool, every: float, as_json: bool) -> None:
    """Show each queue: its lag, its jobs in each state, what ended within the last hour.

    The lag is how long the oldest ready job has been ready. A ~ marks an estimate, where exact counts
    would read too much.
    """
    if not watch:
        _show_once(client, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not console().is_terminal:
            while True:
                _show_once(client, as_json=as_json)
                time.sleep(every)
        _watch(client, every)


def _show_once(client: Client, *, as_json: bool) -> None:
    found = client.queue_stats()
    if as_json:
        print_json(found)
    else:
        print_table(_COLUMNS, _rows(found), right=_RIGHT, empty="no queue has jobs, workers or a pause")


def _watch(client: Client, every_s: float) -> None:
    with Live(console=console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(make_table(_COLUMNS, _rows(client.queue_stats()), right=_RIGHT), refresh=True)
            time.sleep(every_s)


def _rows(found: Sequence[QueueStats]) -> list[list[Cell]]:
    return [
        [
            queue.queue,
            _marked(queue, "lag_s", duration(queue.lag_s) if queue.lag_s else ""),
            *(_marked(queue, field, f"{getattr(queue, field):,}") for _, field in _COUNTS),
            queue.workers,
            _remarks(queue),
        ]
        for queue in found
    ]


def _marked(queue: QueueStats, field: str, text: str) -> str:
    return f"~{text}" if text and field in queue.estimated else text


def _remarks(queue: QueueStats) -> str:
    said: list[str] = []
    if queue.paused:
        until = f" until {cell(queue.paused_until)}" if queue.paused_until else ""
        why = f": {queue.pause_reason}" if queue.pause_reason else ""
        said.append(f"paused{until}{why}")
    if queue.unknown_kinds:
        said.append(f"{queue.unknown_kinds:,} of unknown kinds")
    if queue.ready and not queue.workers:
        said.append("no worker")
    return ", ".join(said)
