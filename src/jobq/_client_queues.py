"""``client.queues``: what holds for whole queues. Both colours run the same operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobq._client_base import documented_by
from jobq._retention import Retention, read_retention, set_retention

if TYPE_CHECKING:
    from datetime import timedelta

    from jobq._client_base import AsyncRun, SyncRun
    from jobq._retention import Keep


class AsyncQueues:
    """What holds for whole queues: how long they keep what has ended.

    Reached as ``client.queues``.
    """

    def __init__(self, run: AsyncRun, schema: str) -> None:
        self._run = run
        self._schema = schema

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
    ) -> None:
        """Say how long a queue's finished jobs are kept, in place of what was said before.

        Args:
            queue: its name; ``None`` for all queues that say nothing of their own.
            completed: the time after a job's end at which it is removed with its arguments, result and
                errors; ``"keep"`` for never; ``None`` for what holds for all queues (there: 24 hours).
            discarded: the same for jobs that failed for good (7 days).
            cancelled: the same for jobs that were cancelled (7 days).

        Raises:
            ConfigError: one of them cannot be what it is.
        """
        await self._run(set_retention(self._schema, Retention(queue, completed, discarded, cancelled)))


class Queues:
    """What holds for whole queues; see the async client's."""

    def __init__(self, run: SyncRun, schema: str) -> None:
        self._run = run
        self._schema = schema

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
    ) -> None:
        self._run(set_retention(self._schema, Retention(queue, completed, discarded, cancelled)))
