"""``jobqctl demo``: see it work."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

import click

from jobq._embedded.errors import EmbeddedError
from jobq.cli.common import DSN_OPTION, EXIT_FAILED, Failure, explain_errors, require_dsn

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType


@click.command()
@DSN_OPTION
@click.option("--orders", type=click.IntRange(20), help="Only so many of the 2,000 orders.")
@click.option("--lose", type=click.IntRange(0), default=0, hidden=True)
@explain_errors
def demo(dsn: str | None, orders: int | None, lose: int) -> None:
    """Watch jobq work: 2,000 e-mails, two workers, one of them killed on the way.

    Starts a temporary PostgreSQL, or works in a schema of its own in the database that DATABASE_URL or
    --dsn names, and leaves nothing behind. Exits with 1 if one order has no outcome.
    """
    try:
        from jobq.demo import story  # noqa: PLC0415 - its libraries are an extra of their own
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "aiosmtpd":
            raise
        raise Failure("the demonstration needs a mail server: pip install 'jobq[demo]'") from error
    try:
        with _tidy_when_interrupted():
            complete = story.run(None if dsn is None else require_dsn(dsn), limit=orders, lose=lose)
    except EmbeddedError as error:
        raise Failure(f"{error}\n(or name a database of yours with DATABASE_URL or --dsn)") from error
    if not complete:
        sys.exit(EXIT_FAILED)


@contextlib.contextmanager
def _tidy_when_interrupted() -> Generator[None]:
    """Have SIGTERM, and SIGINT where a shell's background job ignores it, end it so that it clears up."""

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    before_interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, before_interrupt)
