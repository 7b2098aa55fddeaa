"""Unique: what an enqueue costs whose keys were used many times, under a pinned vacuum horizon.

A hundred keys are enqueued in one call, claimed and completed, and so on, while one connection holds
``BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT …`` open, so that no dead row goes away. The figure is the CPU
time of the enqueuing session alone, a job, in the last tenth of all calls beside that in the first.

The case ``replaced`` is another one: the hundred jobs wait, and each call replaces them all, so that each
of them leaves a trail of its own dead rows. It has no floor: a job is replaced so often only while
somebody pins the horizon.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import workload
from jobq._bench.bareloop import BATCH, BareLoop
from jobq._bench.lab import BenchError
from jobq._bench.meter import session_cpu_s
from jobq._bench.result import Cost, Floor, Result, Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobq._bench.lab import Database, Lab

FLOOR: Final = Floor("ratio", 1.3, at_least=False)
KEYS: Final = BATCH
TENTHS: Final = 10
WARM_UP: Final = 20  # calls


@dataclass(frozen=True, slots=True)
class Case:
    """One way to use keys.

    Attributes:
        unique: how they are held.
        delay: of the jobs; those that wait for it are replaced instead of claimed.
        share: of the calls; a trail grows too long for all of them.
    """

    name: str
    unique: jobq.Unique
    delay: timedelta | None = None
    floor: Floor | None = FLOOR
    share: float = 1.0


CASES: Final = (
    Case("until finished", jobq.Unique(by_args=True)),
    Case("until started", jobq.Unique(by_args=True, until="started")),
    Case("replaced", jobq.Unique(by_args=True, on_conflict="replace"), timedelta(hours=1), None, 0.2),
)


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    calls = lab.pick(full=100, quick=20, tiny=2)  # in a tenth
    rounds = lab.pick(full=3, quick=1, tiny=1)
    for case in CASES:
        tenth = max(1, round(calls * case.share))
        courses: list[list[float]] = []
        for _ in range(rounds):
            with lab.database() as database:
                courses.append(_course(database, case, tenth))
        yield _result(lab, case, tenth, courses)


def _course(database: Database, case: Case, tenth: int) -> list[float]:
    """Return what a job's enqueue cost in each tenth, in microseconds."""
    loop = BareLoop(database.dsn)
    try:
        with jobq.Client(database.dsn, pool_max_size=1) as client, database.connect() as pinning:
            pinning.execute("begin isolation level repeatable read")
            pinning.execute("select count(*) from jobq.ready")
            with client.pool.connection() as connection:
                pid = connection.info.backend_pid
            _use_keys(client, loop, case, WARM_UP)
            edges_s = [_spent_s(pid)]
            for _ in range(TENTHS):
                _use_keys(client, loop, case, tenth)
                edges_s.append(_spent_s(pid))
    finally:
        loop.close()
    return [(b - a) / (tenth * KEYS) * 1e6 for a, b in itertools.pairwise(edges_s)]


def _spent_s(pid: int) -> float:
    """Return a session's CPU seconds; the clock where nobody can tell."""
    spent_s = session_cpu_s(pid)
    return time.monotonic() if spent_s is None else spent_s


def _use_keys(client: jobq.Client, loop: BareLoop, case: Case, calls: int) -> None:
    jobs = [
        jobq.NewJob(
            workload.EMAIL,
            workload.EmailArgs(f"{n}@example.com", "hello"),
            unique=case.unique,
            delay=case.delay,
        )
        for n in range(KEYS)
    ]
    for _ in range(calls):
        made = client.enqueue_many(jobs)
        used = sum(job.inserted or job.replaced for job in made)
        if used != KEYS or (case.delay is None and loop.turn() != KEYS):
            raise BenchError(f"{case.name}: {used} of {KEYS} keys were used, or their jobs not all claimed")


def _result(lab: Lab, case: Case, tenth: int, courses: Sequence[Sequence[float]]) -> Result:
    firsts, lasts = [course[0] for course in courses], [course[-1] for course in courses]
    last = Spread.of(lasts)
    return Result(
        bench="unique",
        case=case.name,
        value=last,
        unit="µs/job",
        yardstick=Spread.of(firsts),
        yardstick_name=f"the first {tenth * KEYS:,} of {TENTHS * tenth * KEYS:,} jobs, of {KEYS} keys",
        ratio=ratios(lasts, firsts),
        runs=len(courses),
        cost=Cost(server_cpu_us=last.median),
        yardstick_cost=Cost(server_cpu_us=Spread.of(firsts).median),
        floor=case.floor,
        settings=lab.settings(slots=None, keys=KEYS, jobs=TENTHS * tenth * KEYS),
        details={"course_us": [Spread.of(part).median for part in zip(*courses, strict=True)]},
    )
