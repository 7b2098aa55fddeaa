"""An application of handlers that behave badly, for tests of `jobqctl worker`.

Each takes ``{"path": …}`` and leaves its traces there: a line with the time for every step that it takes,
so that a test can see when it was last alive.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import jobq

jobs = jobq.Jobs()
STEP_S = 0.02
WORK_S = 0.2
FOR_EVER_S = 300.0  # the test is over long before


def trace(args: dict[str, Any], what: str = "step") -> None:
    with Path(args["path"]).open("a") as file:
        file.write(f"{time.time()} {what} {os.getpid()}\n")


def go_on_and_on(args: dict[str, Any]) -> None:
    end = time.monotonic() + FOR_EVER_S
    while time.monotonic() < end:
        trace(args)
        time.sleep(STEP_S)


@jobs.handler("swallow")
async def swallow(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Ignore every cancellation."""
    end = time.monotonic() + FOR_EVER_S
    while time.monotonic() < end:
        trace(args)
        try:
            await asyncio.sleep(STEP_S)
        except asyncio.CancelledError:
            trace(args, "swallowed")


@jobs.handler("thread")
def thread(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Never look at job.cancelled."""
    go_on_and_on(args)


@jobs.handler("process", run_in="process")
def process(_job: jobq.Job, args: dict[str, Any]) -> None:
    """The same, elsewhere."""
    go_on_and_on(args)


@jobs.handler("polite")
async def polite(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Take long, but end when told to."""
    trace(args)
    await asyncio.sleep(FOR_EVER_S)


@jobs.handler("brief")
async def brief(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Take a moment."""
    trace(args)
    await asyncio.sleep(WORK_S)


@jobs.handler("quick")
async def quick(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Take hardly any time."""
    trace(args)


@jobs.handler("second")
async def second(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Take a second."""
    trace(args)
    await asyncio.sleep(1.0)


@jobs.handler("exit")
async def leave(_job: jobq.Job, args: dict[str, Any]) -> None:
    """End the whole process, and call it a success."""
    trace(args)
    await asyncio.sleep(WORK_S / 4)  # until the others have begun, too
    os._exit(0)


@jobs.handler("sigkill")
async def die(_job: jobq.Job, args: dict[str, Any]) -> None:
    """End the whole process as the kernel does when memory is short."""
    trace(args)
    await asyncio.sleep(WORK_S / 4)
    os.kill(os.getpid(), signal.SIGKILL)


@jobs.handler("block")
async def block(_job: jobq.Job, args: dict[str, Any]) -> None:
    """Block the event loop."""
    trace(args)
    time.sleep(FOR_EVER_S)  # noqa: ASYNC251 - the point of it


@jobs.on_discard
def discarded(job: jobq.Job, error: jobq.AttemptError) -> None:
    """Say so in the worker's log."""
    print(f"discarded {job.kind}: {error.outcome}", flush=True)  # noqa: T201 - the test reads it
