"""Workers that run until they are ended, and how fast they go in the middle of a full queue.

A stretch is measured by what the workers say they have run: from a tenth of the jobs on, when
all is warm, until nine tenths, so that neither a start nor the last few jobs count. Afterwards
every job must stand in the database as completed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import multiprocessing
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import jobq
from jobq._bench import hands, workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.meter import server_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import psycopg

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Database, Lab

_POLL_S: Final = 0.002
_TIMEOUT_S: Final = 600.0
EDGES: Final = (0.1, 0.9)
LIVE: Final = """
select (select count(*) from jobq.ready) + (select count(*) from jobq.running)
     + (select count(*) from jobq.scheduled)
"""

# kinds of their own: how they are run is declared with them
FAILING: Final = jobq.JobType(
    "fails_once", workload.EmailArgs, backoff=jobq.ConstantBackoff(timedelta(0), jitter=0)
)
SNOOZING: Final = jobq.JobType("snoozes", workload.EmailArgs)
CRUNCHING: Final = jobq.JobType("crunches", workload.EmailArgs)

_in_processes: Final = jobq.Jobs()  # a new process finds a handler by its module and name


@_in_processes.handler(CRUNCHING, run_in="process")
def crunch(job: jobq.Job, args: workload.EmailArgs) -> None:
    """Do nothing, in another process."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker is to do.

    Attributes:
        handler: ``async``, ``thread``, or ``process``.
        queues: its slots by queue.
        sleep_s: how long an async handler sleeps.
        snoozes: how often a job of the kind ``snoozes`` comes back.
    """

    handler: str = "async"
    queues: Mapping[str, int] = field(default_factory=lambda: {"default": 200})
    sleep_s: float = 0.0
    snoozes: int = 0

    @property
    def slots(self) -> int:
        """All its slots."""
        return sum(self.queues.values())


def serve(dsn: str, work: Work) -> None:
    """Work, reporting progress in handlers run, until the process is ended. For a hand."""
    logging.getLogger("jobq").addHandler(logging.NullHandler())  # a log nobody reads, as in production
    # a process that handlers run in is a child, which a hand, a daemon to multiprocessing, may not have
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

    async def main() -> None:
        async with workload.working(dsn, registry(work), work.queues):
            await asyncio.Event().wait()

    workload.run_async(main())


def registry(work: Work) -> jobq.Jobs:
    """Return the handlers; all but those in processes count what they have run."""
    if work.handler == "process":
        return _in_processes
    jobs = jobq.Jobs()
    progress = hands.progress
    count = itertools.count(1)

    async def run(job: jobq.Job, args: workload.EmailArgs) -> None:  # noqa: ARG001
        if work.sleep_s:
            await asyncio.sleep(work.sleep_s)
        progress.value = next(count)

    def run_in_thread(job: jobq.Job, args: workload.EmailArgs) -> None:  # noqa: ARG001
        progress.value = next(count)

    async def fail_once(job: jobq.Job, args: workload.EmailArgs) -> None:  # noqa: ARG001
        progress.value = next(count)
        if job.attempt == 1:
            raise ConnectionError("no route to the mail server")

    async def snooze(job: jobq.Job, args: workload.EmailArgs) -> None:  # noqa: ARG001
        progress.value = next(count)
        if job.attempt <= work.snoozes:
            raise jobq.Snooze(timedelta(0))

    jobs.handler(workload.EMAIL)(run_in_thread if work.handler == "thread" else run)
    jobs.handler(FAILING)(fail_once)
    jobs.handler(SNOOZING)(snooze)
    return jobs


def stretch(
    lab: Lab, database: Database, working: Sequence[Hand], jobs: int, *, seen: Callable[[], int] | None = None
) -> tuple[int, Window]:
    """Measure workers that are at it already, or about to be, and see them finish all jobs.

    Args:
        lab: where.
        database: theirs.
        working: their processes, told to `serve`.
        jobs: how many handler runs there will be.
        seen: how many there have been, where the workers do not say.

    Returns:
        How many jobs, and the window in which they were run.

    Raises:
        BenchError: they did not finish, or not every job was completed.
    """
    done = seen or (lambda: sum(hand.progress for hand in working))
    first = _await(done, int(jobs * EDGES[0]), working)
    before, cpu_s = lab.meter.read(), _cpu_s(working)
    last = _await(done, int(jobs * EDGES[1]), working)
    after, spent_s = lab.meter.read(), _cpu_s(working)
    with database.connect() as connection:
        _await(lambda: -_one(connection, LIVE), 0, working)
        rows = connection.execute("select state, count(*) from jobq.jobs group by state").fetchall()
    if set(dict(rows)) != {"completed"}:
        raise BenchError(f"all jobs should be completed, and there are {dict(rows)}")
    client_s = None if cpu_s is None or spent_s is None else spent_s - cpu_s
    return last - first, Window.between(before, after, client_s)


def _one(connection: psycopg.Connection[Any], sql: str) -> int:
    row = connection.execute(sql.encode()).fetchone()
    assert row is not None
    return int(row[0])


def _cpu_s(working: Sequence[Hand]) -> float | None:
    """Return the CPU seconds of all of them and their children."""
    spent_s = [server_cpu_s(hand.pid) for hand in working]
    return None if None in spent_s else sum(s for s in spent_s if s is not None)


def _await(done: Callable[[], int], wanted: int, working: Sequence[Hand]) -> int:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (count := done()) < wanted:
        for hand in working:
            if not hand.busy:
                hand.result()  # raises what it has to say
        if time.monotonic() > deadline_s:
            raise BenchError(f"{count} of {wanted} jobs done within {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    return count
