"""Middleware around runs and before enqueues, in every mode and both colours."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

import jobq
from jobq._worker.execution import StopReason
from jobq.testing import drain, drain_sync
from tests.support import process_handlers
from tests.support.inprocess import working
from tests.support.observed import MODES, fresh_jobs
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from jobq import CallNext, Job


class Recorder:
    """A run middleware that notes what it sees, and does to it as it is told."""

    def __init__(self, name: str = "m") -> None:
        self.name = name
        self.seen: list[Any] = []

    async def __call__(self, job: Job, args: Any, call_next: CallNext) -> Any:
        self.seen.append((f"{self.name} before", job.kind, args))
        try:
            result = await call_next()
        except BaseException as error:
            self.seen.append((f"{self.name} raised", error))
            raise
        self.seen.append((f"{self.name} returned", result))
        return result

    def raised(self) -> BaseException:
        [(_, error)] = [seen for seen in self.seen if seen[0].endswith("raised")]
        assert isinstance(error, BaseException)
        return error


# -- around runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_a_middleware_sees_the_job_its_arguments_and_what_it_returned(dsn: str, mode: str) -> None:
    jobs = fresh_jobs()
    recorder = jobs.use(Recorder())
    async with working(dsn, jobs) as bench:
        job_id = (await bench.client.enqueue(mode, {"do": "x"})).id
        ended = await bench.ended(job_id)
    assert (ended["state"], ended["result"]) == ("completed", {"did": "x"})
    assert recorder.seen == [("m before", mode, {"do": "x"}), ("m returned", {"did": "x"})]


@pytest.mark.parametrize("mode", MODES)
async def test_it_sees_failures_and_signals_and_lets_them_pass(dsn: str, mode: str) -> None:
    jobs = fresh_jobs()
    recorder = jobs.use(Recorder())
    async with working(dsn, jobs) as bench:
        enqueue = bench.client.enqueue
        failing = (await enqueue(mode, {"do": "fail"})).id
        assert (await bench.waits(failing, "retry"))["failures"] == 1
        failure = recorder.raised()
        await bench.client.cancel(failing)  # or its retry is seen among the others
        assert isinstance(failure, jobq.ProcessFailure if mode == "process" else ValueError)
        assert "the handler fails" in str(failure)

        recorder.seen.clear()
        assert (await bench.waits((await enqueue(mode, {"do": "snooze"})).id, "snooze"))["failures"] == 0
        snooze = recorder.raised()
        assert isinstance(snooze, jobq.Snooze)
        assert snooze.delay == timedelta(hours=1)

        recorder.seen.clear()
        ended = await bench.ended((await enqueue(mode, {"do": "cancel"})).id)
        assert (ended["state"], ended["reason"]) == ("cancelled", "not wanted")
        assert isinstance(recorder.raised(), jobq.Cancel)

        recorder.seen.clear()
        ended = await bench.ended((await enqueue(mode, {"do": "permanent"})).id)
        assert (ended["state"], ended["reason"]) == ("discarded", "never")
        assert isinstance(recorder.raised(), jobq.Permanent)

        recorder.seen.clear()
        job_id = (await enqueue(mode, {"do": "retry"})).id
        line = await bench.waits(job_id, "retry")
        assert line["run_at"] - line["created_at"] > timedelta(hours=1.9)
        [error] = bench.errors(job_id)
        assert error["type"] == "jobq._errors.Retry"
        assert isinstance(recorder.raised(), jobq.ProcessFailure if mode == "process" else jobq.Retry)


@pytest.mark.parametrize("mode", MODES)
async def test_it_may_decide_otherwise(dsn: str, mode: str) -> None:
    jobs = fresh_jobs()

    @jobs.use
    async def forgive(job: Job, args: Any, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except (ValueError, jobq.ProcessFailure):
            return "forgiven"

    async with working(dsn, jobs) as bench:
        ended = await bench.ended((await bench.client.enqueue(mode, {"do": "fail"})).id)
    assert (ended["state"], ended["result"], ended["failures"]) == ("completed", "forgiven", 0)


@pytest.mark.parametrize("mode", MODES)
async def test_what_it_raises_itself_is_the_jobs_failure_and_names_it(dsn: str, mode: str) -> None:
    jobs = fresh_jobs()

    @jobs.use
    async def broken_meter(job: Job, args: Any, call_next: CallNext) -> Any:
        await call_next()
        message = "no meter"
        raise LookupError(message)

    async with working(dsn, jobs) as bench:
        job_id = (await bench.client.enqueue(mode, {})).id
        await bench.waits(job_id, "retry")
        [error] = bench.errors(job_id)
    assert (error["type"], error["message"]) == ("LookupError", "no meter")
    assert "raised in the run middleware" in error["traceback"]
    assert "broken_meter" in error["traceback"]


async def test_the_handlers_own_failure_is_not_blamed_on_the_middleware(dsn: str) -> None:
    jobs = fresh_jobs()
    jobs.use(Recorder())
    async with working(dsn, jobs) as bench:
        job_id = (await bench.client.enqueue("async", {"do": "fail"})).id
        await bench.waits(job_id, "retry")
        [error] = bench.errors(job_id)
    assert "run middleware" not in error["traceback"]


async def test_one_that_does_not_call_on_skips_the_handler(dsn: str) -> None:
    jobs = fresh_jobs()

    @jobs.use
    async def skip(job: Job, args: Any, call_next: CallNext) -> Any:
        return "skipped"

    async with working(dsn, jobs) as bench:
        ended = await bench.ended((await bench.client.enqueue("async", {"do": "fail"})).id)
    assert (ended["state"], ended["result"]) == ("completed", "skipped")


async def test_one_that_calls_on_twice_fails_the_job(dsn: str) -> None:
    jobs = fresh_jobs()

    @jobs.use
    async def twice(job: Job, args: Any, call_next: CallNext) -> Any:
        await call_next()
        return await call_next()

    async with working(dsn, jobs) as bench:
        job_id = (await bench.client.enqueue("async", {})).id
        await bench.waits(job_id, "retry")
        [error] = bench.errors(job_id)
    assert error["type"] == "jobq._errors.MiddlewareError"
    assert "twice" in error["message"]


async def test_several_stand_in_the_order_of_use_and_included_ones_inside(dsn: str) -> None:
    inner, outer, stranger = jobq.Jobs(), jobq.Jobs(), jobq.Jobs()
    seen: list[str] = []

    def note(name: str) -> Any:
        async def noting(job: Job, args: Any, call_next: CallNext) -> Any:
            seen.append(f"+{name}")
            try:
                return await call_next()
            finally:
                seen.append(f"-{name}")

        return noting

    @inner.handler("inner")
    async def handle(job: Job, args: dict[str, Any]) -> None:
        seen.append("run")

    stranger.use(note("stranger"))
    inner.use(note("c"))
    outer.use(note("a"))
    outer.include(inner)
    outer.include(stranger)
    outer.use(note("b"))
    async with working(dsn, outer) as bench:
        await bench.ended((await bench.client.enqueue("inner", {})).id)
    assert seen == ["+a", "+b", "+c", "run", "-c", "-b", "-a"]


@pytest.mark.parametrize("mode", ["async", "thread"])
async def test_context_variables_reach_the_handler(dsn: str, mode: str) -> None:
    jobs = jobq.Jobs()
    tenant = contextvars.ContextVar("tenant", default="none")
    seen: list[str] = []

    @jobs.use
    async def set_tenant(job: Job, args: Any, call_next: CallNext) -> Any:
        tenant.set(args["tenant"])
        return await call_next()

    @jobs.handler("async")
    async def on_loop(job: Job, args: dict[str, Any]) -> None:
        seen.append(tenant.get())

    @jobs.handler("thread")
    def in_thread(job: Job, args: dict[str, Any]) -> None:
        seen.append(tenant.get())

    async with working(dsn, jobs) as bench:
        for name in ("a", "b"):
            await bench.ended((await bench.client.enqueue(mode, {"tenant": name})).id)
    assert seen == ["a", "b"]


async def test_a_time_limit_holds_for_the_middleware_too(dsn: str) -> None:
    jobs = fresh_jobs()
    cancelled = asyncio.Event()

    @jobs.use
    async def slow(job: Job, args: Any, call_next: CallNext) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with working(dsn, jobs) as bench:
        job_id = (await bench.client.enqueue("async", {}, timeout=timedelta(milliseconds=100))).id
        await bench.waits(job_id, "retry")
        [error] = bench.errors(job_id)
    assert cancelled.is_set()
    assert error["outcome"] == "timeout"


async def test_a_thread_that_overruns_is_waited_for_and_still_counts_as_running(dsn: str) -> None:
    """The middleware cannot be cancelled away from over a handler that goes on."""
    jobs = jobq.Jobs()
    recorder = jobs.use(Recorder())
    told, go_on = threading.Event(), threading.Event()

    @jobs.handler("deaf")
    def deaf(job: Job, args: dict[str, Any]) -> str:
        job.cancelled.wait(10)
        told.set()
        go_on.wait(10)
        return "late"

    async with working(dsn, jobs, cancel_grace=timedelta(seconds=30)) as bench:
        job_id = (await bench.client.enqueue("deaf", {}, timeout=timedelta(milliseconds=100))).id
        assert await asyncio.to_thread(told.wait, 10)
        assert bench.job(job_id)["state"] == "running"
        go_on.set()
        await bench.waits(job_id, "retry")
        [error] = bench.errors(job_id)
    assert error["outcome"] == "timeout"
    assert recorder.seen[-1] == ("m returned", "late")


async def test_a_process_that_overruns_is_killed_under_its_middleware(dsn: str, tmp_path: Path) -> None:
    jobs = jobq.Jobs()
    jobs.include(process_handlers.jobs)
    recorder = jobs.use(Recorder())
    never = process_handlers.Work("never", str(tmp_path / "pids"))
    async with working(dsn, jobs) as bench:
        made = await bench.client.enqueue(
            process_handlers.in_process, never, timeout=timedelta(seconds=1), max_attempts=2
        )
        await bench.waits(made.id, "retry", 20.0)
        [error] = bench.errors(made.id)
    assert error["outcome"] == "timeout"
    assert recorder.seen[0] == ("m before", "in_process", never)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_middleware", [False, True], ids=["bare", "with middleware"])
async def test_a_run_that_is_stopped_before_its_first_step_ends_all_the_same(
    dsn: str, mode: str, *, with_middleware: bool
) -> None:
    jobs = fresh_jobs()
    if with_middleware:
        jobs.use(Recorder())
    async with working(dsn, jobs) as bench:
        await eventually_async(lambda: bench.worker.health().ready)
        parts = bench.worker._parts
        assert parts is not None
        executor, fill = parts.executor, parts.executor.fill

        def fill_and_stop(line: Any) -> None:
            fill(line)
            executor.stop_all(StopReason.SHUTDOWN)

        executor.fill = fill_and_stop  # type: ignore[method-assign]
        job_id = (await bench.client.enqueue(mode, {})).id
        await eventually_async(
            lambda: bench.job(job_id)["attempt"] >= 2 or bench.job(job_id)["finished_at"], 20.0
        )
        executor.fill = fill  # type: ignore[method-assign]
        assert (await bench.ended(job_id, 20.0))["failures"] == 0
        await eventually_async(lambda: bench.worker.stats().busy == 0)


async def test_what_is_no_middleware_is_refused() -> None:
    wrong: Any = "m"
    with pytest.raises(jobq.ConfigError, match="run middleware"):
        jobq.Jobs().use(wrong)
    with pytest.raises(jobq.ConfigError, match="'claimed'"):
        jobq.Jobs().observe(wrong)


async def test_drains_run_it_too(dsn: str) -> None:
    jobs = fresh_jobs()
    recorder = jobs.use(Recorder())
    async with jobq.AsyncClient(dsn) as client:
        await client.enqueue("async", {"do": "fail"})
        await client.enqueue("thread", {"do": "x"})
        report = await drain(client, jobs)
    assert len(report.retried) == len(report.completed) == 1
    assert [seen[0] for seen in recorder.seen] == ["m before", "m raised", "m before", "m returned"]


def test_sync_drains_run_it_too(dsn: str) -> None:
    jobs = fresh_jobs()
    recorder = jobs.use(Recorder())
    with jobq.Client(dsn) as client:
        client.enqueue("thread", {"do": "x"})
        client.enqueue("async", {"do": "y"})
        report = drain_sync(client, jobs)
    assert sorted(map(str, report.results.values())) == ["{'did': 'x'}", "{'did': 'y'}"]
    assert len(recorder.seen) == 4


# -- observers ---------------------------------------------------------------------------------------


class Witness:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.claims: list[tuple[str, list[int]]] = []
        self.outcomes: dict[int, str] = {}

    def claimed(self, queue: str, jobs: Sequence[Job], took_s: float) -> None:
        assert took_s > 0
        self.claims.append((queue, [job.id for job in jobs]))

    def settled(self, outcomes: Sequence[jobq.Settled], took_s: float) -> None:
        assert took_s > 0
        self.outcomes.update((one.job_id, one.outcome) for one in outcomes)


async def test_an_observer_hears_of_claims_and_of_what_was_recorded(dsn: str) -> None:
    jobs = fresh_jobs()
    witness = jobs.observe(Witness())
    async with working(dsn, jobs) as bench:
        ids = {
            do: (await bench.client.enqueue("async", {"do": do})).id
            for do in ("x", "fail", "permanent", "snooze", "cancel")
        }
        ids["parked"] = (await bench.client.enqueue("unknown", {})).id
        await bench.waits(ids["parked"], "unknown kind")
        await bench.waits(ids["fail"], "retry")
        await bench.waits(ids["snooze"], "snooze")
        for do in ("x", "permanent", "cancel"):
            await bench.ended(ids[do])
        await bench.stop()
    claimed = [job_id for queue, found in witness.claims for job_id in found if queue == "default"]
    assert sorted(claimed) == sorted(set(ids.values()) - {ids["parked"]})
    assert {do: witness.outcomes[job_id] for do, job_id in ids.items()} == {
        "x": "completed",
        "fail": "retried",
        "permanent": "discarded",
        "snooze": "snoozed",
        "cancel": "cancelled",
        "parked": "parked",
    }


async def test_an_observer_that_raises_stops_nothing_and_is_told_of_once(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = fresh_jobs()

    class Broken(Witness):
        def claimed(self, queue: str, jobs: Sequence[Job], took_s: float) -> None:
            message = "no"
            raise RuntimeError(message)

    broken = jobs.observe(Broken())
    async with working(dsn, jobs) as bench:
        for _ in range(3):
            await bench.ended((await bench.client.enqueue("async", {})).id)
        await bench.stop()
    assert len(broken.outcomes) == 3
    assert len([record for record in caplog.records if "observer" in record.message]) == 1


# -- before enqueues ---------------------------------------------------------------------------------


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn, meta={"from": "client"}) as client:
        yield client


def tag(job: jobq.NewJob) -> jobq.NewJob:
    return job.replace(tags=["tagged"])


def test_it_changes_single_and_bulk_jobs(client: jobq.Client) -> None:
    assert client.use(tag) is tag
    client.use(lambda job: job.replace(args={"was": job.args}, priority=5))
    one = client.get(client.enqueue("k", {"n": 1}, priority=2).id)
    many = [client.get(made.id) for made in client.enqueue_many([jobq.NewJob("k", {"n": n}) for n in (2, 3)])]
    for n, info in enumerate([one, *many], start=1):
        assert (info.tags, info.args, info.priority) == (("tagged",), {"was": {"n": n}}, 5)


async def test_it_serves_the_async_client_and_callers_transactions(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        client.use(tag)
        async with client.pool.connection() as connection:
            made = await client.enqueue("k", {}, tx=connection)
        assert (await client.get(made.id)).tags == ("tagged",)
        [made] = await client.enqueue_many([jobq.NewJob("k", {})])
        assert (await client.get(made.id)).tags == ("tagged",)


def test_it_is_shown_the_meta_that_the_job_will_have(client: jobq.Client) -> None:
    kind = jobq.JobType("k", dict[str, int], meta={"from": "kind"})
    shown: list[Any] = []

    @client.use
    def extend(job: jobq.NewJob) -> jobq.NewJob:
        meta = job.options.get("meta") or {}
        shown.append(dict(meta))
        return job.replace(meta={**meta, "more": 1})

    metas = [
        client.get(client.enqueue("k", {}).id).meta,
        client.get(client.enqueue(kind, {}).id).meta,
        client.get(client.enqueue(kind, {}, meta={"from": "call"}).id).meta,
        client.get(client.enqueue(kind, {}, meta=None).id).meta,
    ]
    assert shown == [{"from": "client"}, {"from": "kind"}, {"from": "call"}, {}]
    assert metas == [{**meta, "more": 1} for meta in shown]


def test_an_option_that_it_sets_and_that_cannot_be_is_its_own_mistake(client: jobq.Client) -> None:
    @client.use
    def careless(job: jobq.NewJob) -> jobq.NewJob:
        wrong: Any = {"a": {"priority": 99}, "b": {"metaa": 1}, "c": {"meta": {"x": float("nan")}}}
        return job.replace(**wrong.get(job.kind, {}))

    for kind, said in (("a", "priority=99"), ("b", "metaa: no such option"), ("c", r"meta\.x: nan")):
        with pytest.raises(jobq.MiddlewareError, match=f"careless set {said}"):
            client.enqueue(kind, {})
        with pytest.raises(jobq.MiddlewareError, match=f"^item 1: .*careless set {said}"):
            client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob(kind, {})])


def test_the_callers_own_mistake_stays_the_callers(client: jobq.Client) -> None:
    client.use(tag)
    with pytest.raises(jobq.ConfigError, match="priority=99"):
        client.enqueue("k", {}, priority=99)


def test_one_that_raises_is_an_error_of_the_enqueue_that_names_it(client: jobq.Client) -> None:
    @client.use
    def picky(job: jobq.NewJob) -> jobq.NewJob:
        if job.args == {"n": 2}:
            message = "not this one"
            raise ValueError(message)
        return job

    with pytest.raises(jobq.MiddlewareError, match="picky raised ValueError: not this one") as caught:
        client.enqueue("k", {"n": 2})
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(jobq.MiddlewareError, match=r"^item 1: .*picky"):
        client.enqueue_many([jobq.NewJob("k", {"n": n}) for n in (1, 2)])
    assert client.queue_stats() == []


def test_one_that_returns_no_job_is_named(client: jobq.Client) -> None:
    forgetful: Any = lambda job: None  # noqa: E731
    client.use(forgetful)
    with pytest.raises(jobq.MiddlewareError, match="returned an object of NoneType, not a NewJob"):
        client.enqueue("k", {})


def test_what_cannot_be_called_is_refused(client: jobq.Client) -> None:
    wrong: Any = "m"
    with pytest.raises(jobq.ConfigError, match="enqueue middleware"):
        client.use(wrong)


def test_an_item_that_is_no_new_job_is_still_refused_by_its_place(client: jobq.Client) -> None:
    client.use(tag)
    wrong: Any = ["x"]
    with pytest.raises(jobq.ConfigError, match="item 0"):
        client.enqueue_many(wrong)


def test_a_new_job_can_be_replaced_in_part() -> None:
    job = jobq.NewJob("k", {"n": 1}, priority=1, queue="q")
    other = job.replace(priority=2)
    assert (other.kind, other.args, other.options) == ("k", {"n": 1}, {"priority": 2, "queue": "q"})
    assert job.options == {"priority": 1, "queue": "q"}
    assert job.replace(args=None).args is None
