"""Between an operation and psycopg: statements, their parameters, and what becomes of connections.

Every parameter that is text, a number or a time goes to the server as text of unknown type, and
the cast in the statement decides what it is. psycopg would otherwise name a type for each value
(an int is int2, int4 or int8 by its size), and each combination would be planned and prepared
apart. Rows always come back as tuples of the types that psycopg itself reads, whatever row factory and
loaders somebody has given the connection.
"""

from __future__ import annotations

import os
import select
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import psycopg
import psycopg.rows
from psycopg.adapt import AdaptersMap, Loader, Transformer
from psycopg.pq import ExecStatus

from jobq._driver_errors import DRIVER_ERRORS, is_transient, map_error, sqlstate_of
from jobq._dsn import CONNECTION_DEFAULTS, connection_string
from jobq._operation import Call, Operation, Row, Rows, array_literal

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from psycopg import abc
    from psycopg.abc import Buffer
    from psycopg.pq.abc import PGresult

__all__ = [
    "CONNECTION_DEFAULTS",
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

SyncCursor: TypeAlias = "psycopg.RawCursor[Row]"
AsyncCursor: TypeAlias = "psycopg.AsyncRawCursor[Row]"

_NO_ROWS: Final[Rows] = ()
_SQL_ASCII: Final = "ascii"  # Python's name of it


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


class _Utf8Loader(Loader):
    """Reads text of a session in SQL_ASCII, to which the server hands a database's UTF-8 as it is."""

    def load(self, data: Buffer) -> str:
        return bytes(data).decode()


_ADAPTERS: Final = AdaptersMap(psycopg.adapters)
_ADAPTERS_OF_SQL_ASCII: Final = AdaptersMap(psycopg.adapters)
for _name in ("text", "varchar", "bpchar", "name", '"char"'):
    _ADAPTERS_OF_SQL_ASCII.register_loader(_name, _Utf8Loader)


class _Context(NamedTuple):
    """What a reader reads with."""

    adapters: AdaptersMap
    connection: psycopg.BaseConnection[Any]


def reader_of(connection: psycopg.BaseConnection[Any]) -> abc.Transformer:
    """Return what reads a connection's rows in psycopg's own ways, as its encoding is now."""
    plain = connection.info.encoding != _SQL_ASCII
    return Transformer(_Context(_ADAPTERS if plain else _ADAPTERS_OF_SQL_ASCII, connection))


def wire_encoding(connection: psycopg.BaseConnection[Any]) -> str:
    """Return the encoding that text goes to the server in: Python's name of it."""
    encoding = connection.info.encoding
    return "utf-8" if encoding == _SQL_ASCII else encoding


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
        if cursor.pgresult is None:  # in the caller's pipeline, until it is asked for
            try:
                cursor.fetchall()
            except psycopg.ProgrammingError as error:
                if not _has_no_rows(error, cursor.pgresult):
                    raise
        return _rows(cursor.connection, cursor.pgresult)
    except DRIVER_ERRORS as error:
        raise map_error(error) from error


def _has_no_rows(error: psycopg.ProgrammingError, result: PGresult | None) -> bool:
    """Whether all that is wrong is that a statement which has succeeded, such as BEGIN, returns none."""
    return error.sqlstate is None and result is not None and result.status == ExecStatus.COMMAND_OK


def _rows(connection: psycopg.BaseConnection[Any], result: PGresult | None) -> Rows:
    if result is None or result.status != ExecStatus.TUPLES_OK:
        return _NO_ROWS
    reader = reader_of(connection)
    reader.set_pgresult(result)
    return reader.load_rows(0, result.ntuples, tuple)


async def execute_async(cursor: AsyncCursor, call: Call, *, prepare: bool | None = None) -> Rows:
    """Do what :func:`execute` does, over an async connection."""
    sql: Any = call.sql  # psycopg wants a literal; this is made of literals and quoted identifiers
    try:
        if call.params:
            await cursor.execute(sql, text_params(call.params), prepare=False if call.replan else prepare)
        else:
            await cursor.execute(sql, prepare=prepare or False)
        if cursor.pgresult is None:  # in the caller's pipeline, until it is asked for
            try:
                await cursor.fetchall()
            except psycopg.ProgrammingError as error:
                if not _has_no_rows(error, cursor.pgresult):
                    raise
        return _rows(cursor.connection, cursor.pgresult)
    except DRIVER_ERRORS as error:
        raise map_error(error) from error


# The farewell itself, and the end of the stream behind it; and what may stand before them.
_FAREWELL_READS: Final = 4


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
