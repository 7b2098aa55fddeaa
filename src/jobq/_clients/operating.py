"""What both clients do for operators, by a job's id: look, cancel, retry, delete, reschedule, move."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING, TypeVar

from jobq._clients import verbs
from jobq._clients.base import ClientBase, documented_by
from jobq._clients.pools import AsyncPool, OwnAsyncPool, OwnPool, SyncPool
from jobq._operation import atomic
from jobq._postgres import AsyncCursor, SyncCursor

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from jobq._clients.bulk import AsyncBulk, Bulk
    from jobq._operation import Operation
    from jobq._statements.cancel import Cancellation
    from jobq._statements.filter import JobFilter, JobPage
    from jobq._statements.operator_log import OperatorAction
    from jobq._types import AttemptError, JobInfo

T = TypeVar("T")


class AsyncOperating(ClientBase[AsyncPool, OwnAsyncPool, AsyncCursor]):
    """The operators' verbs of the async client."""

    @abstractmethod
    async def _run(self, operation: Operation[T]) -> T: ...

    @functools.cached_property
    def bulk(self) -> AsyncBulk:
        """What is done to many jobs at once, chosen by a filter."""
        from jobq._clients.bulk import AsyncBulk  # noqa: PLC0415 - as `verbs`

        return AsyncBulk(self._run, self.schema, notify=self.notify)

    async def get(self, job_id: int) -> JobInfo:
        """Return a job as it stands now.

        Raises:
            JobNotFound: there is none with that id.
        """
        return await self._run(verbs.get_job(self.schema, job_id))

    async def errors(self, job_id: int) -> _Errors:
        """Return how a job's attempts failed, the oldest first; older ones than are kept are counted.

        Raises:
            JobNotFound: there is none with that id.
        """
        return await self._run(verbs.job_errors(self.schema, job_id))

    async def list(
        self, which: JobFilter | None = None, *, after: str | None = None, limit: int = 50
    ) -> JobPage:
        """Return one page of jobs: state by state, the newest first in each.

        Running ones come first, then ready, scheduled, discarded, cancelled, completed; within a
        state by id, or by when they ended, the latest first. One call looks through 20,000 jobs at
        most: where few of very many match, a page has fewer than ``limit``, none perhaps, and a
        ``next`` all the same.

        Args:
            which: the jobs that are wanted; ``None`` for all.
            after: ``next`` of the page before.
            limit: 1 to 1,000.

        Raises:
            ConfigError: the limit or ``after`` cannot be what it is.
        """
        return await self._run(verbs.list_jobs(self.schema, which, after, limit))

    async def cancel(self, job_id: int, *, reason: str = "", by: str | None = None) -> Cancellation:
        """End a job that waits, or have the handler of one that runs told to stop.

        A running handler hears of it within a second: an async one is cancelled, one in a thread
        sees ``job.cancelled``, one in a process gets SIGTERM, and is killed with its children after
        the worker's ``cancel_grace``. It becomes ``cancelled`` when the handler has ended, also when
        it returns because it saw ``job.cancelled``, or fails. One that comes to its own end without
        having seen it is ``completed``.

        Args:
            job_id: its id.
            reason: kept with the job, at most 1,000 characters.
            by: who does it, for the operator log; the process's user and host when left out.

        Returns:
            Whether it is cancelled or was asked to stop.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it has ended.
            ConfigError: the reason or the name cannot be kept.
        """
        return await self._run(verbs.cancel_job(self.schema, job_id, reason, by, notify=self.notify))

    async def retry(self, job_id: int, *, reason: str = "", by: str | None = None) -> None:
        """Make a finished job ready again: its attempts go on counting, its failures start from 0.

        Args:
            job_id: its id.
            reason: for the operator log, at most 1,000 characters.
            by: who does it; the process's user and host when left out.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it has not ended, or another live job holds its unique key.
            ConfigError: the reason or the name cannot be kept.
        """
        await self._run(atomic(verbs.retry_job(self.schema, job_id, reason, by, notify=self.notify)))

    async def delete(self, job_id: int, *, reason: str = "", by: str | None = None) -> None:
        """Remove a job that waits or has ended, with its arguments, result and errors. Its key is free.

        Args:
            job_id: its id.
            reason: for the operator log, at most 1,000 characters.
            by: who does it; the process's user and host when left out.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it runs: cancel it first.
            ConfigError: the reason or the name cannot be kept.
        """
        await self._run(verbs.delete_job(self.schema, job_id, reason, by))

    async def reschedule(
        self,
        job_id: int,
        *,
        run_at: datetime | None = None,
        delay: timedelta | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> None:
        """Choose anew when a job that waits becomes ready; a time that has passed means now.

        Args:
            job_id: its id.
            run_at: when, with a time zone; or
            delay: how long from the database's now.
            reason: for the operator log, at most 1,000 characters.
            by: who does it; the process's user and host when left out.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it runs, or has ended.
            ConfigError: not exactly one of ``run_at`` and ``delay``, or one that cannot be what it is.
        """
        await self._run(
            verbs.reschedule_job(self.schema, job_id, run_at, delay, reason, by, notify=self.notify)
        )

    async def move(
        self,
        job_id: int,
        *,
        queue: str | None = None,
        priority: int | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> None:
        """Put a job that waits into another queue, or give it another priority, or both.

        It goes to the end of its new lane. Its unique key stays as it is.

        Args:
            job_id: its id.
            queue: where to; ``None`` leaves it where it is.
            priority: −9 to 9; ``None`` leaves it as it is.
            reason: for the operator log, at most 1,000 characters.
            by: who does it; the process's user and host when left out.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it runs, or has ended.
            ConfigError: neither is given, or one cannot be what it is.
        """
        await self._run(verbs.move_job(self.schema, job_id, queue, priority, reason, by, notify=self.notify))

    async def operator_log(
        self, *, limit: int = 50, before: int | None = None, job_id: int | None = None
    ) -> _Log:
        """Return what operators did, the newest first.

        Args:
            limit: how many entries, 1 to 1,000.
            before: only entries with a smaller id, for the next page.
            job_id: only what was done to this one job by its id, which may be deleted by now; a bulk action
                names no ids.

        Raises:
            ConfigError: one of them cannot be what it is.
        """
        return await self._run(verbs.read_log(self.schema, limit, before, job_id))


class Operating(ClientBase[SyncPool, OwnPool, SyncCursor]):
    """The operators' verbs of the sync client."""

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T: ...

    @functools.cached_property
    def bulk(self) -> Bulk:
        """What is done to many jobs at once, chosen by a filter."""
        from jobq._clients.bulk import Bulk  # noqa: PLC0415 - as `verbs`

        return Bulk(self._run, self.schema, notify=self.notify)

    @documented_by(AsyncOperating.get)
    def get(self, job_id: int) -> JobInfo:
        return self._run(verbs.get_job(self.schema, job_id))

    @documented_by(AsyncOperating.errors)
    def errors(self, job_id: int) -> _Errors:
        return self._run(verbs.job_errors(self.schema, job_id))

    @documented_by(AsyncOperating.list)
    def list(self, which: JobFilter | None = None, *, after: str | None = None, limit: int = 50) -> JobPage:
        return self._run(verbs.list_jobs(self.schema, which, after, limit))

    @documented_by(AsyncOperating.cancel)
    def cancel(self, job_id: int, *, reason: str = "", by: str | None = None) -> Cancellation:
        return self._run(verbs.cancel_job(self.schema, job_id, reason, by, notify=self.notify))

    @documented_by(AsyncOperating.retry)
    def retry(self, job_id: int, *, reason: str = "", by: str | None = None) -> None:
        self._run(atomic(verbs.retry_job(self.schema, job_id, reason, by, notify=self.notify)))

    @documented_by(AsyncOperating.delete)
    def delete(self, job_id: int, *, reason: str = "", by: str | None = None) -> None:
        self._run(verbs.delete_job(self.schema, job_id, reason, by))

    @documented_by(AsyncOperating.reschedule)
    def reschedule(
        self,
        job_id: int,
        *,
        run_at: datetime | None = None,
        delay: timedelta | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> None:
        self._run(verbs.reschedule_job(self.schema, job_id, run_at, delay, reason, by, notify=self.notify))

    @documented_by(AsyncOperating.move)
    def move(
        self,
        job_id: int,
        *,
        queue: str | None = None,
        priority: int | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> None:
        self._run(verbs.move_job(self.schema, job_id, queue, priority, reason, by, notify=self.notify))

    @documented_by(AsyncOperating.operator_log)
    def operator_log(self, *, limit: int = 50, before: int | None = None, job_id: int | None = None) -> _Log:
        return self._run(verbs.read_log(self.schema, limit, before, job_id))


if TYPE_CHECKING:
    # Named out here, where `list` is the builtin and not the verb.
    _Log = list[OperatorAction]
    _Errors = list[AttemptError]
