"""``jobqctl doctor``: what hurts, and what to do about it."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from jobq._doctor import CHECKS, Context, Finding, Level
from jobq._errors import DatabaseUnavailable, Error
from jobq._operation import Call
from jobq._sessions import SyncSession
from jobq._statements.schema import check_schema, validate_schema_name
from jobq.cli.common import DSN_OPTION, EXIT_FAILED, SCHEMA_OPTION, explain_errors, require_dsn
from jobq.cli.escapes import safe
from jobq.cli.output import JSON_OPTION, console, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._operation import Operation

_CHECK_TIME_LIMIT_S: Final = 30
_STYLES: Final = {
    Level.OK: ("ok", "green"),
    Level.NOTE: ("note", "cyan"),
    Level.WARNING: ("warning", "yellow"),
    Level.PROBLEM: ("PROBLEM", "bold red"),
    Level.UNKNOWN: ("unknown", "magenta"),
}


@click.command()
@DSN_OPTION
@SCHEMA_OPTION
@JSON_OPTION
@click.option("--quiet", is_flag=True, help="Show only what is not in order.")
@explain_errors
def doctor(dsn: str | None, schema: str, *, as_json: bool, quiet: bool) -> None:
    """Look for what hurts this queue, and say what to do about each.

    Reads only. Each check has 30 seconds; one that fails or is not allowed is reported as unknown.
    Exits with 1 when something is a warning or a problem.
    """
    validate_schema_name(schema)
    session = SyncSession.open(
        require_dsn(dsn), schema=schema, name="jobqctl doctor", time_limit_s=_CHECK_TIME_LIMIT_S + 5
    )
    try:
        session.run(check_schema(schema))
        findings = list(examine(session, schema))
    finally:
        session.close()
    shown = [finding for finding in findings if not quiet or finding.level is not Level.OK]
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in shown])
    else:
        _print(shown)
    if any(finding.level in {Level.WARNING, Level.PROBLEM} for finding in findings):
        sys.exit(EXIT_FAILED)


def examine(session: SyncSession, schema: str) -> Iterator[Finding]:
    """Run every check, each in a transaction of its own that ends by itself."""
    context = Context(schema, time.time, session.pooled)
    for name, check in CHECKS.items():
        try:
            yield from session.run(_bounded(check(context)))
        except DatabaseUnavailable:
            raise
        except Error as error:
            yield Finding(
                name,
                Level.UNKNOWN,
                f"could not be checked: {error}",
                "Run it as the schema's owner, at a quieter time.",
            )


def _bounded(operation: Operation[list[Finding]]) -> Operation[list[Finding]]:
    yield Call("begin isolation level read committed, read only")
    try:
        yield Call(f"set local statement_timeout = {_CHECK_TIME_LIMIT_S * 1000}")
        findings = yield from operation
    except Error:
        yield Call("rollback")
        raise
    yield Call("rollback")
    return findings


def _print(findings: list[Finding]) -> None:
    out = console()
    for finding in findings:
        word, style = _STYLES[finding.level]
        out.print(f"{word:>8}", style=style, end="  ")
        out.print(f"{finding.check}: {safe(finding.message)}", soft_wrap=True)
        if finding.remedy and finding.level is not Level.OK:
            out.print(f"{'':10}→ {safe(finding.remedy)}", soft_wrap=True)
    if not findings:
        out.print("Nothing to report.")
