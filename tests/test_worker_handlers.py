"""Where handlers run: threads and processes of the worker's own."""

from __future__ import annotations

import contextvars
import os
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import jobq
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.process_handlers import Work, in_process
from tests.support.process_handlers import jobs as process_jobs

if TYPE_CHECKING:
    from tests.conftest import SpawnPython


@dataclass(frozen=True)
class Number:
    n: int


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def test_a_process_handler_runs_in_another_process_which_is_used_again(dsn: str) -> None:
    async with working(dsn, process_jobs, queues={"default": 1}) as bench:
        first = await bench.ended((await bench.client.enqueue(in_process, Work("pid"))).id, 20)
        second = await bench.ended((await bench.client.enqueue(in_process, Work("pid"))).id, 20)
    assert first["state"] == "completed"
    assert first["result"] == second["result"]
    assert first["result"] != os.getpid()
    await eventually_async(lambda: not is_alive(first["result"]), what="the process ends with its worker")


@pytest.mark.parametrize(
    ("what", "state", "said"),
    [
        ("raise", "discarded", "from over there"),
        ("unpicklable", "discarded", "Unpicklable"),
        ("permanent", "discarded", "over"),
        ("snooze", "scheduled", None),
        ("retry", "discarded", "busy"),
        ("cancel", "cancelled", None),
        ("exit", "discarded", "died with code 7"),
        ("segfault", "discarded", "died with code -11"),
        ("system-exit", "discarded", "SystemExit"),
    ],
)
async def test_s26_what_happens_in_a_process_is_recorded_and_the_next_job_is_fine(
    dsn: str, what: str, state: str, said: str | None
) -> None:
    async with working(dsn, process_jobs, queues={"default": 1}) as bench:
        job = await bench.client.enqueue(in_process, Work(what))
        after = await bench.client.enqueue(in_process, Work("pid"))
        assert (await bench.ended(after.id, 20))["state"] == "completed"
        await eventually_async(lambda: bench.job(job.id)["state"] == state)
        errors = bench.errors(job.id)
    if said is None:
        assert errors == []
    else:
        assert said in errors[0]["type"] + errors[0]["message"]


async def test_an_overrun_kills_the_process_with_its_children(dsn: str, tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    async with working(dsn, process_jobs) as bench:
        job = await bench.client.enqueue(in_process, Work("never", str(noted)), timeout=timedelta(seconds=3))
        row = await bench.ended(job.id, 20)
        (error,) = bench.errors(job.id)
    assert (row["state"], error["outcome"]) == ("discarded", "timeout")
    pids = [int(pid) for pid in noted.read_text().split()]
    await eventually_async(lambda: not any(map(is_alive, pids)), what=f"processes {pids} are gone")


async def test_a_stop_kills_process_handlers_and_hands_their_jobs_back(dsn: str, tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    async with working(dsn, process_jobs) as bench:
        job = await bench.client.enqueue(in_process, Work("never", str(noted)))
        await eventually_async(lambda: noted.exists() and len(noted.read_text().split()) == 2, 20)
        report = await bench.stop(grace_s=0.1)
        row = bench.job(job.id)
    assert (row["state"], row["failures"], row["crashes"]) == ("ready", 0, 0)
    assert report.handed_back == 1
    pids = [int(pid) for pid in noted.read_text().split()]
    await eventually_async(lambda: not any(map(is_alive, pids)), what=f"processes {pids} are gone")


async def test_threads_are_bounded_and_see_the_context_but_not_each_others(dsn: str) -> None:
    jobs = jobq.Jobs()
    mark: contextvars.ContextVar[int] = contextvars.ContextVar("mark", default=-1)
    seen: list[int] = []
    most = 0
    running = 0
    lock = threading.Lock()
    gate = threading.Barrier(3)

    @jobs.handler("k")
    def k(job: jobq.Job, args: Number) -> None:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
            seen.append(mark.get())
        mark.set(args.n)
        gate.wait(10)
        with lock:
            running -= 1

    async with working(dsn, jobs, queues={"default": 3}) as bench:
        for job in await bench.client.enqueue_many(jobq.NewJob(k, Number(n)) for n in range(9)):
            await bench.ended(job.id)
    assert most == 3
    assert set(seen) == {-1}


async def test_a_thread_learns_from_its_job_that_it_should_stop(dsn: str) -> None:
    jobs = jobq.Jobs()
    told = threading.Event()

    @jobs.handler("k", timeout=timedelta(milliseconds=50), max_attempts=1)
    def k(job: jobq.Job, args: Number) -> None:
        if job.cancelled.wait(20):
            told.set()

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(k, Number(1))
        row = await bench.ended(job.id)
        assert bench.errors(job.id)[0]["outcome"] == "timeout"
    assert told.is_set()
    assert row["state"] == "discarded"


def test_a_thread_that_never_ends_does_not_keep_the_process(dsn: str, spawn_python: SpawnPython) -> None:
    code = f"""
import asyncio, threading, jobq
jobs = jobq.Jobs()
started = threading.Event()
@jobs.handler("k")
def k(job, args: dict) -> None:
    started.set()
    threading.Event().wait()
async def main():
    async with jobq.AsyncClient({dsn!r}) as client:
        await client.enqueue(k, {{}})
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(grace=__import__("datetime").timedelta(0)))
        run = asyncio.create_task(worker.run())
        await asyncio.to_thread(started.wait)
        await worker.stop()
        print("left", (await run).left_running, flush=True)
asyncio.run(main())
print("end", flush=True)
"""
    process = spawn_python("-c", code)
    assert process.wait(30) == 0, process.output
    assert "left (1,)" in process.output


async def test_a_process_that_leaves_a_daemon_behind_is_seen_to_have_died(dsn: str, tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    async with working(dsn, process_jobs, queues={"default": 1}) as bench:
        job = await bench.client.enqueue(in_process, Work("daemon", str(noted)))
        row = await bench.ended(job.id, 20)
        (error,) = bench.errors(job.id)
    assert (row["state"], error["message"]) == ("discarded", "the handler's process died with code 3")
    os.kill(int(noted.read_text()), signal.SIGKILL)  # it still holds the pipe
