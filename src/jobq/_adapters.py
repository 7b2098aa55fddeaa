"""The caller's own connection: what ``tx=`` takes, chosen by its type's name, importing nothing.

A job is written with the caller's connection, in the caller's transaction. jobq sends it one
statement (a few with unique keys) and nothing else: no commit, no rollback, no savepoint, no setting.
All that can be wrong with a job is found before anything is sent, for a statement that fails
would take the caller's transaction with it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

import psycopg
from psycopg.pq import TransactionStatus

from jobq._driver_errors import map_error
from jobq._errors import TransactionError
from jobq._postgres import async_cursor, execute, execute_async, sync_cursor, text_params

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from jobq._operation import Call, Row, Rows

SyncExecutor = "Callable[[Call], Rows]"
AsyncExecutor = "Callable[[Call], Awaitable[Rows]]"

_PLACEHOLDER: Final = re.compile(r"\$(\d+)")
ACCEPTED: Final = (
    "jobq.Client takes a psycopg.Connection, a SQLAlchemy Session or Connection, Django's connection "
    "or a psycopg2 connection; jobq.AsyncClient takes a psycopg.AsyncConnection, an asyncpg Connection, "
    "or a SQLAlchemy AsyncSession or AsyncConnection"
)


def sync_executor(tx: Any) -> Callable[[Call], Rows]:
    """Return what executes statements on a blocking connection of the caller's.

    Raises:
        TransactionError: it is no such connection, or its transaction has failed already.
    """
    if isinstance(tx, psycopg.Connection):
        _refuse_failed(tx)
        return functools.partial(execute, sync_cursor(tx), prepare=None)
    match _family(tx):
        case "psycopg2":
            return functools.partial(_on_cursor, tx.cursor)
        case "django":
            return functools.partial(_on_cursor, tx.cursor)
        case "sqlalchemy":
            return functools.partial(_on_sqlalchemy, _sqlalchemy_connection(tx))
        case "async":
            raise TransactionError(
                f"tx={type(tx).__name__}: an async connection goes with jobq.AsyncClient. {ACCEPTED}"
            )
        case _:
            _refuse(tx)


def async_executor(tx: Any) -> Callable[[Call], Awaitable[Rows]]:
    """Return what executes statements on an async connection of the caller's.

    Raises:
        TransactionError: it is no such connection, or its transaction has failed already.
    """
    if isinstance(tx, psycopg.AsyncConnection):
        _refuse_failed(tx)
        return functools.partial(execute_async, async_cursor(tx), prepare=None)
    if isinstance(tx, psycopg.Connection) or _family(tx) not in {"async", None}:
        raise TransactionError(
            f"tx={type(tx).__name__}: a blocking connection goes with jobq.Client. {ACCEPTED}"
        )
    if _is_a(tx, "asyncpg", {"Connection", "PoolConnectionProxy"}):
        return functools.partial(_on_asyncpg, tx)
    if _is_a(tx, "sqlalchemy", {"AsyncSession", "async_scoped_session", "AsyncConnection"}):
        return functools.partial(_on_async_sqlalchemy, tx)
    _refuse(tx)


def _refuse(tx: object) -> NoReturn:
    raise TransactionError(f"tx={type(tx).__module__}.{type(tx).__qualname__} is no connection. {ACCEPTED}")


def _refuse_failed(connection: psycopg.BaseConnection[Any]) -> None:
    if connection.closed:
        raise TransactionError("tx: the connection is closed")
    if connection.info.transaction_status == TransactionStatus.INERROR:
        raise TransactionError("tx: its transaction has failed before this call; roll it back first")


def _is_a(tx: object, package: str, names: set[str]) -> bool:
    return any(
        base.__name__ in names and base.__module__.partition(".")[0] == package for base in type(tx).__mro__
    )


def _family(tx: object) -> str | None:
    """Return which kind of connection this is, ``async`` for those that are awaited."""
    if isinstance(tx, psycopg.AsyncConnection) or _is_a(tx, "asyncpg", {"Connection", "PoolConnectionProxy"}):
        return "async"
    if _is_a(tx, "sqlalchemy", {"AsyncSession", "async_scoped_session", "AsyncConnection"}):
        return "async"
    if _is_a(tx, "sqlalchemy", {"Session", "scoped_session", "Connection"}):
        return "sqlalchemy"
    if _is_a(tx, "psycopg2", {"connection"}):
        return "psycopg2"
    if _is_a(tx, "django", {"BaseDatabaseWrapper", "ConnectionProxy"}):
        return "django"
    return None


@functools.lru_cache(maxsize=256)
def _percent_style(sql: str) -> tuple[str, tuple[int, ...]]:
    """Return a statement with ``%s`` for ``$n``, and which parameter each stands for."""
    order = tuple(int(number) - 1 for number in _PLACEHOLDER.findall(sql))
    return _PLACEHOLDER.sub("%s", sql.replace("%", "%%")), order


def _in_order(call: Call) -> tuple[str, tuple[Any, ...]]:
    sql, order = _percent_style(call.sql)
    values = text_params(call.params)
    return sql, tuple(values[i] for i in order)


def _on_cursor(make_cursor: Callable[[], Any], call: Call) -> Rows:
    """Execute on a DB-API cursor with ``%s``: psycopg2's, Django's."""
    sql, values = _in_order(call)
    try:
        with make_cursor() as cursor:
            cursor.execute(sql, values)
            return _tuples(cursor.fetchall() if cursor.description else ())
    except Exception as error:
        raise map_error(error) from error


def _sqlalchemy_connection(tx: Any) -> Any:
    """Return the Connection of a Session, which begins its transaction if it has none yet."""
    if _is_a(tx, "sqlalchemy", {"Session", "scoped_session"}):
        try:
            return tx.connection()
        except Exception as error:
            raise map_error(error) from error
    return tx


def _on_sqlalchemy(connection: Any, call: Call) -> Rows:
    if connection.dialect.driver == "asyncpg":
        sql, values = call.sql, tuple(call.params)
    elif connection.dialect.driver in {"psycopg", "psycopg_async", "psycopg2"}:
        sql, values = _in_order(call)
    else:
        raise TransactionError(
            f"tx: SQLAlchemy over {connection.dialect.driver} is not supported. {ACCEPTED}"
        )
    try:
        result = connection.exec_driver_sql(sql, values)
        return _tuples(result.fetchall() if result.returns_rows else ())
    except Exception as error:
        raise map_error(error) from error


async def _on_async_sqlalchemy(tx: Any, call: Call) -> Rows:
    connection = tx
    try:
        if not _is_a(tx, "sqlalchemy", {"AsyncConnection"}):
            connection = await tx.connection()
    except Exception as error:
        raise map_error(error) from error
    rows: Rows = await connection.run_sync(_on_sqlalchemy, call)
    return rows


async def _on_asyncpg(connection: Any, call: Call) -> Rows:
    try:
        return _tuples(await connection.fetch(call.sql, *call.params))
    except Exception as error:
        raise map_error(error) from error


def _tuples(rows: Sequence[Any]) -> list[Row]:
    """Return plain tuples, whatever rows the caller's connection makes."""
    return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]
