"""Claim: exactly as many as asked, in order, each to one worker, whatever plan the server takes."""

from __future__ import annotations

import random
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import pytest

from jobq._marks import LaneMarks, Range
from jobq._statements.claim import claim, refresh
from jobq._statements.duties import Registration, register, rescue
from jobq._statements.outcomes import settle
from tests.support.storage import SCHEMA, Storage, enqueue_rows, job_row, join_all, settlement

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER, OTHER = 1, 2
SWITCHES: Final = (
    "bitmapscan",
    "hashagg",
    "hashjoin",
    "indexonlyscan",
    "indexscan",
    "material",
    "memoize",
    "mergejoin",
    "nestloop",
    "seqscan",
    "sort",
    "tidscan",
)
LAST_XID: Final = 2**64 - 1


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as storage:
        storage.worker(WORKER)
        storage.worker(OTHER)
        yield storage


@pytest.fixture
def other(dsn: str) -> Iterator[Storage]:
    """A second connection."""
    with Storage(dsn) as storage:
        yield storage


def ids(store: Storage, limit: int, worker_id: int = WORKER) -> list[int]:
    return [job.job_id for job in store.claim(worker_id, limit)]


# -- how many --------------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("cache_mode", ["force_generic_plan", "force_custom_plan"])
@pytest.mark.parametrize("analyzed", [True, False], ids=["analyzed", "never analyzed"])
def test_s17_one_free_slot_claims_one_job_whatever_the_plan(
    dsn: str, cache_mode: str, *, analyzed: bool
) -> None:
    with Storage(dsn, plan_settings=False) as store:
        store.worker(WORKER)
        waiting = store.enqueue(50 * (len(SWITCHES) + 1))
        if analyzed:
            store.sql("analyze")
        store.sql(f"set plan_cache_mode = {cache_mode}")
        for switch in (*SWITCHES, None):
            if switch is not None:
                store.sql(f"set enable_{switch} = off")
            for limit in (1, 7, 1):
                assert ids(store, limit) == waiting[:limit], f"with {switch} off"
                assert store.count("running") == limit
                waiting = waiting[limit:]
                store.sql("delete from jobq.running")
            if switch is not None:
                store.sql(f"reset enable_{switch}")


def test_a_claim_takes_no_more_than_its_limit_over_many_lanes_and_queues(store: Storage) -> None:
    for priority in (-9, 0, 9):
        store.enqueue(10, priority=priority)
        store.enqueue(10, priority=priority, queue="mail")
    assert [len(store.claim(WORKER, 14)) for _ in range(4)] == [14, 14, 2, 0]
    assert [len(store.claim(WORKER, 100, queue="mail")) for _ in range(2)] == [30, 0]
    assert store.claim(WORKER, 100, queue="nobody's") == []


# -- in what order ---------------------------------------------------------------------------------


@pytest.mark.matrix
@pytest.mark.parametrize("batch", [1, 7, 100])
def test_the_larger_priority_first_and_then_the_order_in_which_transactions_began_to_write(
    store: Storage, dsn: str, batch: int
) -> None:
    """Whenever they commit: the transactions here end in an order of their own."""
    rng = random.Random(5)
    writers = [Storage(dsn, plan_settings=False) for _ in range(4)]
    for writer in writers:
        writer.sql("begin")
        writer.enqueue(5, priority=rng.randint(-2, 2))
    for _ in range(30):
        rng.choice(writers).enqueue(rng.randint(1, 2), priority=rng.randint(-9, 9))
    rng.shuffle(writers)
    for writer in writers:
        writer.sql("commit")
        writer.session.close()
    expected = store.sql("select job_id from jobq.ready order by priority desc, xid, job_id")
    claimed: list[int] = []
    while got := ids(store, batch):
        claimed += got
    assert claimed == [job_id for (job_id,) in expected]
    assert sorted(claimed) != claimed, "the history was too simple to show an order"


def test_a_job_that_was_handed_back_waits_behind_those_that_came_meanwhile(store: Storage) -> None:
    [first, second] = store.enqueue(2)
    [job] = store.claim(WORKER, 1)
    [third] = store.enqueue()
    store.run(settle(SCHEMA, WORKER, "w", [settlement(job, "ready")], notify=False))
    assert job.job_id == first
    assert ids(store, 10) == [second, third, first]


# -- to whom ---------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_worker_that_has_ended_or_never_was_claims_nothing(store: Storage) -> None:
    store.enqueue(3)
    store.end_lease(WORKER)
    assert store.claim(WORKER) == []
    assert store.claim(999) == []
    assert store.count("ready") == 3
    assert len(store.claim(OTHER)) == 3


def test_a_claim_that_its_lease_did_not_outlive_is_rescued_by_the_next_sweep(
    store: Storage, other: Storage
) -> None:
    """It was sent in time; when it commits, the sweep that ended the lease has been."""
    [job_id] = store.enqueue()
    store.sql("begin")
    assert ids(store, 1) == [job_id]
    other.end_lease(WORKER)
    assert other.run(rescue(SCHEMA, 3, 10)) == []
    store.sql("commit")
    assert [r.job_id for r in other.run(rescue(SCHEMA, 3, 10))] == [job_id]


@pytest.mark.matrix
def test_what_one_claimer_has_locked_another_passes_over(store: Storage, other: Storage) -> None:
    waiting = store.enqueue(10)
    store.sql("begin")
    assert ids(store, 4) == waiting[:4]
    assert ids(other, 4, OTHER) == waiting[4:8]
    store.sql("rollback")
    assert ids(other, 10, OTHER) == [*waiting[:4], *waiting[8:]]


def test_claimers_side_by_side_never_share_a_job(store: Storage, dsn: str) -> None:
    for priority in (0, 1, -1):
        store.enqueue(500, priority=priority)
    taken: list[list[int]] = [[] for _ in range(4)]
    start = threading.Barrier(len(taken))

    def body(mine: list[int], seed: int) -> None:
        rng = random.Random(seed)
        with Storage(dsn) as claimer:
            start.wait(10)
            while got := ids(claimer, rng.choice([1, 3, 10, 40]), WORKER):
                mine += got

    threads = [threading.Thread(target=body, args=(mine, i)) for i, mine in enumerate(taken)]
    for thread in threads:
        thread.start()
    join_all(threads, 60)
    everything = [job_id for mine in taken for job_id in mine]
    assert len(everything) == len(set(everything)) == 1500
    assert store.count("running") == 1500
    assert store.count("ready") == 0


# -- what comes with it ----------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_claim_brings_the_payload_and_the_counters(store: Storage) -> None:
    past, future = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))
    rows = [
        job_row(kind="mail", args='{"to": "ü"}', max_attempts=3, timeout_s=1.5, expires_at=future),
        job_row(meta='{"trace": 1}', tags='{a,"b c"}', timeout_s=None, expires_at=past),
    ]
    made = store.run(enqueue_rows(rows, notify=True))
    store.sql("update jobq.ready set attempt = 5, failures = 2, crashes = 1 where job_id = %s", made[0].id)
    mail, noop = store.claim(WORKER)
    assert mail._replace(created=None) == (
        *(made[0].id, "mail", "default", 0, 6, 2, 1, 3, 1.5, None, None, None),
        *('{"to": "ü"}', False),
    )
    assert mail.created is not None
    assert abs(mail.created - datetime.now(UTC).timestamp()) < 60
    assert (noop.meta, noop.tags, noop.timeout_s) == ('{"trace": 1}', ["a", "b c"], None)
    assert noop.expired


@pytest.mark.matrix
def test_a_job_whose_payload_is_missing_is_claimed_without_a_kind(store: Storage) -> None:
    lost, kept = store.enqueue(2)
    store.sql("delete from jobq.job where id = %s", lost)
    jobs = store.claim(WORKER)
    assert [(job.job_id, job.kind, job.args) for job in jobs] == [(lost, None, None), (kept, "noop", "{}")]
    assert not jobs[0].expired
    end = settlement(jobs[0], "discarded", "its payload is missing")
    assert store.run(settle(SCHEMA, WORKER, "w", [end], notify=False)) == {lost}


# -- ranges and refresh ----------------------------------------------------------------------------


def test_a_claim_looks_only_where_it_is_told_to(store: Storage) -> None:
    first, second, third = (store.enqueue()[0] for _ in range(3))
    xids = [xid for (xid,) in store.sql("select xid::text::int8 from jobq.ready order by xid")]

    def claim_in(*ranges: Range) -> list[int]:
        store.sql("begin")
        jobs = store.run(claim(SCHEMA, "default", ranges, 10, WORKER))
        store.sql("rollback")
        return [job.job_id for job in jobs]

    assert claim_in(Range(0, xids[1], 0, LAST_XID)) == [second, third]
    assert claim_in(Range(0, xids[1], second + 1, LAST_XID)) == [third]
    assert claim_in(Range(0, xids[1], 0, xids[1])) == [second]
    assert claim_in(Range(1, 0, 0, LAST_XID)) == []
    assert claim_in(Range(0, 0, 0, xids[0]), Range(0, xids[2], 0, LAST_XID)) == [first, third]


@pytest.mark.matrix
def test_a_refresh_tells_the_undecided_writers_and_the_first_row_of_each_range(
    store: Storage, other: Storage
) -> None:
    other.sql("begin")
    [unseen] = other.enqueue(priority=1)
    xid = other.value("select pg_current_xact_id()::text::int8")
    [seen] = store.enqueue()
    seen_xid = store.value("select xid::text::int8 from jobq.ready")
    ranges = LaneMarks().ranges()
    before = store.run(refresh(SCHEMA, "default", ranges, 1.0))
    assert xid in before.in_progress
    assert before.xmax > seen_xid > xid
    assert [row for row in before.first if row] == [(seen_xid, seen)]
    other.sql("commit")
    after = store.run(refresh(SCHEMA, "default", ranges, 2.0))
    assert xid not in after.in_progress
    assert [row for row in after.first if row] == [(xid, unseen), (seen_xid, seen)]
    assert after.server == before.server


def test_a_prepared_transaction_is_an_undecided_writer(store: Storage, other: Storage) -> None:
    other.sql("begin")
    other.enqueue()
    xid = other.value("select pg_current_xact_id()::text::int8")
    other.sql("prepare transaction 'p'")
    store.enqueue()  # before any later one has ended, its id lies beyond the snapshot's end
    try:
        ranges = LaneMarks().ranges()
        assert xid in store.run(refresh(SCHEMA, "default", ranges, 1.0)).in_progress
    finally:
        other.sql("commit prepared 'p'")
    assert xid not in store.run(refresh(SCHEMA, "default", ranges, 1.0)).in_progress
    assert len(store.claim(WORKER)) == 2


@pytest.mark.matrix
def test_marks_that_followed_a_server_still_find_a_transaction_that_commits_late(
    store: Storage, other: Storage
) -> None:
    marks = LaneMarks()
    other.sql("begin")
    [late] = other.enqueue()
    xid = other.value("select pg_current_xact_id()::text::int8")
    for i in range(10):  # the refresh's time is an argument: a second passes at once
        store.enqueue()
        assert len(store.claim(WORKER, marks=marks)) == 1
        store.refresh(marks, i / 10)
    assert marks.lanes[0][0] > xid, "an old writer holds the mark"
    other.sql("commit")
    assert store.claim(WORKER, marks=marks) == []
    assert store.refresh(marks, 2.0), "it did not say that a writer has ended"
    assert [job.job_id for job in store.claim(WORKER, marks=marks)] == [late]


def test_a_server_that_did_not_register_the_worker_gives_it_nothing(store: Storage) -> None:
    store.enqueue()
    me = Registration(77, "w", "host", 1, "0", ["default"], [])
    server = store.run(register(SCHEMA, me, 60.0))
    ranges = LaneMarks().ranges()
    assert store.run(claim(SCHEMA, "default", ranges, 1, 77, server=server - 1)) == []
    assert len(store.run(claim(SCHEMA, "default", ranges, 1, 77, server=server))) == 1
