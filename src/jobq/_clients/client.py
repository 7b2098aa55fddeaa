"""The two clients: the same verbs, awaited or not.

Each verb checks its values, and runs an operation that is written once (`enqueue`, `operate`,
`schema`). What differs between the two classes is who waits: a pool, a connection, an executor. The
verbs of operators stand in `operating`.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, overload

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from jobq._clients import verbs
from jobq._clients.adapters import async_executor, in_autocommit, sync_executor
from jobq._clients.base import ClientBase, documented_by
from jobq._clients.operating import AsyncOperating, Operating
from jobq._clients.pools import (
    AsyncPool,
    OwnAsyncPool,
    OwnPool,
    SyncPool,
    put_back_async,
    take,
    take_async,
)
from jobq._driver_errors import DRIVER_ERRORS, map_error
from jobq._operation import run, run_async
from jobq._postgres import (
    async_cursor,
    connection_string,
    execute,
    execute_async,
    goes_through_pooler,
    sync_cursor,
)
from jobq._statements.schema import check_schema

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

    from jobq._clients.periodic import AsyncPeriodic, Periodic
    from jobq._clients.queues import AsyncQueues, Queues
    from jobq._clients.redacting import AsyncRedacting, Redacting
    from jobq._kinds.jobtype import JobType, NewJob
    from jobq._kinds.options import JobOptions
    from jobq._operation import Operation
    from jobq._statements.stats import QueueStats, WorkerInfo
    from jobq._types import Enqueued

A = TypeVar("A")
T = TypeVar("T")

_OPEN_TIMEOUT_S: Final = 30.0
_ENDED_WITHIN: Final = timedelta(hours=1)


class AsyncClient(AsyncOperating):
    """Makes jobs and looks after them, for asyncio. ``async with`` opens and closes it."""

    __doc__ = f"{__doc__}\n{ClientBase.__doc__}"
    _pool_class = AsyncConnectionPool

    @property
    def pool(self) -> AsyncPool:
        """The psycopg pool, for connections of your own, with psycopg's own defaults.

        Raises:
            ClientClosed: the client is not open, or was opened in another process.
        """
        if self._given is not None:
            return self._given
        self._check_open()
        assert self._own is not None
        return self._own

    @functools.cached_property
    def queues(self) -> AsyncQueues:
        """What holds for whole queues: what is paused, and how long they keep what has ended."""
        from jobq._clients.queues import AsyncQueues  # noqa: PLC0415 - as `verbs`

        return AsyncQueues(self._run, self.schema, notify=self.notify)

    @functools.cached_property
    def redaction(self) -> AsyncRedacting:
        """Which fields of jobs are hidden when jobs are shown."""
        from jobq._clients.redacting import AsyncRedacting  # noqa: PLC0415 - as `verbs`

        return AsyncRedacting(self._run, self.schema)

    @functools.cached_property
    def periodic(self) -> AsyncPeriodic:
        """Schedules: list, add, remove, pause, resume, trigger."""
        from jobq._clients.periodic import AsyncPeriodic  # noqa: PLC0415 - as `verbs`

        return AsyncPeriodic(self._run, self.schema, self._defaults, self._args_limit, notify=self.notify)

    async def open(self) -> None:
        """Connect. Does nothing when it is open.

        Raises:
            DatabaseUnavailable: the server cannot be reached.
        """
        if self._opened_by == os.getpid():
            return
        if self._given is None:
            await self._open_pool()
        self._opened_by = os.getpid()

    async def _open_pool(self) -> None:
        conninfo = connection_string(self.conninfo, name="jobq")
        try:
            # One connection beforehand: its error tells what is wrong, at once.
            async with await psycopg.AsyncConnection.connect(conninfo, autocommit=True) as probe:
                ask = functools.partial(execute_async, async_cursor(probe))
                answer = await run_async(goes_through_pooler(probe), ask)
            low, high = self._sizes
            kwargs = {"prepare_threshold": None} if answer else {}
            pool = OwnAsyncPool(conninfo, kwargs=kwargs, min_size=low, max_size=high, open=False, name="jobq")
            try:
                await pool.open(wait=True, timeout=_OPEN_TIMEOUT_S)
            except BaseException:
                await pool.close()
                raise
        except DRIVER_ERRORS as error:
            raise map_error(error) from error
        self._own = pool

    async def close(self) -> None:
        """Close the client's own connections. A pool that it was given stays open.

        In another process than the one that opened it, this closes nothing: after a fork the
        connections are the parent's.
        """
        mine, self._opened_by = self._opened_by == os.getpid(), None
        if mine and self._own is not None:
            pool, self._own = self._own, None
            self._cursors.clear()
            await pool.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, operation: Operation[T]) -> T:
        """Run an operation on a connection of the pool."""
        if self._opened_by != os.getpid():
            raise self._not_open()
        pool = self._own
        try:
            if pool is None:
                return await self._run_on_given(operation)
            connection = await pool.take()
            try:
                return await run_async(operation, connection.execute_call)
            finally:
                await pool.put_back(connection)
        except DRIVER_ERRORS as error:
            raise map_error(error) from error

    async def _run_on_given(self, operation: Operation[T]) -> T:
        """Run an operation in autocommit, whatever the connection is in before and after."""
        pool = self._given
        assert pool is not None
        connection = await take_async(pool)
        try:
            switch = not connection.autocommit
            if switch:
                await connection.set_autocommit(True)
            try:
                cursor = self._cursor_of(connection, async_cursor)
                return await run_async(operation, functools.partial(execute_async, cursor))
            finally:
                if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                    await connection.close()  # broken, or interrupted in a transaction
                elif switch:
                    await connection.set_autocommit(False)
        finally:
            await put_back_async(pool, connection)

    async def migrate(self) -> list[str]:
        """Bring the schema up to date. Safe at every start of every process.

        Returns:
            The names of the migrations that this call applied, oldest first.

        Raises:
            SchemaTooNew: the schema has moved past this code.
            SchemaError: the server is older than PostgreSQL 14, or the database's encoding is not UTF8.
            DatabaseUnavailable, DatabaseError: the server could not be reached, or refused; or
                the tables were locked by others for too long.
        """
        self._check_open()
        from jobq._clients.migrate import migrate_async  # noqa: PLC0415 - as `verbs`

        return await migrate_async(self.pool, schema=self.schema)

    async def check_schema(self) -> None:
        """Make sure that this code can serve the schema as it is.

        Raises:
            SchemaMissing, SchemaOutdated, SchemaTooNew: it cannot; the message says what to run.
        """
        await self._run(check_schema(self.schema))

    @overload
    async def enqueue(
        self,
        kind: JobType[None],
        args: None = None,
        *,
        tx: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    async def enqueue(
        self, kind: JobType[A], args: A, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued: ...
    @overload
    async def enqueue(
        self, kind: str, args: object = None, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued: ...
    async def enqueue(
        self,
        kind: JobType[Any] | str,
        args: object = None,
        *,
        tx: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Make one job.

        Args:
            kind: a declared kind or a handler; a bare string is the untyped way.
            args: its arguments, of the kind's type.
            tx: your own connection or session; then the job exists if and only if that
                transaction commits. Without, it exists when this call returns.
            options: see :class:`jobq.JobOptions`; they go before the kind's and the client's own.

        Returns:
            The job's id; with a unique key that is held, the holder's id and ``inserted=False``.

        Raises:
            ArgumentsEncodeError: the arguments cannot be stored; names the path.
            ConfigError: the kind or an option cannot be what it is.
            TransactionError: ``tx`` is no connection that this client can use.
            QueueFull: the queue holds as many ready jobs as ``max_ready`` allows; nothing was made.
            DatabaseUnavailable, SchemaError, DatabaseError: what the server said.
        """
        operation = self._enqueue(kind, args, options, own=tx is None or in_autocommit(tx))
        if tx is None:
            return await self._run(operation)
        return await run_async(operation, async_executor(tx))

    async def enqueue_many(self, jobs: Iterable[NewJob], *, tx: object | None = None) -> list[Enqueued]:
        """Make many jobs in one statement: all or none.

        Args:
            jobs: tens of thousands of them will do; a million, or 250 million characters of
                arguments and options, at the most.
            tx: see :meth:`enqueue`.

        Returns:
            One :class:`Enqueued` an item, in their order. Items that repeat a unique key of the
            same call get the first one's id.

        Raises:
            ArgumentsEncodeError, ConfigError: as :meth:`enqueue`; the message names the item.
            TransactionError, QueueFull, DatabaseUnavailable, SchemaError, DatabaseError: as :meth:`enqueue`.
        """
        operation = self._enqueue_many(jobs, own=tx is None or in_autocommit(tx))
        if tx is None:
            return await self._run(operation)
        return await run_async(operation, async_executor(tx))

    async def queue_stats(self) -> list[QueueStats]:
        """Return the numbers of every queue that has jobs, live workers or a pause, by name."""
        return await self._run(verbs.queue_stats(self.schema))

    async def workers(self, *, ended_within: timedelta = _ENDED_WITHIN) -> list[WorkerInfo]:
        """Return the live workers, the newest first, and then those that ended a short while ago.

        Args:
            ended_within: how long ago they may have ended.

        Raises:
            ConfigError: ``ended_within`` is no length of time.
        """
        return await self._run(verbs.workers(self.schema, ended_within))


class Client(Operating):
    """Makes jobs and looks after them, for sync code. ``with`` opens and closes it. Threads may share it."""

    __doc__ = f"{__doc__}\n{ClientBase.__doc__}"
    _pool_class = ConnectionPool

    @property
    @documented_by(AsyncClient.pool)
    def pool(self) -> SyncPool:
        if self._given is not None:
            return self._given
        self._check_open()
        assert self._own is not None
        return self._own

    @functools.cached_property
    def queues(self) -> Queues:
        """What holds for whole queues: what is paused, and how long they keep what has ended."""
        from jobq._clients.queues import Queues  # noqa: PLC0415 - as `verbs`

        return Queues(self._run, self.schema, notify=self.notify)

    @functools.cached_property
    def redaction(self) -> Redacting:
        """Which fields of jobs are hidden when jobs are shown."""
        from jobq._clients.redacting import Redacting  # noqa: PLC0415 - as `verbs`

        return Redacting(self._run, self.schema)

    @functools.cached_property
    def periodic(self) -> Periodic:
        """Schedules: list, add, remove, pause, resume, trigger."""
        from jobq._clients.periodic import Periodic  # noqa: PLC0415 - as `verbs`

        return Periodic(self._run, self.schema, self._defaults, self._args_limit, notify=self.notify)

    @documented_by(AsyncClient.open)
    def open(self) -> None:
        if self._opened_by == os.getpid():
            return
        if self._given is None:
            self._open_pool()
        self._opened_by = os.getpid()

    def _open_pool(self) -> None:
        conninfo = connection_string(self.conninfo, name="jobq")
        try:
            with psycopg.Connection.connect(conninfo, autocommit=True) as probe:
                answer = run(goes_through_pooler(probe), functools.partial(execute, sync_cursor(probe)))
            low, high = self._sizes
            kwargs = {"prepare_threshold": None} if answer else {}
            pool = OwnPool(conninfo, kwargs=kwargs, min_size=low, max_size=high, open=False, name="jobq")
            try:
                pool.open(wait=True, timeout=_OPEN_TIMEOUT_S)
            except BaseException:
                pool.close()
                raise
        except DRIVER_ERRORS as error:
            raise map_error(error) from error
        self._own = pool

    @documented_by(AsyncClient.close)
    def close(self) -> None:
        mine, self._opened_by = self._opened_by == os.getpid(), None
        if mine and self._own is not None:
            pool, self._own = self._own, None
            self._cursors.clear()
            pool.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        """Run an operation on a connection of the pool."""
        if self._opened_by != os.getpid():
            raise self._not_open()
        pool = self._own
        try:
            if pool is None:
                return self._run_on_given(operation)
            connection = pool.take()
            try:
                return run(operation, connection.execute_call)
            finally:
                pool.put_back(connection)
        except DRIVER_ERRORS as error:
            raise map_error(error) from error

    def _run_on_given(self, operation: Operation[T]) -> T:
        """Run an operation in autocommit, whatever the connection is in before and after."""
        pool = self._given
        assert pool is not None
        connection = take(pool)
        try:
            switch = not connection.autocommit
            if switch:
                connection.autocommit = True
            try:
                cursor = self._cursor_of(connection, sync_cursor)
                return run(operation, functools.partial(execute, cursor))
            finally:
                if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                    connection.close()  # broken, or interrupted in a transaction
                elif switch:
                    connection.autocommit = False
        finally:
            pool.putconn(connection)

    @documented_by(AsyncClient.migrate)
    def migrate(self) -> list[str]:
        self._check_open()
        from jobq._clients.migrate import migrate  # noqa: PLC0415 - as `verbs`

        return migrate(self.pool, schema=self.schema)

    @documented_by(AsyncClient.check_schema)
    def check_schema(self) -> None:
        self._run(check_schema(self.schema))

    @overload
    def enqueue(
        self,
        kind: JobType[None],
        args: None = None,
        *,
        tx: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued: ...
    @overload
    def enqueue(
        self, kind: JobType[A], args: A, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued: ...
    @overload
    def enqueue(
        self, kind: str, args: object = None, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued: ...
    @documented_by(AsyncClient.enqueue)
    def enqueue(
        self,
        kind: JobType[Any] | str,
        args: object = None,
        *,
        tx: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        operation = self._enqueue(kind, args, options, own=tx is None or in_autocommit(tx))
        if tx is None:
            return self._run(operation)
        return run(operation, sync_executor(tx))

    @documented_by(AsyncClient.enqueue_many)
    def enqueue_many(self, jobs: Iterable[NewJob], *, tx: object | None = None) -> list[Enqueued]:
        operation = self._enqueue_many(jobs, own=tx is None or in_autocommit(tx))
        if tx is None:
            return self._run(operation)
        return run(operation, sync_executor(tx))

    @documented_by(AsyncClient.queue_stats)
    def queue_stats(self) -> list[QueueStats]:
        return self._run(verbs.queue_stats(self.schema))

    @documented_by(AsyncClient.workers)
    def workers(self, *, ended_within: timedelta = _ENDED_WITHIN) -> list[WorkerInfo]:
        return self._run(verbs.workers(self.schema, ended_within))
