"""The bare loop: the worker's own claim and completion statements, and nothing else.

One connection, one tight loop, batches of 100: what PostgreSQL itself can do with this shape. It
keeps the marks fresh as a worker does, for a claim without them is not the same statement.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

from jobq._bench import hands
from jobq._bench.meter import server_cpu_s
from jobq._bench.workload import DrainReply
from jobq._marks import LaneMarks
from jobq._operation import run
from jobq._postgres import execute, sync_cursor
from jobq._sessions import SyncSession
from jobq._statements.claim import claim, refresh
from jobq._statements.duties import Registration, register
from jobq._statements.outcomes import complete

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._operation import Call, Operation, Rows

T = TypeVar("T")

SCHEMA: Final = "jobq"
QUEUE: Final = "default"
BATCH: Final = 100
REFRESH_S: Final = 0.02  # as often as a worker does at the most
IDLE_S: Final = 0.002
_LEASE_S: Final = 3600.0  # nobody renews it


class BareLoop:
    """A registered worker identity, its connection and its marks."""

    def __init__(self, dsn: str, worker_id: int | None = None) -> None:
        self._session = SyncSession.open(dsn, schema=SCHEMA, name="bare loop", plan_settings=True)
        cursor = sync_cursor(self._session.connection)
        # not the session's own run(), whose guard against a silent server costs a thread a call
        self._execute: Callable[[Call], Rows] = lambda call: execute(cursor, call, prepare=True)
        worker_id = worker_id or os.getpid()
        self._worker_id = worker_id
        self._marks = LaneMarks()
        self._refreshed_s = -REFRESH_S
        me = Registration(worker_id, "bare loop", "here", os.getpid(), "0", [QUEUE], [])
        self._run(register(SCHEMA, me, _LEASE_S))

    def turn(self) -> int:
        """Claim a batch and complete it; return how many jobs that were."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s >= REFRESH_S:
            ranges = self._marks.ranges()
            self._marks.refresh(ranges, self._run(refresh(SCHEMA, QUEUE, ranges, now_s)))
            self._refreshed_s = now_s
        jobs = self._run(claim(SCHEMA, QUEUE, self._marks.ranges(), BATCH, self._worker_id))
        if not jobs:
            return 0
        fences = [(job.job_id, job.attempt) for job in jobs]
        return len(self._run(complete(SCHEMA, self._worker_id, fences, {})))

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def _run(self, operation: Operation[T]) -> T:
        return run(operation, self._execute)


def drain(dsn: str, jobs: int, postmaster_pid: int) -> DrainReply:
    """Claim and complete so many jobs, which are there already. For a hand."""
    loop = BareLoop(dsn)
    try:
        server_s, client_s, began_s = server_cpu_s(postmaster_pid), time.process_time(), time.perf_counter()
        done = 0
        while done < jobs:
            turned = loop.turn()
            assert turned, f"the queue ran dry after {done} of {jobs} jobs"
            done += turned
        seconds = time.perf_counter() - began_s
        return DrainReply.since(server_s, client_s, seconds, postmaster_pid)
    finally:
        loop.close()


def follow(dsn: str, jobs: int) -> None:
    """Claim and complete so many jobs as they come, reporting progress. For a hand."""
    loop = BareLoop(dsn)
    progress = hands.progress
    try:
        while progress.value < jobs:
            turned = loop.turn()
            progress.value += turned
            if not turned:
                time.sleep(IDLE_S)
    finally:
        loop.close()
