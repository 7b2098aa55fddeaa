"""How an embedded worker stops, and what it leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import jobq
from tests.support.inprocess import working
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from jobq._types import StopFlag
    from tests.conftest import SpawnPython


@dataclass(frozen=True)
class Number:
    n: int


def has_claimed(worker: jobq.Worker) -> bool:
    return worker.stats().claimed > 0


def has_length(values: list[int], length: int) -> bool:
    return len(values) == length


async def test_s18_a_grace_too_short_leaves_nothing_running(dsn: str) -> None:
    jobs = jobq.Jobs()
    started = 0
    cancelled: list[int] = []

    @jobs.handler("slow")
    async def slow(job: jobq.Job, args: Number) -> None:
        nonlocal started
        started += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(job.id)
            raise

    async with working(dsn, jobs, queues={"default": 10}) as bench:
        await bench.client.enqueue_many(jobq.NewJob(slow, Number(n)) for n in range(30))
        await eventually_async(lambda: started == 10)
        report = await bench.stop(grace_s=0.1)
        states = bench.rows("select state, count(*) as n from jobq.jobs group by 1")
        workers = bench.rows("select end_reason from jobq.worker")
    assert states == [{"state": "ready", "n": 30}]
    assert len(cancelled) == 10
    assert report.handed_back >= 10
    assert workers == [{"end_reason": "stopped"}]


async def test_s18_an_outcome_that_is_being_written_when_the_stop_comes_is_kept(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("quick")
    async def quick(job: jobq.Job, args: Number) -> None: ...

    done = 0
    for _ in range(10):
        async with working(dsn, jobs) as bench:
            await bench.client.enqueue_many(jobq.NewJob(quick, Number(n)) for n in range(200))
            await eventually_async(partial(has_claimed, bench.worker))
            report = await bench.stop()
            done += report.completed
            rows = bench.rows("select state, count(*) as n from jobq.jobs group by 1")
        counts = {row["state"]: row["n"] for row in rows}
        assert "running" not in counts
        assert counts["completed"] == done


async def test_s20_a_worker_that_is_stopped_before_its_first_step_returns(dsn: str) -> None:
    jobs = jobq.Jobs()
    async with jobq.AsyncClient(dsn) as client:
        for _ in range(1000):
            worker = jobq.Worker(client, jobs)
            run = asyncio.create_task(worker.run(handle_signals=False))
            await worker.stop()
            await asyncio.wait_for(run, 5)


async def test_s20_a_worker_that_is_stopped_in_the_middle_of_its_start_returns(dsn: str) -> None:
    jobs = jobq.Jobs()
    async with jobq.AsyncClient(dsn) as client:
        for n in range(15):
            worker = jobq.Worker(client, jobs)
            run = asyncio.create_task(worker.run(handle_signals=False))
            await asyncio.sleep(n * 0.004)
            await worker.stop()
            await asyncio.wait_for(run, 5)


def _by_truth(flag: StopFlag) -> bool:
    return bool(flag)


def _by_is_set(flag: StopFlag) -> bool:
    return flag.is_set()


def _by_wait(flag: StopFlag) -> bool:
    return flag.wait(0.01)


@pytest.mark.parametrize("look", [_by_truth, _by_is_set, _by_wait])
@pytest.mark.parametrize("around", [False, True], ids=["bare", "within middleware"])
async def test_a_thread_that_returns_because_it_saw_the_stop_is_handed_back(
    dsn: str, look: Callable[[StopFlag], bool], around: bool
) -> None:
    """An import that asks `if job.cancelled: return` between its rows; two thirds of it were lost."""
    jobs = jobq.Jobs()
    rows: list[int] = []

    @jobs.handler("import", store_result=True)
    def import_rows(job: jobq.Job, args: Number) -> int:
        while not look(job.cancelled):
            rows.append(len(rows))
            time.sleep(0.001)
        return len(rows)

    if around:

        @jobs.use
        async def pass_on(job: jobq.Job, args: Any, call_next: Callable[[], Awaitable[Any]]) -> Any:
            return await call_next()

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(import_rows, Number(1))
        await eventually_async(lambda: rows)
        report = await bench.stop(grace_s=0.1)
        row = bench.job(job.id)
    assert (row["state"], row["failures"], row["crashes"]) == ("ready", 0, 0)
    assert (report.completed, report.handed_back, report.left_running) == (0, 1, ())
    assert bench.errors(job.id) == []


async def test_a_coroutine_that_swallows_its_cancellation_and_saw_the_stop_is_handed_back(dsn: str) -> None:
    jobs = jobq.Jobs()
    started = asyncio.Event()

    @jobs.handler("k")
    async def k(job: jobq.Job, args: Number) -> None:
        started.set()
        while not job.cancelled:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(k, Number(1))
        await started.wait()
        report = await bench.stop(grace_s=0.0)
        assert bench.job(job.id)["state"] == "ready"
    assert report.completed == 0


async def test_a_thread_that_saw_the_stop_and_fails_has_failed(dsn: str) -> None:
    jobs = jobq.Jobs()
    started = threading.Event()

    @jobs.handler("k")
    def k(job: jobq.Job, args: Number) -> None:
        started.set()
        if job.cancelled.wait(30):
            raise ValueError("half of it is written")

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(k, Number(1))
        await asyncio.to_thread(started.wait, 10)
        await bench.stop(grace_s=0.0)
        assert (bench.job(job.id)["state"], bench.job(job.id)["failures"]) == ("scheduled", 1)


def test_the_end_of_a_worker_is_told_in_words() -> None:
    assert str(jobq.WorkerReport(1200, 3, (), 0, clogged=False)) == "1,200 jobs completed, 3 handed back"
    bad = str(jobq.WorkerReport(0, 0, tuple(range(25)), 4, clogged=True))
    assert "would not stop: jobs 0, 1, " in bad
    assert "19 and 5 more; 4 outcomes not recorded" in bad
    assert bad.endswith("stuck handlers held its slots")


async def test_the_log_tells_how_a_worker_ended(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jobq")
    async with working(dsn, jobq.Jobs()) as bench:
        await eventually_async(lambda: bench.worker.health().ready, what="it has started")
        await bench.stop()
    [line] = [line.getMessage() for line in caplog.records if "has stopped" in line.getMessage()]
    assert line.endswith("has stopped: 0 jobs completed, 0 handed back")


async def test_s22_a_thread_that_goes_on_keeps_its_job_until_it_ends(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = jobq.Jobs()
    release, started = threading.Event(), threading.Event()
    runs: list[int] = []

    @jobs.handler("stubborn")
    def stubborn(job: jobq.Job, args: Number) -> None:
        runs.append(job.attempt)
        started.set()
        if job.attempt == 1:
            release.wait(30)

    lease = {"lease": timedelta(milliseconds=1500), "heartbeat": timedelta(milliseconds=300)}
    rescue = {"rescue_interval": timedelta(milliseconds=100)}
    try:
        async with working(dsn, jobs, **lease) as bench:
            job = await bench.client.enqueue(stubborn, Number(1))
            await asyncio.to_thread(started.wait, 10)
            stopped_at = time.monotonic()
            report = await bench.stop(grace_s=0.2)
            assert time.monotonic() - stopped_at < 5.2
            assert report.left_running == (job.id,)
            assert "would not stop" in caplog.text
            async with working(dsn, jobs, **lease, **rescue) as other:
                await asyncio.sleep(2.5)  # well beyond the lease: it must still be held
                assert (runs, other.job(job.id)["state"]) == ([1], "running")
                release.set()
                row = await other.ended(job.id)
    finally:
        release.set()
    assert (row["state"], row["crashes"], row["failures"], runs) == ("completed", 0, 0, [1, 2])


def test_s24_a_second_signal_ends_an_embedded_worker_at_once(dsn: str, spawn_python: SpawnPython) -> None:
    code = f"""
import asyncio, threading, jobq
jobs = jobq.Jobs()
@jobs.handler("k")
def k(job, args: dict) -> None:
    print("started", flush=True)
    threading.Event().wait()
async def main():
    async with jobq.AsyncClient({dsn!r}) as client:
        await client.enqueue(k, {{}})
        await jobq.Worker(client, jobs).run()
asyncio.run(main())
"""
    process = spawn_python("-c", code)
    process.wait_for_output("started")
    process.terminate()
    time.sleep(0.5)  # two signals that come at once are one to the kernel
    started = time.monotonic()
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 2
    assert "Traceback" not in process.output


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    "block",
    [
        pytest.param("time.sleep(100)", id="sleep"),
        pytest.param("while True: pass", id="python"),
        pytest.param("sql.execute('select pg_sleep(100)')", id="library"),  # it looks at no signal
        pytest.param("await retaken()", id="retaken"),
    ],
)
def test_s24_a_second_signal_ends_an_embedded_worker_whose_loop_is_blocked(
    dsn: str, spawn_python: SpawnPython, loop: str, block: str
) -> None:
    code = f"""
import asyncio, signal, time, jobq, psycopg2, {loop}
jobs = jobq.Jobs()
sql = psycopg2.connect({dsn!r}).cursor()
async def retaken():
    # Not blocked, but somebody else takes the signals' bytes: the loop itself must do.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, print, "heard")
    await asyncio.sleep(100)
@jobs.handler("k")
async def k(job, args: dict) -> None:
    print("started", flush=True)
    {block}
async def main():
    async with jobq.AsyncClient({dsn!r}) as client:
        await client.enqueue(k, {{}})
        await jobq.Worker(client, jobs).run()
asyncio.Runner(loop_factory={loop}.new_event_loop).run(main())
"""
    process = spawn_python("-c", code)
    process.wait_for_output("started")
    process.terminate()
    time.sleep(0.5)  # two signals that come at once are one to us
    assert process.running, process.output
    started = time.monotonic()
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM, process.output
    assert time.monotonic() - started < 2
    assert process.output.count("Traceback") == 0


def test_signals_of_the_application_reach_it_while_a_worker_runs_and_afterwards(
    dsn: str, spawn_python: SpawnPython
) -> None:
    code = f"""
import asyncio, signal, sys, jobq
async def main():
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    def hear():
        print("heard", flush=True)
        heard.set()
    loop.add_signal_handler(signal.SIGUSR1, hear)
    async with jobq.AsyncClient({dsn!r}) as client:
        worker = jobq.Worker(client, jobq.Jobs())
        run = asyncio.create_task(worker.run())
        while not worker.stats().listening:
            await asyncio.sleep(0.01)
        print("works", flush=True)
        await heard.wait()
        await worker.stop()
        await run
    heard.clear()
    print("stopped", flush=True)
    await heard.wait()
asyncio.run(main())
"""
    process = spawn_python("-c", code)
    for word in ("works", "stopped"):
        process.wait_for_output(word)
        process.signal(signal.SIGUSR1)
    assert process.wait() == 0, process.output
    assert process.output.split() == ["works", "heard", "stopped", "heard"]


async def test_s25_orderly_deploys_use_no_attempt(dsn: str) -> None:
    jobs = jobq.Jobs()
    starts: list[int] = []

    @jobs.handler("slow", max_attempts=3)
    async def slow(job: jobq.Job, args: Number) -> None:
        starts.append(job.attempt)
        if job.attempt <= 5:
            await asyncio.sleep(60)

    job_id = 0
    for deploy in range(5):
        async with working(dsn, jobs) as bench:
            if deploy == 0:
                job_id = (await bench.client.enqueue(slow, Number(1))).id
            await eventually_async(partial(has_length, starts, deploy + 1))
            await bench.stop(grace_s=0)
            row = bench.job(job_id)
            assert (row["state"], row["failures"], row["crashes"]) == ("ready", 0, 0)
    async with working(dsn, jobs) as bench:
        row = await bench.ended(job_id)
    assert (row["state"], starts) == ("completed", [1, 2, 3, 4, 5, 6])


async def test_s29_without_signal_handlers_a_worker_warns_once_and_works(
    dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", refuse)
    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, jobq.Jobs())
        run = asyncio.create_task(worker.run())
        await eventually_async(lambda: worker.stats().listening)
        await worker.stop()
        await run
    assert sum("signals" in record.message for record in caplog.records) == 1


def test_s29_a_worker_off_the_main_thread_warns_once_and_works(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[jobq.WorkerReport] = []

    async def main() -> None:
        jobs = jobq.Jobs()
        done = asyncio.Event()

        @jobs.handler("k")
        async def k(job: jobq.Job, args: Number) -> None:
            done.set()

        async with jobq.AsyncClient(dsn) as client:
            worker = jobq.Worker(client, jobs)
            run = asyncio.create_task(worker.run())
            await client.enqueue(k, Number(1))
            await asyncio.wait_for(done.wait(), 10)
            await worker.stop()
            reports.append(await run)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(30)
    assert reports[0].completed == 1
    assert sum("off the main thread" in record.message for record in caplog.records) == 1


async def test_the_lease_is_renewed_until_the_end_of_the_drain(dsn: str) -> None:
    jobs = jobq.Jobs()
    started = asyncio.Event()

    @jobs.handler("slow")
    async def slow(job: jobq.Job, args: Number) -> None:
        started.set()
        await asyncio.sleep(3)

    lease = {"lease": timedelta(milliseconds=900), "heartbeat": timedelta(milliseconds=200)}
    async with working(dsn, jobs, **lease) as bench:
        job = await bench.client.enqueue(slow, Number(1))
        await started.wait()
        report = await bench.stop(grace_s=10)
        row = bench.job(job.id)
    assert (row["state"], row["attempt"], report.completed) == ("completed", 1, 1)
    assert bench.worker.stats().lost_leases == 0


async def test_a_worker_refuses_what_cannot_work(dsn: str) -> None:
    jobs = jobq.Jobs()
    with jobq.Client(dsn) as sync_client:
        client: Any = sync_client
        with pytest.raises(jobq.ConfigError, match="AsyncClient"):
            jobq.Worker(client, jobs)
    async with working(dsn, jobs) as bench:
        await eventually_async(lambda: bench.worker.stats().listening)
        with pytest.raises(jobq.ConfigError, match="running already"):
            await bench.worker.run()


async def test_a_run_whose_task_is_cancelled_stops_its_handlers_and_leaves_nothing_running(dsn: str) -> None:
    jobs = jobq.Jobs()
    started: list[int] = []
    ended: list[int] = []

    @jobs.handler("slow")
    async def slow(job: jobq.Job, args: Number) -> None:
        started.append(job.id)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(job.id)

    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(queues={"default": 2}))
        run = asyncio.create_task(worker.run(handle_signals=False))
        await client.enqueue_many(jobq.NewJob(slow, Number(n)) for n in range(5))
        await eventually_async(partial(has_length, started, 2))
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert sorted(ended) == sorted(started)
        with psycopg.connect(dsn) as connection:
            assert connection.execute("select state, count(*) from jobq.jobs group by 1").fetchall() == [
                ("ready", 5)
            ]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("queues", {}),
        ("queues", {5: 5}),
        ("queues", {"q": 2.5}),
        ("queues", ["q"]),
        ("lease", 30),
        ("queues", {"": 1}),
        ("queues", {"q": 0}),
        ("queues", {"q" * 129: 1}),
        ("lease", timedelta(0)),
        ("heartbeat", timedelta(seconds=11)),
        ("poll", timedelta(0)),
        ("grace", timedelta(seconds=-1)),
        ("cancel_grace", timedelta(seconds=-1)),
        ("prefetch", -1),
        ("crash_limit", 0),
        ("completion_batch", 0),
        ("pending_outcomes", 0),
        ("promote_interval", timedelta(0)),
        ("rescue_interval", timedelta(0)),
    ],
)
def test_a_bad_setting_fails_at_once_and_is_named(setting: str, value: Any) -> None:
    with pytest.raises(jobq.ConfigError, match=rf"WorkerConfig\.{setting}"):
        jobq.WorkerConfig(**{setting: value})


async def test_a_part_that_fails_by_a_fault_of_ours_ends_the_run_with_its_error(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobq._worker.duties import Promoter

    async def broken(_: Promoter) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(Promoter, "run_once", broken)
    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, jobq.Jobs())
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(worker.run(handle_signals=False), 15)
