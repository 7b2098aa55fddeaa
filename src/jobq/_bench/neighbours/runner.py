"""Runs a neighbour's script, inside that neighbour's own environment, where jobq is not installed.

Called as ``python runner.py NAME``. It reads calls as lines of JSON (``{"call": …, "args": […]}``)
and answers each with one line. A script beside this one is named for its neighbour and defines:

- ``install(address)``: make its tables;
- ``producing(address)``: an async context manager; yields an object with ``push(args)`` and
  ``push_many(list of args)``;
- ``working(address, handle)``: an async context manager that runs a worker whose async handler
  awaits ``handle(args)``;
- ``unfinished(address)``: how many jobs have no recorded outcome yet.

Standard library only, and nothing from jobq.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ARGS = {"to": "user12345@example.com", "subject": "hello hello hello 12"}
POLL_S = 0.02
TIMEOUT_S = 150.0
INTERVAL_S = (0.005, 0.105)


class Calls:
    """What can be called of a script."""

    def __init__(self, script: Any) -> None:
        self._script = script

    async def install(self, address: str) -> None:
        """Make its tables."""
        await self._script.install(address)

    async def enqueue(self, address: str, jobs: int, call: int) -> dict[str, float]:
        """Enqueue so many jobs in bulk; return the seconds and the CPU seconds."""
        async with self._script.producing(address) as producer:
            await producer.push_many([ARGS] * 10)  # connects, prepares
            began_s, cpu_s = time.monotonic(), time.process_time()
            for _ in range(0, jobs, call):
                await producer.push_many([dict(ARGS) for _ in range(call)])
            return {"seconds": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_s}

    async def drain(self, address: str, jobs: int) -> dict[str, float]:
        """Run so many jobs that are there already, from the first handler to the last record."""
        seen = 0
        began = 0.0, 0.0
        all_ran = asyncio.Event()

        async def handle(_args: Any) -> None:
            nonlocal seen, began
            if not seen:
                began = time.monotonic(), time.process_time()
            seen += 1
            if seen >= jobs:
                all_ran.set()

        async with asyncio.timeout(TIMEOUT_S), self._script.working(address, handle):
            await all_ran.wait()
            ran_s = time.monotonic()
            while await self._script.unfinished(address):  # noqa: ASYNC110 - what it waits for is elsewhere
                await asyncio.sleep(POLL_S)
            ended_s, ended_cpu_s = time.monotonic(), time.process_time()
            print(f"all ran after {ran_s - began[0]:.2f} s", file=sys.stderr)
            return {"seconds": ended_s - began[0], "cpu_s": ended_cpu_s - began[1]}

    async def time_starts(self, address: str, probes: int) -> dict[int, float]:
        """Run so many probes as they come; return when each started."""
        starts: dict[int, float] = {}
        all_ran = asyncio.Event()

        async def handle(args: Any) -> None:
            starts[int(args["number"])] = time.monotonic()
            if len(starts) >= probes:
                all_ran.set()

        async with asyncio.timeout(TIMEOUT_S), self._script.working(address, handle):
            await all_ran.wait()
        return starts

    async def push_probes(self, address: str, probes: int) -> dict[int, float]:
        """Enqueue probes one at a time at random intervals; return when each was sent."""
        rng = random.Random(probes)
        sent: dict[int, float] = {}
        async with self._script.producing(address) as producer:
            for number in range(probes):
                await asyncio.sleep(rng.uniform(*INTERVAL_S))
                sent[number] = time.monotonic()
                await producer.push({"number": number})
        return sent


def new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's loop where there is one, as jobq is measured."""
    if importlib.util.find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415 - optional

    return uvloop.new_event_loop()


def main() -> None:
    """Answer calls until nobody asks any more."""
    name = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    sys.stdout = sys.stderr
    path = Path(__file__).with_name(f"{name}_.py")
    spec = importlib.util.spec_from_file_location("neighbour", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["neighbour"] = script  # a library may look a handler up by its module
    spec.loader.exec_module(script)
    calls = Calls(script)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                value = runner.run(getattr(calls, asked["call"])(*asked["args"]))
                answer: dict[str, Any] = {"value": value}
            except BaseException:  # noqa: BLE001 - handed over whole
                answer = {"error": traceback.format_exc()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
