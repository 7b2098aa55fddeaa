"""For the tests of applications that use jobq: run what is due, look at what was enqueued.

Nothing here is a mock. A job goes through the real tables and statements, and its outcome is decided
by the same functions that the worker uses; what is different is that the test itself is the worker, so
that everything happens in one process, in order, and when the test says so::

    async def test_sign_up_sends_a_mail(jobq_async_client):
        await sign_up("a@example.com", jobq_async_client)
        await assert_enqueued(jobq_async_client, send_email, args=EmailArgs("a@example.com"))
        report = await drain(jobq_async_client, jobs)
        assert report.completed

The pytest plugin that comes with jobq has the fixtures: ``jobq_dsn``, ``jobq_client``,
``jobq_async_client`` (a migrated database for each test).
"""

from __future__ import annotations

from jobq.testing.assertions import assert_enqueued, assert_not_enqueued
from jobq.testing.clock import Clock
from jobq.testing.draining import DrainReport, drain, drain_sync
from jobq.testing.handlers import make_job
from jobq.testing.inline import AsyncInlineClient, InlineClient
from jobq.testing.ticks import next_ticks

__all__ = [
    "AsyncInlineClient",
    "Clock",
    "DrainReport",
    "InlineClient",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "drain_sync",
    "make_job",
    "next_ticks",
]
