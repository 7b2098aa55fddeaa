"""The caller's own connection: what ``tx=`` takes, known by its type's name, importing nothing.

A job is written through the caller's connection, in the caller's transaction. jobq sends it one
statement (a few with unique keys) and nothing else: no commit, no rollback, no savepoint, no
setting. All that can be wrong with a job is found before anything is sent, for a statement that
fails would take the caller's transaction with it. Rows are read past whatever row factory the
connection has, and cursors are closed.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from psycopg.pq import TransactionStatus

from jobq._driver_errors import map_error
from jobq._errors import Error, TransactionError
from jobq._operation import Call, Row, Rows
from jobq._postgres import async_cursor, execute, execute_async, sync_cursor, text_params

if TYPE_CHECKING:
    from collections.abc import Iterable

SyncExecutor: TypeAlias = Callable[[Call], Rows]
AsyncExecutor: TypeAlias = Callable[[Call], Awaitable[Rows]]

ACCEPTED: Final = (
    "jobq.Client takes a psycopg or psycopg2 connection, a SQLAlchemy Session or Connection, or Django's "
    "connection; jobq.AsyncClient takes a psycopg AsyncConnection, an asyncpg Connection, or a SQLAlchemy "
    "AsyncSession or AsyncConnection"
)

_PLACEHOLDER: Final = re.compile(r"\$(\d+)")


class _Library(NamedTuple):
    """One kind of connection.

    Attributes:
        package: where its class, or a base of it, is defined.
        names: the class's names there.
        bind: makes the executor of one connection.
        in_autocommit: tells whether each statement is a transaction of its own there.
    """

    package: str
    names: frozenset[str]
    bind: Callable[[Any], Any]
    in_autocommit: Callable[[Any], bool]


def sync_executor(tx: object) -> SyncExecutor:
    """Return what executes statements on a blocking connection of the caller's.

    Raises:
        TransactionError: it is no such connection, or cannot take a statement.
    """
    executor: SyncExecutor = _find(tx, _sync_library, _async_library, "jobq.AsyncClient").bind(tx)
    return executor


def async_executor(tx: object) -> AsyncExecutor:
    """Return what executes statements on an async connection of the caller's.

    Raises:
        TransactionError: it is no such connection, or cannot take a statement.
    """
    executor: AsyncExecutor = _find(tx, _async_library, _sync_library, "jobq.Client").bind(tx)
    return executor


def in_autocommit(tx: object) -> bool:
    """Whether each statement on a connection of the caller's is a transaction of its own.

    What is no such connection is refused by those that bind it. Of SQLAlchemy's it is not known.
    """
    kind: Any = type(tx)
    try:
        library: _Library | None = _sync_library(kind) or _async_library(kind)
    except TypeError:  # a class without a hash
        return False
    return library is not None and library.in_autocommit(tx)


_Lookup: TypeAlias = Callable[[type], "_Library | None"]


def _find(tx: object, wanted: _Lookup, other: _Lookup, other_client: str) -> _Library:
    kind = type(tx)
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        found, foreign = wanted(kind), other(kind)
    except TypeError:  # a class without a hash
        found = foreign = None
    if found is not None:
        return found
    if foreign is not None:
        raise TransactionError(f"tx={name}: this connection goes with {other_client}. {ACCEPTED}")
    raise TransactionError(f"tx={name}: not a connection that jobq knows. {ACCEPTED}")


@functools.lru_cache(maxsize=256)
def _sync_library(kind: type) -> _Library | None:
    return _match(kind, _SYNC_LIBRARIES)


@functools.lru_cache(maxsize=256)
def _async_library(kind: type) -> _Library | None:
    return _match(kind, _ASYNC_LIBRARIES)


def _match(kind: type, libraries: Iterable[_Library]) -> _Library | None:
    for library in libraries:
        for base in kind.__mro__:
            if base.__name__ in library.names and base.__module__.partition(".")[0] == library.package:
                return library
    return None


def _refuse_failed(*, closed: object, status: int) -> None:
    """Refuse a connection that libpq knows to be of no use; psycopg and psycopg2 number alike."""
    if closed:
        raise TransactionError("tx: the connection is closed")
    if status == TransactionStatus.INERROR:
        raise TransactionError("tx: its transaction has failed before this call; roll it back first")


def _psycopg_in_autocommit(tx: Any) -> bool:
    return bool(not tx.closed and tx.autocommit and tx.info.transaction_status == TransactionStatus.IDLE)


def _django_in_autocommit(tx: Any) -> bool:
    if tx.vendor != "postgresql" or tx.in_atomic_block:
        return False
    return tx.connection is None or in_autocommit(tx.connection)


def _asyncpg_in_autocommit(tx: Any) -> bool:
    return not tx.is_closed() and not tx.is_in_transaction()


def _unknown(_tx: object) -> bool:
    return False


def _bind_psycopg(tx: Any) -> SyncExecutor:
    _refuse_failed(closed=tx.closed, status=tx.pgconn.transaction_status)
    return functools.partial(execute, sync_cursor(tx))


def _bind_async_psycopg(tx: Any) -> AsyncExecutor:
    _refuse_failed(closed=tx.closed, status=tx.pgconn.transaction_status)
    return functools.partial(execute_async, async_cursor(tx))


def _bind_psycopg2(tx: Any) -> SyncExecutor:
    _refuse_failed(closed=tx.closed, status=tx.info.transaction_status)
    # The connection may make other cursors by default, whose rows are dicts. The module is
    # there: the connection comes from it.
    plain = sys.modules["psycopg2.extensions"].cursor
    return functools.partial(_on_dbapi, functools.partial(tx.cursor, cursor_factory=plain))


def _bind_django(tx: Any) -> SyncExecutor:
    if tx.vendor != "postgresql":
        raise TransactionError(f"tx: Django's connection {tx.alias!r} is to {tx.vendor}, not to PostgreSQL")
    return functools.partial(_on_dbapi, tx.cursor)


def _on_dbapi(make_cursor: Callable[[], Any], call: Call) -> Rows:
    sql, values = _percent_call(call)
    try:
        with make_cursor() as cursor:
            cursor.execute(sql, values)
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
    except Exception as error:
        raise map_error(error) from error


def _bind_sqlalchemy(tx: Any) -> SyncExecutor:
    return functools.partial(_on_sqlalchemy, tx)


def _on_sqlalchemy(tx: Any, call: Call) -> Rows:
    try:
        # A Session begins its transaction here if it has none; what it has pending is not flushed.
        connection = tx if hasattr(tx, "exec_driver_sql") else tx.connection()
        sql, values = _sqlalchemy_call(connection.dialect, call)
        result = connection.exec_driver_sql(sql, values)
        return [tuple(row) for row in result.fetchall()] if result.returns_rows else []
    except Error:
        raise  # ours already: another dialect
    except Exception as error:
        raise map_error(error) from error


def _sqlalchemy_call(dialect: Any, call: Call) -> tuple[str, tuple[Any, ...] | None]:
    if dialect.name == "postgresql" and dialect.driver in {"psycopg", "psycopg_async", "psycopg2"}:
        return _percent_call(call)
    if dialect.name == "postgresql" and dialect.driver == "asyncpg":
        return call.sql, tuple(call.params)
    raise TransactionError(
        f"tx: SQLAlchemy over {dialect.name}+{dialect.driver}; jobq knows postgresql over psycopg, psycopg2 "
        "and asyncpg"
    )


def _bind_async_sqlalchemy(tx: Any) -> AsyncExecutor:
    return functools.partial(_on_async_sqlalchemy, tx)


async def _on_async_sqlalchemy(tx: Any, call: Call) -> Rows:
    try:
        connection = tx if hasattr(tx, "exec_driver_sql") else await tx.connection()
        rows: Rows = await connection.run_sync(_on_sqlalchemy, call)
    except Error:
        raise  # mapped already
    except Exception as error:
        raise map_error(error) from error
    return rows


def _bind_asyncpg(tx: Any) -> AsyncExecutor:
    if tx.is_closed():
        raise TransactionError("tx: the connection is closed")
    return functools.partial(_on_asyncpg, tx)


async def _on_asyncpg(connection: Any, call: Call) -> Rows:
    try:
        rows: list[Row] = [tuple(row.values()) for row in await connection.fetch(call.sql, *call.params)]
    except Exception as error:
        raise map_error(error) from error
    return rows


@functools.lru_cache(maxsize=256)
def _percent_style(sql: str) -> tuple[str, tuple[int, ...]]:
    """Return a statement with ``%s`` for ``$n``, and which parameter each of them stands for."""
    order = tuple(int(number) - 1 for number in _PLACEHOLDER.findall(sql))
    return _PLACEHOLDER.sub("%s", sql.replace("%", "%%")), order


def _percent_call(call: Call) -> tuple[str, tuple[Any, ...] | None]:
    if not call.params:
        return call.sql, None
    sql, order = _percent_style(call.sql)
    values = text_params(call.params)
    return sql, tuple(values[i] for i in order)


_SYNC_LIBRARIES: Final = (
    _Library("psycopg", frozenset({"Connection"}), _bind_psycopg, _psycopg_in_autocommit),
    _Library(
        "sqlalchemy", frozenset({"Session", "scoped_session", "Connection"}), _bind_sqlalchemy, _unknown
    ),
    _Library(
        "django", frozenset({"BaseDatabaseWrapper", "ConnectionProxy"}), _bind_django, _django_in_autocommit
    ),
    _Library("psycopg2", frozenset({"connection"}), _bind_psycopg2, _psycopg_in_autocommit),
)
_ASYNC_LIBRARIES: Final = (
    _Library("psycopg", frozenset({"AsyncConnection"}), _bind_async_psycopg, _psycopg_in_autocommit),
    _Library(
        "asyncpg", frozenset({"Connection", "PoolConnectionProxy"}), _bind_asyncpg, _asyncpg_in_autocommit
    ),
    _Library(
        "sqlalchemy",
        frozenset({"AsyncSession", "async_scoped_session", "AsyncConnection"}),
        _bind_async_sqlalchemy,
        _unknown,
    ),
)
