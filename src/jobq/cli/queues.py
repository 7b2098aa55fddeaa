"""``jobqctl pause``, ``resume`` and ``retention``: what holds for whole queues."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import click

from jobq._statements.filter import JobFilter
from jobq.cli.database import with_client
from jobq.cli.escapes import safe
from jobq.cli.output import JSON_OPTION, cell, print_json, print_table
from jobq.cli.parsing import parse_instant, parse_length

if TYPE_CHECKING:
    from jobq._clients.client import Client
    from jobq._statements.retention import Keep, Retention
    from jobq.cli.output import Cell

_REASON = click.option("--reason", default="", metavar="TEXT", help="Why, for people and for the log.")
_BY = click.option("--by", metavar="NAME", help="Who does it, for the log; default: user and host.")
_QUEUE = click.option("--queue", metavar="NAME", help="Which queue; or")
_NOW: Final = timedelta(0)
_KIND = click.option("--kind", metavar="NAME", help="which kind, whatever its queue.")
_LOOSE_WORDS: Final = {"allow_extra_args": True}  # refused by _check_target, which says what to write


@click.command(context_settings=_LOOSE_WORDS)
@_QUEUE
@_KIND
@click.option("--until", callback=parse_instant, metavar="TIME", help="End by itself then, in ISO 8601.")
@_REASON
@_BY
@with_client
def pause(
    client: Client,
    *,
    queue: str | None,
    kind: str | None,
    until: datetime | None,
    reason: str,
    by: str | None,
) -> None:
    """Have workers start no more jobs of a queue, or of a kind, within a second. What runs goes on."""
    _check_target(queue, kind)
    if until is not None and until <= datetime.now(UTC):
        raise click.BadParameter(f"{cell(until)} has passed", param_hint="--until")
    client.queues.pause(queue, kind=kind, reason=reason, by=by, until=until)
    ends = "it is resumed" if until is None else cell(until)
    click.echo(f"{_named(queue, kind)} is paused until {ends}")
    if not _is_known(client, queue, kind):
        what = "queue" if queue is not None else "kind"
        click.echo(f"note: no such {what} now has jobs or workers", err=True)


@click.command(context_settings=_LOOSE_WORDS)
@_QUEUE
@_KIND
@_REASON
@_BY
@with_client
def resume(client: Client, *, queue: str | None, kind: str | None, reason: str, by: str | None) -> None:
    """End a pause. Workers go on within a second."""
    _check_target(queue, kind)
    was_paused = client.queues.resume(queue, kind=kind, reason=reason, by=by)
    click.echo(f"{_named(queue, kind)} {'goes on' if was_paused else 'was not paused'}")


@click.command()
@JSON_OPTION
@with_client
def pauses(client: Client, *, as_json: bool) -> None:
    """Show what is paused: by whom, why, and until when."""
    found = client.queues.pauses()
    if as_json:
        print_json(found)
        return
    rows: list[list[Cell]] = [
        [held.scope, held.name, held.paused_at, held.until or "it is resumed", held.paused_by, held.reason]
        for held in found
    ]
    print_table(("what", "name", "since", "until", "by", "reason"), rows, empty="nothing is paused")


def parse_keep(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> timedelta | Keep | None:
    """Return a length of time, or ``keep``."""
    return "keep" if value == "keep" else parse_length(context, parameter, value)


_KEPT: Final = ("completed", "discarded", "cancelled")


@click.command()
@click.option("--queue", metavar="NAME", help="Set it for this queue alone.")
@click.option("--completed", callback=parse_keep, metavar="TIME", help="12h, 7d, or keep. Default: 24 hours.")
@click.option("--discarded", callback=parse_keep, metavar="TIME", help="The same. Default: 7 days.")
@click.option("--cancelled", callback=parse_keep, metavar="TIME", help="The same. Default: 7 days.")
@_REASON
@_BY
@JSON_OPTION
@with_client
def retention(
    client: Client, *, queue: str | None, reason: str, by: str | None, as_json: bool, **given: Any
) -> None:
    """Show how long finished jobs are kept; with options, set it.

    What is set takes the place of all that was said for that queue before; what is left out follows
    the setting for all queues, or the default. The table has what holds then.
    """
    if queue is not None or any(value is not None for value in given.values()):
        client.queues.set_retention(queue, reason=reason, by=by, **given)
    found = client.queues.retention()
    if as_json:
        print_json(found)
        return
    general, *own = found  # the first is for all queues, and says it for every state
    kept = [_kept(general, name) for name in _KEPT]
    rows: list[list[Cell]] = [["(all others)" if own else "(all queues)", *kept]]
    for row in own:
        said = zip(_KEPT, kept, strict=True)
        own_kept = (_kept(row, name) or f"{for_all}, as for all" for name, for_all in said)
        rows.append([row.queue, *own_kept])
    print_table(("queue", *_KEPT), rows, empty="")


def _kept(row: Retention, name: str) -> str:
    """Return how long a state's jobs are kept, "" where the row does not say."""
    value: timedelta | Keep | None = getattr(row, name)
    return "" if value is None else cell(value)


def _check_target(queue: str | None, kind: str | None) -> None:
    words = click.get_current_context().args
    if words:
        name = shlex.quote(words[0])
        raise click.UsageError(f"{words[0]!r}: of a queue or of a kind? Say --queue {name} or --kind {name}.")
    if (queue is None) == (kind is None):
        raise click.UsageError("give --queue or --kind, one of them.")


def _is_known(client: Client, queue: str | None, kind: str | None) -> bool:
    """Whether a job or a live worker has that queue, or kind; also where that would take long to find out."""
    if any(queue in worker.queues or kind in worker.kinds for worker in client.workers(ended_within=_NOW)):
        return True
    chosen = JobFilter(queues=[queue] if queue is not None else (), kinds=[kind] if kind is not None else ())
    page = client.list(chosen, limit=1)
    return bool(page.jobs) or page.next is not None


def _named(queue: str | None, kind: str | None) -> str:
    return f"queue {safe(queue)!r}" if queue is not None else f"kind {safe(kind or '')!r}"
