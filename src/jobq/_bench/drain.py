"""Drain: a worker on a full queue, beside the bare loop on the same cores.

A round is a run of the bare loop and one of a worker for each case, each on a fresh database. The
worker has its defaults and every feature on; handlers do nothing. A handler in a process costs a
message there and one back, so there are fewer of those jobs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import jobq
from jobq._bench import bareloop, workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.rates import rate_result
from jobq._bench.result import Floor, Result
from jobq._bench.workers import CRUNCHING, Work, serve, stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Lab
    from jobq._bench.workload import DrainReply

FINISHED: Final = "select count(*) from jobq.finished"


class Case(NamedTuple):
    """One kind of handler at one number of slots, and what it should reach."""

    handler: str
    slots: int
    floor: Floor | None = None

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.slots} slots" if self.handler == "async" else f"{self.handler}, {self.slots} slots"


CASES: Final = (
    Case("async", 200, Floor("ratio", 0.5)),
    Case("async", 20, Floor("ratio", 0.5)),
    Case("async", 1),
    Case("thread", 200, Floor("value", 12_000)),
    Case("thread", 20, Floor("value", 12_000)),
    Case("process", 2),
)
FLAT: Final = Floor("ratio", 0.8)


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=100_000, quick=40_000, tiny=1_000)
    in_processes = lab.pick(full=5_000, quick=2_000, tiny=100)
    bare: list[tuple[int, Window]] = []
    runs: dict[Case, list[tuple[int, Window]]] = {case: [] for case in CASES}
    for _ in range(lab.pick(full=5, quick=2, tiny=1)):
        bare.append((jobs, _run_once(lab, jobs, bareloop.drain)))
        for case, windows in runs.items():
            if case.handler == "async":
                windows.append((jobs, _run_once(lab, jobs, workload.drain, case.slots)))
            else:
                windows.append(_stretch(lab, case, in_processes if case.handler == "process" else jobs))
    results = {
        case: rate_result(
            "drain",
            case.name,
            windows,
            bare,
            yardstick_name=f"bare loop, batches of {bareloop.BATCH}",
            floor=case.floor,
            settings=lab.settings(slots=case.slots, worker_processes=1, handler=f"{case.handler}, empty"),
        )
        for case, windows in runs.items()
    }
    yield from results.values()
    many, few = CASES[0], CASES[1]
    beside = rate_result(
        "drain",
        f"{few.slots} slots beside {many.slots}",
        runs[few],
        runs[many],
        yardstick_name=f"the same with {many.slots} slots",
        floor=FLAT,
        settings=results[few].settings,
    )
    yield replace(beside, details={})


def _stretch(lab: Lab, case: Case, jobs: int) -> tuple[int, Window]:
    """Have a worker drain a fresh database, and measure its middle."""
    kind = CRUNCHING if case.handler == "process" else workload.EMAIL
    with lab.database() as database, database.connect() as watch, lab.hands(1) as working:
        with jobq.Client(database.dsn) as client:
            workload.fill(client, jobs, lambda _: jobq.NewJob(kind, workload.EMAIL_ARGS))

        def finished() -> int:
            [(count,)] = watch.execute(FINISHED).fetchall()
            return int(count)

        working[0].start(serve, database.dsn, Work(case.handler, {"default": case.slots}))
        seen = finished if case.handler == "process" else None
        return stretch(lab, database, working, jobs, seen=seen)


def _run_once(lab: Lab, jobs: int, drain: Callable[..., DrainReply], *more: int) -> Window:
    """Fill a fresh database, have a fresh process drain it, and check that it did."""
    with lab.database() as database, lab.hands(1) as [hand]:
        with jobq.Client(database.dsn) as client:
            workload.fill(client, jobs)
        before = lab.meter.read()
        reply = _drained(hand, drain, database.dsn, jobs, lab.meter.postmaster_pid, *more)
        wal_bytes = lab.meter.read().wal_bytes - before.wal_bytes
        with database.connect() as connection:
            rows = connection.execute("select state, count(*) from jobq.jobs group by state").fetchall()
        if dict(rows) != {"completed": jobs}:
            raise BenchError(f"{jobs} jobs should be completed, and there are {dict(rows)}")
    return Window(reply.seconds, reply.server_cpu_s, reply.client_cpu_s, wal_bytes)


def _drained(hand: Hand, drain: Callable[..., DrainReply], *arguments: str | int) -> DrainReply:
    return hand.call(drain, *arguments).value
