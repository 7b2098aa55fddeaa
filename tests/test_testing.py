"""jobq.testing: what our users' tests stand on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest

import jobq
from jobq.testing import (
    AsyncInlineClient,
    Clock,
    InlineClient,
    assert_enqueued,
    assert_not_enqueued,
    drain,
    drain_sync,
    make_job,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython


@dataclass(frozen=True)
class Args:
    n: int
    name: str = "x"


HOUR = jobq.ConstantBackoff(timedelta(hours=1), jitter=0)


async def test_drain_runs_what_is_due_and_what_that_enqueues(jobq_async_client: jobq.AsyncClient) -> None:
    jobs = jobq.Jobs()
    client = jobq_async_client
    seen: list[int] = []

    @jobs.handler("count", store_result=True)
    async def count(job: jobq.Job, args: Args) -> int:
        seen.append(args.n)
        if args.n < 3:
            await client.enqueue(count, Args(args.n + 1), queue="other")
        return args.n

    first = await client.enqueue(count, Args(1))
    later = await client.enqueue(count, Args(9), delay=timedelta(hours=1))
    report = await drain(client, jobs)
    assert seen == [1, 2, 3]
    assert report.completed[0] == first.id
    assert report.results[first.id] == 1
    info = await client.get(first.id)
    assert (info.state, info.result) == ("completed", 1)
    assert (await client.get(later.id)).state == "scheduled"


async def test_the_clock_makes_retries_and_scheduled_jobs_due(jobq_async_client: jobq.AsyncClient) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=2, backoff=HOUR)
    async def fails(job: jobq.Job, args: Args) -> None:
        raise ValueError("no")

    client, clock = jobq_async_client, Clock()
    job = await client.enqueue(fails, Args(1))
    report = await drain(client, jobs, clock=clock)
    assert (report.retried, report.discarded) == ([job.id], [])
    assert isinstance(report.errors[0][1], ValueError)
    assert (await drain(client, jobs, clock=clock)).retried == []
    clock.advance(timedelta(minutes=61))
    assert (await drain(client, jobs, clock=clock)).discarded == [job.id]
    assert [error.message for error in await client.errors(job.id)] == ["no", "no"]


SECOND = jobq.ConstantBackoff(timedelta(seconds=1), jitter=0)


def test_a_retry_waits_from_the_clocks_time_on(jobq_client: jobq.Client) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("fails", max_attempts=3, backoff=SECOND)
    def fails(job: jobq.Job, args: Args) -> None:
        raise ValueError("no")

    clock = Clock()
    job = jobq_client.enqueue(fails, Args(1))
    assert drain_sync(jobq_client, jobs, clock=clock).retried == [job.id]
    clock.advance(timedelta(minutes=5))
    report = drain_sync(jobq_client, jobs, clock=clock)
    assert (report.retried, report.discarded) == ([job.id], [])
    clock.advance(timedelta(seconds=1))
    report = drain_sync(jobq_client, jobs, clock=clock)
    assert (report.retried, report.discarded) == ([], [job.id])


def test_what_is_put_off_waits_from_the_clocks_time_on(jobq_client: jobq.Client) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("later")
    def later(job: jobq.Job, args: Args) -> None:
        raise jobq.Snooze(timedelta(minutes=1))

    clock = Clock()
    clock.advance(timedelta(days=400))
    snoozed, unknown = jobq_client.enqueue(later, Args(1)), jobq_client.enqueue("unknown", {})
    for _ in range(2):
        report = drain_sync(jobq_client, jobs, clock=clock)
        assert (report.snoozed, report.parked) == ([snoozed.id], [unknown.id])
        clock.advance(timedelta(minutes=1))


def test_a_clock_in_the_past_serves_as_well(jobq_client: jobq.Client) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("later", max_attempts=2, backoff=HOUR)
    def later(job: jobq.Job, args: Args) -> None:
        raise ValueError("no")

    clock = Clock(datetime(2020, 1, 1, tzinfo=UTC))
    job = jobq_client.enqueue(later, Args(1))
    assert drain_sync(jobq_client, jobs, clock=clock).retried == [job.id]
    assert drain_sync(jobq_client, jobs, clock=clock).discarded == []
    clock.advance(timedelta(hours=1))
    assert drain_sync(jobq_client, jobs, clock=clock).discarded == [job.id]


def test_a_report_raises_what_a_handler_raised(jobq_client: jobq.Client) -> None:
    jobs = jobq.Jobs()
    raised = {1: ValueError("first"), 2: jobq.Permanent("second"), 3: jobq.Snooze(timedelta(hours=1))}

    @jobs.handler("k")
    def k(job: jobq.Job, args: Args) -> None:
        if args.n in raised:
            raise raised[args.n]

    jobq_client.enqueue_many([jobq.NewJob(k, Args(n)) for n in (0, 3)])
    drain_sync(jobq_client, jobs).raise_errors()
    ids = [job.id for job in jobq_client.enqueue_many([jobq.NewJob(k, Args(n)) for n in (1, 2)])]
    with pytest.raises(ValueError, match="first") as caught:
        drain_sync(jobq_client, jobs).raise_errors()
    assert caught.value is raised[1]
    assert caught.value.__notes__ == [f"raised by the handler of job {ids[0]}; 1 more have failed"]


async def test_a_time_limit_is_an_error_of_the_report(jobq_async_client: jobq.AsyncClient) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("slow", timeout=timedelta(milliseconds=10))
    async def slow(job: jobq.Job, args: Args) -> None:
        await asyncio.sleep(30)

    await jobq_async_client.enqueue(slow, Args(1))
    report = await drain(jobq_async_client, jobs)
    with pytest.raises(TimeoutError):
        report.raise_errors()


async def test_every_outcome_is_reported(jobq_async_client: jobq.AsyncClient) -> None:
    jobs = jobq.Jobs()
    outcomes: dict[int, BaseException] = {
        0: jobq.Permanent("p"),
        1: jobq.Snooze(timedelta(hours=1)),
        2: jobq.Cancel("c"),
        3: jobq.Retry(after=timedelta(hours=1)),
    }

    @jobs.handler("k", timeout=timedelta(milliseconds=20), max_attempts=1)
    async def k(job: jobq.Job, args: Args) -> None:
        if args.n in outcomes:
            raise outcomes[args.n]
        await asyncio.sleep(30)

    client = jobq_async_client
    ids = [
        job.id for job in await client.enqueue_many(jobq.NewJob(k, Args(n), max_attempts=2) for n in range(5))
    ]
    unknown = await client.enqueue("unknown", {})
    report = await drain(client, jobs)
    assert report.discarded == [ids[0]]
    assert report.snoozed == [ids[1]]
    assert report.cancelled == [ids[2]]
    assert report.retried == [ids[3], ids[4]]
    assert report.parked == [unknown.id]
    assert (await client.errors(ids[4]))[0].outcome == "timeout"


async def test_an_endless_drain_is_given_up(jobq_async_client: jobq.AsyncClient) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("again")
    async def again(job: jobq.Job, args: Args) -> None:
        await jobq_async_client.enqueue(again, args)

    await jobq_async_client.enqueue(again, Args(1))
    with pytest.raises(AssertionError, match="20 runs"):
        await drain(jobq_async_client, jobs, limit=20)


async def test_only_the_named_queues_are_drained(jobq_async_client: jobq.AsyncClient) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("k")
    def k(job: jobq.Job, args: Args) -> None: ...

    one = await jobq_async_client.enqueue(k, Args(1), queue="a")
    await jobq_async_client.enqueue(k, Args(1), queue="b")
    assert (await drain(jobq_async_client, jobs, queues=["a"])).completed == [one.id]


def test_drain_sync_runs_both_colours(jobq_client: jobq.Client) -> None:
    jobs = jobq.Jobs()
    seen: list[str] = []

    @jobs.handler("sync")
    def sync(job: jobq.Job, args: Args) -> None:
        seen.append("sync")

    @jobs.handler("async")
    async def not_sync(job: jobq.Job, args: Args) -> None:
        seen.append("async")

    jobq_client.enqueue(sync, Args(1))
    jobq_client.enqueue(not_sync, Args(1))
    assert len(drain_sync(jobq_client, jobs).completed) == 2
    assert seen == ["sync", "async"]


async def test_an_inline_client_has_run_the_job_when_enqueue_returns(jobq_dsn: str) -> None:
    jobs = jobq.Jobs()
    seen: list[int] = []

    @jobs.handler("k")
    async def k(job: jobq.Job, args: Args) -> None:
        seen.append(args.n)

    async with AsyncInlineClient(jobq_dsn, jobs=jobs) as client:
        await client.enqueue(k, Args(1))
        assert seen == [1]
        await client.enqueue_many([jobq.NewJob(k, Args(2)), jobq.NewJob(k, Args(3))])
        assert seen == [1, 2, 3]
        with pytest.raises(jobq.ConfigError, match="drain"):
            await client.enqueue(k, Args(1), tx=object())


def test_the_sync_inline_client(jobq_dsn: str) -> None:
    jobs = jobq.Jobs()
    seen: list[int] = []

    @jobs.handler("k")
    def k(job: jobq.Job, args: Args) -> None:
        seen.append(args.n)

    with InlineClient(jobq_dsn, jobs=jobs) as client:
        client.enqueue(k, Args(1))
        client.enqueue_many([jobq.NewJob(k, Args(2))])
    assert seen == [1, 2]


def test_assert_enqueued_looks_into_an_open_transaction(jobq_client: jobq.Client, jobq_dsn: str) -> None:
    kind = jobq.JobType("k", Args, queue="q")
    with psycopg.connect(jobq_dsn) as connection:
        jobq_client.enqueue(kind, Args(1, "é"), tx=connection)
        (info,) = assert_enqueued(connection, kind, args=Args(1, "é"), queue="q", count=1)
        assert info.args == {"n": 1, "name": "é"}
        assert_enqueued(connection, "k", args={"n": 1})
        assert_not_enqueued(jobq_client, kind)
        assert_not_enqueued(connection, kind, args=Args(2))
        assert_not_enqueued(connection, kind, queue="other")
        connection.rollback()
        with pytest.raises(AssertionError, match="nothing at all"):
            assert_enqueued(connection, kind)


async def test_assert_enqueued_says_what_was_there_instead(jobq_async_client: jobq.AsyncClient) -> None:
    await jobq_async_client.enqueue("k", {"n": 7})
    found = await assert_enqueued(jobq_async_client, "k")
    assert found[0].args == {"n": 7}
    with pytest.raises(AssertionError, match=r'(?s)wanted 2 jobs.*found 1.*k in default: \{"n": 7\}'):
        await assert_enqueued(jobq_async_client, "k", count=2)
    with pytest.raises(AssertionError):
        await assert_not_enqueued(jobq_async_client, "k")


def test_make_job_is_a_job_to_call_handlers_with() -> None:
    job = make_job("k", attempt=3, meta={"a": 1}, tags=["t"], created_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert (job.kind, job.attempt, job.failures, job.meta, job.tags) == ("k", 3, 2, {"a": 1}, ("t",))
    assert job.created_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert not job.cancelled.is_set()
    assert make_job(jobq.JobType("x", Args)).kind == "x"


def test_a_made_job_has_the_options_of_its_declaration() -> None:
    jobs = jobq.Jobs()
    limit = timedelta(minutes=2)

    @jobs.handler("k", queue="mail", priority=3, max_attempts=4, timeout=limit, meta={"a": 1}, tags=["t"])
    def k(job: jobq.Job, args: Args) -> None: ...

    job = make_job(k, attempt=2)
    assert (job.kind, job.queue, job.priority, job.max_attempts, job.timeout_s) == ("k", "mail", 3, 4, 120.0)
    assert (job.meta, job.tags, job.failures) == ({"a": 1}, ("t",), 1)
    own = make_job(k, queue="other", timeout=None, tags=(), meta=None)
    assert (own.queue, own.timeout_s, own.tags, own.meta, own.max_attempts) == ("other", None, (), {}, 4)
    plain = make_job("k")
    assert (plain.queue, plain.priority, plain.max_attempts, plain.timeout_s) == ("default", 0, 25, 3600.0)
    wrong: Any = {"delay": limit}
    with pytest.raises(jobq.ConfigError, match="delay: no option of make_job"):
        make_job(k, **wrong)


def test_a_failed_assertion_is_shown_where_the_test_asserts(
    spawn_python: SpawnPython, tmp_path: Path
) -> None:
    (tmp_path / "test_app.py").write_text(
        "import jobq.testing\n"
        "def test_sync(jobq_client): jobq.testing.assert_enqueued(jobq_client, 'k')\n"
        "async def test_async(jobq_async_client):\n"
        "    await jobq.testing.assert_enqueued(jobq_async_client, 'k')\n"
        "def test_not(jobq_client):\n"
        "    jobq_client.enqueue('k')\n"
        "    jobq.testing.assert_not_enqueued(jobq_client, 'k')\n"
    )
    run = spawn_python("-m", "pytest", "-q", "-o", "asyncio_mode=auto", "test_app.py", cwd=tmp_path)
    assert run.wait(120) == 1
    assert run.output.count("AssertionError: wanted") >= 3
    for ours in ("assertions.py:", "_operation.py:", "_clients/"):
        assert ours not in run.output


def test_the_clock_only_goes_forward() -> None:
    clock = Clock(datetime(2030, 1, 1, tzinfo=UTC))
    clock.advance(timedelta(days=1))
    assert timedelta(0) <= clock.now() - datetime(2030, 1, 2, tzinfo=UTC) < timedelta(minutes=1)
    with pytest.raises(jobq.ConfigError, match="forward"):
        clock.advance(timedelta(seconds=-1))
    with pytest.raises(jobq.ConfigError, match="zone"):
        Clock(datetime(2030, 1, 1))  # noqa: DTZ001 - the very thing that is refused


def test_each_test_has_its_own_database(jobq_dsn: str, dsn: str) -> None:
    with psycopg.connect(jobq_dsn) as connection:
        row: Any = connection.execute("select count(*) from jobq.jobs").fetchone()
    assert row == (0,)
    assert jobq_dsn != dsn


# -- the fixtures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "text"),
    [
        ("nonsense", "JOBQ_TEST_DSN: the connection string"),
        ("port=many", "JOBQ_TEST_DSN: the connection string"),
        ("postgresql://u:Secret@127.0.0.1:1/none", "JOBQ_TEST_DSN: connection failed"),
    ],
)
def test_a_server_for_tests_that_is_of_no_use_is_told_in_a_line(
    spawn_python: SpawnPython, tmp_path: Path, dsn: str, text: str
) -> None:
    (tmp_path / "test_app.py").write_text("def test_it(jobq_dsn): pass\n")
    run = spawn_python("-m", "pytest", "-q", "test_app.py", env={"JOBQ_TEST_DSN": dsn}, cwd=tmp_path)
    assert run.wait() == 1
    assert text in run.output
    for unwanted in ("Traceback", "Secret", "_pytest_plugin.py"):
        assert unwanted not in run.output


# -- what is no use --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"queues": "default"}, "queues='default': a sequence of names"),
        ({"clock": 5}, "clock=5: a jobq.testing.Clock"),
        ({"limit": 0}, "limit=0: a number of runs"),
    ],
)
def test_a_drain_of_anything_is_refused_by_name(
    jobq_client: jobq.Client, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(jobq.ConfigError, match=text):
        drain_sync(jobq_client, jobq.Jobs(), **options)


async def test_each_drain_names_the_other_for_the_other_sort_of_client(
    jobq_client: jobq.Client, jobq_dsn: str
) -> None:
    one: Any = jobq_client
    two: Any = jobq.AsyncClient(jobq_dsn)
    with pytest.raises(jobq.ConfigError, match="call drain_sync"):
        await drain(one, jobq.Jobs())
    with pytest.raises(jobq.ConfigError, match=r"call drain\(\)"):
        drain_sync(two, jobq.Jobs())
    nothing: Any = None
    with pytest.raises(jobq.ConfigError, match="jobs=None"):
        drain_sync(jobq_client, nothing)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_ends_a_test_from_within_a_handler_signs_off(jobq_client: jobq.Client, mode: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("async")
    async def handle_async(job: jobq.Job, args: Any) -> None:
        pytest.fail("said by the handler")

    @jobs.handler("sync")
    def handle_sync(job: jobq.Job, args: Any) -> None:
        pytest.fail("said by the handler")

    jobq_client.enqueue(mode)
    with pytest.raises(pytest.fail.Exception, match="said by the handler"):
        drain_sync(jobq_client, jobs)
    with jobq_client.pool.connection() as connection:
        assert connection.execute("select end_reason from jobq.worker").fetchall() == [("stopped",)]


def test_assertions_name_what_no_job_can_be(jobq_client: jobq.Client) -> None:
    anything: Any = None
    with pytest.raises(jobq.ConfigError, match="where=None"):
        assert_enqueued(anything, "k")
    with pytest.raises(jobq.ConfigError, match="kind=None"):
        assert_enqueued(jobq_client, anything)
    with pytest.raises(jobq.ConfigError, match="count='1'"):
        assert_enqueued(jobq_client, "k", count=cast("int", "1"))
    with pytest.raises(jobq.ConfigError, match="args cannot be arguments of 'k'"):
        assert_enqueued(jobq_client, "k", args=object())


def test_assertions_see_documents_of_sql_that_are_odd(jobq_client: jobq.Client) -> None:
    with jobq_client.pool.connection() as connection:
        connection.execute("select jobq.enqueue('k', ('[' || repeat('9', 5000) || ']')::jsonb)")
    with pytest.raises(AssertionError, match="found 0"):
        assert_enqueued(jobq_client, "k", args=[1])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kind": None}, "kind=None"),
        ({"timeout": 5}, "timeout=5: a timedelta"),
        ({"priority": 10}, "priority=10"),
        ({"tags": "abc"}, "tags='abc'"),
        ({"meta": {"a": object()}}, r"meta\.a: an object"),
    ],
)
def test_a_job_of_anything_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(jobq.Error, match=text):
        make_job(**options)


@pytest.mark.parametrize("moment", ["noon", datetime(2030, 1, 1)])  # noqa: DTZ001 - naive on purpose
def test_a_clock_is_set_to_a_moment_and_goes_forward(moment: Any) -> None:
    with pytest.raises(jobq.ConfigError, match="a datetime with a zone"):
        Clock(moment)
    for by in (timedelta(-1), cast("timedelta", 5)):
        with pytest.raises(jobq.ConfigError, match="a timedelta, forward only"):
            Clock().advance(by)
