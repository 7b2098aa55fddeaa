"""Clients that run what they enqueue before the enqueue returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from jobq._clients.client import AsyncClient, Client
from jobq._errors import ConfigError
from jobq.testing.draining import drain, drain_sync

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobq._kinds.jobs import Jobs
    from jobq._kinds.options import JobOptions
    from jobq._types import Enqueued


class AsyncInlineClient(AsyncClient):
    """An `AsyncClient` that runs what it has enqueued before the enqueue returns.

    For tests of code that enqueues and then looks at the effect. The outcomes are recorded as always;
    a handler's exception is not raised here, but retried or discarded.

    Args:
        database, options: see :class:`jobq.AsyncClient`.
        jobs: the handlers.
    """

    def __init__(self, database: Any, *, jobs: Jobs, **options: Any) -> None:
        super().__init__(database, **options)
        self._jobs = jobs

    async def enqueue(
        self, kind: Any, args: Any = None, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = await super().enqueue(kind, args, **options)
        await drain(self, self._jobs)
        return enqueued

    async def enqueue_many(self, jobs: Iterable[Any], *, tx: object | None = None) -> list[Enqueued]:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = await super().enqueue_many(jobs)
        await drain(self, self._jobs)
        return enqueued


class InlineClient(Client):
    """The sync twin of :class:`AsyncInlineClient`."""

    def __init__(self, database: Any, *, jobs: Jobs, **options: Any) -> None:
        super().__init__(database, **options)
        self._jobs = jobs

    def enqueue(
        self, kind: Any, args: Any = None, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = super().enqueue(kind, args, **options)
        drain_sync(self, self._jobs)
        return enqueued

    def enqueue_many(self, jobs: Iterable[Any], *, tx: object | None = None) -> list[Enqueued]:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = super().enqueue_many(jobs)
        drain_sync(self, self._jobs)
        return enqueued


def _refuse_tx(tx: object) -> None:
    if tx is not None:
        raise ConfigError(
            "inline: a job of an open transaction cannot run before its commit, of which jobq does not "
            "hear; use a plain client, and drain() after the commit"
        )
