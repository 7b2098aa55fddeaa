"""Dedicated connections: one operation at a time, and given up when the server falls silent."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final, TypeVar

from psycopg.pq import TransactionStatus

from jobq._direct import OwnAsyncConnection, OwnConnection
from jobq._driver_errors import DRIVER_ERRORS, map_error
from jobq._dsn import connection_string
from jobq._errors import DatabaseUnavailable, Error
from jobq._operation import Call, Operation, Rows, run, run_async
from jobq._postgres import break_connection

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

# The server's own time limits stay inside the client's, so that it is the server that ends a
# statement that takes too long, and the connection survives.
TIME_LIMIT_S: Final = 30.0
_SESSION_SETTINGS: Final = {
    "statement_timeout": "25s",
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "30s",
    "idle_session_timeout": "0",  # an idle listener is no fault
    "default_transaction_isolation": "read committed",  # `skip locked` needs it
    "TimeZone": "UTC",
    # How values look: what the drivers read, and with all their digits.
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "extra_float_digits": "1",
    "array_nulls": "on",  # how they are read: off, a NULL in an array is the text
}
# Statistics of tables that fill and empty all day are always wrong. The worker's statements are
# written for one plan each; these settings leave the planner no other (see DESIGN.md).
_PLAN_SETTINGS: Final = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}

# A pooler tells its clients an invented backend id. Settings made there would stay with a server
# connection that others use next, so nothing is set when the id is not the real one.
_GREET: Final = """
select pg_backend_pid() = $1::int4, case when pg_backend_pid() = $1::int4 then
    (select pg_catalog.count(set_config(name, value, false))
     from unnest($2::text[], $3::text[]) s(name, value)) end
"""


def _greeting(connection: psycopg.BaseConnection[Any], *, plan_settings: bool) -> Call:
    settings = {**_SESSION_SETTINGS, **(_PLAN_SETTINGS if plan_settings else {})}
    return Call(_GREET, [connection.info.backend_pid, list(settings), list(settings.values())])


def _no_answer(limit_s: float) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"the server gave no answer within {limit_s:g} s; the connection was closed")


def _is_idle(connection: psycopg.BaseConnection[Any]) -> bool:
    return connection.info.transaction_status == TransactionStatus.IDLE


class AsyncSession:
    """One dedicated connection in autocommit, for one operation at a time.

    It never reconnects: when it is closed, open another.

    Attributes:
        connection: the psycopg connection, for LISTEN and the like.
        schema: the schema that it was opened for.
        pooled: whether a pooler stands between; then there are no prepared statements and no
            settings of ours, and nothing that belongs to a session can be relied on.
    """

    def __init__(
        self, connection: OwnAsyncConnection, *, schema: str, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self.connection = connection
        self.schema = schema
        self.pooled = False
        self._time_limit_s = time_limit_s
        self._lock = asyncio.Lock()
        self._overdue = False

    @classmethod
    async def open(
        cls,
        conninfo: str,
        *,
        schema: str,
        name: str,
        plan_settings: bool = False,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> AsyncSession:
        """Connect.

        Args:
            conninfo: the connection string; what it leaves open gets jobq's defaults.
            schema: the jobq schema.
            name: the session's ``application_name``.
            plan_settings: forbid the planner what the worker's statements must not become.
            time_limit_s: seconds that one operation may take before the connection is given up.

        Raises:
            ConfigError: the connection string cannot be read.
            DatabaseUnavailable: the server cannot be reached.
        """
        text = connection_string(conninfo, name=name)
        try:
            async with asyncio.timeout(time_limit_s):
                connection = await OwnAsyncConnection.connect(text, autocommit=True)
        except DRIVER_ERRORS as error:
            raise map_error(error) from error
        session = cls(connection, schema=schema, time_limit_s=time_limit_s)
        try:
            await session._greet(plan_settings=plan_settings)
        except BaseException:
            await session.close()
            raise
        return session

    async def _greet(self, *, plan_settings: bool) -> None:
        self.connection.direct.keep(prepares=False)
        rows = await self._guarded(_single(_greeting(self.connection, plan_settings=plan_settings)))
        self.pooled = not rows[0][0]
        self.connection.direct.keep(prepares=not self.pooled)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or broken."""
        return self.connection.closed

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation and return its result.

        Raises:
            DatabaseUnavailable: the connection is closed, broke, or gave no answer in time.
            Error: what else the operation or its statements raise.
        """
        async with self._lock:
            return await self._guarded(operation)

    async def _guarded(self, operation: Operation[T]) -> T:
        guard = asyncio.get_running_loop().call_later(self._time_limit_s, self._give_up)
        try:
            return await run_async(operation, self.connection.execute_call)
        except BaseException as error:
            # Interrupted between BEGIN and COMMIT, the next operation would run in this
            # transaction: such a connection is of no use.
            if self._overdue or not (self.closed or _is_idle(self.connection)):
                await self.connection.close()
            if self._overdue and isinstance(error, Error):
                raise _no_answer(self._time_limit_s) from error
            raise
        finally:
            guard.cancel()

    def _give_up(self) -> None:
        self._overdue = True
        break_connection(self.connection)

    async def close(self) -> None:
        """Close the connection; whoever waits for its answer is woken. Does nothing when it is closed.

        It is freed only when nobody is inside it any more: psycopg's waits keep a pointer of their own.
        """
        if self._lock.locked():
            break_connection(self.connection)
        async with self._lock:
            await self.connection.close()


class SyncSession:
    """The blocking twin of :class:`AsyncSession`, for a thread of its own."""

    def __init__(self, connection: OwnConnection, *, schema: str, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.connection = connection
        self.schema = schema
        self.pooled = False
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._overdue = False

    @classmethod
    def open(
        cls,
        conninfo: str,
        *,
        schema: str,
        name: str,
        plan_settings: bool = False,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> SyncSession:
        """Connect; see :meth:`AsyncSession.open`."""
        text = connection_string(conninfo, name=name)
        try:
            connection = OwnConnection.connect(text, autocommit=True)
        except DRIVER_ERRORS as error:
            raise map_error(error) from error
        session = cls(connection, schema=schema, time_limit_s=time_limit_s)
        try:
            session._greet(plan_settings=plan_settings)
        except BaseException:
            session.close()
            raise
        return session

    def _greet(self, *, plan_settings: bool) -> None:
        self.connection.direct.keep(prepares=False)
        rows = self._guarded(_single(_greeting(self.connection, plan_settings=plan_settings)))
        self.pooled = not rows[0][0]
        self.connection.direct.keep(prepares=not self.pooled)

    @property
    def closed(self) -> bool:
        """Whether the connection is closed or broken."""
        return self.connection.closed

    def run(self, operation: Operation[T]) -> T:
        """Run an operation and return its result; see :meth:`AsyncSession.run`."""
        with self._lock:
            return self._guarded(operation)

    def _guarded(self, operation: Operation[T]) -> T:
        # A thread a call is dear (0.1 ms), and a blocking session makes one every few seconds.
        guard = threading.Timer(self._time_limit_s, self._give_up)
        guard.daemon = True
        guard.start()
        try:
            return run(operation, self.connection.execute_call)
        except BaseException as error:
            if self._overdue or not (self.closed or _is_idle(self.connection)):
                self.connection.close()
            if self._overdue and isinstance(error, Error):
                raise _no_answer(self._time_limit_s) from error
            raise
        finally:
            guard.cancel()

    def _give_up(self) -> None:
        self._overdue = True
        break_connection(self.connection)

    def close(self) -> None:
        """Close the connection. Does nothing when it is closed."""
        self.connection.close()


def _single(call: Call) -> Operation[Rows]:
    rows = yield call
    return rows
