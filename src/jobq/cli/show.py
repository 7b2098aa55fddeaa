"""``jobqctl show``: all that is known about one job."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import click
from rich.text import Text

from jobq._statements.operator_log import MAX_LISTED
from jobq._units import counted, duration
from jobq.cli.database import with_client
from jobq.cli.escapes import safe
from jobq.cli.log import as_documents, told
from jobq.cli.output import JSON_OPTION, SECRETS_OPTION, cell, console, document, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from rich.console import Console

    from jobq._clients.client import Client
    from jobq._statements.operator_log import OperatorAction
    from jobq._types import AttemptError, JobInfo

_NAME_WIDTH: Final = 14
_WORKERS_KNOWN: Final = timedelta(days=7)


@click.command()
@click.argument("job_id", metavar="ID", type=int)
@click.option("--traceback/--no-traceback", default=True, help="Show tracebacks of the errors.")
@SECRETS_OPTION
@JSON_OPTION
@with_client
def show(client: Client, job_id: int, *, traceback: bool, show_secrets: bool, as_json: bool) -> None:
    """Show one job: what it is, where it is and why, its arguments, its history with every error kept."""
    info, errors = client.get(job_id), client.errors(job_id)
    actions = client.operator_log(limit=MAX_LISTED, job_id=job_id)
    if not show_secrets:
        redactions = client.redaction.load()
        info, errors = redactions.job(info), redactions.errors(info, errors)
    if as_json:
        print_json({"job": info, "errors": errors, "actions": as_documents(actions)})
        return
    out = console()
    out.print(Text(f"job {info.id}  {safe(info.kind)}", style="bold"))
    worker = _worker(client, info)
    for name, value in _facts(info, worker):
        out.print(Text(f"  {name:<{_NAME_WIDTH}} {value}"), soft_wrap=True)
    _print_block(out, "arguments", document(info.args, indent=2))
    if info.result is not None:
        _print_block(out, "result", document(info.result, indent=2))
    out.print("timeline")
    for event in sorted([*_operated(actions), *_timeline(info, errors, worker)], key=lambda event: event.at):
        out.print(Text(f"  {cell(event.at) if event.is_dated else '':<20}  {event.what}"), soft_wrap=True)
    _print_errors(out, errors, with_traceback=traceback)


def _worker(client: Client, info: JobInfo) -> str:
    """Return who runs it, or ran it last: the name where it is still known, and the id."""
    if info.worker_id is None:
        return ""
    known = client.workers(ended_within=_WORKERS_KNOWN)
    names = [worker.name for worker in known if worker.id == info.worker_id]
    return f"{safe(names[0])} (id {info.worker_id})" if names else f"worker {info.worker_id}"


def _facts(info: JobInfo, worker: str) -> Iterator[tuple[str, str]]:
    reason = f" ({safe(info.reason)})" if info.reason and info.reason != info.state.value else ""
    yield "state", f"{info.state.value}{reason}"
    yield "queue", f"{safe(info.queue)}, priority {info.priority}"
    limit = "no time limit" if info.timeout_s is None else f"{duration(info.timeout_s)} each"
    yield "attempts", f"{info.attempt} started, {info.failures} of {info.max_attempts} failed, {limit}"
    if info.crashes:
        yield "crashes", f"{counted(info.crashes, 'worker')} died with it"
    if info.unique_key:
        yield "unique key", safe(info.unique_key)
    if info.tags:
        yield "tags", ", ".join(map(safe, info.tags))
    if info.meta:
        yield "meta", safe(document(info.meta))
    if info.expires_at:
        yield "expires", cell(info.expires_at)
    if worker:
        yield "worker", worker


class _Event(NamedTuple):
    """One line of a timeline; ``is_dated``: whether ``at`` is when it was, and not only its place."""

    at: datetime
    what: str
    is_dated: bool = True


def _timeline(info: JobInfo, errors: Sequence[AttemptError], worker: str) -> list[_Event]:
    events = [_Event(info.created_at, "enqueued")]
    if errors and errors[-1].omitted:
        what = f"{counted(errors[-1].omitted, 'older error')} not kept"
        events.append(_Event(_began(errors[0]), what, is_dated=False))
    events += _silent(info, errors)
    for error in errors:
        if error.started_at is not None:
            events.append(
                _Event(error.started_at, f"attempt {error.attempt} started on {safe(error.worker)}")
            )
        what = f"attempt {error.attempt} {error.outcome}: {safe(error.type)}: {safe(error.message[:100])}"
        events.append(_Event(error.ended_at, what))
    if info.run_at is not None:
        events.append(_Event(info.run_at, "ready" if info.state.value == "ready" else "will be ready"))
    if info.claimed_at is not None and not any(error.attempt == info.attempt for error in errors):
        events.append(_Event(info.claimed_at, f"attempt {info.attempt} started on {worker}"))
    if info.finished_at is not None:
        events.append(_Event(info.finished_at, info.state.value))
    return events


def _operated(actions: Sequence[OperatorAction]) -> Iterator[_Event]:
    """Yield what operators did to this one job; what they did to many at once names none of them."""
    for action in reversed(actions):
        details = told({name: value for name, value in action.target.items() if name != "job"})
        what = " ".join(filter(None, (f"{action.action} by {action.actor}", details and f"({details})")))
        yield _Event(action.at, safe(what + (f": {action.reason}" if action.reason else "")))


def _silent(info: JobInfo, errors: Sequence[AttemptError]) -> Iterator[_Event]:
    """Yield a line for the attempts of which nothing is known but their number, before what came next."""
    known = {error.attempt: _began(error) for error in errors}
    if info.claimed_at is not None:
        known.setdefault(info.attempt, info.claimed_at)
    known.setdefault(info.attempt + 1, info.run_at or info.finished_at or info.created_at)
    before = 0
    for attempt, at in sorted(known.items()):
        first, last, before = before + 1, attempt - 1, attempt
        if first > last:
            continue
        which = f"attempt {first}" if first == last else f"attempts {first} to {last}"
        lost = errors and errors[-1].omitted and first == 1
        why = "none that is kept" if lost else "snoozed, put back or handed back"
        yield _Event(at, f"{which} left no error: {why}", is_dated=False)


def _began(error: AttemptError) -> datetime:
    return error.started_at or error.ended_at


def _print_errors(out: Console, errors: Sequence[AttemptError], *, with_traceback: bool) -> None:
    """Print errors; of equal tracebacks the first."""
    shown: dict[str, int] = {}
    for error in errors:
        title = f"attempt {error.attempt}: {error.outcome}: {safe(error.type)}"
        out.print(Text(title, style="bold"), soft_wrap=True)
        out.print(Text(_indented(safe(error.message, keep_lines=True))), soft_wrap=True)
        if not with_traceback or not error.traceback:
            continue
        first = shown.setdefault(error.traceback, error.attempt)
        if first == error.attempt:
            out.print(Text(_indented(safe(error.traceback, keep_lines=True))), soft_wrap=True)
        else:
            out.print(f"  (the same traceback as attempt {first})")


def _print_block(out: Console, title: str, text: str) -> None:
    out.print(title)
    out.print(Text(_indented(safe(text, keep_lines=True))), soft_wrap=True)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip("\n").split("\n"))
