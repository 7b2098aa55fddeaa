"""What a driver's error means: one map for every driver, by SQLSTATE.

psycopg, psycopg2 and asyncpg, bare or wrapped by SQLAlchemy or Django, all carry the server's
SQLSTATE. An error without one never reached a server, or lost it on the way.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import psycopg

from jobq._errors import (
    ClientClosed,
    DatabaseError,
    DatabaseUnavailable,
    Error,
    SchemaMissing,
    SchemaOutdated,
    TransactionError,
)
from jobq._messages import migrate_advice

if TYPE_CHECKING:
    from collections.abc import Iterator

# What psycopg raises when a connection breaks, when a statement cannot even be written to it, or (no error of
# its own) when an answer cannot be read: a moment, where the session's DateStyle is not ISO.
DRIVER_ERRORS: Final = (psycopg.Error, OSError, UnicodeError, NotImplementedError)

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
_DATA_CLASSES: Final = frozenset({"22", "23", "54"})  # values, constraints, limits
# Where `array_nulls` is off, a NULL in an array is read as this text: no number, time or JSON, and as a bytea
# or a text against a CHECK.
_NULL_STATES: Final = frozenset({"22P02", "22007", "23514"})
_NULL_AS_TEXT: Final = re.compile(r'"NULL"|\bNULL,|\\x4e554c4c')
_CONFLICT_CLASS: Final = "40"  # serialization failure, deadlock: the same again may succeed
# SQLAlchemy and Django refuse statements in a transaction that they know to have failed, and on a
# session that is bound to nothing.
_REFUSED_BY_LIBRARY: Final = frozenset({"InvalidRequestError", "TransactionManagementError"})
_CHAIN_LIMIT: Final = 8
# relation "jobq.ready" does not exist; function jobq.enqueue(text, jsonb) does not exist
_QUALIFIED: Final = re.compile(r'["«»„“]\s*(.+?)\.[a-z_]+\s*["«»“”]')
_CALLED: Final = re.compile(r" (\S+)\.[a-z_]+\(")


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


def is_about_data(error: BaseException) -> bool:
    """Whether the server refused the values that it was sent; anything else says nothing about them."""
    state = sqlstate_of(error)
    return state is not None and state[:2] in _DATA_CLASSES


def map_error(error: BaseException) -> Error:
    """Return the jobq error that stands for a driver's, to be raised ``from`` it."""
    if isinstance(error, Error):
        return error
    state = sqlstate_of(error)
    text = first_line(error)
    if _REFUSED_BY_LIBRARY & {base.__name__ for base in type(error).__mro__}:
        return TransactionError(f"tx: {text}")
    if state is None:
        return _map_client_side(error, text)
    if state[:2] in _UNAVAILABLE_CLASSES or state in _UNAVAILABLE_STATES:
        return DatabaseUnavailable(f"{text} (SQLSTATE {state})")
    if state == _FAILED_TRANSACTION:
        return TransactionError(f"the transaction has failed before this call: {text}")
    if state in _MISSING_STATES:
        advice = migrate_advice(_schema_of(text))
        return SchemaMissing(f"{text}: is jobq's schema in this database, and as new as this code? {advice}")
    if state in _OUTDATED_STATES:
        advice = migrate_advice(_schema_of(text))
        return SchemaOutdated(f"{text}: jobq's schema is older than this code needs; {advice}")
    return DatabaseError(f"{text} (SQLSTATE {state}){_nulls_advice(error, state)}")


def _nulls_advice(error: BaseException, state: str) -> str:
    if state in _NULL_STATES and any(_NULL_AS_TEXT.search(str(one)) for one in _causes(error)):
        return ": is array_nulls off for this role or database? jobq needs it on"
    return ""


def _schema_of(text: str) -> str | None:
    """Return the schema that a server's message names, in whatever language it speaks."""
    found = _QUALIFIED.search(text) or _CALLED.search(text)
    return found[1] if found else None


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


def first_line(error: BaseException) -> str:
    """Return the first line of what an error, or what it wraps, says."""
    for one in _causes(error):
        text = str(one).strip()
        if text:
            return text.splitlines()[0]
    return type(error).__name__
