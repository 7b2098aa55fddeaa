# pyright: basic, reportMissingImports=false
"""oban (the open one): a queue with a limit of 200, jobs kept, default notifier."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg
from oban import Oban, worker
from oban.schema import install as install_schema
from psycopg_pool import AsyncConnectionPool

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SETTINGS = {"limit": 200, "pool": 20}
_handle: Any = None


@worker(queue="default")
class _SendEmail:
    async def process(self, job: Any) -> None:
        await _handle(job.args)


SendEmail: Any = _SendEmail


@contextlib.asynccontextmanager
async def _pool(address: str) -> AsyncGenerator[Any]:
    async with AsyncConnectionPool(address, min_size=1, max_size=20, open=False) as pool:
        yield pool


async def install(address: str) -> None:
    async with _pool(address) as pool:
        await install_schema(pool)


class _Producer:
    def __init__(self, oban: Oban) -> None:
        self._oban = oban

    async def push(self, args: Any) -> None:
        await self._oban.enqueue(SendEmail.new(args))

    async def push_many(self, many: Any) -> None:
        await self._oban.enqueue_many([SendEmail.new(args) for args in many])


@contextlib.asynccontextmanager
async def producing(address: str) -> AsyncGenerator[Any]:
    async with _pool(address) as pool, Oban(pool=pool) as oban:
        yield _Producer(oban)


@contextlib.asynccontextmanager
async def working(address: str, handle: Any) -> AsyncGenerator[Any]:
    global _handle  # noqa: PLW0603 - a worker is a class, found by its name
    _handle = handle
    async with _pool(address) as pool, Oban(pool=pool, queues={"default": SETTINGS["limit"]}):
        yield


async def unfinished(address: str) -> int:
    async with await psycopg.AsyncConnection.connect(address) as connection:
        cursor = await connection.execute(
            "select count(*) from oban_jobs where state not in ('completed', 'discarded', 'cancelled')"
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
