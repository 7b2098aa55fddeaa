"""An operator's cancel: of what waits, of what runs, and of what is on its way between the two."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import jobq
from jobq._statements.cancel import Cancellation, cancel_job
from jobq._statements.control import apply_requests, poll
from jobq._statements.duties import rescue
from jobq._statements.operate import retry_job
from jobq._statements.outcomes import complete, release, settle
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.process_handlers import Work, in_process
from tests.support.process_handlers import jobs as process_jobs
from tests.support.storage import BOOM, SCHEMA, Storage, settlement
from tests.support.workers import Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import SpawnPython
    from tests.support.inprocess import Bench

WORKER = 1


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        store.worker(WORKER)
        yield store


async def starts(bench: Bench, job_id: int) -> None:
    """Wait until the job's handler runs."""

    def runs() -> bool:
        parts = bench.worker._parts
        return parts is not None and any(e.job.id == job_id for e in parts.executor.running)

    await eventually_async(runs, what=f"job {job_id} starts")


def requests(bench: Bench) -> int:
    [row] = bench.rows("select count(*) as n from jobq.cancel_request")
    n: int = row["n"]
    return n


# -- in the database ---------------------------------------------------------------------------------


def test_a_job_that_waits_is_cancelled_at_once(store: Storage) -> None:
    [ready] = store.enqueue()
    [scheduled] = store.enqueue(delay_s=60.0)
    for job_id in (ready, scheduled):
        assert store.run(cancel_job(SCHEMA, job_id, "no")) is Cancellation.CANCELLED
        assert store.place(job_id).table == "cancelled"
        assert store.place(job_id).reason == "no"
        with pytest.raises(jobq.JobConflict, match="has ended: it is cancelled"):
            store.run(cancel_job(SCHEMA, job_id, "no"))
    assert store.count("cancel_request") == 0
    with pytest.raises(jobq.JobNotFound):
        store.run(cancel_job(SCHEMA, 4711, "no"))


def test_a_running_job_gets_one_request_that_only_its_worker_is_told(store: Storage) -> None:
    job = store.claimed(WORKER)
    other = store.claimed(WORKER)
    assert store.run(cancel_job(SCHEMA, job.job_id, "no")) is Cancellation.REQUESTED
    assert store.run(cancel_job(SCHEMA, job.job_id, "again")) is Cancellation.REQUESTED
    orders = store.run(poll(SCHEMA, [job.job_id, other.job_id]))
    assert orders.cancels == {job.job_id: "no"}
    assert orders.has_requests
    assert store.run(poll(SCHEMA, [other.job_id])).cancels == {}
    assert store.place(job.job_id).table == "running"
    assert store.run(apply_requests(SCHEMA)) == []
    assert store.count("cancel_request") == 1


@pytest.mark.parametrize(
    "outcome",
    [
        {"to": "scheduled", "reason": "retry", "failure": BOOM},
        {"to": "scheduled", "reason": "snooze", "delay_s": 60.0},
        {"to": "ready"},
        {"to": "discarded", "reason": "permanent", "failure": BOOM},
    ],
    ids=["fails", "snoozes", "is handed back", "fails for good"],
)
def test_s77_a_job_that_ends_before_its_worker_heard_is_cancelled(
    store: Storage, outcome: dict[str, Any]
) -> None:
    job = store.claimed(WORKER)
    store.run(cancel_job(SCHEMA, job.job_id, "no"))
    assert store.run(settle(SCHEMA, WORKER, "w", [settlement(job, **outcome)], notify=True)) == {job.job_id}
    assert store.place(job.job_id).table == "cancelled"
    assert store.place(job.job_id).reason == "no"
    assert store.count("attempt_error") == ("failure" in outcome)
    assert store.run(apply_requests(SCHEMA)) == []
    assert store.count("cancel_request") == 0


def test_s77_a_job_that_completes_before_its_worker_heard_is_completed(store: Storage) -> None:
    job = store.claimed(WORKER)
    store.run(cancel_job(SCHEMA, job.job_id, "no"))
    store.run(complete(SCHEMA, WORKER, [(job.job_id, job.attempt)], {}))
    assert store.run(apply_requests(SCHEMA)) == []
    assert store.place(job.job_id).table == "completed"
    assert store.count("cancel_request") == 0


def test_a_handler_that_cancels_its_job_says_why_itself(store: Storage) -> None:
    job = store.claimed(WORKER)
    store.run(cancel_job(SCHEMA, job.job_id, "the operator's"))
    store.run(settle(SCHEMA, WORKER, "w", [settlement(job, "cancelled", "its own")], notify=True))
    assert store.place(job.job_id).reason == "its own"


def test_a_dead_workers_job_that_was_to_be_cancelled_is_not_started_again(store: Storage) -> None:
    jobs = [store.claimed(WORKER) for _ in range(3)]
    store.run(cancel_job(SCHEMA, jobs[0].job_id, "no"))
    store.end_lease(WORKER)
    rescued = store.run(rescue(SCHEMA, 3, 100))
    assert {job.job_id for job in rescued} == {job.job_id for job in jobs}
    assert not any(job.discarded for job in rescued)
    assert [store.place(job.job_id).table for job in jobs] == ["cancelled", "ready", "ready"]
    assert store.place(jobs[0].job_id).crashes == 1


def test_what_a_worker_hands_back_at_its_end_is_cancelled_where_it_was_to_be(store: Storage) -> None:
    jobs = [store.claimed(WORKER) for _ in range(2)]
    store.run(cancel_job(SCHEMA, jobs[1].job_id, "no"))
    assert set(store.run(release(SCHEMA, WORKER))) == {job.job_id for job in jobs}
    assert [store.place(job.job_id).table for job in jobs] == ["ready", "cancelled"]


@pytest.mark.parametrize("delay_s", [None, 60.0])
def test_a_request_whose_job_waits_again_is_applied(store: Storage, delay_s: float | None) -> None:
    """As where the outcome was written by a worker of the version before, which knows no requests."""
    [job_id] = store.enqueue(delay_s=delay_s)
    store.sql("insert into jobq.cancel_request (job_id, reason) values (%s, 'no')", job_id)
    assert store.run(apply_requests(SCHEMA)) == [job_id]
    assert store.place(job_id) == ("cancelled", 0, 0, 0, None, "no")
    assert store.count("cancel_request") == 0


def test_a_retried_job_is_not_cancelled_by_what_was_asked_of_it_before(store: Storage) -> None:
    job = store.claimed(WORKER)
    store.run(cancel_job(SCHEMA, job.job_id, "no"))
    store.run(settle(SCHEMA, WORKER, "w", [settlement(job, "ready")], notify=True))
    store.run(retry_job(SCHEMA, job.job_id, notify=False))
    assert store.run(apply_requests(SCHEMA)) == []
    assert store.place(job.job_id).table == "ready"


def test_one_round_applies_a_bounded_number_of_requests(store: Storage) -> None:
    store.enqueue(700)
    store.sql("insert into jobq.cancel_request (job_id) select job_id from jobq.ready")
    assert len(store.run(apply_requests(SCHEMA))) == 500
    assert len(store.run(apply_requests(SCHEMA))) == 200


# -- handlers ----------------------------------------------------------------------------------------


async def test_a_running_coroutine_is_cancelled_within_a_moment(dsn: str) -> None:
    jobs = jobq.Jobs()
    cleaned = asyncio.Event()

    @jobs.handler("wait")
    async def wait(job: jobq.Job, args: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(wait, {})
        await starts(bench, job.id)
        asked_at = time.monotonic()
        assert await bench.client.cancel(job.id, reason="wrong customer", by="me") is Cancellation.REQUESTED
        row = await bench.ended(job.id)
        took_s = time.monotonic() - asked_at
        await eventually_async(lambda: requests(bench) == 0, what="the request is removed")
    assert (row["state"], row["reason"]) == ("cancelled", "wrong customer")
    assert cleaned.is_set()
    assert took_s < 3.0  # a poll, and a busy machine
    assert bench.errors(job.id) == []
    assert row["failures"] == 0


async def test_polling_alone_is_enough(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("wait")
    async def wait(job: jobq.Job, args: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async with working(dsn, jobs) as bench, jobq.AsyncClient(dsn, notify=False) as silent:
        job = await silent.enqueue(wait, {})
        await starts(bench, job.id)
        await silent.cancel(job.id)
        assert (await bench.ended(job.id))["state"] == "cancelled"


async def test_a_notification_makes_it_prompt(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobq._worker.control.POLL_S", 60.0)
    jobs = jobq.Jobs()

    @jobs.handler("wait")
    async def wait(job: jobq.Job, args: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async with working(dsn, jobs) as bench:
        await eventually_async(lambda: bench.worker.stats().listening, what="it listens")
        job = await bench.client.enqueue(wait, {})
        await starts(bench, job.id)
        await bench.client.cancel(job.id)
        assert (await bench.ended(job.id))["state"] == "cancelled"


async def test_a_thread_sees_it_and_leaves(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("by_flag")
    def by_flag(job: jobq.Job, args: dict[str, Any]) -> None:
        while not job.cancelled.wait(0.01):
            pass
        job.raise_if_cancelled()

    @jobs.handler("returns", store_result=True)
    def returns(job: jobq.Job, args: dict[str, Any]) -> str:
        return "stopped" if job.cancelled.wait(30) else "finished"

    async with working(dsn, jobs) as bench:
        first = await bench.client.enqueue(by_flag, {})
        second = await bench.client.enqueue(returns, {})
        for job in (first, second):
            await starts(bench, job.id)
            await bench.client.cancel(job.id, reason="stop")
        rows = [await bench.ended(job.id) for job in (first, second)]
    assert [(row["state"], row["reason"]) for row in rows] == [("cancelled", "stop")] * 2


@pytest.mark.parametrize("looks", ["before", "never"])
async def test_a_thread_that_did_not_see_it_and_comes_to_its_end_has_completed(dsn: str, looks: str) -> None:
    jobs = jobq.Jobs()
    go_on = threading.Event()

    @jobs.handler("returns")
    def returns(job: jobq.Job, args: dict[str, Any]) -> None:
        if looks == "before":
            assert not job.cancelled
            assert not job.cancelled.wait(0)
        go_on.wait(30)

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(returns, {})
        await starts(bench, job.id)
        parts = bench.worker._parts
        assert parts is not None
        [execution] = parts.executor.running
        await bench.client.cancel(job.id, reason="stop")
        await eventually_async(lambda: execution.stop_reason is not None, what="it is told")
        go_on.set()
        row = await bench.ended(job.id)
    assert row["state"] == "completed"


async def test_what_fails_after_a_cancel_is_not_retried_and_its_failure_is_kept(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails")
    async def fails(job: jobq.Job, args: dict[str, str]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if args["how"] == "snooze":
                raise jobq.Snooze(timedelta(hours=1)) from None
            raise ValueError("could not clean up") from None

    async with working(dsn, jobs) as bench:
        for how, failures in (("fail", 1), ("snooze", 0)):
            job = await bench.client.enqueue(fails, {"how": how})
            await starts(bench, job.id)
            await bench.client.cancel(job.id, reason="stop")
            row = await bench.ended(job.id)
            assert (row["state"], row["reason"], row["failures"]) == ("cancelled", "stop", failures)
            assert len(bench.errors(job.id)) == failures


async def test_a_process_is_asked_by_a_signal_and_can_clean_up(dsn: str, tmp_path: Path) -> None:
    noted = tmp_path / "cleaned"
    async with working(dsn, process_jobs, queues={"default": 1}) as bench:
        job = await bench.client.enqueue(in_process, Work("clean-up", str(noted)))
        await eventually_async(noted.exists, 20, what="the handler runs")
        await bench.client.cancel(job.id, reason="stop")
        row = await bench.ended(job.id)
        after = await bench.client.enqueue(in_process, Work("pid"))
        assert (await bench.ended(after.id, 20))["state"] == "completed"
    assert (row["state"], row["reason"]) == ("cancelled", "stop")
    assert noted.read_text() == "cleaned"
    assert bench.errors(job.id) == []


async def test_a_process_that_ignores_the_signal_is_killed_with_its_children(
    dsn: str, tmp_path: Path
) -> None:
    noted = tmp_path / "pids"
    grace = timedelta(seconds=0.5)
    async with working(dsn, process_jobs, queues={"default": 1}, cancel_grace=grace) as bench:
        job = await bench.client.enqueue(in_process, Work("stubborn", str(noted)))
        await eventually_async(lambda: noted.exists() and len(noted.read_text().split()) == 2, 20)
        pids = [int(pid) for pid in noted.read_text().split()]
        await bench.client.cancel(job.id)
        row = await bench.ended(job.id)
        await eventually_async(lambda: not any(map(_is_alive, pids)), what="it and its child are dead")
    assert row["state"] == "cancelled"
    assert bench.errors(job.id) == []


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def test_s77_a_job_that_was_claimed_and_has_not_started_never_does(dsn: str) -> None:
    jobs = jobq.Jobs()
    ran: list[int] = []
    go_on = asyncio.Event()

    @jobs.handler("hold")
    async def hold(job: jobq.Job, args: dict[str, Any]) -> None:
        ran.append(job.id)
        if args["waits"]:
            await go_on.wait()

    settings = {"queues": {"default": 1}, "prefetch_horizon": timedelta(seconds=60)}
    async with working(dsn, jobs, **settings) as bench:
        for _ in range(20):  # so short that more are held than run
            await bench.client.enqueue(hold, {"waits": False})
        await eventually_async(lambda: len(ran) == 20)
        await bench.client.enqueue(hold, {"waits": True})
        await eventually_async(lambda: len(ran) == 21)
        held = await bench.client.enqueue(hold, {"waits": False})
        await eventually_async(lambda: bench.job(held.id)["state"] == "running", what="it is claimed")
        assert await bench.client.cancel(held.id, reason="no") is Cancellation.REQUESTED
        assert (await bench.ended(held.id))["reason"] == "no"
        go_on.set()
        after = await bench.client.enqueue(hold, {"waits": False})
        await bench.ended(after.id)
    assert held.id not in ran


async def test_s27_a_time_limit_and_an_operators_cancel_are_told_apart(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("slow", max_attempts=3)
    async def slow(job: jobq.Job, args: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    @jobs.handler("swallows", max_attempts=3)
    async def swallows(job: jobq.Job, args: dict[str, Any]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    async with working(dsn, jobs) as bench:
        limit = timedelta(seconds=0.3)
        late = await bench.client.enqueue(slow, {}, timeout=limit)
        deaf = await bench.client.enqueue(swallows, {}, timeout=limit)
        unwanted = await bench.client.enqueue(slow, {})
        await starts(bench, unwanted.id)
        await bench.client.cancel(unwanted.id, reason="by hand")
        for job in (late, deaf):  # neither completed nor left running
            row = await bench.waits(job.id, "retry")
            assert row["failures"] == 1
            assert [error["outcome"] for error in bench.errors(job.id)] == ["timeout"]
        row = await bench.ended(unwanted.id)
    assert (row["state"], row["reason"], row["failures"]) == ("cancelled", "by hand", 0)
    assert bench.errors(unwanted.id) == []


async def test_a_job_past_its_time_limit_that_is_cancelled_too_is_not_retried(dsn: str) -> None:
    jobs = jobq.Jobs()
    release_it = asyncio.Event()

    @jobs.handler("slow", max_attempts=3)
    async def slow(job: jobq.Job, args: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await release_it.wait()

    async with working(dsn, jobs, cancel_grace=timedelta(seconds=30)) as bench:
        job = await bench.client.enqueue(slow, {}, timeout=timedelta(seconds=0.2))
        await starts(bench, job.id)
        parts = bench.worker._parts
        assert parts is not None
        [execution] = parts.executor.running
        await eventually_async(lambda: execution.stop_reason is not None, what="its time is over")
        await bench.client.cancel(job.id, reason="stop")
        release_it.set()
        row = await bench.ended(job.id)
    assert (row["state"], row["reason"]) == ("cancelled", "stop")
    assert [error["outcome"] for error in bench.errors(job.id)] == ["timeout"]


async def test_s23_a_job_that_drains_can_be_cancelled(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("wait")
    async def wait(job: jobq.Job, args: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async with working(dsn, jobs, grace=timedelta(seconds=30)) as bench:
        job = await bench.client.enqueue(wait, {})
        await starts(bench, job.id)
        parts = bench.worker._parts
        assert parts is not None
        stop = asyncio.create_task(bench.worker.stop())
        await eventually_async(lambda: parts.executor.is_draining, what="it drains")
        await bench.client.cancel(job.id, reason="while it drains")
        row = await bench.ended(job.id, 5)
        await stop
    assert (row["state"], row["reason"]) == ("cancelled", "while it drains")


def test_s23_after_sigterm_a_cancel_reaches_the_job_and_the_process_ends(
    dsn: str, tmp_path: Path, spawn_python: SpawnPython
) -> None:
    site = Site(spawn_python, dsn, tmp_path)
    worker = site.start(grace=60.0)
    [job_id] = site.enqueue("wait", s=60.0)
    site.await_started([job_id])
    worker.process.terminate()
    worker.process.wait_for_output("stops: 1 handlers run")
    with jobq.Client(dsn) as client:
        assert client.cancel(job_id, reason="no use any more") is Cancellation.REQUESTED
        assert worker.process.wait(20) == 0
        job = client.get(job_id)
    assert (job.state, job.reason) == (jobq.JobState.CANCELLED, "no use any more")
    assert [note.event for note in site.notes(job_id=job_id)] == ["start", "stopped"]
