"""History: a job's cost beside millions of finished and scheduled ones, against an empty database.

The rows are made by the server itself. Two kinds of statistics: those of an empty moment, that is
ANALYZE came before the rows and never since; and fresh ones. In turns, a few thousand jobs are
enqueued in bulk and drained by the bare loop, or by a worker; the figure is the CPU of all the
server's processes for all of it, the yardstick the same in a database that was empty.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jobq
from jobq._bench import bareloop, stock, workload
from jobq._bench.lab import Window
from jobq._bench.result import Cost, Floor, Result, Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from jobq._bench.lab import Database, Lab

FLOOR: Final = Floor("ratio", 1.15, at_least=False)
SLOTS: Final = 200
HELD: Final = ("job", "ready", "scheduled", "running", "finished")
_REST_S: Final = 1.2  # until sessions that have ended are counted


class Sample(NamedTuple):
    """What a job cost, enqueue to completion, and its buffer hits."""

    cost: Cost
    hits: float


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    finished = lab.pick(full=10_000_000, quick=500_000, tiny=2_000)
    scheduled = lab.pick(full=1_000_000, quick=50_000, tiny=500)
    with lab.database() as full, lab.database() as empty:
        for database in (full, empty):
            with database.connect() as connection:
                _hold_statistics(connection)
        with full.connect() as connection:
            stock.fill(connection, stock.FINISHED, finished)
            stock.fill(connection, stock.SCHEDULED, scheduled)
            connection.execute("checkpoint")
        settings = lab.settings(slots=SLOTS, finished=finished, scheduled=scheduled)
        yield from _compare(lab, full, empty, "statistics of an empty moment", settings)
        with full.connect() as connection:
            connection.execute("analyze")
        yield from _compare(lab, full, empty, "fresh statistics", settings)


def _hold_statistics(connection: psycopg.Connection[Any]) -> None:
    connection.execute("analyze")
    for table in HELD:
        connection.execute(f"alter table jobq.{table} set (autovacuum_enabled = off)".encode())


def _compare(
    lab: Lab, full: Database, empty: Database, case: str, settings: dict[str, object]
) -> Iterator[Result]:
    jobs = lab.pick(full=20_000, quick=10_000, tiny=500)
    rounds = lab.pick(full=5, quick=2, tiny=1)
    drains: dict[str, tuple[Callable[..., Any], Sequence[int]]] = {
        "bare loop": (bareloop.drain, ()),
        "worker": (workload.drain, (SLOTS,)),
    }
    for who, (drain, more) in drains.items():
        runs = [
            [_sample(lab, database, jobs, drain, more) for database in (empty, full)] for _ in range(rounds)
        ]
        bare, ours = zip(*runs, strict=True)
        yield _result(f"{who}, {case}", ours, bare, settings)


def _sample(
    lab: Lab, database: Database, jobs: int, drain: Callable[..., Any], more: Sequence[int]
) -> Sample:
    hits = _hits(lab, database)
    before = lab.meter.read()
    with jobq.Client(database.dsn) as client:
        workload.fill(client, jobs)
    with lab.hands(1) as [hand]:
        reply = hand.call(drain, database.dsn, jobs, lab.meter.postmaster_pid, *more)
    window = Window.between(before, lab.meter.read(), reply.cpu_s)
    return Sample(window.cost(jobs), (_hits(lab, database) - hits) / jobs)


def _hits(lab: Lab, database: Database) -> int:
    time.sleep(_REST_S)
    return lab.meter.buffer_hits(database.name)


def _result(case: str, ours: Sequence[Sample], bare: Sequence[Sample], settings: dict[str, object]) -> Result:
    values, yardsticks = [[one.cost.server_cpu_us or one.hits for one in runs] for runs in (ours, bare)]
    hits = [a.hits / b.hits for a, b in zip(ours, bare, strict=True)]
    return Result(
        bench="history",
        case=case,
        value=Spread.of(values),
        unit="server µs/job",
        yardstick=Spread.of(yardsticks),
        yardstick_name="the same in an empty database",
        ratio=ratios(values, yardsticks),
        runs=len(ours),
        cost=Cost.median([one.cost for one in ours]),
        yardstick_cost=Cost.median([one.cost for one in bare]),
        floor=FLOOR,
        settings=settings,
        details={"buffer_hits_ratio": Spread.of(hits).median, "buffer_hits": ours[0].hits},
    )
