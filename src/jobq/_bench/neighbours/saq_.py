# pyright: basic, reportMissingImports=false
"""saq, on Redis, whose own settings say what it keeps on disk.

40 jobs at once: each that waits holds a connection, and a pool has 100.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from redis.asyncio import Redis
from saq import Worker
from saq.queue.redis import RedisQueue

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SETTINGS = {"concurrency": 40, "max_concurrent_ops": 80}


def _queue(address: str) -> Any:
    return RedisQueue(Redis.from_url(address), max_concurrent_ops=SETTINGS["max_concurrent_ops"])


async def install(address: str) -> None:
    queue = _queue(address)
    await queue.connect()
    await queue.redis.flushall()
    await queue.disconnect()


class _Producer:
    def __init__(self, queue: Any) -> None:
        self._queue = queue

    async def push(self, args: Any) -> None:
        await self._queue.enqueue("send_email", args=args)

    async def push_many(self, many: Any) -> None:
        await asyncio.gather(*(self._queue.enqueue("send_email", args=args) for args in many))


@contextlib.asynccontextmanager
async def producing(address: str) -> AsyncGenerator[Any]:
    queue = _queue(address)
    await queue.connect()
    try:
        yield _Producer(queue)
    finally:
        await queue.disconnect()


@contextlib.asynccontextmanager
async def working(address: str, handle: Any) -> AsyncGenerator[Any]:
    queue = _queue(address)

    async def send_email(_context: Any, *, args: Any) -> None:
        await handle(args)

    await queue.connect()
    worker = Worker(queue, [("send_email", send_email)], concurrency=SETTINGS["concurrency"])
    running = asyncio.create_task(worker.start())
    try:
        yield
    finally:
        await worker.stop()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await queue.disconnect()


async def unfinished(address: str) -> int:
    queue = _queue(address)
    await queue.connect()
    try:
        return int(await queue.count("incomplete"))
    finally:
        await queue.disconnect()
