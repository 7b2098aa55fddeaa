"""``jobqctl list``: jobs, a page at a time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from jobq._errors import ConfigError
from jobq._statements.filter import Place
from jobq._types import JobState
from jobq._units import duration
from jobq.cli.choosing import filter_options, take_filter
from jobq.cli.database import with_client
from jobq.cli.escapes import safe
from jobq.cli.output import JSON_OPTION, SECRETS_OPTION, document, print_json, print_table, shorten

if TYPE_CHECKING:
    from jobq._clients.client import Client
    from jobq._types import JobInfo
    from jobq.cli.output import Cell

_COLUMNS: Final = ("id", "state", "kind", "queue", "attempt", "when", "reason", "arguments")
_ARGUMENTS: Final = 60  # characters
_REASON: Final = 40


@click.command(name="list")
@filter_options
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="A page's length.")
@click.option(
    "--after", metavar="PLACE", help="The next page: what the page before printed after `more: add --after`."
)
@SECRETS_OPTION
@JSON_OPTION
@with_client
def list_(
    client: Client, *, limit: int, after: str | None, show_secrets: bool, as_json: bool, **given: Any
) -> None:
    """List jobs: running ones first, then ready, scheduled, discarded, cancelled, completed.

    The newest stand first in each state. With --json: {"jobs": [...], "next": PLACE or null}.
    """
    chosen = take_filter(given)
    if after is not None:
        _check_place(after)
    page = client.list(chosen, after=after, limit=limit)
    if not show_secrets:
        page = replace(page, jobs=tuple(map(client.redaction.load().job, page.jobs)))
    if as_json:
        print_json(page)
        return
    now = datetime.now(UTC)
    print_table(
        _COLUMNS, [_row(job, now) for job in page.jobs], right=("id", "attempt"), empty="no such jobs"
    )
    if page.next is not None:
        click.echo(f"more: add --after {page.next}", err=True)


def _check_place(after: str) -> None:
    try:
        Place.read(after)
    except ConfigError:
        raise click.UsageError(
            f"--after {safe(after)}: what the page before printed after `more: add --after`"
        ) from None


def _row(job: JobInfo, now: datetime) -> tuple[Cell, ...]:
    arguments = shorten(document(job.args), _ARGUMENTS)
    attempt = f"{job.attempt} ({job.failures}/{job.max_attempts})"
    reason = shorten(job.reason or "", _REASON) if job.reason != job.state.value else ""
    return str(job.id), job.state.value, job.kind, job.queue, attempt, _when(job, now), reason, arguments


def _when(job: JobInfo, now: datetime) -> str:
    """Say since when it is there, or how long it has to wait."""
    moment = {
        JobState.RUNNING: job.claimed_at,
        JobState.READY: job.run_at,
        JobState.SCHEDULED: job.run_at,
    }.get(job.state, job.finished_at)
    if moment is None:
        return ""
    ago_s = (now - moment).total_seconds()
    if ago_s < 0 and job.state is JobState.SCHEDULED:
        return f"in {duration(-ago_s)}"
    return f"{duration(max(0.0, ago_s))} ago"  # what has been is past, though this clock may be behind
