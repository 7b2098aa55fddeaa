"""Database operations as values, written once for sync and async.

An operation is a generator: it yields each statement that it wants run, is sent the rows, and
returns its result. It does no I/O and knows no driver. Whoever runs it owns the connection:
`run` and `run_async` need only a function that executes one statement. So every verb of the
two clients, and every statement of the worker, exists exactly once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

from jobq._errors import DatabaseError, Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

_DEADLOCK: Final = "40P01"
_TRIES: Final = 5

Row: TypeAlias = tuple[Any, ...]  # a driver's row: each operation knows what its own columns are
Rows: TypeAlias = Sequence[Row]


class Constants:
    """All parameters of a call but the first, where they are the same in many calls.

    Attributes:
        values: the parameters; what is made of them is made once.
        wire: what libpq sends for them, kept by whoever sends them; ``None`` until then.
    """

    __slots__ = ("values", "wire")

    def __init__(self, *values: Any) -> None:
        self.values: Final = values
        self.wire: Sequence[bytes | None] | None = None


class Call(NamedTuple):
    """One statement to execute.

    Attributes:
        sql: the text with ``$1``… placeholders, every one of them cast to its type.
        params: scalars, and lists of scalars or ``None`` for arrays.
        replan: plan it anew each time. For statements that are rare and read: a plan that was kept from
            when the tables were empty reads them whole until somebody analyzes them.
        constants: what all of ``params`` but the first are, where they are the same in many calls.
    """

    sql: str
    params: Sequence[Any] = ()
    replan: bool = False
    constants: Constants | None = None


Operation: TypeAlias = Generator[Call, Rows, T]


def run(operation: Operation[T], execute: Callable[[Call], Rows]) -> T:
    """Run an operation with a blocking ``execute``; return its result.

    A jobq error that a statement meets is thrown into the operation, which may catch it (to roll
    back, to try again) or let it pass.
    """
    try:
        call = next(operation)
        while True:
            try:
                rows = execute(call)
            except Error as error:
                call = operation.throw(error)
            else:
                call = operation.send(rows)
    except StopIteration as done:
        result: T = done.value
        return result


async def run_async(operation: Operation[T], execute: Callable[[Call], Awaitable[Rows]]) -> T:
    """Run an operation with an awaitable ``execute``; return its result. See :func:`run`."""
    try:
        call = next(operation)
        while True:
            try:
                rows = await execute(call)
            except Error as error:
                call = operation.throw(error)
            else:
                call = operation.send(rows)
    except StopIteration as done:
        result: T = done.value
        return result


def again_after_deadlock(make: Callable[[], Operation[T]]) -> Operation[T]:
    """Run an operation, and anew when PostgreSQL ends it to break a deadlock, five times at the most.

    Only for what is a transaction by itself: then nothing of it is left.
    """
    for _ in range(_TRIES - 1):
        try:
            return (yield from make())
        except DatabaseError as error:
            if getattr(error.__cause__, "sqlstate", None) != _DEADLOCK:
                raise
    return (yield from make())


def atomic(operation: Operation[T]) -> Operation[T]:
    """Run an operation in a transaction of its own, for a connection in autocommit.

    Read committed whatever the default is: a statement that lost a race must see who won it.
    """
    yield Call("begin isolation level read committed, read write")
    try:
        result = yield from operation
    except Error:
        # A broken connection has rolled back by itself; the first error is the one to tell.
        with contextlib.suppress(Error):
            yield Call("rollback")
        raise
    yield Call("commit")
    return result


def array_literal(values: Sequence[Any]) -> str:
    """Write a list as PostgreSQL's text form of a one-dimensional array.

    The text form costs 0.2 µs an element on the client and serves every driver alike; the
    drivers' own adaptation of lists costs 1 to 14 µs an element.

    Args:
        values: strings, numbers, booleans, bytes, datetimes with zone, or ``None`` for NULL.
    """
    if set(map(type, values)) == {int}:  # ids, attempts, marks: half the price or less
        return "{" + str(list(values))[1:-1] + "}"
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bytes):
        return '"\\\\x' + value.hex() + '"'
    if isinstance(value, datetime):
        return '"' + value.isoformat() + '"'
    return str(value)


def quote_identifier(name: str) -> str:
    """Quote a name for use in SQL, as ``quote_ident`` would, always with quotes."""
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Quote a text for use in SQL, where it has no backslashes."""
    return "'" + text.replace("'", "''") + "'"


@functools.lru_cache(maxsize=1024)
def in_schema(sql: str, schema: str) -> str:
    """Put the schema's quoted name for ``{schema}`` in a statement, its literal for ``{schema_name}``.

    And for ``{job_ids}`` the sequence of the jobs' ids, by its type: `nextval` of a text may be anybody's.
    """
    sequence = quote_literal(f"{quote_identifier(schema)}.job_id_seq") + "::regclass"
    named = sql.replace("{job_ids}", sequence).replace("{schema_name}", quote_literal(schema))
    return named.replace("{schema}", quote_identifier(schema))
