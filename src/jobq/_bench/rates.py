"""From windows to a result, for the benches that count jobs a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobq._bench.result import Cost, Floor, Result, Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jobq._bench.lab import Window


def rate_result(
    bench: str,
    case: str,
    ours: Sequence[tuple[int, Window]],
    yardstick: Sequence[tuple[int, Window]],
    *,
    yardstick_name: str,
    floor: Floor | None,
    settings: Mapping[str, object],
) -> Result:
    """Return jobs a second beside a yardstick's.

    Args:
        bench: as the result has it.
        case: as the result has it.
        ours: for each round how many jobs, and the window in which they were done.
        yardstick: the same of the yardstick.
        yardstick_name: as the result has it.
        floor: as the result has it.
        settings: as the result has it.
    """
    rates, bare_rates = _rates(ours), _rates(yardstick)
    cost, bare_cost = _cost(ours), _cost(yardstick)
    return Result(
        bench=bench,
        case=case,
        value=Spread.of(rates),
        unit="jobs/s",
        yardstick=Spread.of(bare_rates),
        yardstick_name=yardstick_name,
        ratio=ratios(rates, bare_rates),
        runs=len(ours),
        cost=cost,
        yardstick_cost=bare_cost,
        cpu_ratio=_cpu_ratio(cost, bare_cost),
        floor=floor,
        settings=settings,
        details={
            "jobs": ours[0][0],
            "busy_share": _busy_share(ours),
            "yardstick_busy_share": _busy_share(yardstick),
        },
    )


def _rates(runs: Sequence[tuple[int, Window]]) -> list[float]:
    return [jobs / window.seconds for jobs, window in runs]


def _cost(runs: Sequence[tuple[int, Window]]) -> Cost:
    return Cost.median([window.cost(jobs) for jobs, window in runs])


def _cpu_ratio(ours: Cost, yardstick: Cost) -> float | None:
    if ours.cpu_us is None or yardstick.cpu_us is None:
        return None
    return yardstick.cpu_us / ours.cpu_us


def _busy_share(runs: Sequence[tuple[int, Window]]) -> float | None:
    """Return CPU time used to time passed; on one core, what lacks to 1 was waited, or others had it."""
    shares = [share for _, window in runs if (share := window.busy_share()) is not None]
    return Spread.of(shares).median if shares else None
