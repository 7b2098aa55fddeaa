"""A worker's process whose handlers note what they do: ``python -m tests.chaos.worker SETTINGS``.

``settings["sabotage"]`` names a fault of jobq's own, made by hand, for the test that the auditor sees it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import jobq
from tests.chaos.books import HandlerNotes
from tests.chaos.misbehaviour import misbehave
from tests.chaos.notes import DONE, RAISED, STOPPED
from tests.support.polling import pause

if TYPE_CHECKING:
    from tests.chaos.books import HandlerBook

# Short, so that what the defaults do in a minute takes seconds.
BRISK: Final[dict[str, Any]] = {
    "queues": {"default": 10},
    "lease": 2.5,
    "heartbeat": 0.5,
    "poll": 0.2,
    "grace": 1.0,
    "cancel_grace": 0.3,
    "promote_interval": 0.05,
    "rescue_interval": 0.4,
    "crash_limit": 1_000_000,  # what is killed at random is no job's fault
}
_PLAIN: Final = {"queues", "prefetch", "crash_limit", "completion_batch", "pending_outcomes", "leads"}


class SentOnceTooEarlyError(Exception):
    """What a job raises that is to fail the first time."""


def make_jobs(book: HandlerBook, *, ticks: bool = False) -> jobq.Jobs:  # noqa: C901 - four handlers
    """Return the handlers: on the loop, and in threads; and a schedule, if it is asked for."""
    jobs = jobq.Jobs()
    if hasattr(jobs, "observe"):  # code of the first version, which a test of upgrades runs, has none
        jobs.observe(book)
    soon = jobq.ConstantBackoff(timedelta(milliseconds=100))

    def decide(job: jobq.Job, args: dict[str, Any]) -> None:
        if job.failures == 0 and args["do"] == "fail":
            raise SentOnceTooEarlyError
        if job.attempt == 1 and args["do"] == "snooze":
            raise jobq.Snooze(timedelta(milliseconds=100))

    @jobs.handler("work", backoff=soon)
    async def work(job: jobq.Job, args: dict[str, Any]) -> None:
        book.start(job, args)
        try:
            await asyncio.sleep(args["s"])
            decide(job, args)
        except BaseException as error:
            book.end(job, STOPPED if isinstance(error, asyncio.CancelledError) else RAISED)
            raise
        book.end(job, DONE)

    @jobs.handler("thread", backoff=soon)
    def thread(job: jobq.Job, args: dict[str, Any]) -> None:
        book.start(job, args)
        try:
            pause(args["s"])
            decide(job, args)
        except BaseException:
            book.end(job, RAISED)
            raise
        book.end(job, DONE)

    @jobs.handler("misbehave", backoff=soon, timeout=timedelta(seconds=2))
    async def on_loop(job: jobq.Job, args: dict[str, Any]) -> None:
        book.start(job, args)
        try:
            if job.attempt == 1:
                await misbehave(args["do"])
        except BaseException as error:
            book.end(job, STOPPED if isinstance(error, asyncio.CancelledError) else RAISED)
            raise
        book.end(job, DONE)

    if ticks:

        @jobs.handler("tick")
        async def tick(job: jobq.Job, args: None) -> None:
            """Be made by the schedule; nobody asked for it, so it is not noted."""

        jobs.add_periodic("every second", tick, every=timedelta(seconds=1))
    return jobs


def config(values: dict[str, Any]) -> jobq.WorkerConfig:
    """Return a configuration from plain values, times in seconds."""
    fields: dict[str, Any] = {
        k: v if k in _PLAIN else timedelta(seconds=v) for k, v in (BRISK | values).items()
    }
    return jobq.WorkerConfig(**fields)


def _spoil(settings: dict[str, Any], worker: jobq.Worker) -> None:
    if settings["sabotage"] is not None:  # it knows jobq's insides, which older code does not have
        from tests.chaos import sabotage

        sabotage.apply_to_worker(settings["sabotage"], worker)


async def _work(settings: dict[str, Any]) -> None:
    jobs = make_jobs(HandlerNotes(settings["notes"]), ticks=settings["ticks"])
    async with jobq.AsyncClient(settings["dsn"], pool_min_size=0, **settings["client"]) as client:
        worker = jobq.Worker(client, jobs, config(settings["config"]))
        _spoil(settings, worker)
        await worker.run()


def main() -> None:
    """Run the worker that the command line describes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    threading.current_thread().name = "main"
    settings = json.loads(sys.argv[1])
    asyncio.run(_work(settings))


if __name__ == "__main__":
    main()
