"""From single latencies to a result, for the benches that time starts."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from jobq._bench.result import Cost, Floor, Result, Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PARTS: Final = 5  # in which the samples are cut, to see how a figure varies
_LEAST_IN_PART: Final = 20


def latency_result(
    bench: str,
    percent: int,
    ours_ms: Sequence[float],
    yardstick_ms: Sequence[float],
    *,
    yardstick_name: str,
    floor: Floor | None,
    cost: Cost,
    settings: Mapping[str, object],
) -> Result:
    """Return one percentile beside a yardstick's.

    The value is the percentile of all samples; its spread is that of the same percentile in each
    of five consecutive parts.

    Args:
        bench: as the result has it.
        percent: which percentile.
        ours_ms: the samples in the order in which they were taken.
        yardstick_ms: the same of the yardstick.
        yardstick_name: as the result has it.
        floor: as the result has it.
        cost: as the result has it.
        settings: as the result has it.
    """
    ours, bare = _spread(ours_ms, percent), _spread(yardstick_ms, percent)
    parts = [a / b for a, b in zip(_by_part(ours_ms, percent), _by_part(yardstick_ms, percent), strict=True)]
    return Result(
        bench=bench,
        case=f"p{percent}",
        value=ours,
        unit="ms",
        yardstick=bare,
        yardstick_name=yardstick_name,
        ratio=Spread(ours.median / bare.median, min(parts), max(parts)),
        runs=len(parts),
        cost=cost,
        floor=floor,
        settings=settings,
        details={"samples": len(ours_ms), "p90_ms": percentile(ours_ms, 90), "max_ms": max(ours_ms)},
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the least value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _spread(values: Sequence[float], percent: int) -> Spread:
    parts = _by_part(values, percent)
    return Spread(percentile(values, percent), min(parts), max(parts))


def _by_part(values: Sequence[float], percent: int) -> list[float]:
    parts = max(1, min(_PARTS, len(values) // _LEAST_IN_PART))
    edges = [len(values) * part // parts for part in range(parts + 1)]
    return [percentile(values[begin:end], percent) for begin, end in itertools.pairwise(edges)]
