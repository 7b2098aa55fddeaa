"""``client.queues``: what holds for whole queues. Both colours run the same operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobq._clients.base import documented_by
from jobq._statements.pauses import Pause, pause, read_pauses, resume
from jobq._statements.retention import Retention, read_retention, set_retention

if TYPE_CHECKING:
    from datetime import datetime, timedelta

    from jobq._clients.base import AsyncRun, SyncRun
    from jobq._statements.retention import Keep


class AsyncQueues:
    """What holds for whole queues: what is paused, and how long they keep what has ended.

    Reached as ``client.queues``.
    """

    def __init__(self, run: AsyncRun, schema: str, *, notify: bool = True) -> None:
        self._run = run
        self._schema = schema
        self._notify = notify

    async def pauses(self) -> list[Pause]:
        """Return what is paused now: queues, then kinds, by name."""
        return await self._run(read_pauses(self._schema))

    async def pause(
        self,
        queue: str | None = None,
        *,
        kind: str | None = None,
        reason: str = "",
        by: str | None = None,
        until: datetime | None = None,
    ) -> None:
        """Have workers start no more jobs of a queue, or of a kind, within a second.

        What runs goes on. A paused queue's jobs stay ready. Jobs of a paused kind are put back as
        scheduled, with the reason ``paused``, which uses no retry. Paused again, the newer words hold.

        Args:
            queue: which queue; or
            kind: which kind, whatever its queue.
            reason: why, for people; at most 1,000 characters.
            by: who says so; the process's user and host when left out.
            until: when it ends by itself, with a time zone; ``None`` for not before it is resumed.

        Raises:
            ConfigError: not exactly one of ``queue`` and ``kind``, or something that cannot be kept.
        """
        await self._run(pause(self._schema, queue, kind, reason, by, until, notify=self._notify))

    async def resume(
        self, queue: str | None = None, *, kind: str | None = None, reason: str = "", by: str | None = None
    ) -> bool:
        """End a pause. Workers go on within a second.

        Args:
            queue: which queue; or
            kind: which kind.
            reason: why, for the operator log.
            by: who says so; the process's user and host when left out.

        Returns:
            Whether it was paused.

        Raises:
            ConfigError: not exactly one of ``queue`` and ``kind``, or something that cannot be kept.
        """
        return await self._run(resume(self._schema, queue, kind, reason, by, notify=self._notify))

    async def retention(self) -> list[Retention]:
        """Return how long finished jobs are kept: for all queues, then those with settings of their own."""
        return await self._run(read_retention(self._schema))

    async def set_retention(
        self,
        queue: str | None = None,
        *,
        completed: timedelta | Keep | None = None,
        discarded: timedelta | Keep | None = None,
        cancelled: timedelta | Keep | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> None:
        """Say how long a queue's finished jobs are kept, in place of what was said before.

        Args:
            queue: its name; ``None`` for all queues that say nothing of their own.
            completed: the time after a job's end at which it is removed with its arguments, result and
                errors; ``"keep"`` for never; ``None`` for what holds for all queues (there: 24 hours).
            discarded: the same for jobs that failed for good (7 days).
            cancelled: the same for jobs that were cancelled (7 days).
            reason: why, for the operator log.
            by: who says so; the process's user and host when left out.

        Raises:
            ConfigError: one of them cannot be what it is.
        """
        said = Retention(queue, completed, discarded, cancelled)
        await self._run(set_retention(self._schema, said, reason, by))


class Queues:
    """What holds for whole queues; see the async client's."""

    def __init__(self, run: SyncRun, schema: str, *, notify: bool = True) -> None:
        self._run = run
        self._schema = schema
        self._notify = notify

    @documented_by(AsyncQueues.pauses)
    def pauses(self) -> list[Pause]:
        return self._run(read_pauses(self._schema))

    @documented_by(AsyncQueues.pause)
    def pause(
        self,
        queue: str | None = None,
        *,
        kind: str | None = None,
        reason: str = "",
        by: str | None = None,
        until: datetime | None = None,
    ) -> None:
        self._run(pause(self._schema, queue, kind, reason, by, until, notify=self._notify))

    @documented_by(AsyncQueues.resume)
    def resume(
        self, queue: str | None = None, *, kind: str | None = None, reason: str = "", by: str | None = None
    ) -> bool:
        return self._run(resume(self._schema, queue, kind, reason, by, notify=self._notify))

    @documented_by(AsyncQueues.retention)
    def retention(self) -> list[Retention]:
        return self._run(read_retention(self._schema))

    @documented_by(AsyncQueues.set_retention)
    def set_retention(
        self,
        queue: str | None = None,
        *,
        completed: timedelta | Keep | None = None,
        discarded: timedelta | Keep | None = None,
        cancelled: timedelta | Keep | None = None,
        reason: str = "",
        by: str | None = None,
    ) -> None:
        said = Retention(queue, completed, discarded, cancelled)
        self._run(set_retention(self._schema, said, reason, by))
