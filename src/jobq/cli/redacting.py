"""``jobqctl redact``: which fields of jobs are hidden when jobs are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from jobq.cli.database import with_client
from jobq.cli.escapes import safe
from jobq.cli.output import JSON_OPTION, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._clients.client import Client


@click.command()
@click.argument("fields", metavar="[FIELD]...", nargs=-1)
@click.option("--kind", metavar="NAME", help="Of this kind's jobs alone.")
@click.option("--remove", is_flag=True, help="Hide them no longer.")
@click.option("--reason", default="", metavar="TEXT", help="Why, for the log.")
@click.option("--by", metavar="NAME", help="Who does it, for the log; default: user and host.")
@JSON_OPTION
@with_client
def redact(
    client: Client,
    *,
    fields: Sequence[str],
    kind: str | None,
    remove: bool,
    reason: str,
    by: str | None,
    as_json: bool,
) -> None:
    """Hide what fields of jobs hold: from now on jobqctl shows *** in their place.

    At any depth of arguments, meta and results, and where errors quote it. Without a FIELD, show
    which are hidden: these, those that handlers declare with redact=, and always fields whose names
    tell it, such as password, api_token or secretKey. What is stored, and what handlers get, stays.
    """
    if not fields:
        if remove or kind is not None:
            raise click.UsageError("which fields? Give their names.")
        _print_all(client, as_json=as_json)
        return
    change = client.redaction.remove if remove else client.redaction.add
    changed = change(*fields, kind=kind, reason=reason, by=by)
    if as_json:
        print_json(changed)
        return
    whose = "all jobs" if kind is None else f"jobs of kind {safe(kind)!r}"
    for field in fields:
        now = "is hidden no longer" if remove else "is hidden"
        before = "was not hidden" if remove else "was hidden already"
        click.echo(f"{safe(field)!r} of {whose} {now if field in changed else before}")


def _print_all(client: Client, *, as_json: bool) -> None:
    found = client.redaction.fields()
    if as_json:
        print_json(found)
        return
    rows = [("(all kinds)" if one.kind is None else one.kind, one.field) for one in found]
    print_table(("kind", "field"), rows, empty="none but those whose names tell it, such as password")
