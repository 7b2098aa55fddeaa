"""Where the demonstration runs: a PostgreSQL of its own, or a schema of its own in the user's."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from jobq._errors import ConfigError, DatabaseUnavailable
from jobq.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Generator


_DROP_TRIES: Final = 5


class Place(NamedTuple):
    """A database to play in.

    Attributes:
        dsn: its address; tables without a schema's name go to the demonstration's own.
        schema: where the queue lives.
        description: what to tell the user.
        farewell: what to tell the user when all is removed again.
    """

    dsn: str
    schema: str
    description: str
    farewell: str


@contextlib.contextmanager
def find_place(dsn: str | None) -> Generator[Place]:
    """Prepare a place, and leave nothing of it behind.

    Args:
        dsn: the user's database; ``None`` starts an embedded server.

    Raises:
        DatabaseUnavailable: the user's database cannot be reached.
        EmbeddedError: an embedded server cannot be started.
    """
    if dsn is not None:
        with _own_schema(dsn) as place:
            yield place
        return
    with EmbeddedPostgres() as server:
        release = f"{server.server_version // 10000}.{server.server_version % 10000}"
        yield Place(
            server.dsn(),
            "jobq",
            f"a temporary PostgreSQL {release}, started just now",
            "The temporary PostgreSQL is stopped and removed.",
        )


@contextlib.contextmanager
def _own_schema(dsn: str) -> Generator[Place]:
    schema = f"jobq_demo_{secrets.token_hex(4)}"
    name = sql.Identifier(schema)
    with _connect(dsn) as connection:
        connection.execute(sql.SQL("create schema {}").format(name))
        database = connection.info.dbname
    try:
        # The queue and the shop's own table in one schema, which the search path makes the default.
        options = f"{conninfo_to_dict(dsn).get('options') or ''} -csearch_path={schema}".strip()
        yield Place(
            make_conninfo(dsn, options=options),
            schema,
            f'your database "{database}", in a schema of its own, "{schema}"',
            f'The schema "{schema}" is dropped: your database is as it was.',
        )
    finally:
        _drop(dsn, name)


def _drop(dsn: str, name: sql.Identifier) -> None:
    """Drop a schema, though the server may still be busy with the last statement of a killed worker."""
    with _connect(dsn) as connection:
        for tries_left in reversed(range(_DROP_TRIES)):
            try:
                connection.execute(sql.SQL("drop schema {} cascade").format(name))
            except psycopg.errors.DeadlockDetected:
                if tries_left == 0:
                    raise
            else:
                return


def _connect(dsn: str) -> psycopg.Connection:
    try:
        return psycopg.connect(dsn, autocommit=True, connect_timeout=5)
    except psycopg.ProgrammingError as error:
        raise ConfigError(f"the connection string cannot be read: {error}") from error
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(str(error).strip()) from error
