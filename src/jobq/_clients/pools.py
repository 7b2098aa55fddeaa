"""Where clients get connections from: a pool of their own, or one that they were given.

A client's own pool is psycopg's, with a place in front of it: the connection that the client used last
stays at hand for its next statement, or for anybody else who asks. The way through the pool and back
costs more than all else that a client does for a job (30 of 60 calls); this way takes 2. It takes no
lock either: whoever has to wait for a connection is counted before he looks at the place for the last
time, and whoever puts one there looks at the count afterwards, so none is kept while somebody waits.

Our own statements go past psycopg's cursors (`direct`), so they are in autocommit while the connection
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

    from psycopg_pool import pool, pool_async

AsyncPool: TypeAlias = AsyncConnectionPool[psycopg.AsyncConnection[Any]]
SyncPool: TypeAlias = ConnectionPool[psycopg.Connection[Any]]

# The pool looks at a connection's age when it comes back: a kept one goes there now and then.
_KEEP_S: Final = 60.0
_IDLE: Final = int(TransactionStatus.IDLE)  # a plain integer, as it is compared with each time
RECONNECT_PAUSE_MAX_S: Final = 5.0
"""The longest pause between two tries to connect, as the worker's connections have it."""


class OwnPool(ConnectionPool[psycopg.Connection[Any]]):
    """The pool of a Client."""

    def __init__(self, conninfo: str, **options: Any) -> None:
        self._spare: list[OwnConnection] = []  # one at the most, or one a thread for a moment
        self._spare_until_s = 0.0
        self._asking = 0
        self._gate = threading.Lock()
        super().__init__(conninfo, connection_class=OwnConnection, **options)

    def getconn(self, timeout: float | None = None) -> psycopg.Connection[Any]:
        """Take a connection for whatever one likes."""
        connection = self._ask(timeout)
        connection.direct.forget()
        return connection

    def take(self) -> OwnConnection:
        """Take a connection for the client's own statements, to be put back by `put_back`.

        One that the server has closed meanwhile, as a restart closes all of them, is replaced: it
        would fail a statement that another connection can run.
        """
        try:
            connection = self._spare.pop()
        except IndexError:
            connection = self._ask()
        return self._sound(connection) if connection.input_within_ms(0) else connection

    def _sound(self, connection: OwnConnection) -> OwnConnection:
        """Return a connection that has been sent something, or in place of a broken one another."""
        for _ in range(self.max_size):
            if not is_broken(connection):
                break
            connection.close()
            self.putconn(connection)
            connection = self._ask()
        return connection

    def _ask(self, timeout: float | None = None) -> OwnConnection:
        with self._gate:
            self._asking += 1
        try:
            connection = self._spare.pop() if self._spare else super().getconn(timeout)
        except IndexError:  # another thread was faster
            connection = super().getconn(timeout)
        finally:
            with self._gate:
                self._asking -= 1
        assert isinstance(connection, OwnConnection)
        return connection

    def put_back(self, connection: OwnConnection) -> None:
        """Take back what `take` gave, and keep it at hand if nobody waits for one."""
        if connection.pgconn.transaction_status != _IDLE:
            connection.close()  # broken, or interrupted in a transaction
        elif time.monotonic() >= self._spare_until_s:
            self._spare_until_s = time.monotonic() + _KEEP_S
        elif not self._spare:
            self._spare.append(connection)
            if not self._asking:
                return
            try:
                connection = self._spare.pop()
            except IndexError:  # whoever asked has it
                return
        self.putconn(connection)

    def schedule_task(self, task: pool.MaintenanceTask, delay: float) -> None:
        """Have a task of the pool's run later, a try to connect soon enough."""
        super().schedule_task(task, _pause_s(task, delay))

    def close(self, timeout: float = 5.0) -> None:
        """Close all connections."""
        with self._gate:
            self._asking += 1  # for ever: nothing is kept any more
        while self._spare:
            self.putconn(self._spare.pop())
        super().close(timeout)


class OwnAsyncPool(AsyncConnectionPool[psycopg.AsyncConnection[Any]]):
    """The pool of an AsyncClient."""

    def __init__(self, conninfo: str, **options: Any) -> None:
        self._spare: list[OwnAsyncConnection] = []
        self._spare_until_s = 0.0
        self._asking = 0
        super().__init__(conninfo, connection_class=OwnAsyncConnection, **options)

    async def getconn(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's signature
    ) -> psycopg.AsyncConnection[Any]:
        """Take a connection for whatever one likes."""
        connection = await self._ask(timeout)
        connection.direct.forget()
        return connection

    async def take(self) -> OwnAsyncConnection:
        """Do what :meth:`OwnPool.take` does."""
        connection = self._spare.pop() if self._spare else await self._ask()
        return await self._sound(connection) if connection.input_within_ms(0) else connection

    async def _sound(self, connection: OwnAsyncConnection) -> OwnAsyncConnection:
        for _ in range(self.max_size):
            if not is_broken(connection):
                break
            await connection.close()
            await self.putconn(connection)
            connection = await self._ask()
        return connection

    async def _ask(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's signature
    ) -> OwnAsyncConnection:
        if self._spare:
            return self._spare.pop()
        self._asking += 1
        try:
            connection = await super().getconn(timeout)
        finally:
            self._asking -= 1
        assert isinstance(connection, OwnAsyncConnection)
        return connection

    async def put_back(self, connection: OwnAsyncConnection) -> None:
        """Take back what `take` gave, and keep it at hand if nobody waits for one."""
        if connection.pgconn.transaction_status != _IDLE:
            await connection.close()  # broken, or interrupted in a transaction
        elif time.monotonic() >= self._spare_until_s:
            self._spare_until_s = time.monotonic() + _KEEP_S
        elif not self._spare and not self._asking:
            self._spare.append(connection)
            return
        await _shielded(self.putconn(connection))

    async def schedule_task(self, task: pool_async.MaintenanceTask, delay: float) -> None:
        """Have a task of the pool's run later, a try to connect soon enough."""
        await super().schedule_task(task, _pause_s(task, delay))

    async def close(
        self,
        timeout: float = 5.0,  # noqa: ASYNC109 - psycopg's signature
    ) -> None:
        """Close all connections."""
        self._asking += 1  # for ever: nothing is kept any more
        while self._spare:
            await self.putconn(self._spare.pop())
        await super().close(timeout)


def _pause_s(task: object, delay_s: float) -> float:
    """Return how long a task of a pool's waits.

    psycopg's pool doubles the pauses between its tries for five minutes, so that after an outage enqueues
    would fail for as long again.
    """
    is_try = getattr(task, "attempt", None) is not None
    return min(delay_s, RECONNECT_PAUSE_MAX_S) if is_try else delay_s


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
