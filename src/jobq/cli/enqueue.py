"""``jobqctl enqueue``: make a job by hand."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import click

from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, print_json

if TYPE_CHECKING:
    from jobq._client import Client
    from jobq._options import JobOptions


def parse_json(_context: click.Context, _parameter: click.Parameter, value: str | None) -> object:
    """Return the document that an argument holds; ``-`` reads it from standard input.

    Raises:
        click.BadParameter: it is no JSON.
    """
    if value is None:
        return None
    text = sys.stdin.read() if value == "-" else value
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}") from None


def parse_instant(_context: click.Context, _parameter: click.Parameter, value: str | None) -> datetime | None:
    """Return the moment that an argument names in ISO 8601, with its offset from UTC.

    Raises:
        click.BadParameter: it names none, or has no offset.
    """
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(f"{value!r}: write 2030-01-31T09:00:00+01:00, or …Z for UTC") from None
    if moment.tzinfo is None:
        raise click.BadParameter(f"{value!r}: which zone? End it with Z for UTC, or +01:00 and the like")
    return moment


def parse_seconds(
    _context: click.Context, _parameter: click.Parameter, value: float | None
) -> timedelta | None:
    """Return a length of time.

    Raises:
        click.BadParameter: it is none.
    """
    if value is None:
        return None
    try:
        return timedelta(seconds=value)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value} seconds is no length of time") from None


@click.command()
@click.argument("kind")
@click.argument("args", metavar="[JSON]", callback=parse_json, default="{}")
@click.option("--queue", help="The queue; default: default.")
@click.option("--priority", type=int, help="-9 to 9, the larger runs first.")
@click.option("--delay", type=float, callback=parse_seconds, metavar="SECONDS", help="Run it so much later.")
@click.option("--run-at", callback=parse_instant, metavar="TIME", help="Run it then.")
@click.option("--max-attempts", type=int, help="Failures after which it is discarded.")
@click.option(
    "--timeout",
    type=float,
    callback=parse_seconds,
    metavar="SECONDS",
    help="Time limit of an attempt; 0: none.",
)
@click.option("--unique", metavar="KEY", help="Make none while a job with this key is live.")
@click.option("--meta", callback=parse_json, metavar="JSON", help="An object that travels with it.")
@click.option("--tag", "tags", multiple=True, help="A tag; may be repeated.")
@JSON_OPTION
@with_client
def enqueue(client: Client, kind: str, args: object, *, as_json: bool, **given: Any) -> None:
    """Make a job of KIND with the arguments JSON (- reads them from standard input).

    KIND is a name, so the handler's own declaration is not known here: options that are not given have
    the general defaults.
    """
    made = client.enqueue(kind, args, **_options(given))
    if as_json:
        print_json(made)
    elif made.inserted:
        click.echo(f"job {made.id}")
    else:
        click.echo(f"job {made.id} holds that key already: none was made")


def _options(given: dict[str, Any]) -> JobOptions:
    options = {name: value for name, value in given.items() if value not in (None, ())}
    if options.get("timeout") == timedelta(0):
        options["timeout"] = None
    return cast("JobOptions", options)
