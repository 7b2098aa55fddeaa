"""Unique keys: who holds a key and for how long, and what a second job with it does."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

import jobq
from jobq import Unique
from jobq._statements.duties import end, rescue
from jobq._statements.leader import elect
from jobq._statements.outcomes import complete, settle
from tests.support.inprocess import working
from tests.support.storage import (
    BOOM,
    SCHEMA,
    Storage,
    in_background,
    settlement,
)
from tests.support.unique import (
    AGE,
    FLAVOURS,
    HOUR,
    W,
    claim_one,
    fail,
    promote_all,
    run_one,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Order:
    customer_id: int
    note: str = ""


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        store.worker(W)
        yield store


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


# -- for how long a key is held ----------------------------------------------------------------------


def let_slots_pass(db: psycopg.Connection[Any]) -> None:
    db.execute("update jobq.unique_key set held_until = statement_timestamp() where held_until is not null")


@pytest.mark.matrix
def test_a_key_of_a_period_is_held_for_its_slot_whatever_becomes_of_the_job(
    client: jobq.Client, store: Storage, db: psycopg.Connection[Any]
) -> None:
    unique = Unique("k", period=AGE)
    first = client.enqueue("k", {}, unique=unique)
    held = jobq.Enqueued(first.id, inserted=False)
    assert client.enqueue("k", {}, unique=unique) == held
    run_one(store)
    assert client.enqueue("k", {}, unique=unique) == held, "completed"
    assert client.enqueue("k", {}, unique="k") == held, "whoever asks"
    assert db.execute("select * from jobq.enqueue('k', '{}', unique_key => 'k')").fetchone() == (
        first.id,
        False,
    )
    let_slots_pass(db)
    second = client.enqueue("k", {}, unique=unique)
    assert second.inserted
    let_slots_pass(db)
    assert client.enqueue("k", {}, unique=unique).inserted, "its job still waits, and has its slot behind it"


@pytest.mark.matrix
def test_a_slot_from_before_the_clock_was_set_back_holds_no_key(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    unique = Unique("k", period=HOUR)
    first = client.enqueue("k", {}, unique=unique)
    later = "update jobq.unique_key set held_until = held_until + interval '1 day'"
    made_later = "update jobq.job set created_at = created_at + interval '1 day' where id = %s"
    db.execute(later)
    assert not client.enqueue("k", {}, unique=unique).inserted, "it may be a slot of a longer period"
    db.execute(made_later, [first.id])
    second = client.enqueue("k", {}, unique=unique)
    assert second.inserted
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(second.id, inserted=False)
    db.execute(later)
    db.execute(made_later, [second.id])
    made = db.execute("select inserted from jobq.enqueue('k', '{}', unique_key => 'k')").fetchone()
    assert made == (True,)


@pytest.mark.parametrize(
    "period", [HOUR, timedelta(seconds=1), timedelta(seconds=1.5), timedelta(days=7), timedelta(days=36_525)]
)
def test_slots_are_aligned_to_the_epoch_on_the_databases_clock(
    client: jobq.Client, db: psycopg.Connection[Any], period: timedelta
) -> None:
    client.enqueue("k", {}, unique=Unique("k", period=period))
    row = db.execute("select held_until, now() from jobq.unique_key").fetchone()
    assert row is not None
    slot_end, now = row
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert (slot_end - epoch) % period == timedelta(0)
    assert timedelta(0) < slot_end - now + HOUR  # the clock went on after the enqueue
    assert slot_end - now <= period


@pytest.mark.matrix
def test_a_key_until_the_start_is_free_from_the_first_claim_on(
    client: jobq.Client, store: Storage, db: psycopg.Connection[Any]
) -> None:
    unique = Unique("k", until="started")
    first = client.enqueue("k", {}, unique=unique, delay=HOUR)
    held = jobq.Enqueued(first.id, inserted=False)
    assert client.enqueue("k", {}, unique=unique) == held, "scheduled"
    promote_all(store)
    assert client.enqueue("k", {}, unique=unique) == held, "ready"
    assert db.execute("select * from jobq.enqueue('k', '{}', unique_key => 'k')").fetchone() == (
        first.id,
        False,
    )
    running = claim_one(store)
    second = client.enqueue("k", {}, unique=unique)
    assert second.inserted
    fail(store, running)
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(second.id, inserted=False)
    client.cancel(second.id)
    (third, inserted) = db.execute("select * from jobq.enqueue('k', '{}', unique_key => 'k')").fetchone() or (
        0,
        0,
    )
    assert inserted
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(third, inserted=False)


def test_the_newest_holder_says_for_how_long_and_who_asks_does_not(
    client: jobq.Client, store: Storage, db: psycopg.Connection[Any]
) -> None:
    client.enqueue("k", {}, unique=Unique("k", until="started"))
    claim_one(store)
    plain = client.enqueue("k", {}, unique="k")
    assert plain.inserted, "the first runs without its key"
    claim_one(store)
    for unique in FLAVOURS.values():
        assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(plain.id, inserted=False)


# -- what a second one does ----------------------------------------------------------------------------


def test_raise_names_the_holder_and_leaves_the_callers_transaction_usable(
    dsn: str, client: jobq.Client
) -> None:
    unique = Unique("invoice-42", on_conflict="raise")
    first = client.enqueue("k", {}, unique=unique)
    with pytest.raises(
        jobq.UniqueConflict, match=f"job {first.id} holds the unique key 'invoice-42'"
    ) as caught:
        client.enqueue("k", {}, unique=unique)
    assert caught.value.job_id == first.id
    assert isinstance(caught.value, jobq.JobConflict)
    with psycopg.connect(dsn) as connection:
        with pytest.raises(jobq.UniqueConflict):
            client.enqueue("k", {}, unique=unique, tx=connection)
        other = client.enqueue("k", {}, tx=connection)
        connection.commit()
    assert client.get(other.id).state == "ready"


def test_a_bulk_call_of_which_one_raises_makes_nothing_and_takes_no_key(
    dsn: str, client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    raising, replacing = Unique("held", on_conflict="raise"), Unique("other", on_conflict="replace")
    holder = client.enqueue("k", {}, unique="held")
    other = client.enqueue("k", {"n": 1}, unique="other")
    new = [
        jobq.NewJob("k", {}, unique=Unique("free as well", on_conflict="raise")),
        jobq.NewJob("k", {}, unique="free"),
        jobq.NewJob("k", {"n": 2}, unique=replacing),
        jobq.NewJob("k", {}, unique=raising),
        jobq.NewJob("k", {}),
    ]
    with psycopg.connect(dsn) as connection:
        with pytest.raises(jobq.UniqueConflict, match=f"item 3: job {holder.id}") as caught:
            client.enqueue_many(new, tx=connection)
        connection.commit()
    assert caught.value.job_id == holder.id
    assert db.execute("select count(*) from jobq.job").fetchone() == (2,)
    assert client.get(other.id).args == {"n": 1}
    client.cancel(holder.id)
    made = client.enqueue_many(new)
    assert [job.inserted for job in made] == [True, True, False, True, True]
    assert made[2] == jobq.Enqueued(other.id, inserted=False, replaced=True)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_raising_bulk_call_that_loses_a_race_gives_its_keys_back_in_the_callers_transaction(
    dsn: str, client: jobq.Client, store: Storage, db: psycopg.Connection[Any], flavour: str
) -> None:
    first = FLAVOURS[flavour]
    raising = Unique("b", on_conflict="raise")
    with psycopg.connect(dsn) as faster, psycopg.connect(dsn) as mine:
        won = client.enqueue("k", {}, unique="b", tx=faster)
        new = [jobq.NewJob("k", {}, unique=first), jobq.NewJob("k", {}, unique=raising)]

        def enqueue() -> int | None:
            with pytest.raises(jobq.UniqueConflict) as caught:
                client.enqueue_many(new, tx=mine)
            return caught.value.job_id

        with in_background(store, mine.info.backend_pid, enqueue) as results:
            faster.commit()
        mine.commit()
    assert results == [won.id]
    assert db.execute("select count(*) from jobq.job").fetchone() == (1,)
    assert client.enqueue("k", {}, unique=first).inserted


def test_two_items_of_one_call_that_are_to_raise_are_refused_before_anything_is_sent(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    new = jobq.NewJob("k", {}, unique=Unique("u", on_conflict="raise"))
    with pytest.raises(jobq.UniqueConflict, match="items 0 and 2") as caught:
        client.enqueue_many([new, jobq.NewJob("k", {}), new])
    assert caught.value.job_id is None
    assert db.execute("select count(*) from jobq.job").fetchone() == (0,)


NOW: Final = "ready"
LATER: Final = "scheduled"


@pytest.mark.matrix
@pytest.mark.parametrize("before", [NOW, LATER])
@pytest.mark.parametrize("after", [NOW, LATER])
@pytest.mark.parametrize("fields", [("args",), ("run_at",), ("priority",), ("args", "run_at", "priority")])
def test_replace_changes_what_it_names_and_nothing_else(
    client: jobq.Client, store: Storage, before: str, after: str, fields: Any
) -> None:
    when: dict[str, dict[str, Any]] = {NOW: {}, LATER: {"delay": HOUR}}
    first = client.enqueue("k", {"n": 1}, unique="u", priority=1, queue="q", **when[before])
    old = client.get(first.id)
    unique = Unique("u", on_conflict="replace", replace=fields)
    asked = client.enqueue(
        "other", {"n": 2}, unique=unique, priority=2, queue="p", meta={"m": 1}, **when[after]
    )
    assert asked == jobq.Enqueued(first.id, inserted=False, replaced=True)
    new = client.get(first.id)
    assert new.args == ({"n": 2} if "args" in fields else {"n": 1})
    assert new.priority == (2 if "priority" in fields else 1)
    assert new.state == (after if "run_at" in fields else before)
    assert (new.kind, new.queue, new.meta, new.attempt) == ("k", "q", {}, 0)
    if "run_at" not in fields:
        assert new.run_at == old.run_at
    assert len(store.places()[first.id]) == 1


def test_a_replaced_job_is_never_due_later_than_its_longest_wait_after_it_was_made(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    unique = Unique("u", on_conflict="replace", max_wait=HOUR)
    made = client.enqueue("k", {}, unique=unique, delay=timedelta(minutes=50))
    created = client.get(made.id).created_at
    for minutes, latest in ((55, 55), (70, 60), (20, 20), (600, 60)):
        client.enqueue("k", {}, unique=unique, delay=timedelta(minutes=minutes))
        due = client.get(made.id).run_at
        assert due is not None
        assert abs(due - created - timedelta(minutes=latest)) < timedelta(seconds=30)
    db.execute("update jobq.job set created_at = now() - interval '2 hours'")
    answer = client.enqueue("k", {}, unique=unique, delay=HOUR)
    assert answer == jobq.Enqueued(made.id, inserted=False, replaced=True)
    assert client.get(made.id).state == "ready"


def test_a_ready_job_that_is_replaced_again_and_again_keeps_its_place_in_the_lane(
    client: jobq.Client, store: Storage
) -> None:
    unique = Unique("u", on_conflict="replace")
    first = client.enqueue("k", {"n": 0}, unique=unique)
    for n in range(1, 6):
        client.enqueue("k", {"behind": n})
        assert client.enqueue("k", {"n": n}, unique=unique).replaced
    assert store.claim(W, 1)[0].job_id == first.id


@pytest.mark.parametrize("until", ["finished", "started"])
def test_a_holder_that_has_started_once_is_left_alone(
    client: jobq.Client, store: Storage, until: Any
) -> None:
    """Its id may stand for effects already: arguments of another call are no business of that job."""
    unique = Unique("u", until=until, on_conflict="replace")
    first = client.enqueue("k", {"n": 1}, unique=unique)
    running = claim_one(store)
    before = store.dump()
    second = client.enqueue("k", {"n": 2}, unique=unique)
    if until == "finished":
        assert second == jobq.Enqueued(first.id, inserted=False)
        assert store.dump() == before
        fail(store, running)
        assert client.enqueue("k", {"n": 3}, unique=unique) == jobq.Enqueued(first.id, inserted=False)
    else:
        assert second.inserted
        fail(store, running)
        third = client.enqueue("k", {"n": 3}, unique=unique)
        assert third == jobq.Enqueued(second.id, inserted=False, replaced=True)
    assert client.get(first.id).args == {"n": 1}


def test_a_job_of_a_slot_is_replaced_while_it_waits_and_named_once_it_has_run(
    client: jobq.Client, store: Storage
) -> None:
    unique = Unique("u", period=AGE, on_conflict="replace")
    first = client.enqueue("k", {"n": 1}, unique=unique)
    assert client.enqueue("k", {"n": 2}, unique=unique).replaced
    assert run_one(store).args == '{"n": 2}'
    assert client.enqueue("k", {"n": 3}, unique=unique) == jobq.Enqueued(first.id, inserted=False)


# -- bulk ----------------------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_s50_twenty_thousand_jobs_with_one_computed_key_twice_are_made_in_order_and_all_or_none(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    kind = jobq.JobType("k", Order, unique=Unique(by_args=["customer_id"]))
    new = [jobq.NewJob(kind, Order(n)) for n in range(20_000)]
    new[15_000] = jobq.NewJob(kind, Order(3, "again"))
    made = client.enqueue_many(new)
    assert made[15_000] == jobq.Enqueued(made[3].id, inserted=False)
    assert sum(job.inserted for job in made) == 19_999
    ids = [job.id for job in made if job.inserted]
    assert ids == sorted(ids)
    stored: dict[int, int] = dict(
        db.execute("select id, (args ->> 'customer_id')::int from jobq.job").fetchall()
    )
    assert [stored[job.id] for job in made] == [3 if n == 15_000 else n for n in range(20_000)]
    assert client.get(made[3].id).args == {"customer_id": 3, "note": ""}
    strict = jobq.JobType("strict", Order, unique=Unique(by_args=["customer_id"], on_conflict="raise"))
    new = [jobq.NewJob(strict, Order(n)) for n in range(20_000)]
    with pytest.raises(jobq.UniqueConflict):
        client.enqueue_many([*new, new[3]])
    assert db.execute("select count(*) from jobq.job where kind = 'strict'").fetchone() == (0,)


def test_a_bulk_call_may_mix_all_flavours(client: jobq.Client) -> None:
    held = client.enqueue("k", {"n": 0}, unique="held", delay=HOUR)
    replaced = client.enqueue("k", {"n": 0}, unique="replaced", delay=HOUR)
    options: list[dict[str, Any]] = [
        {},
        {"unique": "held"},
        {"unique": Unique("replaced", on_conflict="replace", replace=["args"])},
        {"unique": Unique("slot", period=AGE)},
        {"unique": Unique("started", until="started")},
        {"unique": Unique(by_args=True, on_conflict="raise")},
        {"unique": Unique("held", on_conflict="return"), "delay": HOUR},
        {"delay": HOUR},
    ]
    made = client.enqueue_many([jobq.NewJob("k", {"n": n}, **one) for n, one in enumerate(options)])
    assert [job.inserted for job in made] == [True, False, False, True, True, True, False, True]
    assert [job.replaced for job in made] == [n == 2 for n in range(len(options))]
    assert (made[1].id, made[2].id, made[6].id) == (held.id, replaced.id, held.id)
    assert client.get(replaced.id).args == {"n": 2}
    assert client.get(replaced.id).state == "scheduled"
    for n, options_ in ((3, options[3]), (4, options[4])):
        assert client.enqueue("k", {}, **options_) == jobq.Enqueued(made[n].id, inserted=False)


def test_items_of_one_call_replace_one_another_in_their_order(client: jobq.Client) -> None:
    def new(n: int, fields: Any = (), **options: Any) -> jobq.NewJob:
        unique: Any = Unique("u", on_conflict="replace", replace=fields) if fields else "u"
        return jobq.NewJob("k", {"n": n}, unique=unique, **options)

    calls = [
        new(0, delay=HOUR),
        new(1, ["args"], priority=1),
        new(2, ["priority"], priority=2),
        new(3),
        new(4, ["args", "run_at"], priority=4),
    ]
    for is_new in (True, False):
        made = client.enqueue_many(calls)
        job = client.get(made[0].id)
        assert {one.id for one in made} == {job.id}
        assert [one.inserted for one in made] == [is_new, False, False, False, False]
        assert [one.replaced for one in made] == [False, True, True, False, True]
        assert (job.args, job.priority, job.state) == ({"n": 4}, 2, "ready")


# -- a key that somebody else now holds ----------------------------------------------------------------------


def test_s43_jobs_of_one_key_that_come_due_together_are_promoted_and_each_runs(
    client: jobq.Client, store: Storage
) -> None:
    unique = Unique("k", until="started")
    pair = []
    for _ in range(2):
        pair.append(client.enqueue("k", {}, unique=unique).id)
        fail(store, claim_one(store))
    single = client.enqueue("k", {}, unique=unique, delay=HOUR).id
    assert promote_all(store) == 3
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(single, inserted=False)
    assert {job.job_id for job in store.claim(W)} == {*pair, single}
    assert client.enqueue("k", {}, unique=unique).inserted


def test_s44_a_key_in_ready_and_in_retry_hinders_nobody_in_its_batch(
    client: jobq.Client, store: Storage
) -> None:
    unique = Unique("k", until="started")
    retried = client.enqueue("k", {}, unique=unique).id
    fail(store, claim_one(store))
    made = client.enqueue_many([jobq.NewJob("k", {})] * 8 + [jobq.NewJob("k", {}, unique=unique)])
    assert all(job.inserted for job in made)
    assert promote_all(store) == 1
    claimed = store.claim(W, 10)
    assert {job.job_id for job in claimed} == {retried, *(job.id for job in made)}
    fences = [(job.job_id, job.attempt) for job in claimed]
    assert store.run(complete(SCHEMA, W, fences, {})) == {fence[0] for fence in fences}


@pytest.mark.parametrize("ending", ["retry", "snooze", "hand back", "crash"])
def test_s46_a_job_whose_key_went_on_leaves_running_and_comes_back_without_it(
    client: jobq.Client, store: Storage, ending: str
) -> None:
    unique = Unique("k", until="started")
    first = client.enqueue("k", {}, unique=unique).id
    running = claim_one(store)
    sibling = client.enqueue("k", {}, unique=unique)
    assert sibling.inserted
    if ending == "crash":
        store.run(end(SCHEMA, W, "died"))
        assert [job.job_id for job in store.run(rescue(SCHEMA, 3, 10))] == [first]
        store.worker(2)
    else:
        ways: dict[str, Any] = {
            "retry": ("scheduled", "retry"),
            "snooze": ("scheduled", "snooze"),
            "hand back": ("ready",),
        }
        store.run(settle(SCHEMA, W, "w", [settlement(running, *ways[ending])], notify=False))
    place = store.place(first)
    assert place.table == {"retry": "scheduled", "snooze": "scheduled"}.get(ending, "ready")
    assert place.reason == (ending if place.table == "scheduled" else None)
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(sibling.id, inserted=False)
    promote_all(store)
    assert {job.job_id for job in store.claim(2 if ending == "crash" else W)} == {first, sibling.id}


@pytest.mark.parametrize("on_conflict", ["return", "raise", "replace"])
async def test_s47_enqueuing_the_key_of_a_running_job_changes_nothing_and_names_it(
    dsn: str, on_conflict: Any
) -> None:
    unique = Unique("k", on_conflict=on_conflict)
    jobs = jobq.Jobs()
    starts: list[int] = []
    has_started, may_end = asyncio.Event(), asyncio.Event()

    @jobs.handler("slow")
    async def slow(job: jobq.Job, args: dict[str, int]) -> None:
        starts.append(args["n"])
        has_started.set()
        await may_end.wait()

    async with working(dsn, jobs) as bench, working(dsn, jobs):
        first = await bench.client.enqueue("slow", {"n": 1}, unique=unique)
        await asyncio.wait_for(has_started.wait(), 10)
        before = bench.rows("select * from jobq.running")
        if on_conflict == "raise":
            with pytest.raises(jobq.UniqueConflict) as caught:
                await bench.client.enqueue("slow", {"n": 2}, unique=unique)
            assert caught.value.job_id == first.id
        else:
            held = await bench.client.enqueue("slow", {"n": 2}, unique=unique)
            assert held == jobq.Enqueued(first.id, inserted=False)
        assert bench.rows("select * from jobq.running") == before
        may_end.set()
        assert (await bench.ended(first.id))["state"] == "completed"
        assert bench.rows("select count(*) from jobq.job") == [{"count": 1}]
    assert starts == [1]


def discarded(client: jobq.Client, store: Storage, **options: Any) -> int:
    """Make a job that is started once, and discarded."""
    made = client.enqueue("k", {}, **options)
    assert made.inserted
    job = claim_one(store)
    assert job.job_id == made.id
    store.run(settle(SCHEMA, W, "w", [settlement(job, "discarded", "no", failure=BOOM)], notify=False))
    return made.id


@pytest.mark.parametrize("flavour", ["finished", "started"])
@pytest.mark.parametrize("by", ["one by one", "in bulk"])
def test_s48_of_eleven_discarded_jobs_the_one_whose_key_is_held_conflicts_and_ten_are_retried(
    client: jobq.Client, store: Storage, flavour: str, by: str
) -> None:
    unique = FLAVOURS[flavour]
    conflicting = discarded(client, store, unique=unique)
    ids = [conflicting, *(discarded(client, store, unique=None if n % 2 else f"{n}") for n in range(10))]
    holder = client.enqueue("k", {}, unique=unique)
    assert holder.inserted
    if by == "in bulk":
        result = client.bulk.retry(jobq.JobFilter(states=["discarded"]))
        assert result.changed == 10
        assert [(one.job_id, one.holder) for one in result.conflicting] == [(conflicting, holder.id)]
    else:
        for job_id in ids[1:]:
            client.retry(job_id)
        with pytest.raises(jobq.UniqueConflict, match=f"job {holder.id} holds its unique key") as caught:
            client.retry(conflicting)
        assert caught.value.job_id == holder.id
    assert {job_id for job_id in ids if client.get(job_id).state == "ready"} == set(ids[1:])
    assert client.get(conflicting).state == "discarded"
    client.cancel(holder.id)
    client.retry(conflicting)
    assert client.get(conflicting).state == "ready"


def test_a_retried_job_holds_its_key_as_it_did_before(client: jobq.Client, store: Storage) -> None:
    plain = discarded(client, store, unique="u")
    client.retry(plain)
    assert client.enqueue("k", {}, unique="u") == jobq.Enqueued(plain, inserted=False)
    run_one(store)
    client.retry(plain)
    assert client.enqueue("k", {}, unique="u") == jobq.Enqueued(plain, inserted=False), "and again"
    run_one(store)

    unique = Unique("s", until="started")
    started = discarded(client, store, unique=unique)
    client.retry(started)
    assert client.enqueue("k", {}, unique=unique).inserted, "once started it runs without its key"
    for _ in range(2):
        run_one(store)
    never = client.enqueue("k", {}, unique=unique).id
    client.cancel(never)
    client.retry(never)
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(never, inserted=False), "never started"
    run_one(store)
    assert client.enqueue("k", {}, unique=unique).inserted, "and still until its start"


def test_a_job_of_a_slot_is_retried_whatever_holds_its_key_now(
    client: jobq.Client, store: Storage, db: psycopg.Connection[Any]
) -> None:
    unique = Unique("k", period=AGE)
    old = discarded(client, store, unique=unique)
    client.retry(old)
    run_one(store)
    let_slots_pass(db)
    new = client.enqueue("k", {}, unique=unique)
    assert new.inserted
    client.retry(old)
    assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(new.id, inserted=False)


def test_of_two_retries_of_one_key_at_once_one_gets_it(dsn: str, client: jobq.Client, store: Storage) -> None:
    one, other = (discarded(client, store, unique="u") for _ in range(2))
    with psycopg.connect(dsn) as holder:
        third = client.enqueue("k", {}, unique="u", tx=holder)
        with jobq.Client(dsn, pool_max_size=1) as waiting:
            with waiting.pool.connection() as connection:
                pid = connection.info.backend_pid

            def retry() -> int | None:
                with pytest.raises(jobq.UniqueConflict) as caught:
                    waiting.retry(one)
                return caught.value.job_id

            with in_background(store, pid, retry) as results:
                holder.commit()
    assert results == [third.id]
    client.cancel(third.id)
    result = client.bulk.retry(jobq.JobFilter(states=["discarded"]))
    assert (result.changed, [(c.job_id, c.holder) for c in result.conflicting]) == (1, [(one, other)])


def test_a_deleted_jobs_key_is_free_and_in_the_end_nothing_of_it_is_left(
    client: jobq.Client, store: Storage
) -> None:
    for flavour, unique in FLAVOURS.items():
        for _ in range(3):
            made = client.enqueue("k", {}, unique=unique)
            assert made.inserted, flavour
            client.delete(made.id)
    term = store.run(elect(SCHEMA, W, "w", 600.0))
    assert term is not None
    for _ in range(2):  # a key's first row goes when it is the only one
        store.walk_keys(term)
    assert store.count("unique_key") == 0
