"""A worker inside the test's own event loop, and a view of what it left in the database."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

import jobq
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FAST: dict[str, Any] = {
    "promote_interval": timedelta(milliseconds=20),
    "poll": timedelta(milliseconds=100),
    "grace": timedelta(seconds=2),
}


class Bench:
    """One test's client, jobs and running worker."""

    def __init__(self, dsn: str, client: jobq.AsyncClient, jobs: jobq.Jobs, worker: jobq.Worker) -> None:
        self.dsn = dsn
        self.client = client
        self.jobs = jobs
        self.worker = worker
        self.run: asyncio.Task[jobq.WorkerReport] | None = None

    def rows(self, sql: str, *params: object) -> list[dict[str, Any]]:
        """Run one query on a connection of its own."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.cursor(row_factory=dict_row)
            return cursor.execute(sql.encode(), params).fetchall()

    def job(self, job_id: int) -> dict[str, Any]:
        """Return the job's line of the view ``jobs``."""
        (row,) = self.rows("select * from jobq.jobs where id = %s", job_id)
        return row

    def errors(self, job_id: int) -> list[dict[str, Any]]:
        """Return the job's errors, the oldest first."""
        return self.rows("select * from jobq.attempt_error where job_id = %s order by attempt", job_id)

    async def ended(self, job_id: int, timeout_s: float = 10.0) -> dict[str, Any]:
        """Wait until the job is finished; return its line."""

        def look() -> dict[str, Any] | None:
            row = self.job(job_id)
            return row if row["finished_at"] is not None else None

        return await eventually_async(look, timeout_s, what=f"job {job_id} ends") or {}

    async def waits(self, job_id: int, reason: str, timeout_s: float = 10.0) -> dict[str, Any]:
        """Wait until the job is scheduled for ``reason``; return its line."""

        def look() -> dict[str, Any] | None:
            row = self.job(job_id)
            return row if row["state"] == "scheduled" and row["reason"] == reason else None

        return await eventually_async(look, timeout_s, what=f"job {job_id} waits: {reason}") or {}

    async def stop(self, grace_s: float | None = None) -> jobq.WorkerReport:
        """Stop the worker and return its report."""
        assert self.run is not None
        await self.worker.stop(grace=None if grace_s is None else timedelta(seconds=grace_s))
        return await self.run


@contextlib.asynccontextmanager
async def working(dsn: str, jobs: jobq.Jobs, **config: Any) -> AsyncIterator[Bench]:
    """Run a worker for the block; stop it afterwards."""
    async with jobq.AsyncClient(dsn) as client:
        settings = {"queues": {"default": 20}, **FAST, **config}
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(**settings))
        bench = Bench(dsn, client, jobs, worker)
        bench.run = asyncio.create_task(worker.run(handle_signals=False))
        try:
            yield bench
        finally:
            await worker.stop(grace=timedelta(seconds=0.5))
            await bench.run
