"""What becomes of a job, by what its handler does."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import jobq
from jobq._marks import LaneMarks
from jobq._statements.duties import promote
from jobq._statements.outcomes import settle
from jobq._worker.decide import Parking
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import SCHEMA, Storage, settlement

if TYPE_CHECKING:
    from collections.abc import Callable

SOON = jobq.ConstantBackoff(timedelta(milliseconds=10))
HOUR = jobq.ConstantBackoff(timedelta(hours=1))


@dataclass(frozen=True)
class Number:
    n: int


@pytest.mark.matrix
async def test_a_job_whose_handler_returns_is_completed(dsn: str) -> None:
    jobs = jobq.Jobs()
    seen: list[tuple[int, Number]] = []

    @jobs.handler("note")
    async def note(job: jobq.Job, args: Number) -> None:
        seen.append((job.id, args))

    async with working(dsn, jobs) as bench:
        enqueued = await bench.client.enqueue(note, Number(7))
        row = await bench.ended(enqueued.id)
    assert (row["state"], row["attempt"], row["failures"]) == ("completed", 1, 0)
    assert seen == [(enqueued.id, Number(7))]


async def test_a_sync_handler_runs_in_a_thread_of_the_workers_own(dsn: str) -> None:
    jobs = jobq.Jobs()
    names: list[str] = []

    @jobs.handler("note")
    def note(job: jobq.Job, args: Number) -> None:
        names.append(threading.current_thread().name)

    async with working(dsn, jobs) as bench:
        await bench.ended((await bench.client.enqueue(note, Number(7))).id)
    assert names[0].startswith("jobq-handler")


async def test_a_result_is_stored_when_asked_for_and_never_otherwise(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("kept", store_result=True)
    async def kept(job: jobq.Job, args: Number) -> dict[str, int]:
        return {"n": args.n}

    @jobs.handler("dropped")
    async def dropped(job: jobq.Job, args: Number) -> int:
        return args.n

    async with working(dsn, jobs) as bench:
        one = await bench.client.enqueue(kept, Number(1970670598291982290))
        two = await bench.client.enqueue(dropped, Number(2))
        assert (await bench.ended(one.id))["result"] == {"n": 1970670598291982290}
        assert (await bench.ended(two.id))["result"] is None


@pytest.mark.parametrize("result", [b"bytes", float("nan"), "x" * 100_000], ids=["bytes", "nan", "too-large"])
async def test_a_result_that_cannot_be_stored_is_a_recorded_failure(dsn: str, result: object) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("kept", store_result=True, max_attempts=1)
    async def kept(job: jobq.Job, args: Number) -> object:
        return result

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(kept, Number(1))
        row = await bench.ended(job.id)
        assert row["state"] == "discarded"
        assert "ArgumentsEncodeError" in bench.errors(job.id)[0]["type"]


@pytest.mark.matrix
async def test_an_exception_means_retry_until_the_attempts_are_used_up(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=3, backoff=SOON)
    async def fails(job: jobq.Job, args: Number) -> None:
        raise ValueError(f"attempt {job.attempt}, {job.failures} failures")

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        row = await bench.ended(job.id)
        errors = bench.errors(job.id)
    assert (row["state"], row["attempt"], row["failures"]) == ("discarded", 3, 3)
    assert "failed 3 of 3 times" in row["reason"]
    assert [error["message"] for error in errors] == [
        "attempt 1, 0 failures",
        "attempt 2, 1 failures",
        "attempt 3, 2 failures",
    ]
    first = errors[0]
    assert first["type"] == "ValueError"
    assert "raise ValueError" in first["traceback"]
    assert first["traceback"].count("  File ") == 1  # the handler's own; jobq's are no news
    assert first["worker"]
    assert first["started_at"] <= first["ended_at"]


async def test_a_retry_waits_for_the_backoff(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", backoff=HOUR)
    async def fails(job: jobq.Job, args: Number) -> None:
        raise ValueError

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        row = await bench.waits(job.id, "retry")
    wait = row["run_at"] - datetime.now(UTC)
    assert timedelta(minutes=53) < wait < timedelta(minutes=67)


async def test_permanent_ends_the_job_at_once(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails")
    async def fails(job: jobq.Job, args: Number) -> None:
        raise jobq.Permanent("no recipient")

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        row = await bench.ended(job.id)
        errors = bench.errors(job.id)
    assert (row["state"], row["attempt"], row["reason"]) == ("discarded", 1, "no recipient")
    assert errors[0]["outcome"] == "permanent"


async def test_retry_chooses_its_own_wait_and_uses_an_attempt(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=2, backoff=HOUR)
    async def fails(job: jobq.Job, args: Number) -> None:
        raise jobq.Retry("busy", after=timedelta(milliseconds=5))

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        row = await bench.ended(job.id)
    assert (row["state"], row["failures"]) == ("discarded", 2)


async def test_snooze_uses_no_attempt(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("sleepy", max_attempts=1)
    async def sleepy(job: jobq.Job, args: Number) -> None:
        if job.attempt < 4:
            raise jobq.Snooze(timedelta(milliseconds=5))

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(sleepy, Number(1))
        row = await bench.ended(job.id)
        assert (row["state"], row["attempt"], row["failures"]) == ("completed", 4, 0)
        assert bench.errors(job.id) == []


async def test_s67_a_failure_after_forty_thousand_snoozes_waits_as_any_first_one_and_uses_one_attempt(
    dsn: str,
) -> None:
    """Two thousand of them are real, and the last twenty go through a worker: each takes 2 ms, or 20."""
    jobs = jobq.Jobs()

    @jobs.handler("sleepy", max_attempts=2, backoff=jobq.PolynomialBackoff(timedelta(hours=1)))
    async def sleepy(job: jobq.Job, args: Any) -> None:
        if job.attempt <= 40_020:
            raise jobq.Snooze(timedelta(0))
        raise ValueError

    with Storage(dsn) as store:
        store.worker(1)
        [job_id] = store.enqueue(kind="sleepy", max_attempts=2)
        marks = LaneMarks()
        for number in range(2_000):
            if number % 100 == 0:
                store.refresh(marks, time.monotonic())
            [claimed] = store.claim(1, marks=marks)
            store.run(settle(SCHEMA, 1, "w", [settlement(claimed, "scheduled", "snooze")], notify=False))
            store.run(promote(SCHEMA, None, 1, notify=False))
        assert store.place(job_id) == ("ready", 2_000, 0, 0, None, None)
        store.sql("update jobq.ready set attempt = 40000")

    async with working(dsn, jobs) as bench:
        row = await bench.waits(job_id, "retry")
        [error] = bench.errors(job_id)
        assert (row["attempt"], row["failures"]) == (40_021, 1)
        assert row["run_at"] - error["ended_at"] <= timedelta(hours=1.1), "a first failure's, with jitter"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("update jobq.scheduled set run_at = now()")
        ended = await bench.ended(job_id)
    assert (ended["state"], ended["attempt"], ended["failures"]) == ("discarded", 40_022, 2)


@pytest.mark.parametrize(
    ("policy", "growth"),
    [(None, lambda n: n**4), (jobq.ExponentialBackoff(), lambda n: 2 ** (n - 1))],
    ids=["default", "exponential"],
)
async def test_s67_the_wait_that_is_stored_after_the_nth_failure_is_spread_and_never_over_the_cap(
    dsn: str, caplog: pytest.LogCaptureFixture, policy: jobq.Backoff | None, growth: Callable[[int], int]
) -> None:
    cap_s, many = 86_400, 10
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=32_767, backoff=policy)
    async def fails(job: jobq.Job, args: None) -> None:
        raise ValueError

    waiting = [1, 25, 1_000, 32_766]
    with jobq.Client(dsn) as client, Storage(dsn) as store:
        for failures in [*waiting, 32_767]:
            made = client.enqueue_many([jobq.NewJob(fails, None)] * many)
            store.sql(
                "update jobq.ready set failures = %s, attempt = 40000 where job_id = any (%s)",
                failures - 1,
                [one.id for one in made],
            )
    async with working(dsn, jobs, promote_interval=timedelta(hours=1)) as bench:  # so none of them is back
        count = "select count(*) as n from jobq.attempt_error"
        await eventually_async(lambda: bench.rows(count) == [{"n": 5 * many}], what="all have failed")
        for failures in waiting:
            rows = bench.rows(
                "select extract(epoch from s.run_at - e.ended_at)::float8 as s"
                " from jobq.scheduled s join jobq.attempt_error e using (job_id) where s.failures = %s",
                failures,
            )
            waits_s = [row["s"] for row in rows]
            nominal_s = min(growth(failures), cap_s)
            assert len(waits_s) == many
            assert 0.9 * nominal_s <= min(waits_s) < max(waits_s) <= min(1.1 * nominal_s, cap_s)
            assert max(waits_s) - min(waits_s) > 0.01 * nominal_s, "not all at once"
        last = bench.rows("select state, failures, count(*) as n from jobq.finished group by 1, 2")
    assert last == [{"state": "discarded", "failures": 32_767, "n": many}], "no attempt beyond the last one"
    assert "backoff policy" not in caplog.text, "none failed and was stood in for"


@pytest.mark.parametrize("wait", [timedelta.max, timedelta(days=100_000)])
async def test_a_wait_beyond_all_measure_hurts_no_other_outcome(dsn: str, wait: timedelta) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("sleepy")
    async def sleepy(job: jobq.Job, args: Number) -> None:
        if args.n == 0:
            raise jobq.Snooze(wait)
        raise jobq.Permanent("done")

    async with working(dsn, jobs) as bench:
        first, *others = await bench.client.enqueue_many(jobq.NewJob(sleepy, Number(n)) for n in range(5))
        await bench.waits(first.id, "snooze")
        for other in others:
            assert (await bench.ended(other.id))["state"] == "discarded"


async def test_cancel_is_no_failure(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("unwanted")
    async def unwanted(job: jobq.Job, args: Number) -> None:
        raise jobq.Cancel("the order was withdrawn")

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(unwanted, Number(1))
        row = await bench.ended(job.id)
        assert (row["state"], row["reason"], row["failures"]) == ("cancelled", "the order was withdrawn", 0)
        assert bench.errors(job.id) == []


@pytest.mark.parametrize("swallows", [False, True], ids=["cancelled", "swallows-the-cancel"])
async def test_s27_a_time_limit_is_recorded_as_a_timeout(dsn: str, *, swallows: bool) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("slow", timeout=timedelta(milliseconds=50), max_attempts=1)
    async def slow(job: jobq.Job, args: Number) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not swallows:
                raise

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(slow, Number(1))
        row = await bench.ended(job.id)
        (error,) = bench.errors(job.id)
    assert row["state"] == "discarded"
    assert error["outcome"] == "timeout"
    assert "time limit of 0.05 s" in error["message"]


class _Own(BaseException):
    pass


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


_EXCEPTIONS = [
    asyncio.CancelledError("own"),
    KeyboardInterrupt(),
    SystemExit(3),
    GeneratorExit(),
    _Own("own"),
    _Unprintable(),
    ValueError("nul \x00 and \ud800"),
]


@pytest.mark.parametrize("mode", ["async", "thread"])
async def test_s26_whatever_a_handler_raises_is_recorded_and_hurts_no_sibling(dsn: str, mode: str) -> None:
    jobs = jobq.Jobs()

    def misbehave(args: Number) -> None:
        if args.n < len(_EXCEPTIONS):
            raise _EXCEPTIONS[args.n]

    async def misbehave_on_the_loop(job: jobq.Job, args: Number) -> None:
        misbehave(args)

    def misbehave_in_a_thread(job: jobq.Job, args: Number) -> None:
        misbehave(args)

    odd = jobs.handler("odd", max_attempts=1)(
        misbehave_on_the_loop if mode == "async" else misbehave_in_a_thread
    )
    assert odd.mode == mode

    async with working(dsn, jobs) as bench:
        count = len(_EXCEPTIONS) + 5
        enqueued = await bench.client.enqueue_many(jobq.NewJob(odd, Number(n)) for n in range(count))
        rows = [await bench.ended(job.id) for job in enqueued]
        for job, row, error in zip(enqueued, rows, _EXCEPTIONS, strict=False):
            assert row["state"] == "discarded"
            (recorded,) = bench.errors(job.id)
            assert recorded["type"].endswith(type(error).__name__)
        assert {row["state"] for row in rows[len(_EXCEPTIONS) :]} == {"completed"}


async def test_s65_a_long_history_stays_bounded_and_says_what_it_dropped(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=30, backoff=jobq.ConstantBackoff(timedelta(0)))
    async def fails(job: jobq.Job, args: Number) -> None:
        raise ValueError("x" * 50_000)

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        await bench.ended(job.id, 20)
        errors = bench.errors(job.id)
    assert [error["attempt"] for error in errors] == list(range(11, 31))
    assert errors[-1]["omitted"] == 10
    assert all(len(error["message"]) < 11_000 and len(error["traceback"]) < 21_000 for error in errors)


async def test_s68_arguments_that_do_not_decode_fail_their_own_job_alone(dsn: str) -> None:
    jobs = jobq.Jobs()
    ran: list[int] = []

    @jobs.handler("note", max_attempts=2, backoff=SOON)
    async def note(job: jobq.Job, args: Number) -> None:
        ran.append(args.n)

    async with working(dsn, jobs) as bench:
        bad = await bench.client.enqueue("note", {"m": 1}, max_attempts=1)
        newer = await bench.client.enqueue("note", {"n": 2, "unknown": "field"})
        row = await bench.ended(bad.id)
        await bench.ended(newer.id)
        (error,) = bench.errors(bad.id)
    assert (row["state"], error["outcome"], ran) == ("discarded", "undecodable", [2])
    assert "`n`" in error["message"]


async def test_a_kind_without_a_handler_is_warned_of_once(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "jobq")
    async with working(dsn, jobq.Jobs()) as bench:
        for kind in ("a", "a", "b", "a"):
            job = await bench.client.enqueue(kind, {})
            await bench.waits(job.id, "unknown kind")
    lines = [line for line in caplog.records if "has no handler" in line.getMessage()]
    assert [(line.levelname, line.__dict__["kind"]) for line in lines] == [
        ("WARNING", "a"),
        ("DEBUG", "a"),
        ("WARNING", "b"),
        ("DEBUG", "a"),
    ]
    assert "jobqctl cancel --kind" in lines[0].getMessage()


async def test_work_behind_very_many_jobs_of_an_unknown_kind_is_reached(dsn: str) -> None:
    """One slot, and by the time that so many are parked one by one, the first of them are back."""
    jobs = jobq.Jobs()

    @jobs.handler("live")
    async def live(job: jobq.Job, args: None) -> None: ...

    async with jobq.AsyncClient(dsn) as client:
        await client.enqueue_many(jobq.NewJob("unknown", None, priority=5) for _ in range(30_000))
        job = await client.enqueue(live, None)
    async with working(dsn, jobs, queues={"default": 1}) as bench:
        assert (await bench.ended(job.id, 30.0))["state"] == "completed"


async def test_jobs_between_some_of_an_unknown_kind_run_in_their_order(dsn: str) -> None:
    """None is claimed without a slot, to be given back to the end of its lane."""
    jobs, ran = jobq.Jobs(), list[int]()

    @jobs.handler("live")
    async def live(job: jobq.Job, args: Number) -> None:
        ran.append(args.n)
        await asyncio.sleep(0.35)  # longer than a worker holds what it has no slot for

    async with jobq.AsyncClient(dsn) as client:
        await client.enqueue_many(
            jobq.NewJob("unknown", None) if n % 3 == 0 else jobq.NewJob(live, Number(n)) for n in range(9)
        )
    async with working(dsn, jobs, queues={"default": 1}):
        await eventually_async(lambda: len(ran) == 6)
    assert ran == [1, 2, 4, 5, 7, 8]


def test_so_many_are_parked_for_longer() -> None:
    parking = Parking()
    delays = [parking.delay_s(5.0) for _ in range(100_001)]
    assert delays[0] == pytest.approx(10.0)
    assert delays[-1] == pytest.approx(10.0 + 100_000 / 2_000)
    assert parking.delay_s(1_000.0) == pytest.approx(10.0), "when they are gone, it is as before"


async def test_s69_an_unknown_kind_is_parked_and_uses_no_attempt(dsn: str) -> None:
    old, new = jobq.Jobs(), jobq.Jobs()

    @old.handler("other")
    async def other(job: jobq.Job, args: Number) -> None: ...

    @new.handler("k")
    async def known(job: jobq.Job, args: Number) -> None: ...

    async with working(dsn, old) as bench:
        enqueued = await bench.client.enqueue_many(jobq.NewJob(known, Number(n)) for n in range(100))
        for job in enqueued:
            assert (await bench.waits(job.id, "unknown kind"))["failures"] == 0
        with psycopg.connect(dsn, autocommit=True) as connection:  # as if the pause were over
            connection.execute("update jobq.scheduled set run_at = now() + interval '0.1 second'")
        async with working(dsn, new) as other_bench:
            for job in enqueued:

                def ended(job_id: int = job.id) -> bool:
                    row = other_bench.job(job_id)
                    if row["reason"] == "unknown kind" and row["state"] == "scheduled":
                        with psycopg.connect(dsn, autocommit=True) as hurry:
                            hurry.execute("update jobq.scheduled set run_at = now()")
                    return bool(row["state"] == "completed")

                await eventually_async(ended)
                assert other_bench.job(job.id)["failures"] == 0


async def test_a_job_that_was_not_started_in_time_is_discarded_with_that_reason(dsn: str) -> None:
    jobs = jobq.Jobs()
    ran: list[int] = []

    @jobs.handler("late")
    async def late(job: jobq.Job, args: Number) -> None:
        ran.append(args.n)

    async with jobq.AsyncClient(dsn) as client:
        job = await client.enqueue(late, Number(1), expires_at=datetime.now(UTC) + timedelta(hours=1))
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("update jobq.job set expires_at = now()")
    async with working(dsn, jobs) as bench:
        row = await bench.ended(job.id)
    assert (row["state"], row["reason"], ran) == ("discarded", "expired before it was started", [])


async def test_on_discard_hears_of_every_discard_and_its_own_faults_hurt_nobody(dsn: str) -> None:
    jobs = jobq.Jobs()
    heard: list[tuple[str, int, str]] = []

    def own(job: jobq.Job, error: jobq.AttemptError) -> None:
        heard.append(("own", job.id, error.message))
        raise RuntimeError("a fault of the callback")

    @jobs.on_discard
    async def for_all(job: jobq.Job, error: jobq.AttemptError) -> None:
        heard.append(("all", job.id, error.message))

    @jobs.handler("fails", on_discard=own)
    async def fails(job: jobq.Job, args: Number) -> None:
        raise jobq.Permanent("over")

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        await eventually_async(lambda: len(heard) == 2)
    assert heard == [("own", job.id, "over"), ("all", job.id, "over")]


async def test_on_discard_hears_of_jobs_that_the_rescuer_discards(dsn: str) -> None:
    jobs = jobq.Jobs()
    heard: list[tuple[int, str]] = []

    @jobs.on_discard
    def note(job: jobq.Job, error: jobq.AttemptError) -> None:
        heard.append((job.id, error.outcome))

    @jobs.handler("k")
    async def never(job: jobq.Job, args: Number) -> None: ...

    async with jobq.AsyncClient(dsn) as client:
        job = await client.enqueue(never, Number(1), queue="elsewhere")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(
                "with x as (delete from jobq.ready returning *) insert into jobq.running"
                " (job_id, worker_id, queue, priority, attempt, failures, crashes)"
                " select job_id, 1, queue, priority, 3, 0, 2 from x"
            )
    async with working(dsn, jobs, rescue_interval=timedelta(milliseconds=50)):
        await eventually_async(lambda: heard)
    assert heard == [(job.id, "crashed")]


async def test_aliases_and_upgrades_run_old_jobs(dsn: str) -> None:
    jobs = jobq.Jobs()
    seen: list[Number] = []

    def upgrade(raw: dict[str, Any]) -> dict[str, Any]:
        return {"n": raw.get("n", raw.get("number"))}

    @jobs.handler("new_name", aliases=["old_name"], upgrade=upgrade)
    async def renamed(job: jobq.Job, args: Number) -> None:
        seen.append(args)

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue("old_name", {"number": 4})
        await bench.ended(job.id)
    assert seen == [Number(4)]


async def test_a_job_knows_itself(dsn: str) -> None:
    jobs = jobq.Jobs()
    seen: list[jobq.Job] = []

    @jobs.handler("k", queue="mail", priority=3, max_attempts=7, timeout=timedelta(seconds=9))
    async def look(job: jobq.Job, args: Number) -> None:
        seen.append(job)

    async with working(dsn, jobs, queues={"mail": 1}) as bench:
        enqueued = await bench.client.enqueue(look, Number(1), meta={"trace": "é"}, tags=["a", 'b"\\,{}'])
        await bench.ended(enqueued.id)
    (job,) = seen
    assert (job.id, job.kind, job.queue, job.priority) == (enqueued.id, "k", "mail", 3)
    assert (job.attempt, job.failures, job.crashes, job.max_attempts, job.timeout_s) == (1, 0, 0, 7, 9.0)
    assert (job.meta, job.tags) == ({"trace": "é"}, ("a", 'b"\\,{}'))
    assert abs(job.created_at - datetime.now(UTC)) < timedelta(minutes=1)


async def test_slots_bound_what_runs_at_once_in_each_queue(dsn: str) -> None:
    jobs = jobq.Jobs()
    running = {"a": 0, "b": 0}
    most = {"a": 0, "b": 0}

    @jobs.handler("k")
    async def count(job: jobq.Job, args: Number) -> None:
        running[job.queue] += 1
        most[job.queue] = max(most[job.queue], running[job.queue])
        await asyncio.sleep(0.002)
        running[job.queue] -= 1

    async with working(dsn, jobs, queues={"a": 3, "b": 5}) as bench:
        new = [jobq.NewJob(count, Number(n), queue=queue) for n in range(100) for queue in ("a", "b")]
        for job in await bench.client.enqueue_many(new):
            await bench.ended(job.id)
    assert most == {"a": 3, "b": 5}


async def test_priority_is_strict_within_a_queue(dsn: str) -> None:
    jobs = jobq.Jobs()
    order: list[int] = []

    @jobs.handler("k")
    async def note(job: jobq.Job, args: Number) -> None:
        order.append(job.priority)

    async with jobq.AsyncClient(dsn) as client:
        enqueued = await client.enqueue_many(
            jobq.NewJob(note, Number(n), priority=n % 19 - 9) for n in range(190)
        )
    async with working(dsn, jobs, queues={"default": 1}) as bench:
        for job in enqueued:
            await bench.ended(job.id)
    assert order == sorted(order, reverse=True)


async def test_s15_handlers_that_ignore_their_time_limit_do_not_hold_up_the_rest(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All slots are taken, so that the quick ones run in those that were given away, or nowhere.

    That five of five stuck ones have their process replaced is a test of its own, under a supervisor.
    """
    jobs = jobq.Jobs()
    release, leave = threading.Event(), asyncio.Event()

    @jobs.handler("stubborn", timeout=timedelta(milliseconds=100), max_attempts=1)
    def stubborn(job: jobq.Job, args: Number) -> None:
        release.wait(60)

    @jobs.handler("long")
    async def long(job: jobq.Job, args: Number) -> None:
        await leave.wait()

    @jobs.handler("quick")
    async def quick(job: jobq.Job, args: Number) -> None: ...

    try:
        async with working(
            dsn, jobs, queues={"default": 6}, cancel_grace=timedelta(milliseconds=200)
        ) as bench:
            last = await bench.client.enqueue(long, Number(0), priority=1)
            stuck = await bench.client.enqueue_many(jobq.NewJob(stubborn, Number(n)) for n in range(5))
            quicks = await bench.client.enqueue_many(jobq.NewJob(quick, Number(n)) for n in range(10))
            for job in quicks:
                assert (await bench.ended(job.id))["state"] == "completed"
            await eventually_async(lambda: bench.worker.stats().stuck == 5)
            assert {bench.job(job.id)["state"] for job in (last, *stuck)} == {"running"}
            assert sum("slot is given to the next job" in record.message for record in caplog.records) == 5
            release.set()
            leave.set()
            for job in stuck:
                assert (await bench.ended(job.id))["state"] == "discarded"
                assert bench.errors(job.id)[0]["outcome"] == "timeout"
    finally:
        release.set()
        leave.set()


async def test_a_worker_full_of_stuck_handlers_stops_and_says_so(dsn: str) -> None:
    jobs = jobq.Jobs()
    release = threading.Event()

    @jobs.handler("stubborn", timeout=timedelta(milliseconds=50), max_attempts=1)
    def stubborn(job: jobq.Job, args: Number) -> None:
        release.wait(30)

    try:
        async with working(
            dsn, jobs, queues={"default": 2}, cancel_grace=timedelta(milliseconds=50)
        ) as bench:
            stuck = await bench.client.enqueue_many(jobq.NewJob(stubborn, Number(n)) for n in range(2))
            assert bench.run is not None
            report = await asyncio.wait_for(asyncio.shield(bench.run), 10)
        assert report.clogged
        assert sorted(report.left_running) == sorted(job.id for job in stuck)
    finally:
        release.set()


async def test_a_failure_is_logged_with_what_becomes_of_the_job(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=2, backoff=SOON)
    async def fails(job: jobq.Job, args: Number) -> None:
        raise ValueError("no")

    async with working(dsn, jobs) as bench:
        job = await bench.client.enqueue(fails, Number(1))
        await bench.ended(job.id)
    lines = [
        (record.levelname, record.getMessage()) for record in caplog.records if "fails" in record.getMessage()
    ]
    assert [level for level, _ in lines] == ["WARNING", "ERROR"]
    assert "ValueError: no; it is retried in" in lines[0][1]
    assert "it is discarded" in lines[1][1]
    assert "raise ValueError" in lines[1][1]


@pytest.mark.parametrize(("signal", "value"), [(jobq.Retry, timedelta(1)), (jobq.Snooze, 5)])
def test_a_signal_that_cannot_be_meant_is_refused(signal: Any, value: object) -> None:
    with pytest.raises(jobq.ConfigError):
        signal(value)


def test_cancelled_is_true_or_false() -> None:
    from jobq.testing import make_job

    job = make_job()
    assert not job.cancelled
    job.cancelled.set()
    assert job.cancelled


@pytest.mark.parametrize("mode", ["async", "thread"])
async def test_a_reason_that_is_no_text_and_a_result_that_bites_end_their_own_job_alone(
    dsn: str, mode: str
) -> None:
    jobs = jobq.Jobs()

    class Biting(dict[str, int]):
        def items(self) -> Any:
            raise RuntimeError("no items")

    def do(args: Number) -> object:
        if args.n == 0:
            raise jobq.Cancel(404)  # type: ignore[arg-type]
        return Biting(a=1) if args.n == 1 else None

    async def on_the_loop(job: jobq.Job, args: Number) -> object:
        return do(args)

    def in_a_thread(job: jobq.Job, args: Number) -> object:
        return do(args)

    odd = jobs.handler("odd", max_attempts=1, store_result=True)(
        on_the_loop if mode == "async" else in_a_thread
    )
    async with working(dsn, jobs) as bench:
        enqueued = await bench.client.enqueue_many(jobq.NewJob(odd, Number(n)) for n in range(6))
        states = [(await bench.ended(job.id))["state"] for job in enqueued]
    assert states[0] == "cancelled"
    assert states[2:] == ["completed"] * 4
    assert states[1] in {"discarded", "completed"}  # json may read a dict without asking for its items


@pytest.mark.parametrize("sqlstate", ["40P01", "40001", "42501", "XX000"])
async def test_a_completed_job_stays_completed_whatever_the_server_says_meanwhile(
    dsn: str, sqlstate: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("quick")
    async def quick(job: jobq.Job, args: Number) -> None: ...

    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            "create function refuse() returns trigger language plpgsql as"
            f" $$ begin raise exception 'not now' using errcode = '{sqlstate}'; end $$".encode()
        )
        admin.execute(
            "create trigger refuse before insert on jobq.finished for each row execute function refuse()"
        )
        async with working(dsn, jobs) as bench:
            enqueued = await bench.client.enqueue_many(jobq.NewJob(quick, Number(n)) for n in range(10))
            await eventually_async(lambda: bench.worker.stats().unrecorded == 10)
            await eventually_async(lambda: "cannot be recorded now" in caplog.text)
            for waiting in range(11, 16):  # claims go on meanwhile, and take the database for well
                enqueued.append(await bench.client.enqueue(quick, Number(waiting)))
                await eventually_async(lambda: bench.worker.stats().unrecorded == waiting)  # noqa: B023
            assert caplog.text.count("cannot be recorded now") == 1
            admin.execute("drop trigger refuse on jobq.finished")
            states = [(await bench.ended(job.id))["state"] for job in enqueued]
            await eventually_async(lambda: bench.worker.stats().completed == 15)
    assert states == ["completed"] * 15


async def test_a_job_that_somebody_put_into_two_tables_leaves_running_and_does_not_end_the_worker(
    dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("quick")
    async def quick(job: jobq.Job, args: Number) -> None: ...

    async with working(dsn, jobs) as bench:
        done = await bench.client.enqueue(quick, Number(1))
        await bench.ended(done.id)
        with psycopg.connect(dsn, autocommit=True) as admin:  # as somebody might retry by hand
            admin.execute(
                "insert into jobq.ready (job_id, queue, priority, attempt) values (%s, 'default', 0, 5)",
                [done.id],
            )
        await eventually_async(lambda: "was refused by the server" in caplog.text)
        await eventually_async(lambda: bench.rows("select 1 from jobq.running") == [])
        after = await bench.client.enqueue(quick, Number(2))
        assert (await bench.ended(after.id))["state"] == "completed"
        assert bench.job(done.id)["state"] == "completed"


@pytest.mark.parametrize("error", [_Unprintable(), SystemExit(3)], ids=["unprintable", "system-exit"])
async def test_an_upgrade_or_a_backoff_that_bites_fails_its_own_job_alone(
    dsn: str, error: BaseException
) -> None:
    jobs = jobq.Jobs()

    def bite(_: object) -> Any:
        raise error

    @jobs.handler("upgraded", upgrade=bite, max_attempts=1)
    async def upgraded(job: jobq.Job, args: Number) -> None: ...

    @jobs.handler("delayed", backoff=bite)
    async def delayed(job: jobq.Job, args: Number) -> None:
        raise ValueError

    @jobs.handler("quick")
    async def quick(job: jobq.Job, args: Number) -> None: ...

    async with working(dsn, jobs) as bench:
        first = await bench.client.enqueue(upgraded, Number(1))
        second = await bench.client.enqueue(delayed, Number(1))
        third = await bench.client.enqueue(quick, Number(1))
        assert (await bench.ended(first.id))["state"] == "discarded"
        assert (await bench.ended(third.id))["state"] == "completed"
        await eventually_async(lambda: bench.errors(second.id))
        assert bench.job(second.id)["failures"] == 1


async def test_a_callback_that_hangs_or_bites_holds_up_no_outcome(dsn: str) -> None:
    jobs = jobq.Jobs()
    heard: list[int] = []

    @jobs.on_discard
    async def hang(job: jobq.Job, error: jobq.AttemptError) -> None:
        heard.append(job.id)
        if len(heard) == 1:
            raise SystemExit(3)
        await asyncio.sleep(600)

    @jobs.handler("fails")
    async def fails(job: jobq.Job, args: Number) -> None:
        raise jobq.Permanent("over")

    async with working(dsn, jobs) as bench:
        for job in await bench.client.enqueue_many(jobq.NewJob(fails, Number(n)) for n in range(30)):
            assert (await bench.ended(job.id))["state"] == "discarded"
        await eventually_async(lambda: len(heard) == 2)
        await eventually_async(lambda: bench.worker.stats().unrecorded == 0)


async def test_what_cannot_be_claimed_in_one_queue_costs_the_others_nothing(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("quick")
    async def quick(job: jobq.Job, args: Number) -> None: ...

    async with jobq.AsyncClient(dsn) as client:
        largest = await client.enqueue(quick, Number(1), queue="a")
        infinite = await client.enqueue(quick, Number(1), queue="a", delay=timedelta(hours=1))
        due = await client.enqueue(quick, Number(1), queue="b", delay=timedelta(milliseconds=100))
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute("update jobq.ready set attempt = 2147483647 where job_id = %s", [largest.id])
        admin.execute("update jobq.scheduled set run_at = 'infinity' where job_id = %s", [infinite.id])
    async with working(dsn, jobs, queues={"a": 2, "b": 2}) as bench:
        assert (await bench.ended(largest.id))["state"] == "completed"
        assert (await bench.ended(due.id))["state"] == "completed"


def test_a_connection_string_that_cannot_be_read_keeps_its_password() -> None:
    with pytest.raises(jobq.ConfigError) as caught:
        jobq.Client("postgresql://u:secret@[::1/db")
    assert "secret" not in str(caught.value)
