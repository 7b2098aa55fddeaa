"""Unique keys while others ask for them at the same time."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

import jobq
from jobq import Unique
from jobq._kinds.jobtype import JobColumns
from jobq._marks import LaneMarks
from jobq._operation import run
from jobq._statements.claim import claim
from jobq._statements.duties import promote
from jobq._statements.enqueue import enqueue_atomically
from jobq._statements.enqueue_unique import MAX_LOCKED_KEYS
from tests.support.polling import eventually
from tests.support.storage import (
    SCHEMA,
    Storage,
    hold,
    in_background,
    is_waiting,
    job_row,
    join_all,
)
from tests.support.unique import (
    FLAVOURS,
    HOUR,
    WAITING,
    W,
    promote_all,
    run_one,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._operation import Call


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        store.worker(W)
        yield store


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


# -- against claims and promotions ----------------------------------------------------------------------


@contextlib.contextmanager
def paused(store: Storage, watcher: Storage, call: Call) -> Iterator[list[Any]]:
    """Send a claim or a promotion that has its snapshot, and waits before it looks at the first row."""
    pause = "with p as materialized (select pg_advisory_xact_lock(77)), s as materialized ("
    sql = call.sql.replace("with s as materialized (", pause)
    sql = sql.replace(" where ", " where (select count(*) from p) = 1 and ", 1)
    watcher.sql("select pg_advisory_lock(77)")
    with in_background(watcher, store.pid, lambda: store.call(call._replace(sql=sql))) as results:
        try:
            yield results
        finally:
            watcher.sql("select pg_advisory_unlock(77)")


def test_a_promotion_that_began_before_a_replacement_does_not_bring_the_job_up_before_its_new_time(
    dsn: str, client: jobq.Client, store: Storage
) -> None:
    unique = Unique("u", on_conflict="replace")
    first = client.enqueue("k", {"n": 1}, unique=unique, delay=HOUR)
    store.sql("update jobq.scheduled set run_at = now() - interval '1 second'")
    with Storage(dsn) as promoter, paused(promoter, store, hold(promote(SCHEMA, None, 10, notify=False))):
        assert client.enqueue("k", {"n": 2}, unique=unique, delay=HOUR).replaced
    assert store.place(first.id).table == "scheduled"
    assert client.get(first.id).args == {"n": 2}


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["in place", "to another lane", "to later"])
def test_a_claim_that_began_before_a_replacement_never_starts_the_job_with_what_it_was_before(
    dsn: str, client: jobq.Client, store: Storage, way: str
) -> None:
    unique = Unique("u", on_conflict="replace")
    first = client.enqueue("k", {"n": 1}, unique=unique)
    ways: dict[str, dict[str, Any]] = {
        "in place": {},
        "to another lane": {"priority": 5},
        "to later": {"delay": HOUR},
    }
    with Storage(dsn) as worker:
        with paused(worker, store, hold(claim(SCHEMA, "default", LaneMarks().ranges(), 10, W))) as results:
            assert client.enqueue("k", {"n": 2}, unique=unique, **ways[way]).replaced
        assert results == [[]]
        if way == "to later":
            assert client.get(first.id).state == "scheduled"
            promote_all(store)
        (job,) = worker.claim(W)
    assert (job.job_id, job.args) == (first.id, '{"n": 2}')


@pytest.mark.parametrize(("until", "inserted"), [("finished", False), ("started", True)])
def test_a_claim_that_is_faster_than_a_replacement_keeps_the_job_and_the_key_goes_on(
    dsn: str, client: jobq.Client, store: Storage, until: Any, *, inserted: bool
) -> None:
    unique = Unique("u", until=until, on_conflict="replace")
    first = client.enqueue("k", {"n": 1}, unique=unique)
    with Storage(dsn) as worker, psycopg.connect(dsn) as mine:
        worker.sql("begin")
        (job,) = worker.claim(W)
        with in_background(
            store, mine.info.backend_pid, lambda: client.enqueue("k", {"n": 2}, unique=unique, tx=mine)
        ) as results:
            worker.sql("commit")
        mine.commit()
    assert job.args == '{"n": 1}'
    assert results == [jobq.Enqueued(results[0].id, inserted=inserted)]
    assert (results[0].id != first.id) == inserted


# -- many at once ------------------------------------------------------------------------------------------

INSERTERS: Final = 32


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_of_many_inserters_in_open_transactions_half_of_them_rolled_back_one_holds_the_key(
    dsn: str, client: jobq.Client, db: psycopg.Connection[Any], flavour: str
) -> None:
    committed: list[tuple[int, jobq.Enqueued]] = []
    failures: list[BaseException] = []
    start = threading.Barrier(INSERTERS)

    def insert(n: int) -> None:
        try:
            with psycopg.connect(dsn) as connection:
                start.wait(60)
                made = client.enqueue("k", {"n": n}, unique=FLAVOURS[flavour], tx=connection)
                assert connection.execute("select 1").fetchone() == (1,), "the caller's transaction lives"
                if n % 2:
                    connection.rollback()
                else:
                    connection.commit()
                    committed.append((n, made))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=insert, args=(n,)) for n in range(INSERTERS)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert failures == []
    assert len(committed) == INSERTERS // 2
    ((job_id, args),) = db.execute("select id, args from jobq.jobs").fetchall()
    assert [made.inserted for _, made in committed].count(True) == 1
    assert {made.id for _, made in committed} == {job_id}
    assert {made.replaced for _, made in committed if not made.inserted} == {flavour == "replace"}
    assert args["n"] in [n for n, made in committed if made.inserted or made.replaced]


@pytest.mark.parametrize("flavour", WAITING)
@pytest.mark.parametrize("end_of_holder", ["commit", "rollback"])
def test_nobody_waits_longer_than_the_holders_transaction(
    dsn: str, client: jobq.Client, store: Storage, flavour: str, end_of_holder: str
) -> None:
    """Those who waited are answered all at once, while all their own transactions are still open."""
    answers: list[jobq.Enqueued] = []
    all_answered = threading.Barrier(9, timeout=30)

    def insert(connection: psycopg.Connection[Any]) -> None:
        answers.append(client.enqueue("k", {}, unique=FLAVOURS[flavour], tx=connection))
        if end_of_holder == "commit":
            all_answered.wait()
        connection.commit()

    with psycopg.connect(dsn) as holder:
        held = client.enqueue("k", {}, unique=FLAVOURS[flavour], tx=holder)
        waiting = [psycopg.connect(dsn) for _ in range(8)]
        threads = [threading.Thread(target=insert, args=(connection,)) for connection in waiting]
        for thread in threads:
            thread.start()
        for connection in waiting:
            pid = connection.info.backend_pid
            eventually(functools.partial(is_waiting, store, pid), what="it waits for the holder")
        getattr(holder, end_of_holder)()
        if end_of_holder == "commit":
            all_answered.wait()
        join_all(threads, 30)
        for connection in waiting:
            connection.close()
    if end_of_holder == "commit":
        assert answers == [jobq.Enqueued(held.id, inserted=False)] * 8
    else:
        assert [answer.inserted for answer in answers].count(True) == 1
        assert len({answer.id for answer in answers}) == 1


def test_a_key_of_a_slot_that_passed_while_its_holder_was_open_is_taken_by_who_waited(
    dsn: str, client: jobq.Client, store: Storage
) -> None:
    unique = Unique("k", period=timedelta(seconds=1))
    with psycopg.connect(dsn) as holder, psycopg.connect(dsn) as mine:
        held = client.enqueue("k", {}, unique=unique, tx=holder)
        pid = mine.info.backend_pid
        with in_background(store, pid, lambda: client.enqueue("k", {}, unique=unique, tx=mine)) as results:
            over = "select bool_and(held_until <= clock_timestamp()) from jobq.unique_key"
            eventually(lambda: (holder.execute(over).fetchone() or (False,))[0], what="the slot passes")
            holder.commit()
        mine.commit()
    assert results[0].inserted
    assert results[0].id != held.id


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_with_a_snapshot_of_its_own_a_transaction_gets_a_right_answer_or_a_serialization_failure(
    dsn: str, client: jobq.Client, flavour: str, level: str
) -> None:
    unique = FLAVOURS[flavour]
    with psycopg.connect(dsn) as connection:
        connection.execute(f"set default_transaction_isolation = '{level}'".encode())
        connection.commit()
        connection.execute("select from jobq.job")
        first = client.enqueue("k", {"n": 1}, unique=unique)
        with pytest.raises(jobq.DatabaseError, match="40001"):
            client.enqueue("k", {"n": 2}, unique=unique, tx=connection)
        connection.rollback()
        again = client.enqueue("k", {"n": 2}, unique=unique, tx=connection)
        assert again == jobq.Enqueued(first.id, inserted=False, replaced=flavour == "replace")
        connection.commit()
        connection.execute("select from jobq.job")
        client.cancel(first.id)
        if flavour == "replace":
            with pytest.raises(jobq.DatabaseError, match="40001"):
                client.enqueue("k", {"n": 3}, unique=unique, tx=connection)
        else:  # in its snapshot the job waits: what it is told was true then
            assert client.enqueue("k", {"n": 3}, unique=unique, tx=connection).id == first.id


def test_a_row_that_is_counted_from_cannot_be_removed_and_one_that_is_gone_is_not_counted_from(
    dsn: str, client: jobq.Client, store: Storage, db: psycopg.Connection[Any]
) -> None:
    """Two who each count from another row would both hold the key."""
    remove = (
        "delete from jobq.unique_key where ctid = any (array(select ctid from jobq.unique_key for update {}))"
    )
    client.enqueue("k", {}, unique="u")
    run_one(store)
    with psycopg.connect(dsn) as mine:
        second = client.enqueue("k", {}, unique="u", tx=mine)
        assert db.execute(remove.format("skip locked").encode()).rowcount == 0
        mine.commit()
    run_one(store)
    with psycopg.connect(dsn) as cleaner, psycopg.connect(dsn) as mine:
        cleaner.execute(remove.format("").encode())
        pid = mine.info.backend_pid
        with in_background(store, pid, lambda: client.enqueue("k", {}, unique="u", tx=mine)) as results:
            cleaner.commit()
        mine.commit()
    assert results[0].inserted
    rows = db.execute("select generation, job_id from jobq.unique_key").fetchall()
    assert rows == [(1, results[0].id)]
    assert client.enqueue("k", {}, unique="u") == jobq.Enqueued(results[0].id, inserted=False)
    assert second.inserted


def test_many_who_replace_one_job_take_turns_and_none_of_them_gives_up(dsn: str, client: jobq.Client) -> None:
    """Each time one of them moves the job, all others find that it has moved."""
    turns, crowd = 5, 20
    first = client.enqueue("k", {}, unique="u", delay=HOUR)
    answers: list[jobq.Enqueued] = []
    failures: list[BaseException] = []

    def replace(n: int) -> None:
        unique = Unique("u", on_conflict="replace")
        try:
            with psycopg.connect(dsn) as connection:
                for turn in range(turns):
                    delay = HOUR if (n + turn) % 2 else None
                    answers.append(client.enqueue("k", {"n": n}, unique=unique, delay=delay, tx=connection))
                    connection.commit()
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=replace, args=(n,)) for n in range(crowd)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert failures == []
    assert answers == [jobq.Enqueued(first.id, inserted=False, replaced=True)] * turns * crowd


def test_large_calls_that_replace_the_same_jobs_in_opposite_orders_all_succeed(
    dsn: str, client: jobq.Client, store: Storage
) -> None:
    """They take no locks by name, and one that the server ends for a deadlock is done again."""
    unique = {n: Unique(f"{n}", on_conflict="replace") for n in range(2 * MAX_LOCKED_KEYS)}
    orders = [list(unique), list(unique)[::-1]]
    failures: list[BaseException] = []
    replaced = Counter[int]()

    def replace(which: int) -> None:
        try:
            for turn in range(4):
                delay = HOUR if turn % 2 else None
                new = [
                    jobq.NewJob("k", {"by": which}, unique=unique[n], delay=delay) for n in orders[which % 2]
                ]
                replaced[which] += sum(made.replaced or made.inserted for made in client.enqueue_many(new))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    threads = [threading.Thread(target=replace, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    assert failures == []
    assert set(replaced.values()) == {4 * len(unique)}
    assert {len(places) for places in store.places().values()} == {1}


@pytest.mark.parametrize("times", [1, 4, 5])
def test_a_call_of_our_own_that_the_server_ends_for_a_deadlock_is_done_again_five_times_in_all(
    times: int,
) -> None:
    sent: list[str] = []

    def execute(call: Call) -> list[tuple[Any, ...]]:
        sent.append(call.sql.split()[0])
        if sent[-1] == "with":
            if sent.count("with") <= times:
                raise jobq.DatabaseError("deadlock detected") from psycopg.errors.DeadlockDetected()
            return [(7, True, None, 1, False, 0)]
        return []

    operation = enqueue_atomically(SCHEMA, JobColumns.of([job_row(unique_key=bytes(16))]), notify=False)
    if times < 5:
        assert run(operation, execute) == [jobq.Enqueued(7, inserted=True)]
    else:
        with pytest.raises(jobq.DatabaseError, match="deadlock"):
            run(operation, execute)
    assert sent == ["begin", "with", "rollback"] * times + ["begin", "with", "commit"] * (times < 5)


def test_any_other_error_of_the_server_ends_the_call() -> None:
    sent: list[str] = []

    def execute(call: Call) -> list[tuple[Any, ...]]:
        sent.append(call.sql.split()[0])
        if sent[-1] == "with":
            raise jobq.DatabaseError("no") from psycopg.errors.InsufficientPrivilege()
        return []

    with pytest.raises(jobq.DatabaseError, match="no"):
        run(enqueue_atomically(SCHEMA, JobColumns.of([job_row(unique_key=bytes(16))]), notify=False), execute)
    assert sent == ["begin", "with", "rollback"]


# -- all of it at once ---------------------------------------------------------------------------------------


class Fray:
    """Threads that enqueue, replace, claim, promote, cancel and retry the same few keys."""

    KEYS: Final = 6
    DURATION_S: Final = 5.0

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.until = time.monotonic() + self.DURATION_S
        self.failures: list[BaseException] = []
        self.counts: Counter[str] = Counter()
        self.last_given: dict[int, int] = {}  # to a job, what its only producer gave it last
        self.started_with: dict[int, int] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        bodies = [functools.partial(self._produce, n) for n in range(3)]
        others = [self._claim, self._claim, self._promote, self._disturb, self._opposing, self._opposing]
        threads = [threading.Thread(target=self._body, args=(body,)) for body in (*bodies, *others)]
        for thread in threads:
            thread.start()
        join_all(threads, self.DURATION_S + 30)
        if self.failures:
            raise self.failures[0]

    def _body(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - a deadlock too: raised in the test's own thread
            self.failures.append(error)

    def _steps(self) -> Iterator[int]:
        n = 0
        while time.monotonic() < self.until and not self.failures:
            n += 1
            yield n

    def _produce(self, producer: int) -> None:
        """Make and replace jobs of keys that nobody else asks for: the order of the calls is known."""
        rng = random.Random(producer)
        with jobq.Client(self.dsn) as client:
            for n in self._steps():
                keys = rng.sample(range(self.KEYS), rng.randint(1, self.KEYS))
                new = [self._new(f"{producer}-{key}", n, rng) for key in keys]
                for made in client.enqueue_many(new):
                    assert made.inserted or made.replaced, "with until='started', what is enqueued will run"
                    self.last_given[made.id] = n
                    self.counts["replaced" if made.replaced else "inserted"] += 1

    @property
    def deadlocks(self) -> int:
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(
                "select deadlocks from pg_stat_database where datname = current_database()"
            ).fetchone()
        assert row is not None
        return int(row[0])

    def _opposing(self) -> None:
        """Make and replace jobs of keys that others ask for too, in whatever order."""
        rng = random.Random()
        with jobq.Client(self.dsn) as client:
            for n in self._steps():
                keys = rng.sample(range(self.KEYS), self.KEYS)
                made = client.enqueue_many([self._new(f"shared-{key}", -n, rng) for key in keys])
                self.counts["opposing"] += sum(one.replaced for one in made)

    def _new(self, key: str, n: int, rng: random.Random) -> jobq.NewJob:
        unique = Unique(key, until="started", on_conflict="replace")
        delay = rng.choice([None, None, timedelta(milliseconds=5)])
        return jobq.NewJob("k", {"n": n}, unique=unique, delay=delay, priority=rng.choice([0, 0, 1]))

    def _claim(self) -> None:
        with Storage(self.dsn) as store:
            for _ in self._steps():
                for job in store.claim(W, 3):
                    assert job.args is not None
                    with self._lock:
                        self.started_with[job.job_id] = json.loads(job.args)["n"]
                    self.counts["started"] += 1

    def _promote(self) -> None:
        with Storage(self.dsn) as store:
            for _ in self._steps():
                self.counts["promoted"] += store.run(promote(SCHEMA, None, 10, notify=False)).jobs

    def _disturb(self) -> None:
        """Cancel and retry jobs of the shared keys, which takes locks of both sorts."""
        with jobq.Client(self.dsn) as client, Storage(self.dsn) as store:
            for _ in self._steps():
                for (job_id,) in store.sql(
                    "select id from jobq.jobs where unique_key like 'shared%%' and attempt = 0"
                    " and state in ('ready', 'scheduled') limit 1"
                ):
                    with contextlib.suppress(jobq.JobConflict):
                        client.cancel(job_id)
                        client.retry(job_id)
                        self.counts["retried"] += 1


@pytest.mark.matrix
def test_replacing_in_opposing_orders_loses_no_job_and_starts_none_with_old_arguments(
    dsn: str, store: Storage
) -> None:
    fray = Fray(dsn)
    fray.run()
    assert fray.deadlocks == 0
    assert min(fray.counts[what] for what in ("replaced", "inserted", "opposing", "started", "promoted")) > 0
    assert fray.counts["retried"] > 0
    promote_all(store)
    for job in store.claim(W, 10_000):
        assert job.args is not None
        fray.started_with[job.job_id] = json.loads(job.args)["n"]
    assert {job_id: fray.started_with.get(job_id) for job_id in fray.last_given} == fray.last_given
    assert {len(places) for places in store.places().values()} == {1}
