"""The completer: records outcomes, many in one statement, each behind its fence.

Outcomes wait here for a few milliseconds or until there are enough. While the database is away
they stay, and the fetcher stops claiming when there are too many of them: a finished outcome is
lost only when its lease ended meanwhile, and then it is counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol, TypeVar

from jobq._driver_errors import is_about_data
from jobq._errors import DatabaseUnavailable, Error
from jobq._statements.outcomes import Failure, Settlement, complete, find_finished, settle
from jobq._worker.observers import Observers
from jobq._worker.outcome import Completion, Outcome

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from jobq._worker.config import WorkerConfig
    from jobq._worker.link import Link
    from jobq._worker.stats import Counters

logger = logging.getLogger("jobq.worker")

OutcomeT = TypeVar("OutcomeT", Completion, Settlement)
_Taken_contra = TypeVar("_Taken_contra", Completion, Settlement, contravariant=True)


class _Statement(Protocol[_Taken_contra]):
    """Records one batch; ``again`` when an earlier try's reply was lost. Returns the ids that it had."""

    async def __call__(self, worker_id: int, batch: Sequence[_Taken_contra], *, again: bool) -> set[int]: ...


class Completer:
    """Takes outcomes from the executor and records them through its own connection.

    Args:
        link: its connection.
        schema: where the queue lives.
        worker_name: kept with each failure.
        config: batch size, delay and bounds.
        counters: what it counts.
        on_recorded: told which jobs (id, attempt) have left this worker's hands, however it went.
        on_discarded: told which settlements were recorded as discarded.
        on_room: called when it was full and is no longer.
        notify: whether jobs handed back may wake listeners.
    """

    def __init__(
        self,
        link: Link,
        schema: str,
        worker_name: str,
        config: WorkerConfig,
        counters: Counters,
        on_recorded: Callable[[int, Sequence[Outcome]], None],
        on_discarded: Callable[[Sequence[Settlement]], None],
        on_room: Callable[[], None],
        *,
        notify: bool,
    ) -> None:
        self._link = link
        self._schema = schema
        self._worker_name = worker_name
        self._config = config
        self._counters = counters
        self._on_recorded = on_recorded
        self._on_discarded = on_discarded
        self._on_room = on_room
        self._notify = notify
        self.observers = Observers(())
        self._waiting: defaultdict[int, list[Outcome]] = defaultdict(list)  # by worker id
        self._count = 0
        self._unsent = asyncio.Event()
        self._full_batch = asyncio.Event()
        self._flushes: list[asyncio.Future[None]] = []

    @property
    def pending(self) -> int:
        """How many outcomes are not recorded yet."""
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether so many outcomes wait that nothing more should be claimed."""
        return self._count >= self._config.pending_outcomes

    def add(self, worker_id: int, outcome: Outcome) -> None:
        """Take one outcome of a job that was claimed as ``worker_id``."""
        self._waiting[worker_id].append(outcome)
        self._count += 1
        if self._count == 1:
            self._unsent.set()
        elif self._count == self._config.completion_batch:
            self._full_batch.set()

    async def flushed(self) -> None:
        """Wait until everything that was added before this call is recorded."""
        flush = asyncio.get_running_loop().create_future()
        self._flushes.append(flush)
        self._unsent.set()
        self._full_batch.set()
        await flush

    async def run(self) -> None:
        """Record outcomes until cancelled."""
        while True:
            await self._unsent.wait()
            if self._count < self._config.completion_batch and not self._flushes:
                await self._gather()
            self._full_batch.clear()
            flushes, self._flushes = self._flushes, []
            for worker_id in list(self._waiting):
                await self._record_waiting(worker_id)
            for flush in flushes:
                if not flush.done():
                    flush.set_result(None)
            if self._count == 0 and not self._flushes:
                self._unsent.clear()

    async def _gather(self) -> None:
        """Give other outcomes a moment to come along."""
        try:
            async with asyncio.timeout(self._config.completion_delay.total_seconds()):
                await self._full_batch.wait()
        except TimeoutError:
            pass  # the moment is over, and what is here goes now

    async def _record_waiting(self, worker_id: int) -> None:
        batch = self._waiting.pop(worker_id)
        completions = [o for o in batch if isinstance(o, Completion)]
        settlements = [o for o in batch if isinstance(o, Settlement)]
        size = self._config.completion_batch
        for start in range(0, len(completions), size):
            await self._record(worker_id, completions[start : start + size], self._complete)
        for start in range(0, len(settlements), size):
            await self._record(worker_id, settlements[start : start + size], self._settle)

    async def _record(
        self,
        worker_id: int,
        batch: Sequence[OutcomeT],
        statement: _Statement[OutcomeT],
    ) -> None:
        """Record one batch, however long the database is away; then account for each item."""
        try:
            had, took_s = await self._insist(lambda again: statement(worker_id, batch, again=again))
        except Error as error:
            if len(batch) == 1:
                await self._record_refused(worker_id, batch[0], error)
                return
            for item in batch:
                await self._record(worker_id, [item], statement)
            return
        await self._account(worker_id, batch, had, took_s)

    async def _insist(self, attempt: Callable[[bool], Awaitable[set[int]]]) -> tuple[set[int], float]:
        """Try until the server answers; return its answer, and the seconds that the last try took.

        A deadlock, a right or a table that is missing, a server that is away: none of it is the
        outcomes' fault, and all of them stay until it is over.

        Args:
            attempt: one try, told whether an earlier one may have taken effect without a reply.

        Raises:
            Error: the server refuses what was sent, for what it is.
        """
        again, failures = False, 0
        while True:
            started = time.monotonic()
            try:
                return await attempt(again), time.monotonic() - started
            except Error as error:
                if is_about_data(error):
                    raise
                again = again or isinstance(error, DatabaseUnavailable)
                failures += 1
                await self._wait_after(error, failures)

    async def _account(self, worker_id: int, batch: Sequence[Outcome], had: set[int], took_s: float) -> None:
        self._counters.completion.add(took_s)
        self._counters.note_database_back()
        self._let_go(worker_id, batch)
        lost = [outcome for outcome in batch if outcome.job_id not in had]
        for outcome in lost:
            self._counters.lost_leases += 1
            logger.warning(
                "outcome of job %d attempt %d dropped: its lease had ended, and the job may run elsewhere. "
                "If it happens often, the worker is frozen at times, or its lease is too short",
                outcome.job_id,
                outcome.attempt,
                extra=_fields(outcome, worker_id),
            )
        recorded = batch if not lost else [o for o in batch if o.job_id in had]
        self._counters.count(recorded)
        if self.observers and recorded:
            self.observers.settled(recorded, took_s)
        discarded = [o for o in recorded if isinstance(o, Settlement) and o.to == "discarded"]
        if discarded:
            self._on_discarded(discarded)

    def _let_go(self, worker_id: int, batch: Sequence[Outcome]) -> None:
        was_full = self.is_full
        self._count -= len(batch)
        self._on_recorded(worker_id, batch)
        if was_full and not self.is_full:
            self._on_room()

    async def _complete(self, worker_id: int, batch: Sequence[Completion], *, again: bool) -> set[int]:
        fences = [(o.job_id, o.attempt) for o in batch]
        results = {o.job_id: o.result for o in batch if o.result is not None}
        had = await self._link.run(complete(self._schema, worker_id, fences, results))
        if again and len(had) < len(batch):
            # The first try's reply was lost, not necessarily its effect.
            had |= await self._link.run(find_finished(self._schema, worker_id, fences))
        return had

    async def _settle(self, worker_id: int, batch: Sequence[Settlement], *, again: bool) -> set[int]:
        had = await self._link.run(
            settle(self._schema, worker_id, self._worker_name, batch, notify=self._notify)
        )
        if again and len(had) < len(batch):
            # Sent twice, the reply of one lost: those that are gone went the first time, or their
            # lease ended. Nothing that is certain can be said, so they are not called lost.
            self._counters.uncertain += len(batch) - len(had)
            return {o.job_id for o in batch}
        return had

    async def _wait_after(self, error: Error, failures: int) -> None:
        """Wait before a batch is tried again; say so the first time, if nobody else has."""
        is_new = self._counters.note_database_away() or not isinstance(error, DatabaseUnavailable)
        if failures == 1 and is_new:
            logger.warning(
                "outcomes cannot be recorded now, %d wait and are kept as long as this process lives, so do "
                "not restart it; look after the database: %s",
                self._count,
                error,
            )
        await asyncio.sleep(self._link.retry_delay_s(failures))

    async def _record_refused(self, worker_id: int, outcome: Outcome, error: Error) -> None:
        """The server will not store this one as it is: keep what can be kept of it."""
        logger.error(
            "outcome of job %d attempt %d was refused by the server and is kept as a failure: %s",
            outcome.job_id,
            outcome.attempt,
            error,
            extra=_fields(outcome, worker_id),
        )
        failure = Failure("failed", "jobq.DatabaseError", f"outcome refused by the server: {error}", "")
        plain = Settlement(
            outcome.job_id,
            outcome.attempt,
            "discarded",
            "its outcome was refused by the server",
            failed=True,
            failure=failure,
        )
        settlement = (self._schema, worker_id, self._worker_name, [plain])
        try:
            had, took_s = await self._insist(lambda _: self._link.run(settle(*settlement, notify=False)))
        except Error as again:
            logger.critical(
                "job %d attempt %d: not even its failure can be recorded, and it stays in `running` "
                "until this worker ends; the server's log may tell more: %s",
                outcome.job_id,
                outcome.attempt,
                again,
                extra=_fields(outcome, worker_id),
            )
            self._let_go(worker_id, [plain])
            return
        await self._account(worker_id, [plain], had, took_s)


def _fields(outcome: Outcome, worker_id: int) -> dict[str, int]:
    return {"job_id": outcome.job_id, "attempt": outcome.attempt, "worker": worker_id}
