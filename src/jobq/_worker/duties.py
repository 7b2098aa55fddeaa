"""What each worker does for the whole fleet, on one more connection: promote and rescue.

Both are safe to do by any number of workers at once. A pass is bounded; one that fails is tried
again after a pause, and the other goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from jobq._errors import DatabaseError, DatabaseUnavailable, Error
from jobq._statements.duties import expire, next_orphan, promote, rescue
from jobq._statements.outcomes import release
from jobq._worker.leniency import Leniency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from jobq._statements.duties import Rescued
    from jobq._worker.config import WorkerConfig
    from jobq._worker.lease import Lease
    from jobq._worker.link import Link
    from jobq._worker.stats import Counters

logger = logging.getLogger("jobq.worker")

_PROMOTE_BATCH: Final = 1000
_RESCUE_BATCH: Final = 500
_RESCAN_S: Final = 10.0  # a full scan for due or orphaned rows, at least this far apart…
_RESCAN_COST_FACTOR: Final = 50.0  # …and never for more than 2 % of the time
_REFUSED_S: Final = 1.0  # after a promotion that the server refused: a right that is missing, a deadlock
_MOST_PASSES: Final = 100  # of one rescue, so that it comes to an end under any load
_SHORTEST_PAUSE_S: Final = 0.002


class Promoter:
    """Moves due jobs to ``ready``.

    Args:
        on_promoted: called with each queue that got jobs.
    """

    def __init__(
        self,
        link: Link,
        schema: str,
        config: WorkerConfig,
        counters: Counters,
        on_promoted: Callable[[str], None],
        *,
        notify: bool,
    ) -> None:
        self._link = link
        self._schema = schema
        self._interval_s = config.promote_interval.total_seconds()
        self._counters = counters
        self._on_promoted = on_promoted
        self._notify = notify
        self._mark: datetime | None = None
        self._rescan_at = 0.0

    async def run(self) -> None:
        """Promote until cancelled."""
        while True:
            try:
                pause_s = await self.run_once()
            except DatabaseUnavailable:
                pause_s = self._link.retry_delay_s()
            except Error:
                logger.exception(
                    "promotion was refused by the server, trying again; `jobqctl doctor` may tell why"
                )
                pause_s = _REFUSED_S
            await asyncio.sleep(pause_s)

    async def run_once(self) -> float:
        """Promote one batch; return the seconds until the next one is due."""
        started = time.monotonic()
        is_rescan = started >= self._rescan_at
        if is_rescan:
            self._mark = None
        promoted = await self._link.run(
            promote(self._schema, self._mark, _PROMOTE_BATCH, notify=self._notify)
        )
        if is_rescan:
            cost_s = time.monotonic() - started
            self._rescan_at = started + max(_RESCAN_S, cost_s * _RESCAN_COST_FACTOR)
        self._mark = promoted.mark
        self._counters.promoted += promoted.jobs
        for queue in promoted.queues:
            self._on_promoted(queue)
        if promoted.jobs == _PROMOTE_BATCH:
            return 0.0
        if promoted.next_due_s is None:
            return self._interval_s
        return min(self._interval_s, max(promoted.next_due_s, _SHORTEST_PAUSE_S))


class Rescuer:
    """Takes back the jobs of dead workers, and what a lost claim left under an old identity.

    Args:
        on_discarded: told of jobs that reached their crash limit.
    """

    def __init__(
        self,
        link: Link,
        schema: str,
        config: WorkerConfig,
        counters: Counters,
        lease: Lease,
        on_discarded: Callable[[Sequence[Rescued]], None],
    ) -> None:
        self._link = link
        self._schema = schema
        self._config = config
        self._counters = counters
        self._lease = lease
        self._on_discarded = on_discarded
        self._set_aside: dict[int, str] = {}
        self._scan_at = 0.0
        self._last_answer_at = time.monotonic()
        # Why the others have not renewed, a worker that has just come cannot know: the database may have
        # been away until now. `EXPIRE` sees that by itself only where the server was started anew.
        self._leniency = Leniency()

    async def run(self) -> None:
        """Rescue until cancelled."""
        is_away = False
        while True:
            try:
                if is_away:
                    await self._return()
                    is_away = False
                await self.run_once()
                self._last_answer_at = time.monotonic()
            except DatabaseUnavailable as error:
                is_away = True
                logger.debug("no rescue while the database is away: %s", error)
            except Error:
                logger.exception(
                    "a rescue was refused by the server, trying again; `jobqctl doctor` may tell why"
                )
            # Spread, so that many workers do not all look at the same moment.
            await asyncio.sleep(self._config.rescue_interval.total_seconds() * (0.8 + 0.4 * self._spread()))

    async def _return(self) -> None:
        """Wait until the database answers; then let all workers renew before anybody is called dead.

        While it was away nobody could renew. Were the first to come back to declare the others' leases
        over, all that they finished meanwhile would be lost and done again.
        """
        await self._link.open()
        if time.monotonic() - self._last_answer_at > self._config.lease.total_seconds() / 2:
            self._leniency.begin()

    def _spread(self) -> float:
        identity = self._lease.current
        return (identity.id % 1000) / 1000 if identity is not None else 0.5

    async def run_once(self) -> int:
        """Do one sweep; return how many jobs were taken back."""
        dead = await self._expire()
        for worker_id, name in dead:
            logger.warning(
                "worker %d (%s) is dead: its lease has ended, and its jobs are taken back. "
                "Look there for why it ended, or what cut it off",
                worker_id,
                name,
                extra={"worker": worker_id},
            )
        await self._retire_identities()
        started = time.monotonic()
        if not dead and started < self._scan_at:
            return 0
        count = await self._sweep()
        cost_s = time.monotonic() - started
        self._scan_at = started + max(_RESCAN_S, cost_s * _RESCAN_COST_FACTOR)
        return count

    async def _expire(self) -> list[tuple[int, str]]:
        """Declare over the leases that are, and return those workers' ids and names."""
        current = self._lease.current
        mine = 0 if current is None else current.id
        latest_us = self._leniency.ask()
        expired = await self._link.run(expire(self._schema, mine, self._leniency.since_us, latest_us))
        if self._leniency.see(expired.now_us):
            logger.warning(
                "the database's clock was stepped forward: leases that look over only since are left to "
                "their workers for a while. Have its host follow NTP, which does not step once it is right"
            )
        return expired.workers

    async def _sweep(self) -> int:
        count = 0
        self._set_aside.clear()
        limit = _RESCUE_BATCH
        for _ in range(_MOST_PASSES):
            leave = list(self._set_aside)
            try:
                rescued = await self._link.run(rescue(self._schema, self._config.crash_limit, limit, leave))
            except DatabaseError as error:
                if limit == 1:
                    await self._set_next_aside(leave, str(error))
                limit = 1  # one by one, to find the row that will not be rescued
                continue
            count += len(rescued)
            self._counters.rescued += len(rescued)
            await self._tell(rescued)
            if len(rescued) < limit:
                break
        return count

    async def _set_next_aside(self, leave: Sequence[int], why: str) -> None:
        """Leave alone, for this sweep, the row that the last pass failed at."""
        found = await self._link.run(next_orphan(self._schema, leave))
        if found is not None:
            self._set_aside[found] = why
            logger.error(
                "job %d cannot be rescued and is left for the next sweep; see `jobqctl show %d`: %s",
                found,
                found,
                why,
                extra={"job_id": found},
            )

    async def _tell(self, rescued: Sequence[Rescued]) -> None:
        for job in rescued:
            logger.warning(
                "job %d attempt %d was taken back from worker %d%s",
                job.job_id,
                job.attempt,
                job.worker_id,
                " and discarded: its workers keep dying with it" if job.discarded else "",
                extra={
                    "job_id": job.job_id,
                    "kind": job.kind,
                    "queue": job.queue,
                    "attempt": job.attempt,
                    "worker": job.worker_id,
                },
            )
        discarded = [job for job in rescued if job.discarded]
        if discarded:
            self._on_discarded(discarded)

    async def _retire_identities(self) -> None:
        """Hand back what a claim without a reply took, and let go of identities that hold nothing."""
        for identity in self._lease.identities[:-1]:
            known = [job_id for job_id, _ in identity.known]
            if not identity.ended:
                back = await self._link.run(release(self._schema, identity.id, known))
                if back:
                    logger.warning("%d jobs of a claim without a reply were handed back", len(back))
            if not identity.known:
                self._lease.retire(identity)
