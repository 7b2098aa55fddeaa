"""``python -m jobq.demo.worker``: one worker process of the demonstration.

Like any application's, but for its short lease, so that one need not wait half a minute to see its jobs
come back after it was killed. It stops when its standard input ends: when the demonstration is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from datetime import timedelta
from typing import Final

import jobq
from jobq.demo.shop import jobs

LEASE: Final = timedelta(seconds=3)

CONFIG: Final = jobq.WorkerConfig(
    queues={"mail": 10},
    lease=LEASE,
    heartbeat=timedelta(seconds=1),
    rescue_interval=timedelta(seconds=1),
    grace=timedelta(seconds=5),
)


async def main() -> None:
    """Work until SIGTERM, or until standard input ends."""
    loop = asyncio.get_running_loop()
    async with jobq.AsyncClient(os.environ["DATABASE_URL"], schema=os.environ["JOBQ_SCHEMA"]) as client:
        worker = jobq.Worker(client, jobs, CONFIG)
        stops: list[asyncio.Task[None]] = []

        def stop_at_end_of_input() -> None:
            sys.stdin.read()
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
                loop.call_soon_threadsafe(lambda: stops.append(loop.create_task(worker.stop())))

        threading.Thread(target=stop_at_end_of_input, daemon=True).start()
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main())
