"""The pools that clients make for themselves.

A pool of psycopg's, with one difference that only its speed shows: connections wait in it in
autocommit, as the clients' own statements want them, and whoever takes one from the pool gets it
with psycopg's own default, where the first statement begins a transaction. To switch for each
statement of ours would cost as much as all else that a client does (2 µs, 4 when awaited).
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import psycopg
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from jobq._postgres import is_broken

AsyncPool: TypeAlias = AsyncConnectionPool[psycopg.AsyncConnection[Any]]
SyncPool: TypeAlias = ConnectionPool[psycopg.Connection[Any]]


class OwnAsyncPool(AsyncConnectionPool[psycopg.AsyncConnection[Any]]):
    """The pool of an AsyncClient."""

    async def getconn(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's signature
    ) -> psycopg.AsyncConnection[Any]:
        """Take a connection, not in autocommit."""
        connection = await super().getconn(timeout)
        with contextlib.suppress(psycopg.Error):  # it has broken: its user will see
            await connection.set_autocommit(False)
        return connection

    async def take(self) -> psycopg.AsyncConnection[Any]:
        """Take a connection as it is."""
        return await super().getconn()


class OwnPool(ConnectionPool[psycopg.Connection[Any]]):
    """The pool of a Client."""

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        """Take a connection, not in autocommit."""
        connection = super().getconn(timeout)
        with contextlib.suppress(psycopg.Error):  # it has broken: its user will see
            connection.autocommit = False
        return connection

    def take(self) -> psycopg.Connection[Any]:
        """Take a connection as it is."""
        return super().getconn()


async def take_async(pool: AsyncPool) -> psycopg.AsyncConnection[Any]:
    """Take a connection for the client's own statements. The caller puts it back.

    One that the server has closed meanwhile, as a restart closes all of them, is replaced: it
    would fail a statement that another connection can run.
    """
    for _ in range(pool.max_size):
        connection = await (pool.take() if isinstance(pool, OwnAsyncPool) else pool.getconn())
        if not is_broken(connection):
            return connection
        await connection.close()
        await pool.putconn(connection)
    return await pool.getconn()


def take(pool: SyncPool) -> psycopg.Connection[Any]:
    """Do what :func:`take_async` does."""
    for _ in range(pool.max_size):
        connection = pool.take() if isinstance(pool, OwnPool) else pool.getconn()
        if not is_broken(connection):
            return connection
        connection.close()
        pool.putconn(connection)
    return pool.getconn()
