"""Migrations: from nothing, or an older version, to the schema that this code needs.

Forward only. Each migration is a file ``migrations/NNNN_name.sql`` and runs in a transaction of
its own, under an advisory lock that belongs to the schema's name: of any number of processes
that start at once, one migrates and the others find it done. The lock and every setting end
with the transaction, so a transaction-mode pooler and a pool of one connection serve as well.

The standing promise is that code of one version before runs on the schema of today. So each
migration states ``-- compatible_from: N``: the oldest code version that can still serve it. A
code version is the number of its newest migration.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import psycopg
import psycopg_pool
from psycopg.pq import TransactionStatus

from jobq._errors import ConfigError, DatabaseError, Error, TransactionError
from jobq._messages import shown
from jobq._operation import Call, Operation, in_schema, run, run_async
from jobq._postgres import (
    async_cursor,
    connection_string,
    execute,
    execute_async,
    map_error,
    sqlstate_of,
    sync_cursor,
)
from jobq._statements.enqueue import enqueue_sql
from jobq._statements.schema import (
    Migration,
    all_migrations,
    read_status,
    refuse_server,
    refuse_too_new,
    validate_schema_name,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

SyncTarget: TypeAlias = "str | psycopg.Connection[Any] | psycopg_pool.ConnectionPool[Any]"
AsyncTarget: TypeAlias = "str | psycopg.AsyncConnection[Any] | psycopg_pool.AsyncConnectionPool[Any]"

# DDL waits for a table's lock no longer than this: whoever comes after it waits behind it, so a
# long wait stops the queue. It gives up, lets the others through, and tries again. Well before the server's
# deadlock_timeout (1 s): a transaction that has one of the tables and waits for another that we have must
# not be the one that is ended.
LOCK_TIMEOUT_S: Final = 0.5
LOCK_ATTEMPTS: Final = 20
LOCK_PAUSE_S: Final = 1.0
_LONGEST_LOCK_TIMEOUT_S: Final = 86_400.0
# How long to wait, each time, for another process that migrates the same schema.
TURN_TIMEOUT_S: Final = 60.0

_LOCK_STATES: Final = frozenset({"55P03", "40P01"})  # not had in time, deadlock

# Not `create schema if not exists`: that needs the right to create schemas in the database even
# when there is nothing to create, and a role that owns only its schema has no such right.
_CREATE_SCHEMA: Final = "create schema {schema}"

_CREATE_VERSION_TABLE: Final = """
create table {schema}.schema_version (
    version         integer primary key check (version >= 1),
    applied_at      timestamptz not null default statement_timestamp(),
    compatible_from integer not null check (compatible_from >= 1)
);
revoke all on {schema}.schema_version from public;
comment on table {schema}.schema_version is
    'migrations applied; compatible_from is the oldest code version that can serve each';
"""

# Read committed, whatever the default: the version is read anew after the lock was waited for.
_BEGIN: Final = "begin isolation level read committed, read write"
_TURN: Final = """
set local lock_timeout = {turn_timeout};
set local statement_timeout = 0;
set local idle_in_transaction_session_timeout = 0;
set local client_min_messages = warning;
set local search_path = pg_catalog;
do $do$ begin perform pg_advisory_xact_lock({key}); end $do$;
set local lock_timeout = {lock_timeout};
"""


def lock_key(schema: str) -> int:
    """Return the key of the advisory lock under which a schema is migrated."""
    digest = hashlib.sha256(f"jobq.migrate:{schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def pending_migrations(schema: str) -> Operation[list[Migration]]:
    """Return the migrations that the schema lacks, oldest first.

    Raises:
        SchemaError: the server is older than PostgreSQL 14, or its encoding is not UTF8.
        SchemaTooNew: the schema has moved past this code.
    """
    status = yield from read_status(schema)
    refuse_server(status)
    refuse_too_new(schema, status)
    return [migration for migration in all_migrations() if migration.version > status.version]


def migrate_schema(
    schema: str, *, lock_timeout_s: float = LOCK_TIMEOUT_S, attempts: int = LOCK_ATTEMPTS
) -> Operation[list[str]]:
    """Bring the schema up to this code's version; return the names of what was applied.

    Raises:
        ConfigError: a setting that cannot be.
    """
    is_number = isinstance(cast("object", lock_timeout_s), int | float)
    if not is_number or not 0 < lock_timeout_s <= _LONGEST_LOCK_TIMEOUT_S:
        raise ConfigError(f"lock_timeout_s={shown(lock_timeout_s)}: more than 0 seconds, at most a day")
    if not isinstance(cast("object", attempts), int) or attempts < 1:
        raise ConfigError(f"attempts={shown(attempts)}: 1 or more tries")
    applied: list[str] = []
    for migration in (yield from pending_migrations(schema)):
        if not (yield from _apply(schema, migration, lock_timeout_s, attempts)):
            continue  # another process was faster
        applied.append(migration.name)
    return applied


def _apply(schema: str, migration: Migration, lock_timeout_s: float, attempts: int) -> Operation[bool]:
    """Apply one migration in its own transaction; return whether it was still to be done."""
    last: Error | None = None
    for _ in range(attempts):
        yield Call(_BEGIN)
        try:
            yield Call(_turn_sql(schema, lock_timeout_s))
            done = yield from _apply_in_turn(schema, migration)
            yield Call("commit")
        except Error as error:
            # A broken connection has rolled back by itself; its error is the one to tell.
            with contextlib.suppress(Error):
                yield Call("rollback")
            if sqlstate_of(error) not in _LOCK_STATES:
                raise
            last = error
            yield Call(f"select pg_sleep({LOCK_PAUSE_S})")
        else:
            return done
    raise DatabaseError(
        f"migration {migration.name} of schema {schema!r} did not get its locks in {attempts} tries of "
        f"{lock_timeout_s} s: end the long transactions on its tables (see pg_stat_activity), or let the "
        "other process that migrates finish, and migrate again"
    ) from last


def _turn_sql(schema: str, lock_timeout_s: float) -> str:
    return (
        _TURN.replace("{key}", str(lock_key(schema)))
        .replace("{turn_timeout}", str(round(TURN_TIMEOUT_S * 1000)))
        .replace("{lock_timeout}", str(max(1, round(lock_timeout_s * 1000))))
    )


def _apply_in_turn(schema: str, migration: Migration) -> Operation[bool]:
    status = yield from read_status(schema)
    if status.version >= migration.version:
        return False
    if not status.schema_exists:
        yield Call(in_schema(_CREATE_SCHEMA, schema))
    yield Call(_step_sql(schema, migration))
    return True


def _step_sql(schema: str, migration: Migration) -> str:
    """Return everything that one migration does, once the schema exists and the lock is held."""
    table = _CREATE_VERSION_TABLE if migration.version == 1 else ""
    note = (
        "insert into {schema}.schema_version (version, compatible_from) "
        f"values ({migration.version}, {migration.compatible_from});\n"
    )
    return enqueue_sql(f"{table}{migration.template.rstrip()}\n{note}", schema)


_SCRIPT_HEAD: Final = """\
-- The jobq schema, for psql. It stops at the first error, and each migration stands or falls as a whole.
\\set ON_ERROR_STOP on
"""

_SCRIPT_SCHEMA: Final = """\
do $do$ begin
    if not exists (select 1 from pg_catalog.pg_namespace where nspname = {schema_name}) then
        create schema {schema};
    end if;
end $do$;
"""


def migration_script(schema: str = "jobq", *, after: int = 0) -> str:
    """Return the migrations as one script for ``psql``.

    Args:
        schema: the schema's name.
        after: leave out migrations up to this version.
    """
    validate_schema_name(schema)
    parts = [_SCRIPT_HEAD]
    for migration in all_migrations():
        if migration.version > after:
            parts.append(f"\n-- {migration.name}\n{_BEGIN};{_turn_sql(schema, LOCK_TIMEOUT_S)}")
            if migration.version == 1:
                parts.append(in_schema(_SCRIPT_SCHEMA, schema))
            parts += [_step_sql(schema, migration), "commit;\n"]
    return "".join(parts)


def migrate(
    target: SyncTarget,
    *,
    schema: str = "jobq",
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    attempts: int = LOCK_ATTEMPTS,
) -> list[str]:
    """Bring a database's jobq schema up to what this version of jobq needs.

    Safe at every start of every process: when there is nothing to do it reads one row, and of
    many processes that start at once exactly one migrates. It needs no superuser and no
    extension; a role that owns its (empty) schema, or may create schemas, is enough.

    Args:
        target: a connection string, or an open psycopg connection outside any transaction, or a
            psycopg pool.
        schema: the schema that holds the queue, 1 to 63 bytes.
        lock_timeout_s: seconds that one try waits for a table that somebody else has locked.
        attempts: tries before it gives up.

    Returns:
        The names of the migrations that this call applied, oldest first.

    Raises:
        ConfigError: the schema's name or a setting cannot be.
        SchemaTooNew: the schema has moved past this code.
        SchemaError: the server is older than PostgreSQL 14, or the database's encoding is not UTF8.
        TransactionError: the connection is in a transaction, or closed.
        DatabaseUnavailable, DatabaseError: the server could not be reached, or refused.
    """
    validate_schema_name(schema)
    operation = migrate_schema(schema, lock_timeout_s=lock_timeout_s, attempts=attempts)
    with _connection(target) as connection:
        return run(operation, functools.partial(execute, sync_cursor(connection)))


async def migrate_async(
    target: AsyncTarget,
    *,
    schema: str = "jobq",
    lock_timeout_s: float = LOCK_TIMEOUT_S,
    attempts: int = LOCK_ATTEMPTS,
) -> list[str]:
    """Do what :func:`migrate` does, over an async psycopg connection or pool."""
    validate_schema_name(schema)
    operation = migrate_schema(schema, lock_timeout_s=lock_timeout_s, attempts=attempts)
    async with _async_connection(target) as connection:
        return await run_async(operation, functools.partial(execute_async, async_cursor(connection)))


def pending(target: SyncTarget, *, schema: str = "jobq") -> list[str]:
    """Return the names of the migrations that a database lacks, oldest first; change nothing."""
    validate_schema_name(schema)
    with _connection(target) as connection:
        found = run(pending_migrations(schema), functools.partial(execute, sync_cursor(connection)))
    return [migration.name for migration in found]


async def pending_async(target: AsyncTarget, *, schema: str = "jobq") -> list[str]:
    """Do what :func:`pending` does, over an async psycopg connection or pool."""
    validate_schema_name(schema)
    async with _async_connection(target) as connection:
        found = await run_async(
            pending_migrations(schema), functools.partial(execute_async, async_cursor(connection))
        )
    return [migration.name for migration in found]


@contextlib.contextmanager
def _connection(target: SyncTarget) -> Generator[psycopg.Connection[Any]]:
    """Give a connection in autocommit, so that each migration's own BEGIN is the only one."""
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(target, str):
                conninfo = connection_string(target, name="jobq migrate")
                connection = stack.enter_context(psycopg.connect(conninfo, autocommit=True))
            elif isinstance(target, psycopg_pool.ConnectionPool):
                connection = stack.enter_context(target.connection())
            elif isinstance(target, psycopg.Connection):  # pyright: ignore[reportUnnecessaryIsInstance]
                connection = target
            else:
                raise _wrong_target(target, "migrate()", "a psycopg Connection or ConnectionPool")
            _refuse_transaction(connection.info.transaction_status)
            before = connection.autocommit
            connection.autocommit = True
        except (psycopg.Error, OSError) as error:
            raise map_error(error) from error
        try:
            yield connection
        finally:
            if not connection.closed:
                if connection.info.transaction_status != TransactionStatus.IDLE:
                    connection.rollback()  # interrupted on its way
                connection.autocommit = before


@contextlib.asynccontextmanager
async def _async_connection(target: AsyncTarget) -> AsyncGenerator[psycopg.AsyncConnection[Any]]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            if isinstance(target, str):
                conninfo = connection_string(target, name="jobq migrate")
                connection = await psycopg.AsyncConnection.connect(conninfo, autocommit=True)
                await stack.enter_async_context(connection)
            elif isinstance(target, psycopg_pool.AsyncConnectionPool):
                connection = await stack.enter_async_context(target.connection())
            elif isinstance(target, psycopg.AsyncConnection):  # pyright: ignore[reportUnnecessaryIsInstance]
                connection = target
            else:
                raise _wrong_target(target, "migrate_async()", "an AsyncConnection or AsyncConnectionPool")
            _refuse_transaction(connection.info.transaction_status)
            before = connection.autocommit
            await connection.set_autocommit(True)
        except (psycopg.Error, OSError) as error:
            raise map_error(error) from error
        try:
            yield connection
        finally:
            if not connection.closed:
                if connection.info.transaction_status != TransactionStatus.IDLE:
                    await connection.rollback()  # interrupted on its way
                await connection.set_autocommit(before)


def _wrong_target(target: object, verb: str, accepted: str) -> ConfigError:
    kind = f"{type(target).__module__}.{type(target).__qualname__}"
    return ConfigError(f"{verb} takes a connection string, {accepted}, not {kind}")


def _refuse_transaction(status: TransactionStatus) -> None:
    if status == TransactionStatus.UNKNOWN:
        raise TransactionError("the connection is closed")
    if status != TransactionStatus.IDLE:
        raise TransactionError(
            "the connection is in a transaction, and each migration runs in one of its own: "
            "commit or roll back first"
        )
