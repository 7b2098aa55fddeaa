"""What commands share: where the database is, how errors are told, exit codes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import click

from jobq._errors import ConfigError, DatabaseUnavailable, Error
from jobq._postgres import connection_string

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_PENDING: Final = 3

DSN_OPTION: Final = click.option(
    "--dsn",
    envvar="DATABASE_URL",
    show_envvar=True,
    metavar="URL",
    help="The database, as postgresql://user@host/name or key=value pairs.",
)

SCHEMA_OPTION: Final = click.option(
    "--schema", default="jobq", show_default=True, help="The schema that holds the queue."
)


def require_dsn(dsn: str | None) -> str:
    """Return the address of the database.

    Raises:
        click.UsageError: there is none.
        ConfigError: it cannot be read.
    """
    if dsn is None:
        raise click.UsageError(
            "which database? Set DATABASE_URL, or pass --dsn postgresql://user@host/name"
            " (--dsn '' takes PGHOST, PGDATABASE and so on)."
        )
    connection_string(dsn, name="jobqctl")
    return dsn


class Failure(click.ClickException):
    """Something went wrong that the message explains; no traceback helps."""

    exit_code = EXIT_FAILED

    def show(self, file: object = None) -> None:  # noqa: ARG002 - click's signature
        """Print the message."""
        click.echo(f"jobqctl: {self.format_message()}", err=True)


def explain_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Have a command end with a message, and no traceback, for what can be expected to go wrong."""

    @functools.wraps(command)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except ConfigError as error:
            raise click.UsageError(str(error)) from error
        except DatabaseUnavailable as error:
            raise Failure(
                f"the database cannot be reached: {error}\n"
                "Is it running, and is --dsn (or DATABASE_URL) right?"
            ) from error
        except Error as error:
            raise Failure(str(error)) from error

    return explained
