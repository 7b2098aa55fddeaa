# pyright: basic, reportMissingImports=false
"""procrastinate: 200 jobs at once on the loop, finished jobs kept (its default), LISTEN on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import procrastinate
import psycopg

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SETTINGS = {"concurrency": 200, "pool": 20, "delete_jobs": "never (its default)"}


def _app(address: str) -> Any:
    return procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=address, max_size=20))


async def install(address: str) -> None:
    async with _app(address).open_async() as app:
        await app.schema_manager.apply_schema_async()


class _Producer:
    def __init__(self, task: Any) -> None:
        self._task = task

    async def push(self, args: Any) -> None:
        await self._task.defer_async(args=args)

    async def push_many(self, many: Any) -> None:
        await self._task.batch_defer_async(*({"args": args} for args in many))


@contextlib.asynccontextmanager
async def producing(address: str) -> AsyncGenerator[Any]:
    app = _app(address)

    @app.task(name="send_email")
    async def send_email(args: Any) -> None:
        pass

    async with app.open_async():
        yield _Producer(send_email)


@contextlib.asynccontextmanager
async def working(address: str, handle: Any) -> AsyncGenerator[Any]:
    app = _app(address)

    @app.task(name="send_email")
    async def send_email(args: Any) -> None:
        await handle(args)

    async with app.open_async():
        worker = asyncio.create_task(
            app.run_worker_async(concurrency=SETTINGS["concurrency"], install_signal_handlers=False)
        )
        try:
            yield
        finally:
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await worker


async def unfinished(address: str) -> int:
    async with await psycopg.AsyncConnection.connect(address) as connection:
        cursor = await connection.execute(
            "select count(*) from procrastinate_jobs where status in ('todo', 'doing')"
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
