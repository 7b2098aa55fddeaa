"""``jobqctl periodic``: schedules, seen and steered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from jobq._units import duration
from jobq.cli.database import with_client
from jobq.cli.escapes import safe
from jobq.cli.output import JSON_OPTION, SECRETS_OPTION, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._clients.client import Client
    from jobq._statements.periodic_operate import PeriodicInfo
    from jobq.cli.output import Cell


@click.group()
def periodic() -> None:
    """Look at schedules, pause them, resume them, or make a job of one now."""


@periodic.command(name="list")
@SECRETS_OPTION
@JSON_OPTION
@with_client
def list_(client: Client, *, show_secrets: bool, as_json: bool) -> None:
    """Show the schedules: when each ticks, and why one does not."""
    found = client.periodic.list()
    if not show_secrets:
        found = list(map(client.redaction.load().schedule, found))
    if as_json:
        print_json(found)
        return
    columns = ("name", "kind", "when", "next", "last", "last job", "remarks")
    print_table(columns, [_row(schedule) for schedule in found], right=("last job",), empty="no schedules")


def _row(schedule: PeriodicInfo) -> list[Cell]:
    if schedule.every is not None:
        when = f"every {duration(schedule.every.total_seconds())}"
    else:
        when = f"{schedule.cron} ({schedule.tz})"
    last_job = None if schedule.last_job_id is None else str(schedule.last_job_id)
    about: list[Cell] = [schedule.name, schedule.kind, when, schedule.next_at, schedule.last_at, last_job]
    return [*about, _remarks(schedule)]


def _remarks(schedule: PeriodicInfo) -> str:
    said: list[str] = []
    if schedule.paused_at is not None:
        why = f": {schedule.pause_reason}" if schedule.pause_reason else ""
        said.append(f"paused by {schedule.paused_by}{why}")
    if not schedule.active:
        said.append("no live worker declares it")
    if schedule.problem:
        said.append(schedule.problem)
    if schedule.dynamic:
        said.append("added by a client")
    return ", ".join(said)


def _steering(command: Callable[..., object]) -> Callable[..., object]:
    made: Callable[..., Any] = with_client(command)
    made = click.option("--by", metavar="NAME", help="Who does it; default: user and host.")(made)
    made = click.option("--reason", default="", metavar="TEXT", help="Why, for the log.")(made)
    return click.argument("name")(made)


@periodic.command()
@_steering
def pause(client: Client, name: str, *, reason: str, by: str | None) -> None:
    """Let the schedule NAME make no jobs until it is resumed."""
    client.periodic.pause(name, reason=reason, by=by)
    click.echo(f"{safe(name)} is paused")


@periodic.command()
@_steering
def resume(client: Client, name: str, *, reason: str, by: str | None) -> None:
    """Let the schedule NAME tick again. What was missed meanwhile is not made up for."""
    client.periodic.resume(name, reason=reason, by=by)
    click.echo(f"{safe(name)} ticks again")


@periodic.command()
@_steering
def remove(client: Client, name: str, *, reason: str, by: str | None) -> None:
    """Remove the schedule NAME, unless live workers declare it. Its jobs stay."""
    client.periodic.remove(name, reason=reason, by=by)
    click.echo(f"{safe(name)} is removed")


@periodic.command()
@JSON_OPTION
@_steering
def trigger(client: Client, name: str, *, reason: str, by: str | None, as_json: bool) -> None:
    """Make a job of the schedule NAME now, beside its ticks."""
    made = client.periodic.trigger(name, reason=reason, by=by)
    if as_json:
        print_json(made)
    elif made.inserted:
        click.echo(f"job {made.id}")
    else:
        click.echo(f"job {made.id} holds its unique key: none was made")
