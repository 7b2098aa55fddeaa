"""Between an operation and psycopg: statements, errors, and dedicated connections.

Every parameter that is text, a number or a time goes to the server as text of unknown type, and
the cast in the statement decides what it is. psycopg would otherwise name a type for each value
(an int is int2, int4 or int8 by its size), and each combination would be planned and prepared
apart. Rows always come back as tuples, whatever the connection's own row factory is.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import psycopg
import psycopg.rows
from psycopg.pq import ExecStatus, TransactionStatus

from jobq._driver_errors import DRIVER_ERRORS, is_transient, map_error, sqlstate_of
from jobq._dsn import CONNECTION_DEFAULTS, connection_string
from jobq._errors import DatabaseUnavailable, Error
from jobq._operation import Call, Operation, Row, Rows, array_literal, run, run_async

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

__all__ = [
    "CONNECTION_DEFAULTS",
    "AsyncSession",
    "SyncSession",
    "async_cursor",
    "connection_string",
    "execute",
    "execute_async",
    "is_transient",
    "map_error",
    "reconnect_delay",
    "sqlstate_of",
    "sync_cursor",
]

T = TypeVar("T")
SyncCursor: TypeAlias = "psycopg.RawCursor[Row]"
AsyncCursor: TypeAlias = "psycopg.AsyncRawCursor[Row]"

_NO_ROWS: Final[Rows] = ()


def text_param(value: Any) -> str | bytes:
    """Return a parameter as psycopg sends it without naming a type for it."""
    if isinstance(value, str | bytes):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list):
        return array_literal(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def text_params(params: Sequence[Any]) -> list[str | bytes | None]:
    """Return a statement's parameters as psycopg sends them."""
    write = _WRITERS.get
    return [
        value if value is None or type(value) is str else write(type(value), text_param)(value)  # pyright: ignore[reportUnknownArgumentType]
        for value in params
    ]


# Without a call of our own for the commonest types: this runs for each parameter of each statement.
_WRITERS: Final[dict[type, Callable[[Any], str | bytes]]] = {
    int: int.__repr__,
    float: float.__repr__,
    bool: ("f", "t").__getitem__,
    list: array_literal,
}


def sync_cursor(connection: psycopg.Connection[Any]) -> SyncCursor:
    """Return a cursor of our own making, whatever factories the connection has."""
    return psycopg.RawCursor(connection, row_factory=psycopg.rows.tuple_row)


def async_cursor(connection: psycopg.AsyncConnection[Any]) -> AsyncCursor:
    """Return a cursor of our own making, whatever factories the connection has."""
    return psycopg.AsyncRawCursor(connection, row_factory=psycopg.rows.tuple_row)


def execute(cursor: SyncCursor, call: Call, *, prepare: bool | None = None) -> Rows:
    """Run one statement and return its rows.

    Args:
        cursor: from :func:`sync_cursor`.
        call: the statement; one without parameters may be several, split by semicolons.
        prepare: whether to prepare it; ``None`` leaves that to the connection's own threshold.

    Raises:
        Error: as :func:`map_error` has it.
    """
    sql: Any = call.sql  # psycopg wants a literal; this is made of literals and quoted identifiers
    try:
        if call.params:
            cursor.execute(sql, text_params(call.params), prepare=False if call.replan else prepare)
        else:
            cursor.execute(sql, prepare=prepare or False)
        result = cursor.pgresult  # None in the caller's pipeline, until it is asked for
        if result is not None and result.status != ExecStatus.TUPLES_OK:
            return _NO_ROWS
        return cursor.fetchall()
    except DRIVER_ERRORS as error:
        raise map_error(error) from error


async def execute_async(cursor: AsyncCursor, call: Call, *, prepare: bool | None = None) -> Rows:
    """Do what :func:`execute` does, over an async connection."""
    sql: Any = call.sql  # psycopg wants a literal; this is made of literals and quoted identifiers
    try:
        if call.params:
            await cursor.execute(sql, text_params(call.params), prepare=False if call.replan else prepare)
        else:
            await cursor.execute(sql, prepare=prepare or False)
        result = cursor.pgresult  # None in the caller's pipeline, until it is asked for
        if result is not None and result.status != ExecStatus.TUPLES_OK:
            return _NO_ROWS
        return await cursor.fetchall()
    except DRIVER_ERRORS as error:
        raise map_error(error) from error


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

# The farewell itself, and the end of the stream behind it; and what may stand before them.
_FAREWELL_READS: Final = 4

# A pooler tells its clients an invented backend id. Settings made there would stay with a server
# connection that others use next, so nothing is set when the id is not the real one.
_GREET: Final = """
select pg_backend_pid() = $1::int4, case when pg_backend_pid() = $1::int4 then
    (select pg_catalog.count(set_config(name, value, false))
     from unnest($2::text[], $3::text[]) s(name, value)) end
"""


def reconnect_delay(failures: int, rng: random.Random) -> float:
    """Return the seconds to wait before connecting again: about 0.05, 0.1, 0.2 … 5, jittered.

    Args:
        failures: how many tries have failed in a row, 1 or more.
        rng: where the jitter comes from; each wait is 50 to 100 % of its nominal length.
    """
    nominal = min(5.0, 0.05 * 2.0 ** min(max(failures - 1, 0), 16))
    return nominal * rng.uniform(0.5, 1.0)


def break_connection(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Shut a connection's socket, so that whoever waits for its silent server wakes with an error.

    Closing it instead would take the file descriptor from under the one that waits on it.
    """
    try:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as twin:
            twin.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.Error):
        return  # it is closed, or the other side has shut it: nobody waits for it any more


def goes_through_pooler(connection: psycopg.BaseConnection[Any]) -> Operation[bool]:
    """Ask whether a pooler stands between: it tells its clients an invented backend id."""
    rows = yield Call("select pg_backend_pid()")
    return bool(rows[0][0] != connection.info.backend_pid)


def is_broken(connection: psycopg.BaseConnection[Any]) -> bool:
    """Whether the server has closed an idle connection meanwhile. Asks the socket, not the server: 2 µs.

    An idle connection has nothing to read but the server's farewell, now and then a notice.
    """
    try:
        socket_state = select.poll()
        socket_state.register(connection.pgconn.socket, select.POLLIN)
        for _ in range(_FAREWELL_READS):
            if not socket_state.poll(0):
                return False
            connection.pgconn.consume_input()
    except (OSError, psycopg.Error):
        return True
    return connection.closed


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
        self, connection: psycopg.AsyncConnection[Any], *, schema: str, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self.connection = connection
        self.schema = schema
        self.pooled = False
        self._cursor = async_cursor(connection)
        self._time_limit_s = time_limit_s
        self._lock = asyncio.Lock()
        self._overdue = False
        self._prepare: bool | None = False

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
                connection = await psycopg.AsyncConnection.connect(text, autocommit=True)
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
        rows = await self._guarded(_single(_greeting(self.connection, plan_settings=plan_settings)))
        self.pooled = not rows[0][0]
        self._prepare = not self.pooled
        if self.pooled:
            self.connection.prepare_threshold = None

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
            return await run_async(operation, self._execute)
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

    async def _execute(self, call: Call) -> Rows:
        return await execute_async(self._cursor, call, prepare=self._prepare)

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

    def __init__(
        self, connection: psycopg.Connection[Any], *, schema: str, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        self.connection = connection
        self.schema = schema
        self.pooled = False
        self._cursor = sync_cursor(connection)
        self._time_limit_s = time_limit_s
        self._lock = threading.Lock()
        self._overdue = False
        self._prepare: bool | None = False

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
            connection = psycopg.Connection.connect(text, autocommit=True)
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
        rows = self._guarded(_single(_greeting(self.connection, plan_settings=plan_settings)))
        self.pooled = not rows[0][0]
        self._prepare = not self.pooled
        if self.pooled:
            self.connection.prepare_threshold = None

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
            return run(operation, self._execute)
        except BaseException as error:
            if self._overdue or not (self.closed or _is_idle(self.connection)):
                self.connection.close()
            if self._overdue and isinstance(error, Error):
                raise _no_answer(self._time_limit_s) from error
            raise
        finally:
            guard.cancel()

    def _execute(self, call: Call) -> Rows:
        return execute(self._cursor, call, prepare=self._prepare)

    def _give_up(self) -> None:
        self._overdue = True
        break_connection(self.connection)

    def close(self) -> None:
        """Close the connection. Does nothing when it is closed."""
        self.connection.close()


def _single(call: Call) -> Operation[Rows]:
    rows = yield call
    return rows
