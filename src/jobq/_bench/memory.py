"""Memory: what a worker holds when idle, and after very many jobs.

Resident memory as the kernel counts it, on uvloop where that is installed. The yardstick of an idle
worker is a process that has imported psycopg and opened a connection; that of a busy one is itself
after its first jobs, when every path has been taken once.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from jobq._bench import workload
from jobq._bench.horizon import Flow
from jobq._bench.lab import BenchError
from jobq._bench.result import Cost, Floor, Result, Spread
from jobq._bench.workers import Work, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.lab import Lab

IDLE: Final = Floor("value", 60.0, at_least=False)
GROWTH: Final = Floor("value", 10.0, at_least=False)
WARM_UP: Final = 5_000
_SETTLE_S: Final = 2.0
_READY_TIMEOUT_S: Final = 30.0


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    if sys.platform != "linux":
        raise BenchError("memory is read from /proc")
    jobs = lab.pick(full=1_000_000, quick=100_000, tiny=2_000)
    with lab.database() as database, lab.hands(2) as [worker, bare], database.connect() as connection:
        bare_mb = bare.call(connect_only, database.dsn).value
        worker.start(serve, database.dsn, Work())
        workload.await_one_row(connection, workload.WORKER_IS_THERE, _READY_TIMEOUT_S)
        time.sleep(_SETTLE_S)
        idle_mb = resident_mb(worker.pid)
        with Flow(lab, database.dsn, database.name, worker) as flow:
            flow.push(WARM_UP)
            flow.rest()
            warm_mb = resident_mb(worker.pid)
            flow.push(jobs)
            flow.rest()
        after_mb = resident_mb(worker.pid)
    yield _result(lab, "idle", idle_mb, bare_mb, "a process with one connection of psycopg", IDLE)
    grown_mb = max(after_mb - warm_mb, 0.01)  # a worker that shrank has not grown
    grown = _result(lab, "growth", grown_mb, warm_mb, "the same after 5,000 jobs", GROWTH)
    yield replace(grown, details={"jobs": jobs})


def _result(lab: Lab, case: str, value_mb: float, bare_mb: float, name: str, floor: Floor) -> Result:
    return Result(
        bench="memory",
        case=case,
        value=Spread.of([value_mb]),
        unit="MB",
        yardstick=Spread.of([bare_mb]),
        yardstick_name=name,
        ratio=Spread.of([value_mb / bare_mb]),
        runs=1,
        cost=Cost(),
        floor=floor,
        settings=lab.settings(slots=Work().slots, worker_processes=1),
    )


def resident_mb(pid: int) -> float:
    """Return a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise BenchError(f"process {pid} has no memory of its own")


def connect_only(dsn: str) -> float:
    """Connect, and return this process's resident memory. For a hand."""
    with psycopg.connect(dsn):
        return resident_mb(os.getpid())
