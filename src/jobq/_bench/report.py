"""Results for people: a table, by rich where that is installed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._bench.result import Result, Spread

_HEADINGS: Final = (
    "bench",
    "value",
    "yardstick",
    "ratio",
    "by CPU",
    "floor",
    "server µs",
    "client µs",
    "WAL B",
)
_LEFT: Final = {0, 5}  # columns of words


def print_report(results: Sequence[Result]) -> None:
    """Print the results of one bench: a table, what its yardstick was, and the settings."""
    if not results:
        return
    rows = [_row(result) for result in results]
    _print_table(rows)
    for name in dict.fromkeys(result.yardstick_name for result in results):
        print(f"  yardstick: {name}")
    print(f"  in brackets: least and most of {results[0].runs} runs; CPU and WAL are a job's;")
    print("  by CPU: what the ratio would be if CPU time alone decided, whoever else uses these cores")
    settings = results[0].settings
    print("  " + ", ".join(f"{key}={value}" for key, value in settings.items() if value is not None))
    print()


def _row(result: Result) -> list[str]:
    floor = "–"
    if result.floor is not None:
        floor = f"{result.floor} {'reached' if result.reached else 'MISSED'}"
    cost = result.cost
    return [
        f"{result.bench}, {result.case}",
        f"{_spread(result.value)} {result.unit}",
        _spread(result.yardstick),
        _spread(result.ratio),
        _figure(result.cpu_ratio),
        floor,
        *(_figure(figure) for figure in (cost.server_cpu_us, cost.client_cpu_us, cost.wal_bytes)),
    ]


def _spread(spread: Spread) -> str:
    if spread.least == spread.most:
        return _figure(spread.median)
    return f"{_figure(spread.median)} [{_figure(spread.least)} {_figure(spread.most)}]"


def _figure(figure: float | None) -> str:
    if figure is None:
        return "–"
    if abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.1f}" if abs(figure) >= 10 else f"{figure:.2f}"


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    if sys.stdout.isatty():
        try:
            _print_rich(rows)
        except ImportError:
            pass
        else:
            return
    widths = [max(len(row[column]) for row in (_HEADINGS, *rows)) for column in range(len(_HEADINGS))]
    for row in (_HEADINGS, *rows):
        cells = [
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def _print_rich(rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415 - optional

    table = Table()
    for column, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if column in _LEFT else "right")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    Console().print(table)
