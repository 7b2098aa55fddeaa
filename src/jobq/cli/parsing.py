"""What options and arguments say, as values: documents, moments, lengths of time."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import Final

import click

_LENGTH: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|w)?")
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3_600, "d": 86_400, "w": 604_800}


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
    """Return the moment, in UTC, that an argument names in ISO 8601 with its offset from there.

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
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise click.BadParameter(f"{value!r} is no moment of the years 1 to 9999") from None


def parse_length(_context: click.Context, _parameter: click.Parameter, value: str | None) -> timedelta | None:
    """Return a length of time: ``0``, ``90s``, ``15m``, ``2h``, ``7d``, ``1w``.

    A number needs its unit: whoever means days and is understood as seconds may lose history.

    Raises:
        click.BadParameter: it is none.
    """
    if value is None:
        return None
    match = _LENGTH.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r}: write a length of time such as 90s, 15m, 2h or 7d")
    number, unit = float(match[1]), match[2]
    if unit is None and number:
        n = match[1]
        raise click.BadParameter(f"{n}: of what? write {n}s, {n}m, {n}h or {n}d")
    try:
        return timedelta(seconds=number * _SECONDS[unit or "s"])
    except OverflowError:
        raise click.BadParameter(f"{value!r} is too long") from None
