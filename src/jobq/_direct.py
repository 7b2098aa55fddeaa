"""jobq's own connections, of clients and of workers: statements go to libpq past psycopg's cursors.

After each wait for a commit everything is cold, and a call of Python's costs eight times what it does in
a loop. A statement through a cursor runs 30 Python functions, here 5: 21 µs of the client's CPU against
13 for what libpq does alone. How it waits, is interrupted and fails is psycopg's own.

Statements are prepared under names made of their text. psycopg's ``DEALLOCATE ALL`` (after a rollback of
a user's) and a ``DISCARD ALL`` take them away: so whoever has had the connection for his own use leaves it
with nothing known, and our next statement first asks the server which of them are there.
"""

from __future__ import annotations

import functools
import hashlib
import select
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import errors, generators
from psycopg.pq import ExecStatus

from jobq._driver_errors import DRIVER_ERRORS, map_error
from jobq._postgres import reader_of, text_param, wire_encoding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.abc import PQGen
    from psycopg.pq.abc import PGresult

    from jobq._operation import Call, Rows

# Texts are made of a few dozen templates; should somebody's be of endless variety, the rest is not prepared.
_MAX_PREPARED: Final = 200
_OURS: Final = b"select name from pg_prepared_statements where name like 'jobq\\_%'"
_NO_ROWS: Final[Rows] = ()
# Plain integers, as libpq's answers are that they are compared with.
_TUPLES_OK: Final = int(ExecStatus.TUPLES_OK)
_SUCCESS: Final = frozenset(map(int, (ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK, ExecStatus.EMPTY_QUERY)))
# A prepared statement that is of no use any more, for a migration has changed the type of a column, or that
# has gone unseen: the connection is given up, and all that it has prepared with it.
_STALE: Final = frozenset({"0A000", "26000", "42P05"})


class _Statement:
    """A text as one connection sends it and reads its rows.

    Attributes:
        text: encoded.
        name: under which it is prepared, ``None`` when it is not.
        reader: knows how to read the types of its columns.
    """

    __slots__ = ("name", "reader", "text")

    def __init__(self, text: bytes, name: bytes | None, connection: psycopg.BaseConnection[Any]) -> None:
        self.text: Final = text
        self.name: Final = name
        self.reader: Final = reader_of(connection)


class Direct:
    """What both colours know about one connection: how statements are sent and rows read.

    Attributes:
        statements: those that are prepared, by their text.
    """

    def __init__(self, connection: psycopg.BaseConnection[Any]) -> None:
        self.statements: Final[dict[str, _Statement]] = {}
        self._connection: Final = connection
        self._pgconn: Final = connection.pgconn
        self._on_server: set[bytes] | None = None
        self._prepares = True
        self._encoding = "utf-8"
        self._is_utf8 = True

    def forget(self) -> None:
        """Take nothing for granted any more: somebody else gets the connection."""
        self.statements.clear()
        self._on_server = None

    def keep(self, *, prepares: bool) -> None:
        """Take the connection as nobody else's: nothing is prepared but what was prepared here."""
        self.forget()
        self._read_encoding()
        self._on_server = set()
        self._prepares = prepares

    def send(self, statement: _Statement, call: Call) -> None:
        """Send a call's statement, which is in autocommit."""
        if statement.name is not None:
            self._pgconn.send_query_prepared(statement.name, self._wire_params(call))
        elif call.params:
            self._pgconn.send_query_params(statement.text, self._wire_params(call))
        else:
            self._pgconn.send_query(statement.text)

    def rows(self, statement: _Statement, results: Sequence[PGresult]) -> Rows:
        """Return the rows of a statement's results; of several statements in one text the first one's."""
        result = results[0]
        if len(results) > 1 or result.status != _TUPLES_OK:
            result = self._checked(results)
            if result.status != _TUPLES_OK:
                return _NO_ROWS
        reader = statement.reader
        reader.set_pgresult(result)
        return reader.load_rows(0, result.ntuples, tuple)

    def _wire_params(self, call: Call) -> list[bytes | None]:
        constants = call.constants
        if constants is None or not self._is_utf8:
            return _written(call.params, self._encoding)
        if constants.wire is None:
            constants.wire = _written(constants.values, "utf-8")
        first = call.params[0]
        if isinstance(first, str) and "\0" not in first:
            return [first.encode(), *constants.wire]
        return [*_written((first,), "utf-8"), *constants.wire]

    def _checked(self, results: Sequence[PGresult]) -> PGresult:
        """Return the first of some results if all of them tell of success."""
        for result in results:
            if result.status not in _SUCCESS:
                error = errors.error_from_result(result, encoding=self._encoding)
                if error.sqlstate in _STALE:
                    self._pgconn.finish()
                raise error
        return results[0]

    def learn(self, call: Call) -> PQGen[_Statement]:
        """Prepare a call's statement, unless it is there already, or must not be."""
        on_server = self._on_server
        if on_server is None:
            on_server = self._on_server = yield from self._look_around()
        text = call.sql.encode(self._encoding)
        if not call.params or call.replan or not self._prepares or len(self.statements) >= _MAX_PREPARED:
            return _Statement(text, None, self._connection)
        name = _name_of(call.sql)
        if name not in on_server:
            self._pgconn.send_prepare(name, text)
            self._checked((yield from generators.execute(self._pgconn)))
            on_server.add(name)
        statement = self.statements[call.sql] = _Statement(text, name, self._connection)
        return statement

    def _look_around(self) -> PQGen[set[bytes]]:
        """Learn how the connection is set now, and which statements of ours the server has."""
        self._read_encoding()
        self._prepares = self._connection.prepare_threshold is not None
        if not self._prepares:
            return set()
        self._pgconn.send_query(_OURS)
        result = self._checked((yield from generators.execute(self._pgconn)))
        return {result.get_value(row, 0) or b"" for row in range(result.ntuples)}

    def _read_encoding(self) -> None:
        self._encoding = wire_encoding(self._connection)
        self._is_utf8 = self._encoding == "utf-8"


class OwnConnection(psycopg.Connection[Any]):
    """A connection of our own; for others it is psycopg's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.direct: Final = Direct(self)
        self.input_within_ms: Final = _input_of(self)

    def execute_call(self, call: Call) -> Rows:
        """Run one statement in autocommit and return its rows.

        Raises:
            Error: as `map_error` has it.
        """
        direct = self.direct
        try:
            statement = direct.statements.get(call.sql)
            if statement is None:
                statement = self.wait(direct.learn(call))
            direct.send(statement, call)
            return direct.rows(statement, self.wait(generators.execute(self.pgconn)))
        except DRIVER_ERRORS as error:
            raise map_error(error) from error


class OwnAsyncConnection(psycopg.AsyncConnection[Any]):
    """A connection of our own; for others it is psycopg's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.direct: Final = Direct(self)
        self.input_within_ms: Final = _input_of(self)

    async def execute_call(self, call: Call) -> Rows:
        """Do what :meth:`OwnConnection.execute_call` does."""
        direct = self.direct
        try:
            statement = direct.statements.get(call.sql)
            if statement is None:
                statement = await self.wait(direct.learn(call))
            direct.send(statement, call)
            return direct.rows(statement, await self.wait(generators.execute(self.pgconn)))
        except DRIVER_ERRORS as error:
            raise map_error(error) from error


def _input_of(connection: psycopg.BaseConnection[Any]) -> Callable[[int], list[Any]]:
    """Return what tells whether the server has sent something unasked, such as its farewell."""
    socket_state = select.poll()
    socket_state.register(connection.pgconn.socket, select.POLLIN)
    return socket_state.poll


@functools.lru_cache(maxsize=1024)
def _name_of(sql: str) -> bytes:
    return b"jobq_" + hashlib.sha256(sql.encode()).hexdigest()[:32].encode()


def _written(params: Sequence[object], encoding: str) -> list[bytes | None]:
    """Return parameters as libpq sends them: text, of no type."""
    wire: list[bytes | None] = []
    for value in params:
        if isinstance(value, str) and "\0" not in value:
            wire.append(value.encode(encoding))
        elif value is None:
            wire.append(None)
        else:
            wire.append(_other(value, encoding))
    return wire


def _other(value: object, encoding: str) -> bytes:
    if isinstance(value, bytes):
        return b"\\x" + value.hex().encode()
    text = str(text_param(value))
    if "\0" in text:  # libpq takes a text's first NUL for its end
        raise psycopg.DataError("PostgreSQL text fields cannot contain NUL (0x00) bytes")
    return text.encode(encoding)
