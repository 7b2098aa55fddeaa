"""Growth: what a job costs as one thing grows, in the bare loop, so that only the server counts.

* length: so many more jobs wait behind those that are claimed and completed;
* finished: so many have ended before, and are kept;
* connections: so many bare loops side by side on the same cores, on one queue.

Each figure stands beside the smallest of its curve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobq._bench import bareloop, stock
from jobq._bench.hands import call_all
from jobq._bench.lab import Window
from jobq._bench.result import Cost, Result, Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobq._bench.lab import Lab

JOBS: Final = 10_000


def length(lab: Lab) -> Iterator[Result]:
    """Measure by how many jobs wait."""
    lengths = lab.pick(
        full=(1_000, 10_000, 100_000, 1_000_000, 10_000_000),
        quick=(1_000, 10_000, 100_000, 500_000),
        tiny=(500, 1_000),
    )
    yield from _beforehand(lab, "length", "waiting", lengths, stock.READY)


def finished(lab: Lab) -> Iterator[Result]:
    """Measure by how many jobs have ended and are kept."""
    sizes = lab.pick(
        full=(1_000, 100_000, 1_000_000, 10_000_000), quick=(1_000, 100_000, 500_000), tiny=(500, 1_000)
    )
    yield from _beforehand(lab, "finished", "finished", sizes, stock.FINISHED)


def _beforehand(lab: Lab, bench: str, what: str, sizes: Sequence[int], sql: str) -> Iterator[Result]:
    """Measure jobs beside so many rows that were made before, in a database each."""
    rounds = lab.pick(full=3, quick=2, tiny=1)
    jobs = lab.pick(full=JOBS, quick=JOBS, tiny=500)
    runs: dict[int, list[Window]] = {size: [] for size in sizes}
    for size, windows in runs.items():
        for _ in range(rounds if size < 5_000_000 else 1):
            with lab.database() as database, lab.hands(1) as [hand]:
                with database.connect() as connection:
                    stock.fill(connection, sql, size)
                    stock.fill(connection, stock.READY, jobs)
                    connection.execute("checkpoint")
                reply = hand.call(bareloop.drain, database.dsn, jobs, lab.meter.postmaster_pid).value
                windows.append(Window(reply.seconds, reply.server_cpu_s, reply.client_cpu_s, None))
    yield from _curve(lab, bench, what, runs, jobs)


def connections(lab: Lab) -> Iterator[Result]:
    """Measure by how many loops claim from one queue at the same time."""
    counts = lab.pick(full=(1, 2, 5, 10, 20, 50), quick=(1, 5, 20), tiny=(1, 2))
    total = lab.pick(full=60_000, quick=30_000, tiny=1_000)
    runs: dict[int, list[Window]] = {count: [] for count in counts}
    for _ in range(lab.pick(full=3, quick=1, tiny=1)):
        for count, windows in runs.items():
            with lab.database() as database, lab.hands(count) as hands:
                with database.connect() as connection:
                    stock.fill(connection, stock.READY, 2 * total)
                each = total // count
                before = lab.meter.read()
                replies = call_all(hands, bareloop.drain, database.dsn, each, lab.meter.postmaster_pid)
                client_s = sum(reply.value.client_cpu_s for reply in replies)
                windows.append(Window.between(before, lab.meter.read(), client_s))
    yield from _curve(lab, "connections", "loops", runs, total)


def _curve(lab: Lab, bench: str, what: str, runs: dict[int, list[Window]], jobs: int) -> Iterator[Result]:
    costs = {size: [_us(window, jobs) for window in windows] for size, windows in runs.items()}
    smallest, *_ = costs
    for size, values in costs.items():
        bare = [Spread.of(costs[smallest]).median] * len(values)
        yield Result(
            bench=bench,
            case=f"{size:,} {what}",
            value=Spread.of(values),
            unit="server µs/job",
            yardstick=Spread.of(costs[smallest]),
            yardstick_name=f"{smallest:,} {what}",
            ratio=ratios(values, bare),
            runs=len(values),
            cost=Cost.median([window.cost(jobs) for window in runs[size]]),
            settings=lab.settings(slots=None, jobs=jobs),
            details={"jobs_per_s": Spread.of([jobs / window.seconds for window in runs[size]]).median},
        )


def _us(window: Window, jobs: int) -> float:
    spent_s = window.seconds if window.server_cpu_s is None else window.server_cpu_s
    return spent_s / jobs * 1e6
