"""Back-pressure: a queue that holds as many ready jobs as its producers may leave there."""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import jobq
from jobq._kinds.options import DEFAULTS
from jobq._operation import Call
from jobq._statements.backpressure import Backpressure
from tests.support.storage import SCHEMA, Storage
from tests.test_plans import explain, whole_scans

if TYPE_CHECKING:
    from jobq._operation import Operation, Rows


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        monkeypatch.setattr("jobq._statements.backpressure.time.monotonic", lambda: self.now)


def enqueue() -> Operation[str]:
    yield Call("enqueue")
    return "done"


def drive(operation: Operation[str], count: int, took: Any = None) -> tuple[str | None, list[str]]:
    """Run a guarded enqueue whose queue holds so many; return its result and what it sent."""
    sent: list[str] = []
    answer: Rows | None = None
    try:
        call = next(operation)
        while True:
            sent.append("count" if "count(*)" in call.sql else call.sql)
            if took is not None:
                took()
            answer = [(count,)]
            call = operation.send(answer)
    except StopIteration as done:
        return done.value, sent
    except jobq.QueueFull:
        return None, sent


def test_a_queue_is_counted_once_a_second_and_the_answer_stands_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    pressure = Backpressure(SCHEMA, 10)
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 8) == ("done", ["count", "enqueue"])
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 50) == ("done", ["enqueue"])
    clock.now += 1.01
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 10) == (None, ["count"])
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 0) == (None, [])
    clock.now += 1.01
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 0) == ("done", ["count", "enqueue"])


def test_counting_takes_two_per_cent_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pressure = Backpressure(SCHEMA, 10)

    def take_long() -> None:
        clock.now += 0.1

    drive(pressure.guarded([DEFAULTS], enqueue()), 0, take_long)
    clock.now += 4.8
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 0)[1] == ["enqueue"]
    clock.now += 0.3
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 0)[1] == ["count", "enqueue"]


def test_a_clients_own_jobs_count_and_so_do_those_of_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    pressure = Backpressure(SCHEMA, 10)
    assert drive(pressure.guarded([DEFAULTS] * 6, enqueue()), 0) == ("done", ["count", "enqueue"])
    assert drive(pressure.guarded([DEFAULTS] * 5, enqueue()), 6) == (None, ["count"])
    assert drive(pressure.guarded([DEFAULTS] * 4, enqueue()), 6) == ("done", ["enqueue"])
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 10) == (None, ["count"])
    operation = pressure.guarded([DEFAULTS] * 11, enqueue())
    with pytest.raises(jobq.QueueFull, match=r"11 more were to come.*enqueue fewer jobs at a time") as full:
        next(operation)
    assert full.value.jobs == 11


def test_where_its_own_jobs_fill_a_queue_it_is_counted_sooner_for_they_may_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Clock(monkeypatch)
    pressure = Backpressure(SCHEMA, 3)
    sent = [drive(pressure.guarded([DEFAULTS], enqueue()), 0) for _ in range(9)]
    assert [len(calls) for _, calls in sent] == [2, 1, 1] * 3
    assert {result for result, _ in sent} == {"done"}


def test_jobs_count_while_their_call_is_under_way_and_no_longer_when_it_failed() -> None:
    pressure = Backpressure(SCHEMA, 1)
    first = pressure.guarded([DEFAULTS], enqueue())
    next(first)
    first.send([(0,)])
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 0)[0] is None
    with pytest.raises(jobq.DatabaseError):
        first.throw(jobq.DatabaseError("refused"))
    assert drive(pressure.guarded([DEFAULTS], enqueue()), 0)[0] == "done"


def test_one_client_leaves_no_more_jobs_than_its_limit(dsn: str) -> None:
    with jobq.Client(dsn, max_ready=3) as client:
        made = 0
        for _ in range(12):
            with contextlib.suppress(jobq.QueueFull):
                client.enqueue("k", {})
                made += 1
        assert made == 3
        with pytest.raises(jobq.QueueFull):
            client.enqueue_many([jobq.NewJob("k", {}, queue="other") for _ in range(4)])
        client.enqueue_many([jobq.NewJob("k", {}, queue="other") for _ in range(3)])
    with Storage(dsn) as store:
        assert store.count("ready") == 6


def test_only_what_is_ready_at_once_counts_and_only_where_there_is_a_limit() -> None:
    pressure = Backpressure(SCHEMA, {"a": 1})
    soon = datetime.now(UTC) + timedelta(hours=1)
    for options in ({"queue": "b"}, {"queue": "a", "run_at": soon}, {"queue": "a", "delay_s": 1.0}):
        job = DEFAULTS._replace(**options)
        assert drive(pressure.guarded([job], enqueue()), 5)[1] == ["enqueue"]
    past = DEFAULTS._replace(queue="a", run_at=datetime(2001, 1, 1, tzinfo=UTC))
    assert drive(pressure.guarded([past], enqueue()), 5) == (None, ["count"])


def test_a_full_queue_refuses_and_says_what_to_do(dsn: str) -> None:
    with jobq.Client(dsn, max_ready={"mail": 3}) as client:
        for _ in range(3):
            client.enqueue("k", {}, queue="mail")
        client._backpressure._queues.clear()  # type: ignore[union-attr]
        with pytest.raises(
            jobq.QueueFull, match=r"queue 'mail' holds 3 ready jobs .* allows 3: enqueue again"
        ) as full:
            client.enqueue("k", {}, queue="mail")
        assert (full.value.queue, full.value.count, full.value.limit) == ("mail", 3, 3)
        with pytest.raises(jobq.QueueFull):
            client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob("k", {}, queue="mail")])
        client.enqueue("k", {}, queue="mail", delay=timedelta(hours=1))
        client.enqueue("k", {})
        client.bulk.cancel(jobq.JobFilter(states=["ready"]))
        client._backpressure._queues.clear()  # type: ignore[union-attr]
        client.enqueue("k", {}, queue="mail")
    with Storage(dsn) as store:
        assert store.count("job") == 6


async def test_it_holds_within_a_transaction_of_the_callers_and_leaves_it_usable(dsn: str) -> None:
    async with jobq.AsyncClient(dsn, max_ready=1) as client:
        await client.enqueue("k", {}, unique="u")
        client._backpressure._queues.clear()  # type: ignore[union-attr]
        async with await psycopg.AsyncConnection.connect(dsn) as connection:
            with pytest.raises(jobq.QueueFull):
                await client.enqueue("k", {}, tx=connection)
            with pytest.raises(jobq.QueueFull):
                await client.enqueue_many([jobq.NewJob("k", {})], tx=connection)
            await client.enqueue("k", {}, queue="other", tx=connection)
            await connection.commit()
        assert len((await client.list()).jobs) == 2


@pytest.mark.parametrize("limit", [0, -1, 1_000_001, True, "5", {"q": 0}, {"": 5}, {"q": "5"}])
def test_a_limit_that_cannot_be_is_named(limit: Any) -> None:
    with pytest.raises(jobq.ConfigError, match=r"max_ready|queue"):
        jobq.Client("host=nowhere", max_ready=limit)


def test_counting_reads_the_queues_own_entries(dsn: str) -> None:
    with Storage(dsn, plan_settings=False) as store:
        store.sql("alter table jobq.ready set (autovacuum_enabled = off)")
        store.sql("analyze jobq.ready")
        store.enqueue(5000, queue="other")
        store.enqueue(5, queue="q")
        operation = Backpressure(SCHEMA, 10)._count("q", 10)
        assert whole_scans(explain(store, next(operation))) == []
        operation.close()


def test_it_costs_little(dsn: str) -> None:
    """A call that need not count is a few microseconds dearer; measured against one that is not limited."""
    pressure = Backpressure(SCHEMA, 1000)
    drive(pressure.guarded([DEFAULTS], enqueue()), 0)
    started = time.perf_counter()
    for _ in range(1000):
        pressure.guarded([DEFAULTS], enqueue()).close()
    assert time.perf_counter() - started < 0.2  # 200 µs each would be a fault, whatever the machine does
