"""``jobqctl show``: all that is known about one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from rich.text import Text

from jobq._units import duration
from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, cell, console, document, print_json, safe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from rich.console import Console

    from jobq._clients.client import Client
    from jobq._types import AttemptError, JobInfo

_NAME_WIDTH: Final = 14


@click.command()
@click.argument("job_id", metavar="ID", type=int)
@click.option("--traceback/--no-traceback", default=True, help="Show tracebacks of the errors.")
@JSON_OPTION
@with_client
def show(client: Client, job_id: int, *, traceback: bool, as_json: bool) -> None:
    """Show one job: what it is, where it is and why, its arguments, its history with every error kept."""
    info, errors = client.get(job_id), client.errors(job_id)
    if as_json:
        print_json({"job": info, "errors": errors})
        return
    out = console()
    out.print(Text(f"job {info.id}  {safe(info.kind)}", style="bold"))
    for name, value in _facts(info):
        out.print(Text(f"  {name:<{_NAME_WIDTH}} {value}"), soft_wrap=True)
    _print_block(out, "arguments", document(info.args, indent=2))
    if info.result is not None:
        _print_block(out, "result", document(info.result, indent=2))
    out.print("timeline")
    for moment, what in _timeline(info, errors):
        out.print(Text(f"  {cell(moment)}  {what}"), soft_wrap=True)
    for error in errors:
        _print_error(out, error, with_traceback=traceback)


def _facts(info: JobInfo) -> Iterator[tuple[str, str]]:
    reason = f" ({safe(info.reason)})" if info.reason else ""
    yield "state", f"{info.state.value}{reason}"
    yield "queue", f"{safe(info.queue)}, priority {info.priority}"
    limit = "no time limit" if info.timeout_s is None else f"{duration(info.timeout_s)} each"
    yield "attempts", f"{info.attempt} started, {info.failures} of {info.max_attempts} failed, {limit}"
    if info.crashes:
        yield "crashes", f"{info.crashes} workers died with it"
    if info.unique_key:
        yield "unique key", safe(info.unique_key)
    if info.tags:
        yield "tags", ", ".join(map(safe, info.tags))
    if info.meta:
        yield "meta", safe(document(info.meta))
    if info.expires_at:
        yield "expires", cell(info.expires_at)
    if info.worker_id:
        yield "worker", str(info.worker_id)


def _timeline(info: JobInfo, errors: Sequence[AttemptError]) -> list[tuple[datetime, str]]:
    events = [(info.created_at, "enqueued")]
    if errors and errors[-1].omitted:
        events.append((errors[0].ended_at, f"{errors[-1].omitted:,} older errors are not kept"))
    for error in errors:
        if error.started_at is not None:
            events.append((error.started_at, f"attempt {error.attempt} started on {safe(error.worker)}"))
        what = f"attempt {error.attempt} {error.outcome}: {safe(error.type)}: {safe(error.message[:100])}"
        events.append((error.ended_at, what))
    if info.run_at is not None:
        events.append((info.run_at, "ready" if info.state.value == "ready" else "will be ready"))
    if info.claimed_at is not None and not any(error.attempt == info.attempt for error in errors):
        events.append((info.claimed_at, f"attempt {info.attempt} claimed"))
    if info.finished_at is not None:
        events.append((info.finished_at, info.state.value))
    return sorted(events, key=lambda event: event[0])


def _print_error(out: Console, error: AttemptError, *, with_traceback: bool) -> None:
    out.print(
        Text(f"attempt {error.attempt}: {error.outcome}: {safe(error.type)}", style="bold"), soft_wrap=True
    )
    out.print(Text(_indented(safe(error.message, keep_lines=True))), soft_wrap=True)
    if with_traceback and error.traceback:
        out.print(Text(_indented(safe(error.traceback, keep_lines=True))), soft_wrap=True)


def _print_block(out: Console, title: str, text: str) -> None:
    out.print(title)
    out.print(Text(_indented(safe(text, keep_lines=True))), soft_wrap=True)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.rstrip("\n").split("\n"))
