"""The leader: one at a time, whatever stops, freezes or dies; an old term writes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, cast

import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import jobq
from jobq._errors import DatabaseError
from jobq._operation import Call, Operation, in_schema
from jobq._statements.leader import LED, Deposed, Term, elect, led, renew_term, resign
from jobq._worker.leader import Leader
from jobq._worker.lease import Identity
from jobq._worker.link import Link
from tests.support.inprocess import working
from tests.support.polling import eventually, eventually_async
from tests.support.storage import SCHEMA, Storage, hold, in_background
from tests.support.workers import ROOT, Site

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from jobq._worker.leader import Duty
    from jobq._worker.lease import Lease
    from tests.conftest import SpawnPython
    from tests.support.proxy import TcpProxy
    from tests.support.workers import WorkerProcess

LEASE_S: Final = 600.0


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        yield store


@pytest.fixture
def site(dsn: str, spawn_python: SpawnPython, tmp_path: Path) -> Site:
    return Site(spawn_python, dsn, tmp_path)


def write(term: Term, text: str = "written") -> Operation[int]:
    """Write as a leader does; return how many rows that changed."""
    rows = yield Call(
        in_schema(
            f"with {LED} insert into {{schema}}.operator_log (actor, action, target)"
            " select 'leader', $3::text, '{}' from led returning id",
            SCHEMA,
        ),
        (*term, text),
    )
    return len(rows)


def elected(store: Storage, worker_id: int, lease_s: float = LEASE_S) -> Term | None:
    return store.run(elect(SCHEMA, worker_id, f"w{worker_id}", lease_s))


def end_term(store: Storage) -> None:
    """Let the lease of whoever leads run out."""
    store.sql("update jobq.leader set lease_until = clock_timestamp()")


# -- elections -----------------------------------------------------------------------------------------


def test_one_leads_and_the_others_wait(store: Storage) -> None:
    store.worker(1)
    store.worker(2)
    assert elected(store, 1) == Term(1, 1)
    assert elected(store, 2) is None
    assert elected(store, 1) is None, "one term is enough"
    assert store.sql("select term, worker_id, worker from jobq.leader") == [(1, 1, "w1")]


def test_a_term_grows_with_each_election(store: Storage) -> None:
    store.worker(1)
    store.worker(2)
    terms = []
    for worker_id in (1, 2, 2, 1):
        term = elected(store, worker_id)
        assert term is not None
        terms.append(term)
        assert store.run(resign(SCHEMA, term))
    assert terms == [Term(1, 1), Term(2, 2), Term(2, 3), Term(1, 4)]


def test_a_lease_that_ran_out_is_not_renewed_any_more(store: Storage) -> None:
    store.worker(1)
    term = elected(store, 1)
    assert term is not None
    assert store.run(renew_term(SCHEMA, term, LEASE_S))
    end_term(store)
    assert not store.run(renew_term(SCHEMA, term, LEASE_S))
    assert elected(store, 1) == Term(1, 2)


def test_who_has_ended_can_neither_be_elected_nor_stay(store: Storage) -> None:
    store.worker(1)
    store.worker(2)
    assert elected(store, 1)
    store.end_lease(1)
    assert elected(store, 1) is None
    assert elected(store, 2) == Term(2, 2)
    store.end_lease(2)
    assert elected(store, 3) is None, "nobody knows that one"


def test_a_term_that_ends_later_than_a_lease_from_now_is_over(store: Storage) -> None:
    """Its leader renewed it before the clock was set back, and may be gone."""
    store.worker(1)  # with a lease as long as that of its terms
    store.worker(2)
    term = elected(store, 1)
    assert term is not None
    store.sql("update jobq.leader set lease_until = lease_until + interval '1 hour'")
    assert elected(store, 2) == Term(2, 2)
    assert not store.run(renew_term(SCHEMA, term, LEASE_S))
    assert store.run(renew_term(SCHEMA, Term(2, 2), LEASE_S))
    assert elected(store, 1) is None


def test_resigning_an_old_term_unseats_nobody(store: Storage) -> None:
    store.worker(1)
    store.worker(2)
    old = elected(store, 1)
    assert old is not None
    end_term(store)
    new = elected(store, 2)
    assert new is not None
    assert not store.run(resign(SCHEMA, old))
    assert store.run(write(new)) == 1


def test_of_many_candidates_at_once_one_is_elected(dsn: str) -> None:
    stores = [Storage(dsn) for _ in range(8)]
    try:
        for number, store in enumerate(stores, 1):
            store.worker(number)
        with ThreadPoolExecutor(len(stores)) as pool:
            for turn in range(1, 21):
                terms = [t for t in pool.map(lambda n: elected(stores[n - 1], n), range(1, 9)) if t]
                assert [term.number for term in terms] == [turn]
                end_term(stores[0])
    finally:
        for store in stores:
            store.session.close()


# -- what an old term writes ---------------------------------------------------------------------------


def test_a_write_that_was_decided_before_an_election_changes_nothing_after_it(store: Storage) -> None:
    store.worker(1)
    store.worker(2)
    old = elected(store, 1)
    assert old is not None
    late = hold(write(old, "late"))
    end_term(store)
    new = elected(store, 2)
    assert new is not None
    assert store.call(late) == []
    assert store.run(write(new)) == 1
    assert store.sql("select action from jobq.operator_log") == [("written",)]


def test_a_lease_that_ran_out_without_a_successor_writes_nothing_either(store: Storage) -> None:
    store.worker(1)
    term = elected(store, 1)
    assert term is not None
    end_term(store)
    assert store.run(write(term)) == 0
    with pytest.raises(Deposed):
        store.run(led(SCHEMA, term, write(term)))


def test_no_write_is_overtaken_in_its_middle(store: Storage) -> None:
    """While a leader's statement runs, nobody is elected, however long ago its lease ended."""
    store.worker(1)
    store.worker(2)
    old = elected(store, 1)
    assert old is not None
    with Storage(store.dsn) as writing, Storage(store.dsn) as blocking:
        blocking.sql("begin")
        blocking.sql("lock table jobq.operator_log in exclusive mode")
        with in_background(store, writing.pid, lambda: writing.run(led(SCHEMA, old, write(old)))) as wrote:
            end_term(store)  # changes no key, so it waits for nobody
            assert elected(store, 2) is None
            blocking.sql("commit")
        assert wrote == [0], "its term was over when it wrote"
    assert elected(store, 2) == Term(2, 2)


def test_a_write_whose_snapshot_is_older_than_the_election_sees_it_all_the_same(store: Storage) -> None:
    """The statement has begun, and waits before it comes to the leader's row; then somebody is elected."""
    store.worker(1)
    store.worker(2)
    old = elected(store, 1)
    assert old is not None
    slow = (
        f"with gate as materialized (select pg_advisory_lock(7)), {LED}"
        " insert into {schema}.operator_log (actor, action, target)"
        " select 'l', 'late', '{}' from gate, led returning id"
    )
    with Storage(store.dsn) as writing, Storage(store.dsn) as electing:
        electing.sql("select pg_advisory_lock(7)")
        call = Call(in_schema(slow, SCHEMA), old)
        with in_background(store, writing.pid, lambda: writing.call(call)) as wrote:
            end_term(store)
            assert elected(electing, 2) == Term(2, 2)
            electing.sql("select pg_advisory_unlock(7)")
        assert wrote == [[]]


def test_a_leader_that_freezes_in_its_transaction_does_not_keep_the_row(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._statements.leader._LONGEST_IDLE_S", 0.5)
    store.worker(1)
    store.worker(2)
    old = elected(store, 1)
    assert old is not None
    with Storage(store.dsn) as frozen:
        operation = led(SCHEMA, old, write(old))
        call, began = next(operation), False
        while "for key share" not in call.sql:
            call = operation.send(frozen.call(call) if began else frozen.sql(call.sql))
            began = True
        assert frozen.session.connection.execute_call(call) == [(1,)]
        end_term(store)
        assert elected(store, 2) is None
        eventually(lambda: elected(store, 2), 5.0, what="the server ends its session")


def test_a_renewal_waits_for_no_write(store: Storage) -> None:
    store.worker(1)
    term = elected(store, 1)
    assert term is not None
    with Storage(store.dsn) as writing:
        writing.sql("begin")
        assert writing.run(write(term)) == 1
        store.sql("set lock_timeout = '2s'")
        assert store.run(renew_term(SCHEMA, term, LEASE_S))
        writing.sql("commit")


def test_a_leaders_transaction_is_whole_or_nothing(store: Storage) -> None:
    store.worker(1)
    term = elected(store, 1)
    assert term is not None

    limit = "select current_setting('idle_in_transaction_session_timeout')"
    before = store.value(limit)

    def write_and_fail() -> Operation[None]:
        yield from write(term)
        yield Call("select 1 / 0")

    with pytest.raises(DatabaseError):
        store.run(led(SCHEMA, term, write_and_fail()))
    assert store.count("operator_log") == 0
    assert store.run(led(SCHEMA, term, write(term))) == 1
    assert store.value(limit) == before, "the limit ends with the transaction"


class Terms(RuleBasedStateMachine):
    """Candidates that are elected, renew, resign, decide to write and write later, in any order."""

    CANDIDATES: Final = (1, 2, 3)
    guarded = True
    dsn: str

    def __init__(self) -> None:
        super().__init__()
        self.store = Storage(self.dsn)
        self.store.sql("truncate jobq.worker, jobq.operator_log")
        self.store.sql("update jobq.leader set term = 0, worker_id = null, lease_until = '-infinity'")
        for candidate in self.CANDIDATES:
            self.store.worker(candidate)
        self.terms: dict[int, Term] = {}  # what each believes
        self.leader: Term | None = None  # what is so
        self.number = 0
        self.decided: list[tuple[Term, Call]] = []
        self.written = 0

    def teardown(self) -> None:
        self.store.session.close()

    @rule(candidate=st.sampled_from(CANDIDATES))
    def stand(self, candidate: int) -> None:
        term = elected(self.store, candidate)
        assert (term is not None) == (self.leader is None)
        if term is not None:
            self.number += 1
            assert term == Term(candidate, self.number)
            self.leader = self.terms[candidate] = term

    @rule(candidate=st.sampled_from(CANDIDATES))
    def renew(self, candidate: int) -> None:
        if term := self.terms.get(candidate):
            assert self.store.run(renew_term(SCHEMA, term, LEASE_S)) == (term == self.leader)

    @rule(candidate=st.sampled_from(CANDIDATES))
    def resign(self, candidate: int) -> None:
        if term := self.terms.get(candidate):
            self.store.run(resign(SCHEMA, term))
            self.leader = None if term == self.leader else self.leader

    @rule()
    def run_out(self) -> None:
        end_term(self.store)
        self.leader = None

    @rule(candidate=st.sampled_from(CANDIDATES))
    def decide(self, candidate: int) -> None:
        if term := self.terms.get(candidate):
            call = hold(write(term))
            if not self.guarded:
                call = Call(call.sql.replace("and lease_until > clock_timestamp()", "or true"), call.params)
            self.decided.append((term, call))

    @precondition(lambda self: self.decided)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        term, call = self.decided.pop(data.draw(st.integers(0, len(self.decided) - 1)))
        wrote = len(self.store.call(call))
        assert wrote == (term == self.leader), f"{term} wrote while {self.leader} led"
        self.written += wrote

    @invariant()
    def only_leaders_have_written(self) -> None:
        assert self.store.count("operator_log") == self.written


def run_terms(dsn: str, *, guarded: bool) -> None:
    machine = type("Machine", (Terms,), {"dsn": dsn, "guarded": guarded})
    chosen = settings(max_examples=30, stateful_step_count=30, deadline=None, database=None)
    if not guarded:  # the first that is found will do
        chosen = settings(chosen, max_examples=500, phases=[Phase.generate], report_multiple_bugs=False)
    run_state_machine_as_test(machine, settings=chosen)


def test_in_any_order_only_the_leader_of_the_moment_writes(dsn: str) -> None:
    run_terms(dsn, guarded=True)


def test_writes_without_their_term_are_caught_by_that_test(dsn: str) -> None:
    with pytest.raises(AssertionError, match="wrote while"):
        run_terms(dsn, guarded=False)


# -- the loop --------------------------------------------------------------------------------------------


class FakeLease:
    """An identity of the process that a test changes."""

    def __init__(self, worker_id: int | None) -> None:
        self.worker_id = worker_id

    @property
    def current(self) -> Identity | None:
        return None if self.worker_id is None else Identity(self.worker_id, time.monotonic() + 60.0)


class FakeDuty:
    """Counts its passes, and fails in those that it is told to."""

    interval_s = 0.01

    def __init__(self, name: str, failing: Sequence[int] = (), error: Exception | None = None) -> None:
        self.name = name
        self.passes: list[Term] = []
        self._failing = failing
        self._error = error or DatabaseError("refused")

    async def run_once(self, term: Term) -> float | None:
        self.passes.append(term)
        if len(self.passes) in self._failing:
            raise self._error
        return None


@contextlib.asynccontextmanager
async def leading(dsn: str, lease: FakeLease, *duties: Duty, lease_s: float = 3.0) -> AsyncIterator[Leader]:
    """Run a leader's loop for the block."""
    link, own = (Link(dsn, SCHEMA, name, 5.0) for name in ("test", "test leader"))
    config = jobq.WorkerConfig(lease=timedelta(seconds=lease_s), heartbeat=timedelta(seconds=lease_s / 5))
    leader = Leader(link, own, SCHEMA, config, cast("Lease", lease), "w", duties)
    running = asyncio.create_task(leader.run())
    try:
        yield leader
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.gather(link.close(), own.close())


async def test_s59_a_duty_that_fails_is_tried_again_and_the_others_go_on(
    store: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jobq._worker.leader._FIRST_RETRY_S", 0.2)
    store.worker(1)
    bad, good = FakeDuty("bad", failing=[1]), FakeDuty("good")
    async with leading(store.dsn, FakeLease(1), bad, good):
        await eventually_async(lambda: len(good.passes) >= 3)
        assert len(bad.passes) == 1, "it waits before it tries again"
        await eventually_async(lambda: len(bad.passes) >= 3)
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.levelname for line in lines] == ["ERROR", "WARNING"]
    assert "duty 'bad' failed" in lines[0].getMessage()
    assert "jobqctl doctor" in lines[0].getMessage()
    assert "succeeds again after 1 failures" in lines[1].getMessage()


async def test_a_duty_that_cannot_reach_the_database_leaves_it_to_others_to_say_so(
    store: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jobq._worker.leader._FIRST_RETRY_S", 0.01)
    caplog.set_level(logging.DEBUG, "jobq")
    store.worker(1)
    away = jobq.DatabaseUnavailable("no route")
    bad, good = FakeDuty("bad", range(1, 4), away), FakeDuty("good")
    async with leading(store.dsn, FakeLease(1), bad, good, lease_s=600.0):  # no renewal meanwhile
        await eventually_async(lambda: len(bad.passes) >= 4)
    levels = [line.levelname for line in caplog.records if "duty 'bad'" in line.getMessage()]
    assert levels == ["DEBUG"] * 3


async def test_a_duty_that_alone_gets_no_answer_is_told_of(
    store: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jobq._worker.leader._FIRST_RETRY_S", 0.2)
    store.worker(1)
    bad = FakeDuty("bad", range(1, 1000), jobq.DatabaseUnavailable("its statement takes too long"))
    async with leading(store.dsn, FakeLease(1), bad, lease_s=1.0):
        await eventually_async(lambda: "duty 'bad' failed" in caplog.text, what="it is told of")
    [first, *_] = [line for line in caplog.records if "duty 'bad' failed" in line.getMessage()]
    assert first.levelname == "ERROR"


async def test_a_fault_of_ours_in_a_duty_is_logged_with_its_traceback(
    store: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    store.worker(1)
    bad, good = FakeDuty("bad", [1], ZeroDivisionError("ours")), FakeDuty("good")
    async with leading(store.dsn, FakeLease(1), bad, good):
        await eventually_async(lambda: len(bad.passes) >= 2 and len(good.passes) >= 2)
    [line] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.exc_info is not None
    assert line.exc_info[0] is ZeroDivisionError


async def test_a_duty_that_finds_its_term_over_ends_the_reign(store: Storage) -> None:
    store.worker(1)
    other = FakeDuty("other")
    async with leading(store.dsn, FakeLease(1), FakeDuty("deposed", [2], Deposed("over")), other) as leader:
        await eventually_async(lambda: leader.term)
        await eventually_async(lambda: leader.term is None)
        passes = len(other.passes)
        await asyncio.sleep(0.1)
        assert len(other.passes) == passes, "no duty is done without a term"


async def test_a_new_identity_means_a_new_term(store: Storage) -> None:
    store.worker(1)
    store.worker(2)
    lease, duty = FakeLease(1), FakeDuty("duty")
    async with leading(store.dsn, lease, duty):
        await eventually_async(lambda: duty.passes)
        lease.worker_id = None  # for a moment it is not sure who it is
        await eventually_async(lambda: store.value("select lease_until = '-infinity' from jobq.leader"))
        lease.worker_id = 2
        await eventually_async(lambda: duty.passes[-1] == Term(2, 2))


async def test_without_a_connection_for_the_duties_somebody_else_is_elected(
    store: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.worker(1)
    monkeypatch.setattr("jobq._worker.leader._STAND_BACK_S", 0.1)
    closed = Link("host=127.0.0.1 port=1 connect_timeout=1", SCHEMA, "nobody there", 2.0)
    link = Link(store.dsn, SCHEMA, "test", 5.0)
    lease: Any = FakeLease(1)
    leader = Leader(link, closed, SCHEMA, jobq.WorkerConfig(), lease, "w", [])
    running = asyncio.create_task(leader.run())
    await eventually_async(lambda: store.value("select term from jobq.leader") >= 2)
    assert leader.term is None
    assert "without a connection" in caplog.text
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await link.close()


async def test_a_worker_whose_role_may_not_lead_says_so_once(
    store: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("jobq._worker.leader._STAND_BACK_S", 0.02)
    store.worker(1)
    store.sql("alter table jobq.leader rename to gone")
    duty = FakeDuty("duty")
    async with leading(store.dsn, FakeLease(1), duty):
        await asyncio.sleep(0.3)
        lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert [line.startswith("this worker cannot be elected") for line in lines] == [True]
        store.sql("alter table jobq.gone rename to leader")
        await eventually_async(lambda: duty.passes)


# -- workers -----------------------------------------------------------------------------------------------


async def test_a_worker_leads_and_says_so(dsn: str) -> None:
    async with working(dsn, jobq.Jobs()) as bench:
        await eventually_async(lambda: bench.worker.stats().is_leader)
        assert bench.worker.stats().term == 1
        connections = "select 1 from pg_stat_activity where starts_with(application_name, 'jobq leader')"
        assert len(bench.rows(connections)) == 1
        await bench.stop()
        assert bench.rows("select lease_until::text as until from jobq.leader") == [{"until": "-infinity"}]


# What each duty of the leader has to do: there before it is elected, and gone (or made) once it has done it.
LEFT_TO_DO: Final = """
insert into jobq.job (id, kind, args, max_attempts) values (-1, 'old', '{}', 1);
insert into jobq.finished (job_id, state, finished_at, queue, priority, attempt, failures, crashes)
    values (-1, 'completed', '2020-01-01', 'default', 0, 1, 0, 0);
insert into jobq.worker (id, name, host, pid, version, queues, kinds, lease_until, ended_at, end_reason)
    values (1, 'old', 'host', 1, '0', '{}', '{}', '2020-01-01', '2020-01-01', 'stopped');
"""
IS_DONE: Final = {
    "retention": "select not exists (select from jobq.finished where job_id = -1)",
    "trimming": "select not exists (select from jobq.worker where id = 1)",
    "periodic": "select exists (select from jobq.periodic_tick where job_id is not null)",
}


@pytest.mark.parametrize(("table", "failing"), [("retention", "retention"), ("operator_log", "trimming")])
async def test_s59_a_duty_that_fails_as_its_worker_is_elected_is_tried_again_and_the_leader_is_whole(
    store: Storage, caplog: pytest.LogCaptureFixture, table: str, failing: str
) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("beat")
    async def beat(job: jobq.Job, args: None) -> None: ...

    jobs.add_periodic("heart", beat, every=timedelta(seconds=1), run_at_start=True)
    store.sql(LEFT_TO_DO)
    store.sql(f"alter table jobq.{table} rename to gone")
    async with working(store.dsn, jobs) as bench:
        await eventually_async(lambda: f"duty '{failing}' failed" in caplog.text)
        for duty in IS_DONE.keys() - {failing}:
            await eventually_async(lambda duty=duty: store.value(IS_DONE[duty]), what=f"{duty} goes on")  # type: ignore[misc]
        assert not store.value(IS_DONE[failing])
        store.sql(f"alter table jobq.gone rename to {table}")
        await eventually_async(lambda: store.value(IS_DONE[failing]), what="it is tried again")
        await eventually_async(lambda: f"duty '{failing}' succeeds again" in caplog.text)
        ticks = "select count(*) from jobq.periodic_tick where job_id is not null"
        before = store.value(ticks)
        await eventually_async(lambda: store.value(ticks) > before, what="all of them go on")
        assert (bench.worker.stats().is_leader, bench.worker.stats().term) == (True, 1)
    others = [f"duty '{duty}' failed" for duty in IS_DONE.keys() - {failing}]
    assert not any(line in caplog.text for line in others)


async def test_a_worker_that_may_not_lead_never_does(dsn: str) -> None:
    async with working(dsn, jobq.Jobs(), leads=False) as bench:
        await asyncio.sleep(1.2)  # longer than a candidate takes to be elected
        assert not bench.worker.stats().is_leader
        assert bench.worker.stats().term is None
        async with working(dsn, jobq.Jobs()) as other:
            await eventually_async(lambda: other.worker.stats().is_leader)


async def test_a_leader_behind_a_transaction_pooler(pooled_dsn: str, dsn: str) -> None:
    async with working(pooled_dsn, jobq.Jobs()) as bench:
        await eventually_async(lambda: bench.worker.stats().is_leader)
    with psycopg.connect(dsn) as connection:
        until = connection.execute("select term, lease_until::text from jobq.leader").fetchone()
    assert until == (1, "-infinity")


def leader_of(site: Site) -> tuple[int, int]:
    """Return the term, and who leads in it with a live lease; 0 for nobody."""
    [row] = site.sql(
        "select term, case when lease_until > clock_timestamp() then worker_id else 0 end from jobq.leader"
    )
    return row[0], row[1]


def await_leader(site: Site, worker: WorkerProcess, timeout_s: float) -> int:
    """Wait until a worker leads; return the term."""
    eventually(lambda: leader_of(site)[1] in worker.ids, timeout_s, what="it leads")
    return leader_of(site)[0]


def test_a_leader_that_stops_in_order_has_a_successor_within_a_second(site: Site) -> None:
    first = site.start(grace=10.0)
    await_leader(site, first, 3.0)
    second = site.start()
    [job_id] = site.enqueue("gate", gate="open")
    site.await_started([job_id])
    holder = next(w for w in (first, second) if site.notes("start")[0].worker_id in w.ids)
    # It resigns before it waits for its handlers.
    first.process.terminate()
    began = time.monotonic()
    await_leader(site, second, 5.0)
    assert time.monotonic() - began < 1.5  # a second, and the slowness of a busy machine
    assert holder.process.running
    site.open("open")
    assert first.process.wait(10.0) == 0
    assert second.stats()["is_leader"]


def test_a_leader_that_was_killed_has_a_successor_within_its_lease(site: Site) -> None:
    first = site.start()
    await_leader(site, first, 3.0)
    second = site.start()
    first.kill()
    began = time.monotonic()
    term = await_leader(site, second, 6.0)
    assert term == 2
    assert time.monotonic() - began < 2.0 + 1.5  # the lease, a look, and a busy machine


def test_a_frozen_leader_loses_its_term_and_writes_nothing_when_it_wakes(site: Site) -> None:
    first = site.start()
    await_leader(site, first, 3.0)
    second = site.start()
    first.pause()
    await_leader(site, second, 6.0)
    first.resume()
    eventually(lambda: not first.stats()["is_leader"], 5.0, what="it knows")
    term, worker_id = leader_of(site)
    assert (term, worker_id) == (2, second.ids[-1])
    first.stop()
    assert leader_of(site) == (term, worker_id), "who leads no more cannot resign for another"


def test_a_leader_that_nobody_hears_any_more_is_replaced_and_stops_in_time(
    site: Site, proxy: TcpProxy
) -> None:
    first = site.start(dsn=proxy.dsn)
    await_leader(site, first, 3.0)
    second = site.start()
    proxy.silence()
    await_leader(site, second, 6.0)
    began = time.monotonic()
    first.process.terminate()
    assert first.process.wait(10.0) == 0
    assert time.monotonic() - began < 6.0, "the grace of 1 s, and 5 s"
    assert leader_of(site)[1] == second.ids[-1]


def test_a_network_that_comes_back_finds_the_old_leader_knowing_that_it_is_one_no_more(
    site: Site, proxy: TcpProxy
) -> None:
    first = site.start(dsn=proxy.dsn)
    await_leader(site, first, 3.0)
    second = site.start()
    proxy.silence()
    await_leader(site, second, 6.0)
    eventually(lambda: not first.stats()["is_leader"], 5.0, what="its own clock has told it")
    proxy.resume()
    second.stop()
    term = await_leader(site, first, 6.0)
    assert term == 3


FROZEN: Final = """
import os, signal, sys
from jobq._statements.leader import Term, elect
from tests.test_leader import SCHEMA, Storage, elected, write
with Storage(sys.argv[1]) as store:
    store.worker(1)
    decided = write(elected(store, 1, 1.0))
    call = next(decided)
    print("decided", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print("wrote", len(store.call(call)), flush=True)
"""


def test_a_process_that_is_stopped_between_decision_and_write_changes_nothing(
    site: Site, store: Storage, spawn_python: SpawnPython
) -> None:
    process = spawn_python("-c", FROZEN, site.dsn, cwd=ROOT)
    process.wait_for_output("decided")
    store.worker(2)
    eventually(lambda: elected(store, 2), 5.0, what="the lease of the frozen one runs out")
    process.signal(signal.SIGCONT)
    assert process.wait(10.0) == 0
    assert "wrote 0" in process.output
    assert store.count("operator_log") == 0
