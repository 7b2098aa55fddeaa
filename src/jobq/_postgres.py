"""Between an operation and psycopg: statements, errors, and dedicated connections.

Every parameter that is text, a number or a time goes to the server as text of unknown type, and
the cast in the statement decides what it is. psycopg would otherwise name a type for each value
(an int is int2, int4 or int8 by its size), and each combination would be planned and prepared
apart. Rows always come back as tuples, whatever the connection's own row factory is.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
import psycopg.rows
from psycopg.pq import ExecStatus

from jobq._errors import (
    ClientClosed,
    DatabaseError,
    DatabaseUnavailable,
    Error,
    SchemaMissing,
    SchemaOutdated,
    TransactionError,
)
from jobq._operation import Call, Row, Rows, array_literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SyncCursor: TypeAlias = "psycopg.RawCursor[Row]"
AsyncCursor: TypeAlias = "psycopg.AsyncRawCursor[Row]"

_NO_ROWS: Final[Rows] = ()
# What drivers raise when a connection breaks or a statement cannot even be written to it.
DRIVER_ERRORS: Final = (psycopg.Error, OSError, UnicodeError)


def text_param(value: Any) -> str | bytes | None:
    """Return a parameter as psycopg sends it without naming a type for it."""
    if value is None or isinstance(value, str | bytes):
        return value
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, list):
        return array_literal(value)
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def text_params(params: Sequence[Any]) -> list[str | bytes | None]:
    """Return a statement's parameters as psycopg sends them."""
    return [value if type(value) is str else text_param(value) for value in params]


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
    try:
        if call.params:
            cursor.execute(call.sql, text_params(call.params), prepare=prepare)
        else:
            cursor.execute(call.sql, prepare=prepare if prepare else False)
        result = cursor.pgresult
        if result is None or result.status != ExecStatus.TUPLES_OK:
            return _NO_ROWS
        return cursor.fetchall()
    except DRIVER_ERRORS as error:
        raise map_error(error) from error


async def execute_async(cursor: AsyncCursor, call: Call, *, prepare: bool | None = None) -> Rows:
    """Do what :func:`execute` does, over an async connection."""
    try:
        if call.params:
            await cursor.execute(call.sql, text_params(call.params), prepare=prepare)
        else:
            await cursor.execute(call.sql, prepare=prepare if prepare else False)
        result = cursor.pgresult
        if result is None or result.status != ExecStatus.TUPLES_OK:
            return _NO_ROWS
        return await cursor.fetchall()
    except DRIVER_ERRORS as error:
        raise map_error(error) from error


# Whole classes of SQLSTATE, then single states, that mean "not now" rather than "not so":
# connection, resources and system errors; cancelled by a time limit; terminated, crashed,
# starting, database dropped, idle too long; a lock not had in time; read-only, as a server is
# after a failover has passed the primary's part on.
_UNAVAILABLE_CLASSES: Final = frozenset({"08", "53", "58"})
_UNAVAILABLE_STATES: Final = frozenset(
    {"57014", "57P01", "57P02", "57P03", "57P04", "57P05", "25P03", "25P04", "55P03", "25006"}
)
_MISSING_STATES: Final = frozenset({"42P01", "3F000"})  # table, schema
_OUTDATED_STATES: Final = frozenset({"42703", "42883"})  # column, function
_FAILED_TRANSACTION: Final = "25P02"
_CONFLICT_CLASS: Final = "40"  # serialization failure, deadlock: the same again may succeed
_MIGRATE: Final = "run `jobqctl migrate`, or `client.migrate()` at start"
_CHAIN_LIMIT: Final = 8


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it wraps, from outside in, whoever wrapped it."""
    current: BaseException | None = error
    for _ in range(_CHAIN_LIMIT):
        if current is None:
            return
        yield current
        wrapped = getattr(current, "orig", None)  # SQLAlchemy's name for the driver's error
        current = wrapped if isinstance(wrapped, BaseException) else current.__cause__


def sqlstate_of(error: BaseException) -> str | None:
    """Return the SQLSTATE that a server's error carries, through any wrapping, or ``None``."""
    for one in _causes(error):
        for name in ("sqlstate", "pgcode"):  # psycopg and asyncpg; psycopg2
            state = getattr(one, name, None)
            if isinstance(state, str):
                return state
    return None


def is_transient(error: BaseException) -> bool:
    """Whether the same statement may well succeed when it is sent again a little later."""
    if isinstance(error, DatabaseUnavailable):
        return True
    state = sqlstate_of(error)
    return state is not None and state.startswith(_CONFLICT_CLASS)


def map_error(error: BaseException) -> Error:
    """Return the jobq error that stands for a driver's, to be raised ``from`` it."""
    if isinstance(error, Error):
        return error
    state = sqlstate_of(error)
    text = _first_line(error)
    if state is None:
        return _map_client_side(error, text)
    if state[:2] in _UNAVAILABLE_CLASSES or state in _UNAVAILABLE_STATES:
        return DatabaseUnavailable(f"{text} (SQLSTATE {state})")
    if state == _FAILED_TRANSACTION:
        return TransactionError(f"the transaction has failed before this call: {text}")
    if state in _MISSING_STATES:
        return SchemaMissing(f"{text}: is jobq's schema in this database? {_MIGRATE}")
    if state in _OUTDATED_STATES:
        return SchemaOutdated(f"{text}: jobq's schema is older than this code needs; {_MIGRATE}")
    return DatabaseError(f"{text} (SQLSTATE {state})")


def _map_client_side(error: BaseException, text: str) -> Error:
    """Map an error that never reached a server, or lost it on the way."""
    for one in _causes(error):
        if isinstance(one, UnicodeError):
            return DatabaseError(f"the connection's client_encoding cannot carry this text: {text}")
        if isinstance(one, OSError | TimeoutError):
            return DatabaseUnavailable(f"{type(one).__name__}: {text}")
        names = {base.__name__ for base in type(one).__mro__}
        if "PoolClosed" in names:
            return ClientClosed(text)
        if "OperationalError" in names or ("InterfaceError" in names and "closed" in text):
            return DatabaseUnavailable(text)
    return DatabaseError(text)


def _first_line(error: BaseException) -> str:
    for one in _causes(error):
        text = str(one).strip()
        if text:
            return text.splitlines()[0]
    return type(error).__name__
