# pyright: basic, reportMissingImports=false
"""pgqueuer: over asyncpg, its faster driver, batches of 500; finished jobs move to its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job  # noqa: TC002 - the library reads the annotation
from pgqueuer.queries import Queries

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SETTINGS = {"batch_size": 500, "driver": "asyncpg"}


async def install(address: str) -> None:
    connection = await asyncpg.connect(address)
    try:
        await Queries(AsyncpgDriver(connection)).install()
    finally:
        await connection.close()


class _Producer:
    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    async def push(self, args: Any) -> None:
        await self._queries.enqueue("send_email", json.dumps(args).encode())

    async def push_many(self, many: Any) -> None:
        payloads = [json.dumps(args).encode() for args in many]
        await self._queries.enqueue(["send_email"] * len(payloads), payloads, [0] * len(payloads))


@contextlib.asynccontextmanager
async def producing(address: str) -> AsyncGenerator[Any]:
    connection = await asyncpg.connect(address)
    try:
        yield _Producer(Queries(AsyncpgDriver(connection)))
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def working(address: str, handle: Any) -> AsyncGenerator[Any]:
    connection = await asyncpg.connect(address)
    queue = PgQueuer(AsyncpgDriver(connection))

    @queue.entrypoint("send_email")
    async def send_email(job: Job) -> None:
        await handle(json.loads(job.payload or b"null"))

    worker = asyncio.create_task(
        queue.qm.run(dequeue_timeout=timedelta(seconds=1), batch_size=SETTINGS["batch_size"])
    )
    try:
        yield
    finally:
        queue.qm.shutdown.set()
        await worker
        await connection.close()


async def unfinished(address: str) -> int:
    connection = await asyncpg.connect(address)
    try:
        return int(await connection.fetchval("select count(*) from pgqueuer"))
    finally:
        await connection.close()
