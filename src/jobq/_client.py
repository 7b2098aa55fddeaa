"""The two clients: the same verbs, awaited or not.

Each verb prepares its values, and runs an operation that is written once (`_enqueue`, `_operate`,
`_schema`). What differs between the two classes is who waits: a pool, a connection, an executor.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack, cast, overload

import psycopg
import psycopg.conninfo
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from jobq import _migrate
from jobq._adapters import async_executor, sync_executor
from jobq._driver_errors import DRIVER_ERRORS, map_error
from jobq._enqueue import JobRow, enqueue_many, enqueue_one
from jobq._errors import ClientClosed, ConfigError
from jobq._jobtype import JobType, NewJob, prepare, prepare_many
from jobq._limits import MAX_ARGUMENTS_BYTES
from jobq._operate import cancel_job, get_job, job_errors, retry_job
from jobq._operation import run, run_async
from jobq._options import DEFAULTS, resolve
from jobq._postgres import async_cursor, connection_string, execute, execute_async, sync_cursor
from jobq._schema import check_schema, validate_schema_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType
    from typing import Self

    from jobq._operation import Call, Operation, Rows
    from jobq._options import JobOptions, JobTypeOptions, ResolvedOptions
    from jobq._types import AttemptError, Enqueued, JobInfo

A = TypeVar("A")
T = TypeVar("T")
_F = TypeVar("_F", bound="Callable[..., object]")

AsyncPool = AsyncConnectionPool[psycopg.AsyncConnection[Any]]
SyncPool = ConnectionPool[psycopg.Connection[Any]]

MAX_CALL_BYTES: Final = 256 * 1024 * 1024  # arguments of one enqueue_many; the protocol's own end is 1 GiB
_OPEN_TIMEOUT_S: Final = 30.0
# What a pool passes to `connect` beside the connection string's own parameters.
_NO_CONNINFO: Final = frozenset(
    {"autocommit", "row_factory", "cursor_factory", "context", "prepare_threshold"}
)


class _Settings:
    """What both clients are made with.

    Args:
        database: a connection string, or a psycopg pool of the client's own colour, which stays
            yours to open and close.
        schema: the schema that holds the queue.
        pool_min_size, pool_max_size: connections that the client's own pool keeps, and makes.
        args_limit_bytes: the most that one job's arguments may have, in bytes of UTF-8 JSON.
        notify: whether enqueues wake waiting workers; without, they find jobs by polling.
        listen_dsn: a direct connection string for a worker's listener, where ``database`` goes
            through a transaction pooler.
        defaults: options that hold for every job where neither the call nor the kind says otherwise.

    Raises:
        ConfigError: something of it cannot work; the message names it.

    Attributes:
        schema, notify, listen_dsn: as they were given.
        conninfo: the connection string, for connections of one's own.
    """

    _pool_class: type[AsyncPool | SyncPool]

    def __init__(
        self,
        database: str | AsyncPool | SyncPool,
        *,
        schema: str = "jobq",
        pool_min_size: int = 1,
        pool_max_size: int = 10,
        args_limit_bytes: int = MAX_ARGUMENTS_BYTES,
        notify: bool = True,
        listen_dsn: str | None = None,
        **defaults: Unpack[JobTypeOptions],
    ) -> None:
        if not 1 <= args_limit_bytes <= MAX_CALL_BYTES:
            raise ConfigError(f"args_limit_bytes={args_limit_bytes}: 1 to {MAX_CALL_BYTES}")
        if not 0 <= pool_min_size <= pool_max_size or pool_max_size < 1:
            raise ConfigError(f"pool sizes {pool_min_size} to {pool_max_size}: 0 ≤ min ≤ max, and 1 ≤ max")
        self.schema: Final = validate_schema_name(schema)
        self.notify: Final = notify
        self.listen_dsn: Final = listen_dsn
        self.conninfo: Final = self._conninfo_of(database)
        self._args_limit: Final = args_limit_bytes
        self._defaults: Final[ResolvedOptions] = resolve(defaults, DEFAULTS)
        self._given: Final = None if isinstance(database, str) else database
        self._sizes: Final = (pool_min_size, pool_max_size)
        self._prepare: bool | None = None
        self._opened_by: int | None = None

    def _conninfo_of(self, database: object) -> str:
        if isinstance(database, str):
            return connection_string(database, name="jobq")
        if not isinstance(database, self._pool_class):
            raise ConfigError(
                f"{type(self).__name__}: takes a connection string or a {self._pool_class.__name__}, "
                f"not {type(database).__name__}"
            )
        conninfo: object = database.conninfo
        kwargs: object = database.kwargs
        if not isinstance(conninfo, str) or not (kwargs is None or isinstance(kwargs, dict)):
            raise ConfigError(
                "a pool that computes its connection string cannot serve; pass the string itself"
            )
        given = cast("dict[str, Any]", kwargs or {})
        parts = {name: value for name, value in given.items() if name not in _NO_CONNINFO}
        return psycopg.conninfo.make_conninfo(conninfo, **parts)

    def _check_open(self) -> None:
        if self._opened_by is None:
            name = type(self).__name__
            raise ClientClosed(f"the {name} is not open: use it in a `with` block, or call open() first")
        if self._opened_by != os.getpid():
            raise ClientClosed(
                f"this {type(self).__name__} was opened by process {self._opened_by}, before a fork: "
                "its connections belong to that process. Open a client of its own in each process"
            )

    def _row(self, kind: JobType[Any] | str, args: object, options: JobOptions) -> JobRow:
        name, text, resolved = prepare(
            kind, args, cast("dict[str, object]", options), self._defaults, self._args_limit
        )
        return JobRow(name, text, *resolved)

    def _rows(self, jobs: Iterable[NewJob]) -> list[JobRow]:
        prepared = prepare_many(jobs, self._defaults, self._args_limit)
        size = sum(len(text) for _, text, _ in prepared)
        if size > MAX_CALL_BYTES:
            raise ConfigError(
                f"enqueue_many: {len(prepared)} jobs with {size} bytes of arguments in one call; "
                f"at most {MAX_CALL_BYTES}: make several calls, in one transaction if they belong together"
            )
        return [JobRow(name, text, *resolved) for name, text, resolved in prepared]


def _documented_by(other: Callable[..., object]) -> Callable[[_F], _F]:
    """Take over a docstring, so that what both clients say stands once."""

    def document(function: _F) -> _F:
        function.__doc__ = other.__doc__
        return function

    return document


class AsyncClient(_Settings):
    """Makes jobs and looks after them, for asyncio. ``async with`` opens and closes it."""

    __doc__ = f"{__doc__}\n{_Settings.__doc__}"
    _pool_class = AsyncConnectionPool

    @functools.cached_property
    def pool(self) -> AsyncPool:
        """The psycopg pool, for connections of your own; those of the client's own pool are in autocommit."""
        if self._given is not None:
            return cast("AsyncPool", self._given)
        low, high = self._sizes
        return AsyncConnectionPool(
            self.conninfo,
            min_size=low,
            max_size=high,
            open=False,
            configure=self._configure,
            kwargs={"autocommit": True},
            name="jobq",
        )

    async def _configure(self, connection: psycopg.AsyncConnection[Any]) -> None:
        """Prepare statements, but not through a pooler, which invents the backend's id."""
        row = await (await connection.execute("select pg_backend_pid()")).fetchone()
        self._prepare = True if row and row[0] == connection.info.backend_pid else None
        if self._prepare is None:
            connection.prepare_threshold = None

    async def open(self) -> None:
        """Connect.

        Raises:
            DatabaseUnavailable: the server cannot be reached.
        """
        if self._given is None:
            try:
                await self.pool.open(wait=True, timeout=_OPEN_TIMEOUT_S)
            except DRIVER_ERRORS as error:
                await self.pool.close()
                del self.pool
                raise map_error(error) from error
        self._opened_by = os.getpid()

    async def close(self) -> None:
        """Close the client's own connections. A pool that it was given stays open."""
        if self._opened_by is not None and self._opened_by == os.getpid() and self._given is None:
            await self.pool.close()
            del self.pool
        self._opened_by = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        await self.close()

    async def run(self, operation: Operation[T], *, atomic: bool = False) -> T:
        """Run one operation on a connection of the pool; ``atomic``: its statements in one transaction."""
        self._check_open()
        try:
            async with self.pool.connection() as connection:
                execute_one = self._executor(connection)
                if atomic:
                    async with connection.transaction():
                        return await run_async(operation, execute_one)
                return await run_async(operation, execute_one)
        except DRIVER_ERRORS as error:
            raise map_error(error) from error

    def _executor(self, connection: psycopg.AsyncConnection[Any]) -> Callable[[Call], Awaitable[Rows]]:
        return functools.partial(execute_async, async_cursor(connection), prepare=self._prepare)

    async def migrate(self) -> list[str]:
        """Bring the schema up to date. Safe at every start of every process.

        Returns:
            The names of the migrations that this call applied.

        Raises:
            SchemaTooNew: the schema has moved past this code.
            DatabaseUnavailable: the server cannot be reached, or a lock could not be had.
        """
        self._check_open()
        return await _migrate.migrate_async(self.pool, schema=self.schema)

    async def check_schema(self) -> None:
        """Make sure that this code can serve the schema as it is.

        Raises:
            SchemaMissing, SchemaOutdated, SchemaTooNew: it cannot; the message says what to run.
        """
        await self.run(check_schema(self.schema))

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
            DatabaseUnavailable, SchemaError, DatabaseError: what the server said.
        """
        row = self._row(kind, args, options)
        operation = enqueue_one(self.schema, row, notify=self.notify)
        if tx is not None:
            return await run_async(operation, async_executor(tx))
        return await self.run(operation, atomic=row.unique_key is not None)

    async def enqueue_many(self, jobs: Iterable[NewJob], *, tx: object | None = None) -> list[Enqueued]:
        """Make many jobs in one statement: all or none.

        Args:
            jobs: tens of thousands of them will do; 256 MiB of arguments at the most.
            tx: see :meth:`enqueue`.

        Returns:
            One :class:`Enqueued` an item, in their order. Items that repeat a unique key of the
            same call get the first one's id.

        Raises:
            ArgumentsEncodeError, ConfigError: as :meth:`enqueue`; the message names the item.
            TransactionError, DatabaseUnavailable, SchemaError, DatabaseError: as :meth:`enqueue`.
        """
        rows = self._rows(jobs)
        operation = enqueue_many(self.schema, rows, notify=self.notify)
        if tx is not None:
            return await run_async(operation, async_executor(tx))
        return await self.run(operation, atomic=any(row.unique_key is not None for row in rows))

    async def get(self, job_id: int) -> JobInfo:
        """Return a job as it stands now.

        Raises:
            JobNotFound: there is none with that id.
        """
        return await self.run(get_job(self.schema, job_id))

    async def errors(self, job_id: int) -> list[AttemptError]:
        """Return how a job's attempts failed, the oldest first; older ones than are kept are counted."""
        return await self.run(job_errors(self.schema, job_id))

    async def cancel(self, job_id: int, *, reason: str = "") -> None:
        """End a job that waits.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it runs, or has ended.
        """
        await self.run(cancel_job(self.schema, job_id, reason))

    async def retry(self, job_id: int) -> None:
        """Make a finished job ready again, with its history and a fresh budget.

        Raises:
            JobNotFound: there is none with that id.
            JobConflict: it has not ended, or another live job holds its unique key.
        """
        await self.run(retry_job(self.schema, job_id, notify=self.notify))


class Client(_Settings):
    """Makes jobs and looks after them, for sync code. ``with`` opens and closes it. Threads may share it."""

    __doc__ = f"{__doc__}\n{_Settings.__doc__}"
    _pool_class = ConnectionPool

    @functools.cached_property
    def pool(self) -> SyncPool:
        """The psycopg pool, for connections of your own; those of the client's own pool are in autocommit."""
        if self._given is not None:
            return cast("SyncPool", self._given)
        low, high = self._sizes
        return ConnectionPool(
            self.conninfo,
            min_size=low,
            max_size=high,
            open=False,
            configure=self._configure,
            kwargs={"autocommit": True},
            name="jobq",
        )

    def _configure(self, connection: psycopg.Connection[Any]) -> None:
        """Prepare statements, but not through a pooler, which invents the backend's id."""
        row = connection.execute("select pg_backend_pid()").fetchone()
        self._prepare = True if row and row[0] == connection.info.backend_pid else None
        if self._prepare is None:
            connection.prepare_threshold = None

    @_documented_by(AsyncClient.open)
    def open(self) -> None:
        if self._given is None:
            try:
                self.pool.open(wait=True, timeout=_OPEN_TIMEOUT_S)
            except DRIVER_ERRORS as error:
                self.pool.close()
                del self.pool
                raise map_error(error) from error
        self._opened_by = os.getpid()

    @_documented_by(AsyncClient.close)
    def close(self) -> None:
        if self._opened_by is not None and self._opened_by == os.getpid() and self._given is None:
            self.pool.close()
            del self.pool
        self._opened_by = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.close()

    @_documented_by(AsyncClient.run)
    def run(self, operation: Operation[T], *, atomic: bool = False) -> T:
        self._check_open()
        try:
            with self.pool.connection() as connection:
                execute_one = self._executor(connection)
                if atomic:
                    with connection.transaction():
                        return run(operation, execute_one)
                return run(operation, execute_one)
        except DRIVER_ERRORS as error:
            raise map_error(error) from error

    def _executor(self, connection: psycopg.Connection[Any]) -> Callable[[Call], Rows]:
        return functools.partial(execute, sync_cursor(connection), prepare=self._prepare)

    @_documented_by(AsyncClient.migrate)
    def migrate(self) -> list[str]:
        self._check_open()
        return _migrate.migrate(self.pool, schema=self.schema)

    @_documented_by(AsyncClient.check_schema)
    def check_schema(self) -> None:
        self.run(check_schema(self.schema))

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
    @_documented_by(AsyncClient.enqueue)
    def enqueue(
        self,
        kind: JobType[Any] | str,
        args: object = None,
        *,
        tx: object | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        row = self._row(kind, args, options)
        operation = enqueue_one(self.schema, row, notify=self.notify)
        if tx is not None:
            return run(operation, sync_executor(tx))
        return self.run(operation, atomic=row.unique_key is not None)

    @_documented_by(AsyncClient.enqueue_many)
    def enqueue_many(self, jobs: Iterable[NewJob], *, tx: object | None = None) -> list[Enqueued]:
        rows = self._rows(jobs)
        operation = enqueue_many(self.schema, rows, notify=self.notify)
        if tx is not None:
            return run(operation, sync_executor(tx))
        return self.run(operation, atomic=any(row.unique_key is not None for row in rows))

    @_documented_by(AsyncClient.get)
    def get(self, job_id: int) -> JobInfo:
        return self.run(get_job(self.schema, job_id))

    @_documented_by(AsyncClient.errors)
    def errors(self, job_id: int) -> list[AttemptError]:
        return self.run(job_errors(self.schema, job_id))

    @_documented_by(AsyncClient.cancel)
    def cancel(self, job_id: int, *, reason: str = "") -> None:
        self.run(cancel_job(self.schema, job_id, reason))

    @_documented_by(AsyncClient.retry)
    def retry(self, job_id: int) -> None:
        self.run(retry_job(self.schema, job_id, notify=self.notify))
