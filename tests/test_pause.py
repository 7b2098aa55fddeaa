"""Pauses: what workers start no more, how soon, and what becomes of jobs that they hold."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

import jobq
from jobq._statements.claim import Claimed
from jobq._statements.control import poll
from jobq._statements.pauses import PUT_BACK_S
from jobq._worker.decide import refuse
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import SCHEMA, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.inprocess import Bench


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        yield store


def counting() -> tuple[jobq.Jobs, list[int]]:
    """Return handlers of two kinds that note which jobs ran."""
    jobs, ran = jobq.Jobs(), []

    @jobs.handler("one")
    async def one(job: jobq.Job, args: dict[str, Any]) -> None:
        ran.append(job.id)

    @jobs.handler("two")
    async def two(job: jobq.Job, args: dict[str, Any]) -> None:
        ran.append(job.id)

    return jobs, ran


async def obeys(bench: Bench, *, queues: set[str] | None = None, kinds: set[str] | None = None) -> None:
    """Wait until the worker knows of these pauses and no others."""

    def knows() -> bool:
        parts = bench.worker._parts
        if parts is None:
            return False
        paused = {line.queue for line in parts.lines if line.is_paused}
        return paused == (queues or set()) and parts.executor.paused_kinds == (kinds or set())

    await eventually_async(knows, 5, what="the worker obeys")


# -- saying so ---------------------------------------------------------------------------------------


def test_pauses_are_listed_with_who_why_and_until_when(client: jobq.Client) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    client.queues.pause("mail", reason="the relay is down", by="anna", until=until)
    client.queues.pause(kind="report")
    mail, report = client.queues.pauses()
    assert (mail.scope, mail.name, mail.reason, mail.paused_by) == (
        "queue",
        "mail",
        "the relay is down",
        "anna",
    )
    assert mail.until == until
    assert datetime.now(UTC) - mail.paused_at < timedelta(minutes=1)
    assert (report.scope, report.name, report.reason, report.until) == ("kind", "report", None, None)
    assert client.queues.resume("mail")
    assert not client.queues.resume("mail")
    assert client.queues.pauses() == [report]
    actions = [(entry.action, dict(entry.target), entry.reason) for entry in reversed(client.operator_log())]
    assert actions[0] == ("pause", {"queue": "mail", "until": until.isoformat()}, "the relay is down")
    assert actions[1:] == [
        ("pause", {"kind": "report"}, None),
        ("resume", {"queue": "mail"}, None),
        ("resume", {"queue": "mail"}, None),
    ]


def test_the_newer_words_hold_and_a_pause_ends_by_itself(client: jobq.Client, store: Storage) -> None:
    client.queues.pause("mail", reason="first")
    client.queues.pause("mail", reason="second")
    [pause] = client.queues.pauses()
    assert pause.reason == "second"
    assert store.run(poll(SCHEMA, [])).queues == {"mail"}
    client.queues.pause("mail", until=datetime.now(UTC) - timedelta(seconds=1))
    assert client.queues.pauses() == []
    assert store.run(poll(SCHEMA, [])).queues == frozenset()
    assert not client.queues.resume("mail")
    client.queues.pause("other", until=datetime.now(UTC) - timedelta(seconds=1))
    client.queues.pause("third")
    assert store.sql("select name from jobq.pause") == [("third",)]  # what has ended does not pile up


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"queue": "a", "kind": "b"},
        {"queue": ""},
        {"kind": "x" * 200},
        {"queue": "a", "until": datetime(2030, 1, 1)},  # noqa: DTZ001 - the mistake under test
        {"queue": "a", "reason": "x" * 1001},
        {"queue": "a", "by": ""},
    ],
)
def test_what_cannot_be_paused_is_said(client: jobq.Client, wrong: dict[str, Any]) -> None:
    with pytest.raises(jobq.ConfigError):
        client.queues.pause(**wrong)
    assert client.queues.pauses() == []
    assert client.operator_log() == []


def test_a_job_of_a_paused_kind_is_put_back_for_a_while_and_uses_no_retry() -> None:
    row = Claimed(1, "k", "q", 0, 3, 2, 0, 25, None, 0.0, None, None, "{}", expired=False)
    waits = set()
    for _ in range(50):
        back = refuse(row, is_known=True, is_paused=True)
        assert back is not None
        assert (back.to, back.reason, back.failed) == ("scheduled", "paused", False)
        assert PUT_BACK_S[0] <= back.delay_s <= PUT_BACK_S[1]
        waits.add(back.delay_s)
    assert len(waits) > 40  # spread, so that they do not all come back at once
    assert refuse(row, is_known=True) is None
    unknown = refuse(row, is_known=False, is_paused=True)
    assert unknown is not None
    assert unknown.reason == "unknown kind"


# -- workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("notify", [True, False])
async def test_a_paused_queue_is_not_claimed_from_until_it_is_resumed(dsn: str, notify: bool) -> None:
    jobs, ran = counting()
    async with (
        working(dsn, jobs, queues={"a": 5, "b": 5}) as bench,
        jobq.AsyncClient(dsn, notify=notify) as operator,
    ):
        await operator.queues.pause("a", reason="maintenance")
        await obeys(bench, queues={"a"})
        held = await bench.client.enqueue("one", {}, queue="a")
        runs = await bench.client.enqueue("one", {}, queue="b")
        await bench.ended(runs.id)
        await asyncio.sleep(0.3)  # some polls
        assert bench.job(held.id)["state"] == "ready"
        assert bench.job(held.id)["attempt"] == 0
        await operator.queues.resume("a")
        await bench.ended(held.id, 5)
    assert ran == [runs.id, held.id]


async def test_a_worker_that_starts_obeys_from_its_first_claim(dsn: str) -> None:
    jobs, ran = counting()
    async with jobq.AsyncClient(dsn) as client:
        await client.queues.pause("a")
        await client.queues.pause(kind="one")
        in_queue = await client.enqueue("two", {}, queue="a")
        of_kind = await client.enqueue("one", {}, queue="b")
    async with working(dsn, jobs, queues={"a": 5, "b": 5}) as bench:
        await bench.waits(of_kind.id, "paused")
        await obeys(bench, queues={"a"}, kinds={"one"})
        assert bench.job(in_queue.id)["state"] == "ready"
    assert ran == []


async def test_jobs_of_a_paused_kind_come_back_when_it_is_resumed(dsn: str) -> None:
    jobs, ran = counting()
    async with working(dsn, jobs) as bench:
        await bench.client.queues.pause(kind="one")
        await obeys(bench, kinds={"one"})
        one = await bench.client.enqueue("one", {})
        two = await bench.client.enqueue("two", {})
        await bench.ended(two.id)
        row = await bench.waits(one.id, "paused")
        assert row["failures"] == 0
        assert bench.errors(one.id) == []
        assert timedelta(0) < row["run_at"] - datetime.now(UTC) <= timedelta(seconds=PUT_BACK_S[1])
        await bench.client.queues.resume(kind="one")
        await bench.ended(one.id, 5)
    assert ran == [two.id, one.id]


async def test_what_is_held_and_not_started_is_given_back(dsn: str) -> None:
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
        blocking = await bench.client.enqueue(hold, {"waits": True})
        await eventually_async(lambda: len(ran) == 21)
        held = [(await bench.client.enqueue(hold, {"waits": False})).id for _ in range(5)]
        await eventually_async(lambda: all(bench.job(job_id)["state"] == "running" for job_id in held))
        await bench.client.queues.pause("default")
        await obeys(bench, queues={"default"})
        await eventually_async(lambda: all(bench.job(job_id)["state"] == "ready" for job_id in held))
        assert bench.job(blocking.id)["state"] == "running"  # what runs goes on
        go_on.set()
        await bench.ended(blocking.id)
        assert ran[21:] == []
        await bench.client.queues.resume("default")
        for job_id in held:
            await bench.ended(job_id)
        assert all(bench.job(job_id)["failures"] == 0 for job_id in held)


async def test_a_pause_that_ends_by_itself_is_over_within_a_moment(dsn: str) -> None:
    jobs, ran = counting()
    async with working(dsn, jobs) as bench:
        await bench.client.queues.pause("default", until=datetime.now(UTC) + timedelta(seconds=1.5))
        await obeys(bench, queues={"default"})
        job = await bench.client.enqueue("one", {})
        row = await bench.ended(job.id, 8)
        [paused_until] = bench.rows("select until from jobq.pause")
        assert row["claimed_at"] >= paused_until["until"]
    assert ran == [job.id]
