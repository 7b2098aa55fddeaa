"""Where clients get connections from: a pool of their own, or one that they were given.

A client's own pool is psycopg's, with a place in front of it: the connection that the client used last
stays at hand for its next statement, or for anybody else who asks. The way through the pool and back
costs more than all else that a client does for a job (30 of 60 calls); this way takes 6. Whoever has
to wait for a connection is counted before he waits, so none is kept while somebody waits.

Our own statements go past psycopg's cursors (`_direct`), so they are in autocommit while the connection
stands as psycopg's defaults have it, for whoever else takes it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from jobq._direct import OwnAsyncConnection, OwnConnection
from jobq._postgres import is_broken

if TYPE_CHECKING:
    from collections.abc import Coroutine

AsyncPool: TypeAlias = AsyncConnectionPool[psycopg.AsyncConnection[Any]]
SyncPool: TypeAlias = ConnectionPool[psycopg.Connection[Any]]

# The pool looks at a connection's age when it comes back: a kept one goes there now and then.
_KEEP_S: Final = 60.0


class OwnPool(ConnectionPool[psycopg.Connection[Any]]):
    """The pool of a Client."""

    def __init__(self, conninfo: str, **options: Any) -> None:
        self._spare: OwnConnection | None = None
        self._spare_until_s = 0.0
        self._asking = 0
        self._keeps = True
        self._gate = threading.Lock()
        super().__init__(conninfo, connection_class=OwnConnection, **options)

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        """Take a connection for whatever one likes."""
        connection = self._next(timeout)
        connection.direct.forget()
        return connection

    def take(self) -> OwnConnection:
        """Take a connection for the client's own statements, to be put back by `put_back`.

        One that the server has closed meanwhile, as a restart closes all of them, is replaced: it
        would fail a statement that another connection can run.
        """
        for _ in range(self.max_size + 1):
            connection = self._next()
            if connection.direct.is_silent() or not is_broken(connection):
                return connection
            connection.close()
            self.putconn(connection)
        return self._next()

    def _next(self, timeout: float | None = None) -> OwnConnection:
        with self._gate:
            spare, self._spare = self._spare, None
            if spare is None:
                self._asking += 1
        if spare is not None:
            return spare
        try:
            connection = super().getconn(timeout)
        finally:
            with self._gate:
                self._asking -= 1
        assert isinstance(connection, OwnConnection)
        return connection

    def put_back(self, connection: OwnConnection) -> None:
        """Take back what `take` gave, and keep it at hand if nobody waits for one."""
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.close()  # broken, or interrupted in a transaction
        else:
            now_s = time.monotonic()
            with self._gate:
                if self._spare is None and not self._asking and self._keeps:
                    if now_s < self._spare_until_s:
                        self._spare = connection
                        return
                    self._spare_until_s = now_s + _KEEP_S
        self.putconn(connection)

    def close(self, timeout: float = 5.0) -> None:
        """Close all connections."""
        with self._gate:
            spare, self._spare, self._keeps = self._spare, None, False
        if spare is not None:
            self.putconn(spare)
        super().close(timeout)


class OwnAsyncPool(AsyncConnectionPool[psycopg.AsyncConnection[Any]]):
    """The pool of an AsyncClient."""

    def __init__(self, conninfo: str, **options: Any) -> None:
        self._spare: OwnAsyncConnection | None = None
        self._spare_until_s = 0.0
        self._asking = 0
        self._keeps = True
        super().__init__(conninfo, connection_class=OwnAsyncConnection, **options)

    async def getconn(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's signature
    ) -> psycopg.AsyncConnection[Any]:
        """Take a connection for whatever one likes."""
        connection = await self._next(timeout)
        connection.direct.forget()
        return connection

    async def take(self) -> OwnAsyncConnection:
        """Do what :meth:`OwnPool.take` does."""
        for _ in range(self.max_size + 1):
            connection = await self._next()
            if connection.direct.is_silent() or not is_broken(connection):
                return connection
            await connection.close()
            await self.putconn(connection)
        return await self._next()

    async def _next(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's signature
    ) -> OwnAsyncConnection:
        spare, self._spare = self._spare, None
        if spare is not None:
            return spare
        self._asking += 1
        try:
            connection = await super().getconn(timeout)
        finally:
            self._asking -= 1
        assert isinstance(connection, OwnAsyncConnection)
        return connection

    async def put_back(self, connection: OwnAsyncConnection) -> None:
        """Take back what `take` gave, and keep it at hand if nobody waits for one."""
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            await connection.close()  # broken, or interrupted in a transaction
        else:
            now_s = time.monotonic()
            if self._spare is None and not self._asking and self._keeps:
                if now_s < self._spare_until_s:
                    self._spare = connection
                    return
                self._spare_until_s = now_s + _KEEP_S
        await _shielded(self.putconn(connection))

    async def close(
        self,
        timeout: float = 5.0,  # noqa: ASYNC109 - psycopg's signature
    ) -> None:
        """Close all connections."""
        spare, self._spare, self._keeps = self._spare, None, False
        if spare is not None:
            await self.putconn(spare)
        await super().close(timeout)


async def _shielded(put: Coroutine[Any, Any, None]) -> None:
    """Put a connection back even when we are cancelled meanwhile: the pool would lose it."""
    await asyncio.shield(put)


def take(pool: SyncPool) -> psycopg.Connection[Any]:
    """Take a connection from a pool that was given, as `OwnPool.take` does from ours."""
    for _ in range(pool.max_size + 1):
        connection = pool.getconn()
        if not is_broken(connection):
            return connection
        connection.close()
        pool.putconn(connection)
    return pool.getconn()


async def take_async(pool: AsyncPool) -> psycopg.AsyncConnection[Any]:
    """Take a connection from a pool that was given, as `OwnAsyncPool.take` does from ours."""
    for _ in range(pool.max_size + 1):
        connection = await pool.getconn()
        if not is_broken(connection):
            return connection
        await connection.close()
        await pool.putconn(connection)
    return await pool.getconn()


async def put_back_async(pool: AsyncPool, connection: psycopg.AsyncConnection[Any]) -> None:
    """Put back what `take_async` took."""
    await _shielded(pool.putconn(connection))
