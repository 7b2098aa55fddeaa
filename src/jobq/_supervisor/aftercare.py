"""Aftercare: what becomes of the jobs that a worker process held when it ended.

A lease that runs out would bring them back too, in half a minute. Here it is known at once that the
process is gone, so they come back in milliseconds. Who pays depends on how it ended: whoever was stopped
hands back, and no job pays; whoever died may have died of one of its jobs, so each that it had begun pays one
crash. What it had only claimed is handed back: a prefetch of hundreds must not make as many suspects.

It has a thread of its own, since the database may be slow or away, and a supervisor must not be.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from jobq._errors import Error
from jobq._postgres import reconnect_delay
from jobq._sessions import SyncSession
from jobq._statements.duties import at_crash_limit, end, rescue
from jobq._statements.outcomes import release

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("jobq.supervisor")

_MOST_ESTATES: Final = 1000  # while the database is away; by then the leases of the oldest have run out
_RESCUE_BATCH: Final = 500
_MOST_BATCHES: Final = 1000
_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing


class Estate(NamedTuple):
    """What a process left.

    Attributes:
        process: what to call it in the log.
        worker_ids: those that it had registered.
        died: whether it died by itself, so that the jobs that it had begun are suspects.
        started: which those are. ``None`` or none: all that it held, for then nobody knows, or it died
            of what a job brought before it was begun.
    """

    process: str
    worker_ids: tuple[int, ...]
    died: bool
    started: frozenset[int] | None = None


class Aftercare:
    """Settles estates, one after another, as soon as the database lets it.

    Args:
        conninfo: where the database is.
        schema: where the queue lives.
        crash_limit: as the workers have it. A job that has reached it is left to a worker's rescuer,
            which can tell the application's ``on_discard``.
    """

    def __init__(self, conninfo: str, schema: str, crash_limit: int) -> None:
        self._conninfo = conninfo
        self._schema = schema
        self._crash_limit = crash_limit
        self._estates: deque[Estate] = deque(maxlen=_MOST_ESTATES)
        self._changed = threading.Condition()
        self._closing = False
        self._abandoned = False
        self._session: SyncSession | None = None
        self._thread = threading.Thread(target=self._run, name="jobq-aftercare", daemon=True)
        self._thread.start()

    def add(self, estate: Estate) -> None:
        """Take an estate on; it is settled in the thread."""
        with self._changed:
            self._estates.append(estate)
            self._changed.notify()

    def close(self, within_s: float) -> int:
        """Settle what is there within so many seconds; return how many estates had to be left."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(within_s)
        with self._changed:
            self._abandoned = True
            self._changed.notify()
            return len(self._estates)

    def _run(self) -> None:
        failures = 0
        while (estate := self._next()) is not None:
            try:
                self._settle(estate)
            except Error as error:
                failures += 1
                if failures == 1:
                    logger.warning(
                        "jobs of %s cannot be given back yet, trying on: %s", estate.process, error
                    )
                self._close_session()
                self._pause(reconnect_delay(failures, _RNG))
                continue
            failures = 0
            with self._changed:
                if self._estates and self._estates[0] is estate:
                    self._estates.popleft()
                is_last = not self._estates
            if is_last:  # weeks may pass until the next one
                self._close_session()
        self._close_session()

    def _next(self) -> Estate | None:
        with self._changed:
            while not self._estates and not self._closing:
                self._changed.wait()
            return self._estates[0] if self._estates and not self._abandoned else None

    def _pause(self, pause_s: float) -> None:
        until = time.monotonic() + pause_s
        with self._changed:
            while not self._abandoned and (left_s := until - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def _settle(self, estate: Estate) -> None:
        if estate.died:
            self._rescue(estate)
            return
        session = self._open()
        for worker_id in estate.worker_ids:
            back = session.run(release(self._schema, worker_id, ends=True))
            if back:
                logger.info("%s: %s handed back", estate.process, _count(back))

    def _rescue(self, estate: Estate) -> None:
        session = self._open()
        for worker_id in estate.worker_ids:
            if estate.started:
                # Before its end is declared: other workers' rescuers charge all that they find then.
                back = session.run(release(self._schema, worker_id, list(estate.started)))
                if back:
                    logger.info("%s: %s handed back that it had not begun", estate.process, _count(back))
            session.run(end(self._schema, worker_id, "died"))
        leave = session.run(at_crash_limit(self._schema, self._crash_limit))
        for _ in range(_MOST_BATCHES):
            rescued = session.run(rescue(self._schema, self._crash_limit, _RESCUE_BATCH, leave))
            if rescued:
                logger.warning("%s: %s taken back", estate.process, _count([job.job_id for job in rescued]))
            if len(rescued) < _RESCUE_BATCH:
                return

    def _open(self) -> SyncSession:
        if self._session is None or self._session.closed:
            self._session = SyncSession.open(
                self._conninfo, schema=self._schema, name="jobq supervisor", plan_settings=True
            )
        return self._session

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()


def _count(job_ids: Sequence[int]) -> str:
    if len(job_ids) <= 5:
        return f"job{'s' * (len(job_ids) > 1)} {', '.join(map(str, job_ids))}"
    return f"{len(job_ids)} jobs"
