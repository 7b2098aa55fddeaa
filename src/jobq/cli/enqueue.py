"""``jobqctl enqueue``: make a job by hand."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import click

from jobq.cli.database import with_client
from jobq.cli.output import JSON_OPTION, print_json
from jobq.cli.parsing import parse_instant, parse_json, parse_length

if TYPE_CHECKING:
    from jobq._clients.client import Client
    from jobq._kinds.options import JobOptions


@click.command()
@click.argument("kind")
@click.argument("args", metavar="[JSON]", callback=parse_json, default="{}")
@click.option("--queue", help="The queue; default: default.")
@click.option("--priority", type=int, help="-9 to 9, the larger runs first.")
@click.option(
    "--delay", callback=parse_length, metavar="TIME", help="Run it so much later: 90s, 15m, 2h, 7d."
)
@click.option("--run-at", callback=parse_instant, metavar="TIME", help="Run it then.")
@click.option("--max-attempts", type=int, help="Failures after which it is discarded.")
@click.option(
    "--timeout", callback=parse_length, metavar="TIME", help="Time limit of an attempt: 90s, 2h; 0: none."
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
