"""jobq itself, asked the same as its neighbours: a worker with its defaults and 200 slots."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import psycopg

import jobq
from jobq._bench.workers import LIVE
from jobq._bench.workload import EMAIL, PROBE, EmailArgs, ProbeArgs
from jobq._bench.workload import working as run_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

SETTINGS = {"slots": 200}


async def install(address: str) -> None:
    """Make the tables."""
    await asyncio.to_thread(jobq.migrate, address)


class _Producer:
    def __init__(self, client: jobq.AsyncClient) -> None:
        self._client = client

    async def push(self, args: dict[str, Any]) -> None:
        await self._client.enqueue(PROBE, ProbeArgs(**args))

    async def push_many(self, many: Sequence[dict[str, str]]) -> None:
        await self._client.enqueue_many([jobq.NewJob(EMAIL, EmailArgs(**args)) for args in many])


@contextlib.asynccontextmanager
async def producing(address: str) -> AsyncGenerator[_Producer]:
    """Yield what enqueues."""
    async with jobq.AsyncClient(address) as client:
        yield _Producer(client)


@contextlib.asynccontextmanager
async def working(address: str, handle: Callable[[Any], Awaitable[None]]) -> AsyncGenerator[None]:
    """Run a worker."""
    jobs = jobq.Jobs()

    @jobs.handler(EMAIL)
    async def send(job: jobq.Job, args: EmailArgs) -> None:  # noqa: ARG001
        await handle(args)

    @jobs.handler(PROBE)
    async def probe(job: jobq.Job, args: ProbeArgs) -> None:  # noqa: ARG001
        await handle({"number": args.number})

    async with run_worker(address, jobs, SETTINGS["slots"]):
        yield


async def unfinished(address: str) -> int:
    """Return how many jobs have no outcome yet."""
    async with await psycopg.AsyncConnection.connect(address) as connection:
        cursor = await connection.execute(LIVE.encode())
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
