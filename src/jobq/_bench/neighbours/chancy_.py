# pyright: basic, reportMissingImports=false
"""chancy: the async executor, 200 at once, eager polling, which its documentation has for throughput."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import psycopg
from chancy import Chancy, Queue, Worker, job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SETTINGS = {"concurrency": 200, "executor": "AsyncExecutor", "polling_interval": 1, "eager_polling": True}
_handle: Any = None


@job()
async def send_email(args: Any) -> None:
    await _handle(args)


def _app(address: str) -> Chancy:
    quiet = logging.getLogger("neighbour")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    return Chancy(address, log=quiet)


async def install(address: str) -> None:
    async with _app(address) as app:
        await app.migrate()
        await app.declare(
            Queue(
                "default",
                concurrency=SETTINGS["concurrency"],
                executor=Chancy.Executor.Async,
                polling_interval=1,
                eager_polling=True,
            )
        )


class _Producer:
    def __init__(self, app: Chancy) -> None:
        self._app = app

    async def push(self, args: Any) -> None:
        await self._app.push(send_email.job.with_kwargs(args=args))

    async def push_many(self, many: Any) -> None:
        jobs = [send_email.job.with_kwargs(args=args) for args in many]
        async for _ in self._app.push_many(jobs, batch_size=len(jobs)):
            pass


@contextlib.asynccontextmanager
async def producing(address: str) -> AsyncGenerator[Any]:
    async with _app(address) as app:
        yield _Producer(app)


@contextlib.asynccontextmanager
async def working(address: str, handle: Any) -> AsyncGenerator[Any]:
    global _handle  # noqa: PLW0603 - a job is a function, found by its name
    _handle = handle
    async with _app(address) as app, Worker(app, register_signal_handlers=False):
        await asyncio.sleep(0)
        yield


async def unfinished(address: str) -> int:
    async with await psycopg.AsyncConnection.connect(address) as connection:
        cursor = await connection.execute(
            "select count(*) from chancy_jobs where state in ('pending', 'running', 'retrying')"
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
