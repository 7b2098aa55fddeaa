"""``client.bulk``: what is done to many jobs at once. Both colours run the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobq._clients.base import documented_by
from jobq._errors import ConfigError
from jobq._messages import shown
from jobq._statements.bulk import COUNTED_BY_DEFAULT as COUNTED
from jobq._statements.bulk import MAX_BATCH, BulkRun, count_jobs, read_when, read_where
from jobq._statements.bulk_sql import Settings
from jobq._statements.filter import checked_filter
from jobq._statements.operator_log import Entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime, timedelta

    from jobq._clients.base import AsyncRun, SyncRun
    from jobq._statements.bulk import Action, BulkCount, BulkResult
    from jobq._statements.filter import JobFilter


class _BulkBase:
    """What both colours make their runs of."""

    def __init__(self, schema: str, *, notify: bool) -> None:
        self._schema = schema
        self._notify = notify

    def _start(
        self, action: Action, chosen: JobFilter, reason: str, by: str | None, batch: int, **more: Any
    ) -> BulkRun:
        said = {"filter": checked_filter(chosen).described(), **more.pop("said", {})}
        entry = Entry(f"{action} in bulk", said, by, reason)
        settings = Settings(notify=self._notify, **more)
        return BulkRun(self._schema, action, chosen, entry, settings, batch)

    def _reschedule(
        self,
        chosen: JobFilter,
        run_at: datetime | None,
        delay: timedelta | None,
        reason: str,
        by: str | None,
        batch: int,
    ) -> BulkRun:
        when = read_when(run_at, delay)
        return self._start("reschedule", chosen, reason, by, batch, when=when, said=when.described())

    def _move(
        self,
        chosen: JobFilter,
        queue: str | None,
        priority: int | None,
        reason: str,
        by: str | None,
        batch: int,
    ) -> BulkRun:
        said = read_where(queue, priority)
        return self._start("move", chosen, reason, by, batch, **said, said=said)

    @staticmethod
    def _check_progress(on_progress: object) -> None:
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress={shown(on_progress)}: a function, or None for none")


class AsyncBulk(_BulkBase):
    """What is done to many jobs at once, chosen by a :class:`jobq.JobFilter`.

    Each action goes through its jobs in batches, the newest first, each batch in a short transaction
    of its own: nothing is locked for long, and what is interrupted has done whole batches. Doing the
    same again takes it up. The operator log gets one entry, which counts what was done.

    Reached as ``client.bulk``. All actions take:

    - ``filter``: which jobs; of those, the ones to which the action applies. One that chooses every
      job is refused: say at least which states.
    - ``reason``, ``by``: for the operator log; the process's user and host when ``by`` is left out.
    - ``batch``: rows that one transaction looks at, 1 to 1,000.
    - ``on_progress``: called after each batch with the :class:`jobq.BulkResult` so far; what it
      raises ends the action there.

    and raise ``ConfigError`` when one of these cannot be what it is.
    """

    def __init__(self, run: AsyncRun, schema: str, *, notify: bool) -> None:
        super().__init__(schema, notify=notify)
        self._run = run

    async def _drive(self, bulk: BulkRun, on_progress: Callable[[BulkResult], None] | None) -> BulkResult:
        self._check_progress(on_progress)
        while (step := bulk.step()) is not None:
            await self._run(step)
            if on_progress is not None:
                on_progress(bulk.result)
        return bulk.result

    async def count(
        self, filter: JobFilter, *, action: Action | None = None, limit: int | None = COUNTED
    ) -> BulkCount:
        """Count the jobs that a filter chooses: what an action would do, without doing it.

        Args:
            filter: which jobs.
            action: count only those to which this action applies, such as ``"cancel"``.
            limit: stop counting there; ``None`` counts all, which takes seconds where there are millions.

        Raises:
            ConfigError: one of them cannot be what it is.
        """
        return await self._run(count_jobs(self._schema, filter, action, limit))

    async def cancel(
        self,
        filter: JobFilter,
        *,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        """Cancel those that wait, and ask the workers of those that run to stop them."""
        return await self._drive(self._start("cancel", filter, reason, by, batch), on_progress)

    async def retry(
        self,
        filter: JobFilter,
        *,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        """Make discarded and cancelled ones ready again; completed ones where the filter's states name them.

        One whose unique key another live job holds stays as it is, and is named in the result.
        """
        return await self._drive(self._start("retry", filter, reason, by, batch), on_progress)

    async def delete(
        self,
        filter: JobFilter,
        *,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        """Remove those that wait or have ended, with arguments, results and errors. Running ones stay."""
        return await self._drive(self._start("delete", filter, reason, by, batch), on_progress)

    async def reschedule(
        self,
        filter: JobFilter,
        *,
        run_at: datetime | None = None,
        delay: timedelta | None = None,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        """Choose anew when those that wait become ready: at ``run_at``, or after ``delay``."""
        bulk = self._reschedule(filter, run_at, delay, reason, by, batch)
        return await self._drive(bulk, on_progress)

    async def move(
        self,
        filter: JobFilter,
        *,
        queue: str | None = None,
        priority: int | None = None,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        """Give those that wait another ``queue``, ``priority`` or both."""
        return await self._drive(self._move(filter, queue, priority, reason, by, batch), on_progress)


class Bulk(_BulkBase):
    """What is done to many jobs at once."""

    __doc__ = AsyncBulk.__doc__

    def __init__(self, run: SyncRun, schema: str, *, notify: bool) -> None:
        super().__init__(schema, notify=notify)
        self._run = run

    def _drive(self, bulk: BulkRun, on_progress: Callable[[BulkResult], None] | None) -> BulkResult:
        self._check_progress(on_progress)
        while (step := bulk.step()) is not None:
            self._run(step)
            if on_progress is not None:
                on_progress(bulk.result)
        return bulk.result

    @documented_by(AsyncBulk.count)
    def count(
        self, filter: JobFilter, *, action: Action | None = None, limit: int | None = COUNTED
    ) -> BulkCount:
        return self._run(count_jobs(self._schema, filter, action, limit))

    @documented_by(AsyncBulk.cancel)
    def cancel(
        self,
        filter: JobFilter,
        *,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        return self._drive(self._start("cancel", filter, reason, by, batch), on_progress)

    @documented_by(AsyncBulk.retry)
    def retry(
        self,
        filter: JobFilter,
        *,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        return self._drive(self._start("retry", filter, reason, by, batch), on_progress)

    @documented_by(AsyncBulk.delete)
    def delete(
        self,
        filter: JobFilter,
        *,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        return self._drive(self._start("delete", filter, reason, by, batch), on_progress)

    @documented_by(AsyncBulk.reschedule)
    def reschedule(
        self,
        filter: JobFilter,
        *,
        run_at: datetime | None = None,
        delay: timedelta | None = None,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        return self._drive(self._reschedule(filter, run_at, delay, reason, by, batch), on_progress)

    @documented_by(AsyncBulk.move)
    def move(
        self,
        filter: JobFilter,
        *,
        queue: str | None = None,
        priority: int | None = None,
        reason: str = "",
        by: str | None = None,
        batch: int = MAX_BATCH,
        on_progress: Callable[[BulkResult], None] | None = None,
    ) -> BulkResult:
        return self._drive(self._move(filter, queue, priority, reason, by, batch), on_progress)
