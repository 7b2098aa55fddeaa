"""``jobqctl log``: who did what, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, document, print_json, print_table

if TYPE_CHECKING:
    from jobq._clients.client import Client
    from jobq.cli.output import Cell


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many entries."
)
@click.option("--before", type=int, metavar="ID", help="Only entries before this one.")
@JSON_OPTION
@with_client
def log(client: Client, *, limit: int, before: int | None, as_json: bool) -> None:
    """Show what operators did, the newest first: who, what, to what, to how many jobs, and why."""
    found = client.operator_log(limit=limit, before=before)
    if as_json:
        print_json(found)
        return
    rows: list[list[Cell]] = [
        [
            str(entry.id),
            entry.at,
            entry.actor,
            entry.action,
            document(entry.target),
            entry.jobs,
            entry.reason,
        ]
        for entry in found
    ]
    columns = ("id", "at", "who", "what", "to what", "jobs", "why")
    print_table(columns, rows, right=("id", "jobs"), empty="nobody has done anything")
