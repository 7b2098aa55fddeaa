"""``python -m bench.document``: the table and the plot of docs/performance.md, from history.jsonl.

Of each bench and case the newest results of full size count; where there are none, the newest quick ones,
marked as such. The plot has jobq's drain beside its neighbours', what a job costs as one thing grows, and the
course of the ratios over time.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

from jobq._bench.records import read
from jobq._bench.registry import BENCHES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jobq._bench.records import Record

ROOT: Final = Path(__file__).parents[1]
HISTORY: Final = ROOT / "bench" / "history.jsonl"
PAGE: Final = ROOT / "docs" / "performance.md"
PLOT: Final = ROOT / "docs" / "performance.svg"
BEGIN, END = "<!-- from bench/history.jsonl: python -m bench.document -->", "<!-- until here -->"
COURSES: Final = (
    ("drain", "200 slots", "drain beside the bare loop", "#0b5cad"),
    ("single", "1 client", "enqueue beside an INSERT", "#b5540a"),
    ("cycle", "enqueue and drain", "cycle beside the bare loop", "#3c7a2b"),
)
# Cases that begin with a number, and what it counts; a curve without a case of its own for 1 begins there.
CURVES: Final = (
    ("length", "waiting", "jobs waiting", "#0b5cad"),
    ("finished", "finished", "finished jobs kept", "#3c7a2b"),
    ("connections", "loops", "claiming connections", "#b5540a"),
    ("lanes", "queues", "queues of a worker", "#7a2b6d"),
    ("lanes", "priorities", "priorities", "#8a8f00"),
)
_WIDTH, _BAR, _LEFT, _TOP = 760, 26, 160, 44
_BARS_END: Final = 700
_CHART_HEIGHT: Final = 180


def main() -> int:
    """Write both."""
    records = list(read(HISTORY))
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_table(page, table(records)), encoding="utf-8")
    PLOT.write_text(plot(records), encoding="utf-8")
    return 0


def newest(records: Iterable[Record]) -> dict[tuple[str, str], Record]:
    """Return the record that counts for each bench and case, in the order of the registry."""
    chosen: dict[tuple[str, str], Record] = {}
    for record in records:
        key = record["bench"], record["case"]
        full_before = key in chosen and chosen[key]["settings"]["size"] == "full"
        if record["settings"]["size"] == "full" or not full_before:
            chosen.pop(key, None)
            chosen[key] = record
    order = {name: number for number, name in enumerate(BENCHES)}
    return dict(sorted(chosen.items(), key=lambda item: order.get(item[0][0], len(order))))


# -- the table ---------------------------------------------------------------------------------------------


def table(records: Sequence[Record]) -> str:
    """Return the results as Markdown."""
    rows = [
        "| bench | value | yardstick | ratio | target | server µs | client µs | WAL B | commit |",
        "|---|--:|--:|--:|---|--:|--:|--:|---|",
    ]
    rows += [_row(record) for record in newest(records).values()]
    return "\n".join(rows)


def _row(record: Record) -> str:
    low, high = record["ratio_spread"]
    ratio = figure(record["ratio"]) + (f" ({figure(low)}–{figure(high)})" if low != high else "")
    target = "–"
    if record["floor"] is not None:
        target = record["floor"] + ("" if record["reached"] else " **missed**")
    size = "" if record["settings"]["size"] == "full" else f", {record['settings']['size']}"
    cells = (
        f"{record['bench']}, {record['case']}",
        f"{figure(record['value'])} {record['unit']}",
        f"{figure(record['yardstick'])} ({record['yardstick_name']})",
        ratio,
        target,
        *(figure(record[name]) for name in ("server_cpu_us", "client_cpu_us", "wal_bytes")),
        f"{record['commit']}{size}",
    )
    return "| " + " | ".join(cells) + " |"


def figure(value: float | None) -> str:
    """Return a number as people write it."""
    if value is None:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def with_table(page: str, text: str) -> str:
    """Return the page with its table replaced.

    Raises:
        ValueError: it has no place for one.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: there is no line {BEGIN!r} with {END!r} after it")
    return f"{before}{begin}\n{text}\n{end}{after}"


# -- the plot ------------------------------------------------------------------------------------------------


def plot(records: Sequence[Record]) -> str:
    """Return an SVG of all three charts."""
    chosen = newest(records)
    bars = _bars(chosen)
    curves_top = _TOP + len(bars) * _BAR + 60
    courses_top = curves_top + _CHART_HEIGHT + 130
    charted = [
        *_drawn_bars(bars),
        *_drawn_curves(chosen, curves_top),
        *_drawn_courses(records, courses_top),
    ]
    height = courses_top + _CHART_HEIGHT + 70
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>', *charted, "</svg>\n"])


def _bars(chosen: dict[tuple[str, str], Record]) -> list[tuple[str, float]]:
    """Return names and jobs a second: jobq's, and each neighbour's."""
    drains = [
        record for (bench, case), record in chosen.items() if (bench, case[:5]) == ("neighbours", "drain")
    ]
    if not drains:
        return []
    neighbours = sorted(
        ((str(r["yardstick_name"]), float(r["yardstick"])) for r in drains), key=lambda b: -b[1]
    )
    return [("jobq", float(drains[0]["value"])), *neighbours]


def _drawn_bars(bars: Sequence[tuple[str, float]]) -> list[str]:
    drawn = [_text(20, 24, "Drain: jobs a second, server and one worker on one core", bold=True)]
    most = max((rate for _, rate in bars), default=1.0)
    for number, (name, rate) in enumerate(bars):
        y = _TOP + number * _BAR
        width = max(1.0, (_BARS_END - _LEFT - 70) * rate / most)
        color = "#0b5cad" if name == "jobq" else "#9aa5b1"
        drawn.append(_text(_LEFT - 8, y + 14, name, anchor="end"))
        drawn.append(f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>')
        drawn.append(_text(_LEFT + width + 6, y + 14, figure(rate)))
    return drawn


def curve(chosen: dict[tuple[str, str], Record], bench: str, what: str) -> list[tuple[int, float]]:
    """Return sizes, and what a job costs the server then as a ratio to the smallest one."""
    points: list[tuple[int, float]] = []
    for (name, case), record in chosen.items():
        number, _, unit = case.partition(" ")
        own, first = record["server_cpu_us"], record["yardstick_server_cpu_us"]
        if (name, unit) != (bench, what) or own is None:
            continue
        ratio = record["ratio"] if record["unit"] == "server µs/job" else own / first if first else None
        if ratio is not None:
            points.append((int(number.replace(",", "")), float(ratio)))
    if points and points[0][1] != 1.0:
        points.insert(0, (1, 1.0))
    return sorted(points)


def _drawn_curves(chosen: dict[tuple[str, str], Record], top: float) -> list[str]:
    drawn = [_text(20, top, "Server CPU a job as something grows, beside its smallest", bold=True)]
    base, left, right = top + 20 + _CHART_HEIGHT, 60, _BARS_END
    most = 3.0
    for step in range(7):
        y = base - _CHART_HEIGHT * step / 6
        drawn.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e7eb"/>')
        drawn.append(_text(left - 8, y + 4, f"{most * step / 6:.1f}", anchor="end"))
    drawn += [
        _text(left + decade * (right - left) / 7, base + 18, f"{10**decade:,}", anchor="middle")
        for decade in range(8)
    ]
    for number, (bench, what, name, color) in enumerate(CURVES):
        points = [
            (left + math.log10(size) / 7 * (right - left), base - _CHART_HEIGHT * min(ratio, most) / most)
            for size, ratio in curve(chosen, bench, what)
        ]
        drawn += _line(points, color)
        drawn.append(_text(left + number % 3 * 235, base + 42 + number // 3 * 20, name, color=color))
    return drawn


def _line(points: Sequence[tuple[float, float]], color: str) -> list[str]:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return [
        f'<polyline points="{joined}" fill="none" stroke="{color}" stroke-width="2"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points),
    ]


def _drawn_courses(records: Sequence[Record], top: float) -> list[str]:
    drawn = [_text(20, top, "Ratio to the yardstick, over commits", bold=True)]
    base, left, right = top + 20 + _CHART_HEIGHT, 60, _BARS_END
    for tenths in range(0, 11, 2):
        y = base - _CHART_HEIGHT * tenths / 10
        drawn.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e3e7eb"/>')
        drawn.append(_text(left - 8, y + 4, f"{tenths / 10:.1f}", anchor="end"))
    for number, (bench, case, name, color) in enumerate(COURSES):
        course = [
            float(record["ratio"])
            for record in records
            if (record["bench"], record["case"]) == (bench, case) and record["settings"]["size"] == "full"
        ]
        step = (right - left) / max(1, len(course) - 1)
        points = [(left + i * step, base - _CHART_HEIGHT * min(r, 1.0)) for i, r in enumerate(course)]
        drawn += _line(points, color)
        drawn.append(_text(left + number * 235, base + 30, name, color=color))
    return drawn


def _text(x: float, y: float, text: str, **look: Any) -> str:
    weight = ' font-weight="bold"' if look.get("bold") else ""
    anchor, color = look.get("anchor", "start"), look.get("color", "#1f2933")
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}"{weight}>{escape(text)}</text>'
    )


if __name__ == "__main__":
    sys.exit(main())
