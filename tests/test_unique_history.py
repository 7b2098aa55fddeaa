"""Unique keys whose rows come and go while others still look at how they were."""

from __future__ import annotations

import contextlib
import random
import string
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

import jobq
from jobq._kinds.unique import unique_key
from jobq._statements import keys
from jobq._statements.keys import FIRST_KEY, forget_keys, look_at_keys
from jobq._statements.leader import Term, elect
from jobq._statements.retention import Rule, Walk, remove_finished
from tests.support.storage import SCHEMA, Storage, in_background
from tests.support.unique import W, run_one

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY: Final = "u"
BY_SQL: Final = "select inserted from jobq.enqueue('k', unique_key => 'u')"
LIVE: Final = "select id from jobq.jobs where unique_key = 'u' and state in ('ready', 'scheduled', 'running')"
EVERY: Final = Walk(Rule(0.0, ("completed", "cancelled", "discarded"), (), ()))


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        store.worker(W)
        yield store


@pytest.fixture
def term(store: Storage) -> Term:
    term = store.run(elect(SCHEMA, W, "w", 600.0))
    assert term is not None
    return term


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


@contextlib.contextmanager
def looking_back(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that sees what there is now, whatever happens in the block."""
    with psycopg.connect(dsn) as connection:
        look_back(connection)
        yield connection


def look_back(connection: psycopg.Connection[Any], *, from_now_on: bool = True) -> None:
    """Let a connection's next transaction see what there is now, or what there is when it is used."""
    connection.rollback()
    connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    if from_now_on:
        connection.execute("select from jobq.job")


def make_and_end(client: jobq.Client, key: str = KEY) -> int:
    job_id = client.enqueue("k", {}, unique=key).id
    client.cancel(job_id)
    return job_id


def remove_all_that_ended(store: Storage, term: Term) -> int:
    store.sql("update jobq.finished set finished_at = '2020-01-01'")
    return store.run(remove_finished(SCHEMA, term, EVERY)).jobs


def retry(client: jobq.Client, store: Storage, term: Term) -> None:
    client.retry(make_and_end(client))


def delete(client: jobq.Client, store: Storage, term: Term) -> None:
    before = make_and_end(client)
    client.enqueue("k", {}, unique=KEY)
    client.delete(before)
    store.walk_keys(term)


def remove(client: jobq.Client, store: Storage, term: Term) -> None:
    make_and_end(client)
    make_and_end(client)
    client.enqueue("k", {}, unique=KEY)
    assert remove_all_that_ended(store, term) > 1


WAYS: Final = {"retry": retry, "delete": delete, "retention": remove}


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("way", WAYS)
def test_who_saw_a_key_before_it_was_taken_cannot_have_it_beside_the_one_that_has_it_now(
    dsn: str, client: jobq.Client, store: Storage, term: Term, way: str, used: bool
) -> None:
    if used:
        make_and_end(client)
    with looking_back(dsn) as other, looking_back(dsn) as third:
        WAYS[way](client, store, term)
        with pytest.raises(jobq.DatabaseError, match="40001"):
            client.enqueue("k", {}, unique=KEY, tx=other)
        with pytest.raises(psycopg.errors.SerializationFailure):
            third.execute(BY_SQL)
    [(holder,)] = store.sql(LIVE)
    assert client.enqueue("k", {}, unique=KEY) == jobq.Enqueued(holder, inserted=False)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_waited_for_one_key_looks_again_at_the_others(
    dsn: str, client: jobq.Client, store: Storage, term: Term, way: str
) -> None:
    """Its statement sees the keys as they were when it began."""
    first = next(name for name in string.ascii_letters if unique_key(name) < unique_key(KEY))
    make_and_end(client)
    both = [jobq.NewJob("k", {}, unique=first), jobq.NewJob("k", {}, unique=KEY)]
    with psycopg.connect(dsn) as other, Storage(dsn) as asking:
        client.enqueue("k", {}, unique=first, tx=other)
        connection = asking.session.connection
        connection.autocommit = False
        waits = in_background(store, asking.pid, lambda: client.enqueue_many(both, tx=connection))
        with waits as answers:
            WAYS[way](client, store, term)
            other.rollback()
        connection.commit()
    [[made, found]] = answers
    [(holder,)] = store.sql(LIVE)
    assert made.inserted
    assert found == jobq.Enqueued(holder, inserted=False)


class History:
    """What happens to one key, one step after the other; some look at it with snapshots of their own."""

    def __init__(self, dsn: str, client: jobq.Client, store: Storage, term: Term, seed: int) -> None:
        self.client, self.store, self.term = client, store, term
        self.rng = random.Random(seed)
        self.others = [psycopg.connect(dsn) for _ in range(4)]
        for other in self.others:
            look_back(other)
        self.made = self.refused = 0

    def close(self) -> None:
        for other in self.others:
            other.close()

    def steps(self) -> list[Callable[[], object]]:
        return [self.enqueue, self.end, self.retry, self.delete, self.remove, self.walk, self.ask, self.ask]

    def enqueue(self) -> None:
        self.client.enqueue("k", {}, unique=KEY)

    def end(self) -> None:
        if self.rng.random() < 0.5:
            with contextlib.suppress(ValueError):  # nothing waits
                run_one(self.store)
        for (job_id,) in self.store.sql(LIVE):
            self.client.cancel(job_id)

    def _any(self) -> list[int]:
        ids = [job_id for (job_id,) in self.store.sql("select job_id from jobq.finished order by job_id")]
        return ids and [self.rng.choice(ids)]

    def retry(self) -> None:
        for job_id in self._any():
            with contextlib.suppress(jobq.UniqueConflict):
                self.client.retry(job_id)

    def delete(self) -> None:
        for job_id in self._any():
            self.client.delete(job_id)

    def remove(self) -> None:
        for job_id in self._any():
            self.store.sql("update jobq.finished set finished_at = '2020-01-01' where job_id = %s", job_id)
        self.store.run(remove_finished(SCHEMA, self.term, EVERY))

    def walk(self) -> None:
        self.store.walk_keys(self.term)

    def ask(self) -> None:
        """Let one that looks back ask for the key, and then look anew."""
        other = self.rng.choice(self.others)
        try:
            if self.rng.random() < 0.5:
                self.made += self.client.enqueue("k", {}, unique=KEY, tx=other).inserted
            else:
                self.made += bool(other.execute(BY_SQL).fetchall()[0][0])
            other.commit()
        except psycopg.errors.SerializationFailure:
            self.refused += 1
        except jobq.DatabaseError as refused:
            assert isinstance(refused.__cause__, psycopg.errors.SerializationFailure)  # noqa: PT017 - need not be
            self.refused += 1
        look_back(other, from_now_on=self.rng.random() < 0.6)

    def run(self, count: int) -> None:
        for _ in range(count):
            self.rng.choice(self.steps())()
            live = self.store.sql(LIVE)
            assert len(live) <= 1, f"two hold one key: {live}"


@contextlib.contextmanager
def history(dsn: str, client: jobq.Client, store: Storage, term: Term, seed: int) -> Iterator[History]:
    told = History(dsn, client, store, term, seed)
    try:
        yield told
    finally:
        told.close()


@pytest.mark.parametrize("seed", range(4))
def test_in_no_order_of_events_two_live_jobs_have_one_key(
    dsn: str, client: jobq.Client, store: Storage, term: Term, seed: int
) -> None:
    with history(dsn, client, store, term, seed) as told:
        told.run(600)
        assert told.made > 2
        assert told.refused > 10
    for (job_id,) in store.sql(LIVE):
        client.cancel(job_id)
    remove_all_that_ended(store, term)
    store.walk_keys(term)
    store.walk_keys(term)
    assert store.count("unique_key") == 0, "nothing of it stays"


BROKEN: Final = {
    "the row before is left as it was": (
        "FORGET", "has_later and before_tid not in", "false and before_tid not in",
    ),
    "the first row goes, too": ("FORGET", "before_tid is not null or not has_later", "true"),
}  # fmt: skip


@pytest.mark.parametrize("how", BROKEN)
def test_without_each_of_the_rules_some_order_gives_one_key_to_two(
    dsn: str, client: jobq.Client, store: Storage, term: Term, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    name, rule, broken = BROKEN[how]
    statement: str = getattr(keys, name)
    assert statement.count(rule) == 1
    monkeypatch.setattr(keys, name, statement.replace(rule, broken))
    with pytest.raises(AssertionError, match="two hold one key"):
        tell_many(dsn, client, store, term)


def tell_many(dsn: str, client: jobq.Client, store: Storage, term: Term) -> None:
    for seed in range(40):
        with history(dsn, client, store, term, seed) as told:
            told.run(300)
        for (job_id,) in store.sql(LIVE):
            client.cancel(job_id)


def test_a_removal_sees_who_came_between_its_look_and_its_lock(
    dsn: str, client: jobq.Client, store: Storage, term: Term, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key's only row when it looked, and not any more when it has it."""
    look = "with stale as materialized ("
    pause = f"with p as materialized (select pg_advisory_xact_lock(77)), {look.removeprefix('with ')}"
    paused = keys.LOCK.replace(look, pause).replace(
        "where coalesce", "where (select count(*) from p) = 1 and coalesce"
    )
    monkeypatch.setattr(keys, "LOCK", paused)
    with looking_back(dsn) as other, Storage(dsn) as watcher:
        client.delete(make_and_end(client))
        stale, _ = store.run(look_at_keys(SCHEMA, FIRST_KEY))
        watcher.sql("select pg_advisory_lock(77)")
        with in_background(
            watcher, store.pid, lambda: store.run(forget_keys(SCHEMA, term, stale))
        ) as removed:
            holder = client.enqueue("k", {}, unique=KEY)
            watcher.sql("select pg_advisory_unlock(77)")
        assert (holder.inserted, removed) == (True, [0])
        with pytest.raises(jobq.DatabaseError, match="40001"):
            client.enqueue("k", {}, unique=KEY, tx=other)
