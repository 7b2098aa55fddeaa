"""``jobqctl log``: who did what, and why."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import click

from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, document, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from jobq._clients.client import Client
    from jobq._statements.operator_log import OperatorAction
    from jobq.cli.output import Cell


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="How many entries."
)
@click.option("--before", type=int, metavar="ID", help="Only entries before this one.")
@click.option("--job", "job_id", type=int, metavar="ID", help="Only what was done to this one job.")
@JSON_OPTION
@with_client
def log(client: Client, *, limit: int, before: int | None, job_id: int | None, as_json: bool) -> None:
    """Show what operators did, the newest first: who, what, to what, to how many jobs, and why."""
    found = client.operator_log(limit=limit, before=before, job_id=job_id)
    if as_json:
        print_json(as_documents(found))
        return
    rows: list[list[Cell]] = [
        [
            str(entry.id),
            entry.at,
            entry.actor,
            entry.action,
            told(entry.target),
            entry.jobs,
            entry.reason,
        ]
        for entry in found
    ]
    columns = ("id", "at", "who", "what", "to what", "jobs", "why")
    print_table(columns, rows, right=("id", "jobs"), empty="nobody has done anything")


def as_documents(entries: Sequence[OperatorAction]) -> list[OperatorAction]:
    """Return entries as they are written in JSON: the ids of workers as texts."""
    return [dataclasses.replace(entry, target=_with_text_ids(entry.target)) for entry in entries]


def told(target: Mapping[str, object]) -> str:
    """Write a target as people read it: ``kinds=report, states=discarded``, without what was not said."""
    return ", ".join(f"{name}={_value(value)}" for name, value in _said(target))


def _said(target: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in target.items():
        if isinstance(value, dict):
            yield from _said(cast("dict[str, object]", value))
        elif value is not None:
            yield name, value


def _value(value: object) -> str:
    if isinstance(value, list):
        return "|".join(map(_value, cast("list[object]", value)))
    return value if isinstance(value, str) else document(value)


def _with_text_ids(target: Mapping[str, object]) -> dict[str, object]:
    """Write the id of a worker as a text, as everywhere in JSON."""
    return {
        name: _with_text_ids(cast("dict[str, object]", value))
        if isinstance(value, dict)
        else str(value)
        if name == "worker"
        else value
        for name, value in target.items()
    }
