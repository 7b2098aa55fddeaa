"""How commands print: tables for people, JSON for programs, nothing that a terminal would obey.

What comes from the database was written by anybody. Control characters, and the marks that turn the
direction of writing, are shown as escapes; JSON is ASCII and keeps every digit.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, TypeAlias

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobq._statements.stats import WorkerInfo
from jobq._units import duration
from jobq.cli.escapes import safe

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Cell: TypeAlias = "str | int | float | datetime | timedelta | None"

SECRETS_OPTION: Final = click.option(
    "--show-secrets", is_flag=True, help="Show what redacted fields hold, too; see `jobqctl redact`."
)
JSON_OPTION: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def shorten(text: str, limit: int) -> str:
    """Cut a text to so many characters, and show that it was cut."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def instant(moment: datetime | None) -> str:
    """Write an instant in UTC, to the second."""
    return "" if moment is None else moment.strftime("%Y-%m-%d %H:%M:%S") + "Z"


def cell(value: Cell) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, timedelta):
        return duration(value.total_seconds())
    return safe(value)


def console(*, to_stderr: bool = False) -> Console:
    """Return a console for the terminal, or the pipe, that there is.

    In a pipe a table is as wide as its content: whoever cuts columns there does not want folded ones.
    """
    stream: TextIO = sys.stderr if to_stderr else sys.stdout
    if not _is_utf8(stream) and isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    made = Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made.width = 10_000
    return made


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, right: Iterable[str] = (), folds: bool = True
) -> Table:
    """Return rows under their headings, as a table without a frame.

    Args:
        columns: the headings.
        rows: one sequence of cells a row.
        right: the headings whose columns hold numbers.
        folds: whether cells are folded where the screen is too narrow; else lines go on beyond it.
    """
    numbers = frozenset(right)
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        side: Literal["right", "left"] = "right" if column in numbers else "left"
        table.add_column(column, justify=side, overflow="fold", no_wrap=not folds)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    return table


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, right: Iterable[str] = (), empty: str
) -> None:
    """Print a table, or to standard error what is to be said when there are no rows."""
    if not rows:
        click.echo(empty, err=True)
        return
    out = console()
    out.print(make_table(columns, rows, right=right, folds=out.is_terminal))


def print_json(value: object) -> None:
    """Print a value as one JSON document: dataclasses and structs as objects, times in ISO 8601, every digit.

    Workers' ids are texts.
    """
    indent = 2 if sys.stdout.isatty() else None
    click.echo(json.dumps(value, default=_as_json, indent=indent))


def document(value: object, *, indent: int | None = None) -> str:
    """Return a job's document as people read it; numbers and depths beyond Python's as texts."""
    return json.dumps(value, default=_as_json, ensure_ascii=False, indent=indent)


def _as_json(value: Any) -> object:
    names = _names_of(value)
    if names:
        members = {name: getattr(value, name) for name in names}
        for name in ("worker_id", *(("id",) if isinstance(value, WorkerInfo) else ())):
            if members.get(name) is not None:
                members[name] = str(members[name])  # of 62 bits: JavaScript would round it
        return members
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _names_of(value: Any) -> Iterable[str]:
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    return [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else ()


def _is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"
