"""``jobqctl cancel``, ``retry``, ``delete``, ``move``, ``reschedule``: one job, some, or all that match."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jobq._errors import JobConflict, JobNotFound
from jobq._units import counted
from jobq.cli.choosing import filter_options, take_filter
from jobq.cli.common import EXIT_FAILED
from jobq.cli.database import with_client
from jobq.cli.escapes import safe
from jobq.cli.output import JSON_OPTION, console, print_json
from jobq.cli.parsing import parse_instant, parse_length

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._clients.client import Client
    from jobq._statements.bulk import Action, BulkResult
    from jobq._statements.filter import JobFilter

_DONE: Final = {
    "cancel": "cancelled",
    "retry": "made ready again",
    "delete": "deleted",
    "move": "moved",
    "reschedule": "rescheduled",
}
_CONFLICTS_SHOWN: Final = 10

_OPTIONS = (
    click.argument("ids", nargs=-1, type=int, metavar="[ID]..."),
    filter_options,
    click.option("--all", "every", is_flag=True, help="All to which it applies, where nothing else is said."),
    click.option("--reason", default="", metavar="TEXT", help="Why, for the operator log."),
    click.option("--by", metavar="NAME", help="Who does it, for the log; default: user and host."),
    click.option("--dry-run", is_flag=True, help="Only count what would be done."),
    click.option("--yes", is_flag=True, help="Do not ask before many jobs are changed."),
    JSON_OPTION,
    with_client,
)


def _steering(command: Callable[..., object]) -> Callable[..., object]:
    """Give a command its ids, its filter, and what all of these commands take."""
    made: Callable[..., Any] = command
    for option in reversed(_OPTIONS):
        made = option(made)
    return made


@click.command()
@_steering
def cancel(client: Client, **given: Any) -> None:
    """Cancel jobs: those that wait end at once, the handlers of those that run are told to stop.

    Give ids, or options that say which jobs, or both.
    """
    _act(client, "cancel", given, {})


@click.command()
@_steering
def retry(client: Client, **given: Any) -> None:
    """Make finished jobs ready again, their failures counted from 0.

    Completed ones only where --state completed, or an id, names them.
    """
    _act(client, "retry", given, {})


@click.command()
@_steering
def delete(client: Client, **given: Any) -> None:
    """Remove jobs that wait or have ended, with their arguments, results and errors.

    Those that run must be cancelled first.
    """
    _act(client, "delete", given, {})


@click.command()
@click.option("--to-queue", "queue", metavar="NAME", help="The queue to move them to.")
@click.option("--to-priority", "priority", type=int, metavar="-9..9", help="The priority to give them.")
@_steering
def move(client: Client, *, queue: str | None, priority: int | None, **given: Any) -> None:
    """Move jobs that wait to another queue, or give them another priority, or both."""
    if queue is None and priority is None:
        raise click.UsageError("where to? Give --to-queue, --to-priority, or both.")
    _act(client, "move", given, {"queue": queue, "priority": priority})


@click.command()
@click.option("--run-at", callback=parse_instant, metavar="TIME", help="When, in ISO 8601 with its zone.")
@click.option(
    "--delay", callback=parse_length, metavar="TIME", help="How long from now: 90s, 15m, 2h; 0: now."
)
@_steering
def reschedule(client: Client, *, run_at: object, delay: object, **given: Any) -> None:
    """Choose anew when jobs that wait become ready."""
    if (run_at is None) == (delay is None):
        raise click.UsageError("when? Give one of --run-at and --delay.")
    _act(client, "reschedule", given, {"run_at": run_at, "delay": delay})


def _act(client: Client, action: Action, given: dict[str, Any], how: dict[str, Any]) -> None:
    ids, every, dry_run = given.pop("ids"), given.pop("every"), given.pop("dry_run")
    is_sure, as_json = given.pop("yes"), given.pop("as_json")
    chosen = take_filter(given, ids)
    how |= given  # reason and by
    if chosen.is_empty:
        if not every:
            raise click.UsageError("which jobs? Give ids, options that choose them, or --all.")
        chosen = _all_of(action, chosen)
    if dry_run:
        _tell_count(client, action, chosen, as_json=as_json)
    elif ids and set(chosen.described()) == {"ids"}:
        _each(client, action, ids, how, as_json=as_json)
    else:
        _in_bulk(client, action, chosen, how, is_sure=is_sure, as_json=as_json)


def _all_of(action: Action, chosen: JobFilter) -> JobFilter:
    """Name the states of an action, for a filter that names nothing is refused."""
    waiting = ("ready", "scheduled")
    states = {
        "cancel": (*waiting, "running"),
        "retry": ("discarded", "cancelled"),
        "delete": (*waiting, "discarded", "cancelled", "completed"),
    }.get(action, waiting)
    return type(chosen)(states=states)


def _tell_count(client: Client, action: Action, chosen: JobFilter, *, as_json: bool) -> None:
    count = client.bulk.count(chosen, action=action, limit=None)
    if as_json:
        print_json({"action": action, "jobs": count.jobs, "dry_run": True})
    else:
        click.echo(f"{counted(count.jobs, 'job')} would be {_DONE[action]}")


def _each(
    client: Client, action: Action, ids: tuple[int, ...], how: dict[str, Any], *, as_json: bool
) -> None:
    """Do it job by job: what cannot be is told of each, and the others are done."""
    told: list[dict[str, object]] = []
    for job_id in ids:
        try:
            answer = getattr(client, action)(job_id, **how)
        except (JobNotFound, JobConflict) as error:
            told.append({"job": job_id, "done": False, "error": str(error)})
        else:
            told.append({"job": job_id, "done": True, "outcome": str(answer or _DONE[action])})
    if as_json:
        print_json(told)
    else:
        for entry in told:
            if entry["done"]:
                outcome = "asked to stop" if entry["outcome"] == "requested" else entry["outcome"]
                click.echo(f"job {entry['job']}: {outcome}")
            else:
                click.echo(f"jobqctl: {safe(str(entry['error']))}", err=True)
    if not all(entry["done"] for entry in told):
        sys.exit(EXIT_FAILED)


def _in_bulk(
    client: Client, action: Action, chosen: JobFilter, how: dict[str, Any], *, is_sure: bool, as_json: bool
) -> None:
    count = client.bulk.count(chosen, action=action, limit=None).jobs
    if not is_sure and count > 1:
        _confirm(f"{counted(count, 'job')} will be {_DONE[action]}")
    with _progress(count, what=action) as on_progress:
        result: BulkResult = getattr(client.bulk, action)(chosen, on_progress=on_progress, **how)
    if as_json:
        print_json(result)
    else:
        click.echo(_summary(action, result))
    for conflict in result.conflicting[:_CONFLICTS_SHOWN]:
        holder = "another job" if conflict.holder is None else f"job {conflict.holder}"
        click.echo(f"jobqctl: job {conflict.job_id}: {holder} holds its unique key", err=True)
    if result.conflicts:
        sys.exit(EXIT_FAILED)


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what}: add --yes where nobody can be asked (--dry-run only counts).")
    click.confirm(f"{what}. Go on?", abort=True, err=True)


def _summary(action: Action, result: BulkResult) -> str:
    said = [f"{counted(result.changed, 'job')} {_DONE[action]}"]
    if result.requested:
        said.append(f"{counted(result.requested, 'running one')} asked to stop")
    if result.conflicts:
        said.append(f"{result.conflicts:,} left alone, since their unique keys are held")
    return ", ".join(said)


@contextlib.contextmanager
def _progress(total: int, *, what: str) -> Any:
    """Show a bar on a terminal; yields what is called after each batch."""
    out = console(to_stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def on_progress(result: BulkResult) -> None:
            progress.update(task, completed=result.changed + result.requested + result.conflicts)

        yield on_progress
