"""Drain: a worker on a full queue, beside the bare loop on the same cores.

A round is a run of the bare loop and one of a worker for each number of slots, each on a fresh
database with as many jobs. The worker has its defaults and every feature on; handlers do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import bareloop, workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.rates import rate_result
from jobq._bench.result import Floor, Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Lab
    from jobq._bench.workload import DrainReply

SLOTS: Final = (200, 20)
FLOOR: Final = Floor("ratio", 0.5)


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=100_000, quick=40_000, tiny=1_000)
    rounds = lab.pick(full=5, quick=2, tiny=1)
    bare: list[tuple[int, Window]] = []
    workers: dict[int, list[tuple[int, Window]]] = {slots: [] for slots in SLOTS}
    for _ in range(rounds):
        bare.append((jobs, _run_once(lab, jobs, bareloop.drain)))
        for slots, windows in workers.items():
            windows.append((jobs, _run_once(lab, jobs, workload.drain, slots)))
    for slots, windows in workers.items():
        yield rate_result(
            "drain",
            f"{slots} slots",
            windows,
            bare,
            yardstick_name=f"bare loop, batches of {bareloop.BATCH}",
            floor=FLOOR,
            settings=lab.settings(slots=slots, worker_processes=1, handler="async, does nothing"),
        )


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
