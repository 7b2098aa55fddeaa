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
import re
from importlib import resources
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import psycopg
import psycopg_pool
from psycopg.pq import TransactionStatus

from jobq._errors import (
    ConfigError,
    DatabaseError,
    Error,
    SchemaError,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    TransactionError,
)
from jobq._operation import Call, Operation, in_schema, run, run_async
from jobq._postgres import async_cursor, execute, execute_async, map_error, sqlstate_of, sync_cursor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

SyncTarget: TypeAlias = "str | psycopg.Connection[Any] | psycopg_pool.ConnectionPool[Any]"
AsyncTarget: TypeAlias = "str | psycopg.AsyncConnection[Any] | psycopg_pool.AsyncConnectionPool[Any]"

OLDEST_SERVER: Final = 140000

# DDL waits for a table's lock no longer than this: whoever comes after it waits behind it, so a
# long wait stops the queue. It gives up, lets the others through, and tries again.
LOCK_TIMEOUT_S: Final = 2.0
LOCK_ATTEMPTS: Final = 10
LOCK_PAUSE_S: Final = 1.0
# How long to wait, each time, for another process that migrates the same schema.
TURN_TIMEOUT_S: Final = 60.0

_LOCK_NOT_AVAILABLE: Final = "55P03"
_FORBIDDEN_IN_NAME: Final = re.compile(r"""["'`\\%{}$\x00-\x1f\x7f]""")
_HEADER: Final = re.compile(r"^-- compatible_from: (\d+)$", re.MULTILINE)


class Migration(NamedTuple):
    """One step of the schema.

    Attributes:
        version: its number, from 1.
        name: its file's name without the suffix.
        compatible_from: the oldest code version that can serve the schema after it.
        template: its SQL, with ``{schema}`` where the schema's name goes.
    """

    version: int
    name: str
    compatible_from: int
    template: str


class SchemaStatus(NamedTuple):
    """What a database says about its jobq schema.

    Attributes:
        database: the database's name.
        version: the newest migration applied, 0 for none.
        compatible_from: the oldest code version that can serve it, 0 for none.
        server_version: as in ``server_version_num``, for example 150004.
        encoding: the database's encoding.
        schema_exists: whether a schema of that name exists, even an empty one.
    """

    database: str
    version: int
    compatible_from: int
    server_version: int
    encoding: str
    schema_exists: bool


def validate_schema_name(schema: str) -> str:
    """Return the name when it can be a jobq schema's.

    Raises:
        ConfigError: it is empty, longer than 63 bytes, starts with ``pg_``, or has a quote,
            control character, backslash, percent sign, dollar sign or brace in it.
    """
    if not isinstance(schema, str) or not schema:
        raise ConfigError(f"schema={schema!r}: the name of a PostgreSQL schema, such as 'jobq'")
    try:
        size = len(schema.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"schema={schema!r}: not valid Unicode") from error
    if size > 63:
        raise ConfigError(f"schema={schema!r}: {size} bytes; PostgreSQL's names end at 63")
    if _FORBIDDEN_IN_NAME.search(schema):
        raise ConfigError(
            f"schema={schema!r}: no quotes, control characters, backslashes, or any of % $ {{ }} in a schema's name"
        )
    if schema.startswith("pg_"):
        raise ConfigError(f"schema={schema!r}: PostgreSQL keeps names that start with pg_ for itself")
    return schema


@functools.cache
def all_migrations() -> tuple[Migration, ...]:
    """Return the migrations that this code carries, oldest first."""
    folder = resources.files("jobq").joinpath("migrations")
    found = []
    for file in folder.iterdir():
        if match := re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name):
            template = file.read_text(encoding="utf-8")
            header = _HEADER.search(template)
            if header is None:
                raise ConfigError(f"migration {file.name} lacks its line '-- compatible_from: N'")
            found.append(Migration(int(match[1]), file.name.removesuffix(".sql"), int(header[1]), template))
    return tuple(sorted(found))


def code_version() -> int:
    """Return the schema version that this code needs."""
    return all_migrations()[-1].version


_STATUS: Final = """
select current_database(),
       exists (select 1 from pg_catalog.pg_namespace where nspname = {schema_name}),
       exists (select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
               where n.nspname = {schema_name} and c.relname = 'schema_version'),
       current_setting('server_version_num')::int4, current_setting('server_encoding')
"""

_VERSION: Final = "select version, compatible_from from {schema}.schema_version order by version desc limit 1"

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
comment on table {schema}.schema_version is 'migrations applied; compatible_from is the oldest code version that can serve each';
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


def read_status(schema: str) -> Operation[SchemaStatus]:
    """Ask a database for its jobq schema's version."""
    rows = yield Call(in_schema(_STATUS, schema))
    database, schema_exists, has_table, server_version, encoding = rows[0]
    version = compatible_from = 0
    if has_table:
        rows = yield Call(in_schema(_VERSION, schema))
        version, compatible_from = rows[0] if rows else (0, 0)
    return SchemaStatus(database, version, compatible_from, server_version, encoding, schema_exists)


def check_schema(schema: str) -> Operation[None]:
    """Make sure that this code can serve the schema as it is.

    Raises:
        SchemaMissing, SchemaOutdated, SchemaTooNew: it cannot; the message says what to run.
    """
    status = yield from read_status(schema)
    where = f'schema "{schema}" of database "{status.database}"'
    run_this = "run `jobqctl migrate`, or `client.migrate()` at start"
    if status.version == 0:
        raise SchemaMissing(f"there is no jobq {where}: {run_this}")
    if status.version < code_version():
        raise SchemaOutdated(
            f"{where} is at version {status.version}, and this jobq needs {code_version()}: {run_this}"
        )
    _refuse_too_new(schema, status)


def _refuse_too_new(schema: str, status: SchemaStatus) -> None:
    if status.compatible_from > code_version():
        raise SchemaTooNew(
            f'schema "{schema}" of database "{status.database}" is at version {status.version}, which serves code '
            f"from version {status.compatible_from} on; this jobq is at {code_version()}: upgrade jobq"
        )


def pending_migrations(schema: str) -> Operation[list[Migration]]:
    """Return the migrations that the schema lacks, oldest first.

    Raises:
        SchemaError: the server is older than PostgreSQL 14, or its encoding is not UTF8.
        SchemaTooNew: the schema has moved past this code.
    """
    status = yield from read_status(schema)
    _refuse_server(status)
    _refuse_too_new(schema, status)
    return [migration for migration in all_migrations() if migration.version > status.version]


def _refuse_server(status: SchemaStatus) -> None:
    if status.server_version < OLDEST_SERVER:
        major, minor = divmod(status.server_version, 10000)
        raise SchemaError(f"the server is PostgreSQL {major}.{minor}; jobq needs 14 or newer")
    if status.encoding != "UTF8":
        raise SchemaError(
            f'database "{status.database}" is encoded as {status.encoding}; jobq needs UTF8 '
            "(create database … encoding 'UTF8' template template0)"
        )


def migrate_schema(
    schema: str, *, lock_timeout_s: float = LOCK_TIMEOUT_S, attempts: int = LOCK_ATTEMPTS
) -> Operation[list[str]]:
    """Bring the schema up to this code's version; return the names of what was applied."""
    applied = []
    for migration in (yield from pending_migrations(schema)):
        if (yield from _apply(schema, migration, lock_timeout_s, attempts)):
            applied.append(migration.name)
    return applied


def _apply(schema: str, migration: Migration, lock_timeout_s: float, attempts: int) -> Operation[bool]:
    """Apply one migration in its own transaction; return whether it was still to be done."""
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
            if sqlstate_of(error) != _LOCK_NOT_AVAILABLE:
                raise
            last = error
            yield Call(f"select pg_sleep({LOCK_PAUSE_S})")
        else:
            return done
    raise DatabaseError(
        f"migration {migration.name} of schema {schema!r} found its tables locked {attempts} times "
        f"({lock_timeout_s} s each): end the long transactions on them (see pg_stat_activity) and migrate again"
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
    return in_schema(f"{table}{migration.template.rstrip()}\n{note}", schema)


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
        SchemaTooNew: the schema has moved past this code.
        SchemaError: the server is older than PostgreSQL 14, or the database's encoding is not UTF8.
        TransactionError: the connection is in a transaction.
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
def _connection(target: object) -> Iterator[psycopg.Connection[Any]]:
    """Give a connection in autocommit, so that each migration's own BEGIN is the only one."""
    with contextlib.ExitStack() as stack:
        try:
            if isinstance(target, str):
                connection = stack.enter_context(psycopg.connect(target, autocommit=True))
            elif isinstance(target, psycopg_pool.ConnectionPool):
                connection = stack.enter_context(target.connection())
            elif isinstance(target, psycopg.Connection):
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
async def _async_connection(target: object) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            if isinstance(target, str):
                connection = await psycopg.AsyncConnection.connect(target, autocommit=True)
                await stack.enter_async_context(connection)
            elif isinstance(target, psycopg_pool.AsyncConnectionPool):
                connection = await stack.enter_async_context(target.connection())
            elif isinstance(target, psycopg.AsyncConnection):
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
    if status != TransactionStatus.IDLE:
        raise TransactionError(
            "the connection is in a transaction; each migration runs in one of its own, so commit or roll back first"
        )
