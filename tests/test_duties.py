"""Duties: leases, rescue and promotion, done by any number of workers at once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pytest

import jobq._statements.enqueue_unique
import jobq._statements.outcomes
from jobq._errors import DatabaseError, DatabaseUnavailable, JobConflict, JobNotFound
from jobq._statements import duties
from jobq._statements.bulk import BulkRun
from jobq._statements.bulk_sql import Settings
from jobq._statements.cancel import Cancellation, cancel_job
from jobq._statements.control import apply_requests
from jobq._statements.duties import discarded, end, expire, next_orphan, promote, renew, rescue
from jobq._statements.filter import JobFilter
from jobq._statements.leader import Term, elect
from jobq._statements.locks import limit_lock_waits, lock_holders
from jobq._statements.operate import retry_job
from jobq._statements.operator_log import Entry
from jobq._statements.outcomes import Settlement, complete, release, settle
from jobq._statements.retention import Rule, Walk, remove_finished
from tests.support.storage import (
    BOOM,
    SCHEMA,
    Storage,
    enqueue_rows,
    hold,
    in_background,
    job_row,
    join_all,
    settlement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from jobq._operation import Call, Operation
    from jobq._statements.bulk import Action, BulkResult

OLD, NEW = 1, 2
CRASH_LIMIT = 3


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as storage:
        storage.worker(OLD, name="old")
        storage.worker(NEW, name="new")
        yield storage


@pytest.fixture
def other(dsn: str) -> Iterator[Storage]:
    """A second connection."""
    with Storage(dsn) as storage:
        yield storage


@pytest.fixture
def third(dsn: str) -> Iterator[Storage]:
    """A third connection."""
    with Storage(dsn) as storage:
        yield storage


def rescued(store: Storage, limit: int = 100, leave: tuple[int, ...] = ()) -> list[int]:
    return [job.job_id for job in store.run(rescue(SCHEMA, CRASH_LIMIT, limit, leave))]


def expired(store: Storage, but: int = 0, **known: int) -> list[int]:
    """Declare over what is; return those workers."""
    return [worker_id for worker_id, _ in store.run(expire(SCHEMA, but, **known)).workers]


# -- leases ----------------------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_lease_is_renewed_until_it_is_declared_over_and_never_after(store: Storage) -> None:
    assert store.run(renew(SCHEMA, OLD, 60.0))
    left = store.value("select lease_until - clock_timestamp() from jobq.worker where id = %s", OLD)
    assert timedelta(seconds=50) < left <= timedelta(seconds=60)
    assert expired(store) == []
    assert store.run(renew(SCHEMA, OLD, -1.0))
    assert expired(store, OLD) == [], "nobody calls himself dead"
    assert expired(store) == [OLD]
    assert expired(store) == []
    assert not store.run(renew(SCHEMA, OLD, 60.0))
    assert not store.run(end(SCHEMA, OLD, "stopped")), "it had ended"
    assert store.value("select end_reason from jobq.worker where id = %s", OLD) == "lease ended"


@pytest.mark.matrix
@pytest.mark.parametrize("reason", ["stopped", "died"])
def test_a_worker_ends_once(store: Storage, reason: str) -> None:
    assert store.run(end(SCHEMA, OLD, reason))
    assert not store.run(end(SCHEMA, OLD, reason))
    assert not store.run(renew(SCHEMA, OLD, 60.0))
    assert expired(store) == []
    assert store.sql("select end_reason from jobq.worker where ended_at is not null") == [(reason,)]


def test_a_renewal_that_came_first_keeps_its_lease_from_a_sweep_that_saw_it_over(
    store: Storage, other: Storage
) -> None:
    """The sweep waits for nobody: a row that its worker is just renewing is passed over."""
    store.run(renew(SCHEMA, OLD, -1.0))
    store.sql("begin")
    assert store.run(renew(SCHEMA, OLD, 60.0))
    assert expired(other) == []
    store.sql("commit")
    assert expired(other) == []
    assert store.run(renew(SCHEMA, OLD, 60.0))


def test_a_renewal_that_waited_for_the_sweep_learns_that_it_is_over(
    store: Storage, other: Storage, third: Storage
) -> None:
    store.run(renew(SCHEMA, OLD, -1.0))
    other.sql("begin")
    assert other.run(expire(SCHEMA)).workers == [(OLD, "old")]
    with in_background(third, store.pid, lambda: store.run(renew(SCHEMA, OLD, 60.0))) as renewed:
        other.sql("commit")
    assert renewed == [False]


def test_a_sweep_that_was_overtaken_by_a_renewal_does_not_end_it(
    store: Storage, other: Storage, third: Storage
) -> None:
    """It chose the worker by an old snapshot, and meets the renewed row when it comes to write."""
    store.run(renew(SCHEMA, OLD, -1.0))
    paused = pause(hold(expire(SCHEMA)), "where ended_at is null and lease_until <", before="scan")
    with paused_in(other, third, paused) as ended:
        assert store.run(renew(SCHEMA, OLD, 60.0))
    assert [worker_id for _, worker_id, _ in ended[0]] == [None]
    assert store.run(renew(SCHEMA, OLD, 60.0))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have leases judged as if the server had been started at another time, given as SQL."""
    text = duties.EXPIRE

    def set_start(moment: str) -> None:
        monkeypatch.setattr(duties, "EXPIRE", text.replace("pg_postmaster_start_time()", moment))

    return set_start


# A clock that was set back by an hour is one whose stamps lie an hour ahead.
SET_BACK: Final = """
update jobq.worker set started_at = started_at + interval '1 hour',
    heartbeat_at = heartbeat_at + interval '1 hour', lease_until = lease_until + interval '1 hour'
"""


def let_lapse(store: Storage, worker_id: int) -> None:
    """Have a worker's lease of a minute be over."""
    store.sql(
        "update jobq.worker set heartbeat_at = now() - interval '61 s', lease_until = now() - interval '1 s'"
        " where id = %s",
        worker_id,
    )


def seconds_left(store: Storage, worker_id: int) -> float:
    left: timedelta = store.value("select lease_until - now() from jobq.worker where id = %s", worker_id)
    return left.total_seconds()


@pytest.mark.matrix
def test_a_lease_from_before_the_clock_was_set_back_is_counted_from_now(
    store: Storage, started: Callable[[str], None]
) -> None:
    started("timestamptz 'epoch'")
    store.run(renew(SCHEMA, OLD, 60.0))
    store.sql(SET_BACK)
    assert seconds_left(store, OLD) > 3600
    assert expired(store) == [], "it may live, and renew at any moment"
    assert 59 < seconds_left(store, OLD) <= 60
    let_lapse(store, OLD)
    assert expired(store) == [OLD], "as any other"


def test_a_renewal_that_comes_while_the_sweep_looks_is_not_shortened(
    store: Storage, other: Storage, third: Storage
) -> None:
    store.sql(SET_BACK)
    paused = pause(hold(expire(SCHEMA)), "where ended_at is null and heartbeat_at >", before="scan")
    stamps = "select heartbeat_at, lease_until from jobq.worker where id = %s"
    with paused_in(other, third, paused):
        assert store.run(renew(SCHEMA, OLD, 120.0))
        renewed = store.sql(stamps, OLD)
    assert store.sql(stamps, OLD) == renewed


@pytest.mark.matrix
def test_what_the_caller_knows_counts_as_a_renewal_of_every_lease(
    store: Storage, started: Callable[[str], None]
) -> None:
    started("timestamptz 'epoch'")
    let_lapse(store, OLD)
    now_us = store.run(expire(SCHEMA, latest_us=0)).now_us
    assert expired(store, latest_us=now_us) == [], "the clock shows more than it could"
    assert expired(store, since_us=now_us - 29_000_000) == [], "within half of its lease of 60 s"
    assert expired(store, since_us=now_us + 10_000_000, latest_us=0) == []
    assert expired(store, since_us=now_us + 10_000_000) == [OLD], "the clock was set back since"


def test_a_server_that_was_started_later_than_now_holds_no_lease(
    store: Storage, started: Callable[[str], None]
) -> None:
    """It was started before its clock was set back."""
    let_lapse(store, OLD)
    started("(now() - interval '1 second')")
    assert expired(store) == []
    started("(now() + interval '1 hour')")
    assert expired(store) == [OLD]


@pytest.mark.matrix
def test_who_keeps_others_from_a_table_is_named(store: Storage, other: Storage) -> None:
    assert store.run(lock_holders(SCHEMA)) == []
    other.sql("begin")
    other.sql("select from jobq.job for update")
    assert store.run(lock_holders(SCHEMA)) == [], "what statements hold keeps nobody waiting"
    other.sql("lock table jobq.running in exclusive mode")
    [holder] = store.run(lock_holders(SCHEMA))
    assert (holder.table, holder.pid) == ("running", other.pid)
    assert holder.for_s == pytest.approx(0.0, abs=5.0)
    assert str(holder).startswith(f"table running is locked by server process {other.pid} for ")
    assert str(holder).endswith("(lock table jobq.running in exclusive mode)")
    store.run(limit_lock_waits(0.05))
    with pytest.raises(DatabaseUnavailable, match="lock timeout"):
        store.run(release(SCHEMA, OLD))
    store.run(limit_lock_waits(0))
    other.sql("prepare transaction 'held'")
    [holder] = store.run(lock_holders(SCHEMA))
    assert str(holder) == "table running is locked by a prepared transaction"
    other.sql("rollback prepared 'held'")


# -- rescue ----------------------------------------------------------------------------------------

GATE: Final = 4711  # the advisory lock that a paused statement waits for


def pause(call: Call, anchor: str, *, before: str) -> Call:
    """Let a statement wait for the gate at the first row that it looks at, or that it has chosen."""
    wait = f"pg_advisory_xact_lock_shared({GATE})::text is not null"
    replacement = {
        "scan": anchor.replace("where ", f"where {wait} and "),
        "write": f"{anchor} where {wait}",
    }[before]
    assert call.sql.count(anchor) == 1
    return call._replace(sql=call.sql.replace(anchor, replacement))


class paused_in:  # noqa: N801 - reads as the function that it is
    """Run a paused statement on one connection while the block works on others; then let it go on."""

    def __init__(self, store: Storage, watcher: Storage, call: Call) -> None:
        self._watcher = watcher
        self._running = in_background(watcher, store.pid, lambda: store.call(call))

    def __enter__(self) -> list[Any]:
        self._watcher.sql(f"select pg_advisory_lock({GATE})")
        return self._running.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._watcher.sql(f"select pg_advisory_unlock({GATE})")
        self._running.__exit__(None, None, None)


SCAN: Final = "where worker_id <> all"


def test_s01_a_rescuer_that_pauses_between_choosing_and_writing_writes_what_it_chose(
    store: Storage, other: Storage, third: Storage
) -> None:
    """Its choice is a lock: nobody else can end, rescue or give away the row before it goes on."""
    job = store.claimed(OLD)
    store.end_lease(OLD)
    call = pause(hold(rescue(SCHEMA, CRASH_LIMIT, 100)), "array(select tid from s", before="write")
    late = complete(SCHEMA, OLD, [(job.job_id, job.attempt)], {})
    with paused_in(other, third, call) as answer:
        assert rescued(store) == [], "the row is locked"
        assert store.claim(NEW) == []
        store.sql("set lock_timeout = '50ms'")
        with pytest.raises(Exception, match="lock timeout"):
            store.run(late)
    assert [row[0] for row in answer[0]] == [job.job_id]
    [again] = store.claim(NEW)
    assert again.attempt == job.attempt + 1


def test_s01_a_rescuer_that_pauses_before_choosing_leaves_a_newer_claim_alone(
    store: Storage, other: Storage, third: Storage
) -> None:
    """Its snapshot shows a stale row; by the time it looks, the job runs anew."""
    job = store.claimed(OLD)
    store.end_lease(OLD)
    call = pause(hold(rescue(SCHEMA, CRASH_LIMIT, 100)), SCAN, before="scan")
    with paused_in(other, third, call) as answer:
        assert rescued(store) == [job.job_id]
        [again] = store.claim(NEW)
        before = store.dump()
    assert answer == [[]]
    assert store.dump() == before
    assert store.run(complete(SCHEMA, NEW, [(again.job_id, again.attempt)], {})) == {job.job_id}


def test_s01_of_one_stale_batch_a_rescuer_that_paused_takes_only_what_is_still_stale(
    store: Storage, other: Storage, third: Storage
) -> None:
    """Three rows of its snapshot: meanwhile one completes, one is claimed anew, and one is left."""
    store.enqueue(3)
    done, again, stale = store.claim(OLD)
    store.end_lease(OLD)
    call = pause(hold(rescue(SCHEMA, CRASH_LIMIT, 100)), SCAN, before="scan")
    kept = (
        "select 'finished', f::text from jobq.finished f"
        " union all select 'running', r::text from jobq.running r where worker_id = %s"
        " union all select 'error', e::text from jobq.attempt_error e"
    )
    with paused_in(other, third, call) as answer:
        assert store.run(complete(SCHEMA, OLD, [(done.job_id, done.attempt)], {})) == {done.job_id}
        assert rescued(store, leave=(stale.job_id,)) == [again.job_id]
        [anew] = store.claim(NEW)
        before = store.sql(kept, NEW)
        assert [what for what, _ in before] == ["finished", "running", "error"]
    assert [row[0] for row in answer[0]] == [stale.job_id]
    [error] = [row for row in store.sql(kept, NEW) if row not in before]
    assert error[1].startswith(f"({stale.job_id},{stale.attempt},crashed,"), "that of the stale one alone"
    assert set(before) <= set(store.sql(kept, NEW)), "timestamps and all"
    assert store.place(done.job_id) == ("completed", 1, 0, 0, OLD, None)
    assert store.place(anew.job_id) == ("running", 2, 0, 1, NEW, None)
    assert store.place(stale.job_id) == ("ready", 1, 0, 1, None, None)


def test_s12_of_two_rescuers_with_one_stale_snapshot_the_second_changes_nothing(
    store: Storage, other: Storage, third: Storage
) -> None:
    store.enqueue(5)
    store.claim(OLD)
    store.end_lease(OLD)
    call = pause(hold(rescue(SCHEMA, CRASH_LIMIT, 100)), SCAN, before="scan")
    with paused_in(other, third, call) as second:
        assert len(rescued(store)) == 5
        assert len(store.claim(NEW, 3)) == 3
        before = store.dump()
    assert second == [[]]
    assert store.dump() == before


def test_s12_rescuers_side_by_side_share_the_work(store: Storage, other: Storage) -> None:
    store.enqueue(10)
    store.claim(OLD)
    store.end_lease(OLD)
    store.sql("begin")
    first = rescued(store, 4)
    second = rescued(other, 100)
    store.sql("commit")
    assert (len(first), len(second)) == (4, 6)
    assert set(first).isdisjoint(second)
    assert store.count("ready") == 10


@pytest.mark.matrix
def test_a_job_goes_back_at_once_then_after_a_pause_and_is_discarded_at_the_limit(store: Storage) -> None:
    [job_id] = store.enqueue()
    for crashes, table in ((1, "ready"), (2, "scheduled"), (3, "discarded")):
        worker = store.worker(10 + crashes, name=f"doomed {crashes}")
        [job] = store.claim(worker)
        assert (job.attempt, job.crashes, job.failures) == (crashes, crashes - 1, 0)
        assert store.run(end(SCHEMA, worker, "died"))
        [rescued_job] = store.run(rescue(SCHEMA, CRASH_LIMIT, 100))
        assert rescued_job == (job_id, crashes, "default", worker, crashes == CRASH_LIMIT, "noop")
        place = store.place(job_id)
        assert (place.table, place.attempt, place.failures, place.crashes) == (table, crashes, 0, crashes)
        if table == "scheduled":
            assert place.reason == "crash"
            wait = store.value("select run_at - now() from jobq.scheduled")
            assert timedelta(0) < wait < timedelta(seconds=2)
            store.sql("update jobq.scheduled set run_at = now() - interval '1 second'")
            assert store.run(promote(SCHEMA, None, 10, notify=False)).jobs == 1
    assert store.place(job_id).reason == "its worker died with it 3 times"
    errors = store.sql("select attempt, outcome, type, worker from jobq.attempt_error order by attempt")
    assert errors == [(n, "crashed", "jobq.WorkerDied", f"doomed {n}") for n in (1, 2, 3)]
    [(told, last)] = store.run(discarded(SCHEMA, [job_id]))
    assert (told.id, last.attempt, last.outcome) == (job_id, 3, "crashed")


def test_a_limit_of_one_crash_discards_at_the_first(store: Storage) -> None:
    job = store.claimed(OLD)
    store.end_lease(OLD)
    [one] = store.run(rescue(SCHEMA, 1, 100))
    assert one.discarded
    assert store.place(job.job_id).table == "discarded"


def test_a_rescued_job_keeps_its_failures_and_its_lane(store: Storage) -> None:
    job = store.claimed(OLD, priority=7, queue="mail")
    store.sql("update jobq.running set failures = 4")
    store.end_lease(OLD)
    rescued(store)
    assert store.place(job.job_id) == ("ready", 1, 4, 1, None, None)
    assert store.sql("select queue, priority from jobq.ready") == [("mail", 7)]


def test_a_rescue_leaves_living_workers_alone_and_goes_no_further_than_its_limit(store: Storage) -> None:
    store.enqueue(10)
    store.claim(OLD, 6)
    store.claim(NEW, 4)
    store.end_lease(OLD)
    assert [len(rescued(store, 4)) for _ in range(3)] == [4, 2, 0]
    assert store.count("running") == 4


@pytest.mark.matrix
def test_suspects_are_given_out_one_by_one(store: Storage) -> None:
    """`next_orphan` names what a rescue of one takes; what is left stays where it is."""
    waiting = store.enqueue(4)
    store.claim(OLD)
    assert store.run(next_orphan(SCHEMA, [])) is None
    store.end_lease(OLD)
    leave = [waiting[0], waiting[2]]
    assert store.run(next_orphan(SCHEMA, leave)) == waiting[1]
    assert rescued(store, 1, tuple(leave)) == [waiting[1]]
    assert rescued(store, 100, tuple(leave)) == [waiting[3]]
    assert store.run(next_orphan(SCHEMA, leave)) is None
    assert rescued(store) == leave


def test_a_rescue_of_a_job_without_payload_names_no_kind_and_works(store: Storage) -> None:
    job = store.claimed(OLD)
    store.sql("delete from jobq.job")
    store.end_lease(OLD)
    [one] = store.run(rescue(SCHEMA, CRASH_LIMIT, 100))
    assert (one.job_id, one.kind) == (job.job_id, None)


def test_what_a_discard_callback_is_told_of_a_job_that_no_attempt_failed(store: Storage) -> None:
    job = store.claimed(OLD, meta='{"a": 1}')
    end_it = settlement(job, "discarded", "too late to start")
    store.run(settle(SCHEMA, OLD, "old", [end_it], notify=False))
    assert store.run(discarded(SCHEMA, [999])) == []
    [(told, last)] = store.run(discarded(SCHEMA, [job.job_id]))
    assert (told.kind, told.attempt) == ("noop", 1)
    assert (last.type, last.message) == ("jobq.NotStarted", "too late to start")


def test_a_release_is_not_stopped_by_a_job_that_somebody_wrote_into_ready_by_hand(store: Storage) -> None:
    first, second = store.enqueue(2)
    store.claim(OLD)
    store.sql("insert into jobq.ready (job_id, queue, priority, attempt) values (%s, 'default', 0, 1)", first)
    assert store.run(release(SCHEMA, OLD)) == [first, second]
    assert (store.count("running"), store.count("ready")) == (0, 2)


# -- promotion -------------------------------------------------------------------------------------


def schedule(store: Storage, *due_s: float, **options: Any) -> list[int]:
    """Make a scheduled job for each time, in seconds from now, past ones too."""
    ids = []
    for seconds in due_s:
        [job_id] = store.enqueue(delay_s=3600.0, **options)
        store.sql(
            "update jobq.scheduled set run_at = now() + %s * interval '1 second' where job_id = %s",
            seconds,
            job_id,
        )
        ids.append(job_id)
    return ids


@pytest.mark.matrix
def test_due_jobs_are_promoted_in_the_order_of_their_time_and_no_more_than_the_limit(
    store: Storage,
) -> None:
    third, first, second, later = schedule(store, -10, -30, -20, 40, queue="mail", priority=3)
    one = store.run(promote(SCHEMA, None, 1, notify=True))
    assert (one.queues, one.jobs) == (["mail"], 1)
    assert one.next_due_s == pytest.approx(40, abs=5)
    assert [job.job_id for job in store.claim(NEW, queue="mail")] == [first]
    rest = store.run(promote(SCHEMA, one.mark, 10, notify=True))
    assert (rest.queues, rest.jobs) == (["mail"], 2)
    assert {job.job_id for job in store.claim(NEW, queue="mail")} == {second, third}
    assert store.place(later).table == "scheduled"
    none = store.run(promote(SCHEMA, rest.mark, 10, notify=True))
    assert (none.queues, none.jobs) == ([], 0)


@pytest.mark.matrix
def test_the_clock_of_a_test_may_stand_in_for_the_databases(store: Storage) -> None:
    [job_id] = schedule(store, 3600)
    now = datetime.now(UTC)
    early = store.run(promote(SCHEMA, None, 10, notify=False, now=now + timedelta(seconds=3500)))
    assert early.jobs == 0
    assert store.run(promote(SCHEMA, None, 10, notify=False, now=now + timedelta(hours=2))).jobs == 1
    assert store.place(job_id).table == "ready"


def test_a_mark_never_passes_a_job_that_it_can_see_nor_the_last_second(store: Storage) -> None:
    empty = store.run(promote(SCHEMA, None, 10, notify=False))
    assert empty.next_due_s is None
    now = store.value("select now()")
    assert empty.mark is not None
    assert timedelta(0) < now - empty.mark < timedelta(seconds=10)
    schedule(store, -3, -2, 50)
    mark = empty.mark - timedelta(hours=1)
    for _ in range(3):
        left = store.value("select min(run_at) from jobq.scheduled")
        step = store.run(promote(SCHEMA, mark, 1, notify=False))
        assert step.mark is not None
        assert step.mark <= min(left, store.value("select now() - interval '1 second'"))
        mark = step.mark
    assert store.count("scheduled") == 1


@pytest.mark.matrix
def test_a_job_that_appears_behind_the_mark_is_found_by_the_full_rescan(
    store: Storage, other: Storage
) -> None:
    """Its transaction was open past the job's own time."""
    other.sql("begin")
    schedule(other, -5)
    mark = store.run(promote(SCHEMA, None, 10, notify=False)).mark
    other.sql("commit")
    assert store.run(promote(SCHEMA, mark, 10, notify=False)).jobs == 0, "the mark was of no use"
    assert store.run(promote(SCHEMA, None, 10, notify=False)).jobs == 1


def test_promoters_side_by_side_share_the_work(store: Storage, other: Storage) -> None:
    schedule(store, *range(-10, 0))
    store.sql("begin")
    assert store.run(promote(SCHEMA, None, 4, notify=False)).jobs == 4
    assert other.run(promote(SCHEMA, None, 100, notify=False)).jobs == 6
    store.sql("commit")
    assert store.count("ready") == 10


def test_a_promoted_job_keeps_its_counters(store: Storage) -> None:
    [job_id] = schedule(store, -1)
    store.sql("update jobq.scheduled set attempt = 5, failures = 2, crashes = 1, reason = 'retry'")
    store.run(promote(SCHEMA, None, 10, notify=False))
    assert store.place(job_id) == ("ready", 5, 2, 1, None, None)


# -- all of them at once ---------------------------------------------------------------------------

KEYS: Final = [bytes([n]) * 16 for n in range(30)]


class Crowd:
    """Threads that move the same few jobs about in opposite orders, each over its own connection."""

    def __init__(self, dsn: str, duration_s: float, term: Term) -> None:
        self.dsn = dsn
        self.term = term
        self.until = time.monotonic() + duration_s
        self.moves: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.workers = [OLD, NEW]
        self.requests = 0  # to cancel a job that runs, of which nobody knows yet what came
        self._lock = threading.Lock()

    def run(self) -> None:
        bodies = [self.claim, self.complete, self.complete, self.settle, self.settle, self.rescue]
        bodies += [self.promote, self.promote, self.enqueue, self.enqueue, self.let_workers_die, self.release]
        bodies += [self.cancel, self.retry, self.retry, self.apply]
        bodies += [self.cancel_in_bulk, self.retry_in_bulk, self.move_in_bulk, self.delete_in_bulk]
        bodies += [self.remove, self.remove]
        threads = [
            threading.Thread(target=self._body, args=(body, seed), name=body.__name__, daemon=True)
            for seed, body in enumerate(bodies)
        ]
        for thread in threads:
            thread.start()
        join_all(threads, 100)
        if self.failures:
            raise self.failures[0]

    def _body(self, step: Callable[[Storage, random.Random], int], seed: int) -> None:
        rng = random.Random(seed)
        moved = 0
        try:
            with Storage(self.dsn) as store:
                while time.monotonic() < self.until and not self.failures:
                    moved += step(store, rng)
        except BaseException as error:  # noqa: BLE001 - a deadlock too: raised again in the test's thread
            self.failures.append(error)
        with self._lock:
            self.moves[step.__name__] += moved

    def claim(self, store: Storage, rng: random.Random) -> int:
        return len(store.claim(rng.choice(self.workers), rng.randint(1, 60)))

    def complete(self, store: Storage, rng: random.Random) -> int:
        """Complete what somebody else may complete, settle or rescue at this moment."""
        worker, fences = self._some(store, rng)
        return len(store.run(complete(SCHEMA, worker, fences[:20], {})))

    def settle(self, store: Storage, rng: random.Random) -> int:
        worker, fences = self._some(store, rng)
        kinds: list[dict[str, Any]] = [
            {"to": "scheduled", "reason": "retry", "failed": True, "failure": BOOM},
            {"to": "scheduled", "reason": "snooze", "delay_s": 0.01},
            {"to": "ready"},
        ]
        batch = [Settlement(*fence, **rng.choice(kinds)) for fence in fences]
        return len(store.run(settle(SCHEMA, worker, "w", batch, notify=True)))

    def release(self, store: Storage, rng: random.Random) -> int:
        time.sleep(0.02)  # a pace: released at once, nothing else would ever be done
        return len(store.run(release(SCHEMA, rng.choice(self.workers))))

    def rescue(self, store: Storage, rng: random.Random) -> int:
        return len(store.run(rescue(SCHEMA, 10_000, 100)))

    def promote(self, store: Storage, rng: random.Random) -> int:
        return store.run(promote(SCHEMA, None, 50, notify=True)).jobs

    def enqueue(self, store: Storage, rng: random.Random) -> int:
        keys = rng.sample(KEYS, len(KEYS))
        rows = [
            job_row(unique_key=key, unique_name=key.hex(), delay_s=rng.choice([None, 0.01])) for key in keys
        ]
        return sum(made.inserted for made in store.run(enqueue_rows(rows, notify=True)))

    def cancel(self, store: Storage, rng: random.Random) -> int:
        return self._attempt(store, self._cancel(self._any(store, rng)))

    def _cancel(self, job_id: int) -> Operation[None]:
        """Cancel a job; one that runs is cancelled later by somebody else, or completes before."""
        if (yield from cancel_job(SCHEMA, job_id, "no")) is Cancellation.REQUESTED:
            with self._lock:
                self.requests += 1
            raise JobConflict

    def apply(self, store: Storage, rng: random.Random) -> int:
        time.sleep(0.02)  # a pace
        cancelled = len(store.run(apply_requests(SCHEMA)))
        with self._lock:
            self.requests -= cancelled
        return cancelled

    def cancel_in_bulk(self, store: Storage, rng: random.Random) -> int:
        done = self._in_bulk(store, rng, "cancel", 20)
        with self._lock:
            self.requests += done.requested
        return done.changed

    def retry_in_bulk(self, store: Storage, rng: random.Random) -> int:
        return self._in_bulk(store, rng, "retry", 40, states=["completed", "cancelled", "discarded"]).changed

    def move_in_bulk(self, store: Storage, rng: random.Random) -> int:
        return self._in_bulk(store, rng, "move", 40).changed

    def delete_in_bulk(self, store: Storage, rng: random.Random) -> int:
        time.sleep(0.05)  # a pace
        return self._in_bulk(store, rng, "delete", 2, states=["completed", "cancelled"]).changed

    def remove(self, store: Storage, rng: random.Random) -> int:
        """Remove what has reached its age, as two leaders would of whom one does not know yet."""
        time.sleep(0.1)  # a pace
        store.sql(
            "update jobq.finished set finished_at = '2020-01-01' where ctid = any (array("
            "select ctid from jobq.finished offset %s limit 2))",
            rng.randrange(20),
        )
        every = Walk(Rule(0.0, ("completed", "cancelled", "discarded"), (), ()))
        removed = store.run(remove_finished(SCHEMA, self.term, every, rng.randint(1, 3))).jobs
        store.walk_keys(self.term)
        return removed

    def _in_bulk(
        self, store: Storage, rng: random.Random, action: Action, many: int, **chosen: Any
    ) -> BulkResult:
        ids = [job_id for (job_id,) in store.sql("select id from jobq.job limit 150")]
        which = JobFilter(ids=rng.sample(ids, min(many, len(ids))), **chosen)
        settings = Settings(priority=rng.randint(-1, 1))
        bulk = BulkRun(SCHEMA, action, which, Entry(action, {}), settings, rng.randint(1, many))
        while (step := bulk.step()) is not None:
            store.run(step)
        return bulk.result

    def retry(self, store: Storage, rng: random.Random) -> int:
        return self._attempt(store, retry_job(SCHEMA, self._any(store, rng), notify=True))

    def _any(self, store: Storage, rng: random.Random) -> int:
        job_id: int = store.value("select id from jobq.job offset %s limit 1", rng.randrange(150))
        return job_id

    def _attempt(self, store: Storage, operation: Operation[None]) -> int:
        """Ask for what the job's state, or its key, may forbid just now."""
        try:
            store.run(operation)
        except (JobConflict, JobNotFound):  # deleted at this moment
            return 0
        return 1

    def let_workers_die(self, store: Storage, rng: random.Random) -> int:
        time.sleep(0.05)  # a pace
        place = rng.randrange(2)
        died, self.workers[place] = self.workers[place], store.worker(rng.randrange(2**62))
        return int(store.run(end(SCHEMA, died, "died")))

    def _some(self, store: Storage, rng: random.Random) -> tuple[int, list[tuple[int, int]]]:
        worker = rng.choice(self.workers)
        rows = store.sql("select job_id, attempt from jobq.running where worker_id = %s", worker)
        fences = [(row[0], row[1]) for row in rows]
        rng.shuffle(fences)
        return worker, fences


def contend(store: Storage, duration_s: float) -> None:
    made = store.enqueue(150)
    term = store.run(elect(SCHEMA, store.worker(3), "leader", 600.0))
    assert term is not None
    crowd = Crowd(store.dsn, duration_s, term)
    crowd.run()
    busy = {name: moved for name, moved in crowd.moves.items() if name != "apply"}  # others come before it
    assert min(busy.values()) > 0, f"somebody had nothing to do: {crowd.moves}"
    assert len(crowd.moves) == 16
    places = store.places()
    assert {len(where) for where in places.values()} == {1}, "a job stands nowhere, or twice"
    assert (
        len(places)
        == len(made) + crowd.moves["enqueue"] - crowd.moves["delete_in_bulk"] - crowd.moves["remove"]
    )
    twice = store.sql(
        "select unique_key from jobq.jobs where state in ('ready', 'scheduled', 'running')"
        " and unique_key is not null group by unique_key having count(*) > 1"
    )
    assert twice == [], "two live jobs hold one key"
    finished = sum(where[0].table in {"completed", "cancelled"} for where in places.values())
    by_request = finished - (
        crowd.moves["complete"] + crowd.moves["cancel"] + crowd.moves["cancel_in_bulk"] + crowd.moves["apply"]
        - crowd.moves["retry"] - crowd.moves["retry_in_bulk"] - crowd.moves["delete_in_bulk"]
        - crowd.moves["remove"]
    )  # fmt: skip
    assert 0 <= by_request <= crowd.requests, "settled or rescued as cancelled, and never asked to be"


def test_s73_opposite_orders_over_the_same_jobs_do_not_deadlock(store: Storage) -> None:
    contend(store, 6.0)


@pytest.mark.slow
def test_s73_opposite_orders_for_a_minute_do_not_deadlock(store: Storage) -> None:
    contend(store, 60.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name", "order"),
    [
        (jobq._statements.outcomes, "SETTLE", "    order by r.tid\n"),
        (jobq._statements.enqueue_unique, "ENQUEUE_UNIQUE", "from fit order by unique_key\n"),
    ],
    ids=["settle", "unique keys"],
)
def test_s73_without_its_order_the_same_crowd_deadlocks(
    store: Storage, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, order: str
) -> None:
    statement: str = getattr(module, name)
    assert statement.count(order) == 1
    unordered = order.split("order by", maxsplit=1)[0] + "\n"
    statement = statement.replace(order, unordered).replace("not is_held order by unique_key", "not is_held")
    monkeypatch.setattr(module, name, statement)
    with pytest.raises(DatabaseError, match="deadlock detected"):
        contend(store, 40.0)
