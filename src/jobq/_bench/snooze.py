"""Snoozes: what an attempt costs when the same few jobs come back many times under a pinned horizon.

A hundred jobs snooze for no time, hundreds of times each, on a worker. The figure is server CPU an
attempt in the last tenth of the attempts, beside the first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.result import Cost, Floor, Result, Spread, ratios
from jobq._bench.workers import SNOOZING, Work, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Lab
    from jobq._bench.meter import Reading

FLOOR: Final = Floor("ratio", 1.3, at_least=False)
JOBS: Final = 100
TENTHS: Final = 10
_POLL_S: Final = 0.002
_TIMEOUT_S: Final = 240.0


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    snoozes = lab.pick(full=500, quick=100, tiny=20)
    runs = [_once(lab, snoozes) for _ in range(lab.pick(full=3, quick=1, tiny=1))]
    firsts, lasts = [first for first, _ in runs], [last for _, last in runs]
    values, yardsticks = [[cost.server_cpu_us or 0.0 for cost in costs] for costs in (lasts, firsts)]
    yield Result(
        bench="snooze",
        case=f"{JOBS} jobs",
        value=Spread.of(values),
        unit="server µs/attempt",
        yardstick=Spread.of(yardsticks),
        yardstick_name="the first tenth of the attempts",
        ratio=ratios(values, yardsticks),
        runs=len(runs),
        cost=Cost.median(lasts),
        yardstick_cost=Cost.median(firsts),
        floor=FLOOR,
        settings=lab.settings(slots=Work().slots, snoozes=snoozes),
    )


def _once(lab: Lab, snoozes: int) -> tuple[Cost, Cost]:
    attempts = JOBS * (snoozes + 1)
    with lab.database() as database, lab.hands(1) as [worker], database.connect() as pinning:
        pinning.execute("begin isolation level repeatable read")
        pinning.execute("select count(*) from jobq.ready")
        with jobq.Client(database.dsn) as client:
            workload.fill(client, JOBS, lambda _: jobq.NewJob(SNOOZING, workload.EMAIL_ARGS))
        worker.start(serve, database.dsn, Work(snoozes=snoozes))
        edges = [_edge(lab, worker, attempts * tenth // TENTHS) for tenth in (0, 1, TENTHS - 1, TENTHS)]
    return _cost(edges[0], edges[1]), _cost(edges[2], edges[3])


def _edge(lab: Lab, worker: Hand, attempts: int) -> tuple[int, Reading, float | None]:
    """Wait for so many attempts; return how many there were, and the counters."""
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (count := worker.progress) < max(attempts, 1):
        if not worker.busy:
            worker.result()  # raises what it has to say
        if time.monotonic() > deadline_s:
            raise BenchError(f"{count} of {attempts} attempts within {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return count, lab.meter.read(), worker.cpu_s()


def _cost(before: tuple[int, Reading, float | None], after: tuple[int, Reading, float | None]) -> Cost:
    client_s = None if before[2] is None or after[2] is None else after[2] - before[2]
    return Window.between(before[1], after[1], client_s).cost(after[0] - before[0])
