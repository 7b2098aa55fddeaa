"""Outcomes: the fence before every write to a running job, and a history that stays bounded.

A late write is held until its job has been rescued and claimed anew, in two ways: before it is sent,
and inside the server, where it waits with the snapshot of the old days.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from jobq._limits import MAX_WAIT
from jobq._marks import LaneMarks
from jobq._operation import run
from jobq._statements.claim import claim
from jobq._statements.duties import next_orphan, promote, rescue
from jobq._statements.enqueue import enqueue_one
from jobq._statements.filter import list_jobs
from jobq._statements.outcomes import (
    MAX_ERRORS_KEPT,
    Settlement,
    complete,
    find_finished,
    release,
    settle,
)
from tests.support.storage import (
    BOOM,
    SCHEMA,
    Storage,
    enqueue_rows,
    hold,
    in_background,
    job_row,
    settlement,
)
from tests.test_plans import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._operation import Call, Operation, Rows
    from jobq._statements.claim import Claimed

OLD, NEW = 1, 2


def _settle(job: Claimed, *args: Any, **options: Any) -> Operation[set[int]]:
    return settle(SCHEMA, OLD, "old", [settlement(job, *args, **options)], notify=True)


OUTCOMES: Final[dict[str, Callable[[Claimed], Operation[Any]]]] = {
    "complete": lambda job: complete(SCHEMA, OLD, [(job.job_id, job.attempt)], {job.job_id: '"done"'}),
    "retry": lambda job: _settle(job, "scheduled", "retry", delay_s=9.0, failure=BOOM),
    "snooze": lambda job: _settle(job, "scheduled", "snooze", delay_s=9.0),
    "cancel": lambda job: _settle(job, "cancelled", "no longer wanted"),
    "discard": lambda job: _settle(job, "discarded", "failed 25 of 25 times", failure=BOOM),
    "hand back": lambda job: _settle(job, "ready"),
    "park": lambda job: _settle(job, "scheduled", "unknown kind", delay_s=10.0),
    "release": lambda job: release(SCHEMA, OLD),
}
FENCED: Final = [name for name in OUTCOMES if name != "release"]  # by job and attempt, that is
# What each part of the fence becomes when it is taken out of a statement.
PARTS: Final = {
    "job_id": ("job_id = o.job_id and attempt", "o.job_id is not null and attempt"),
    "attempt": ("attempt = o.attempt", "o.attempt is not null"),
    "worker_id": ("worker_id = $3::int8", "$3::int8 is not null"),
}


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


def without(call: Call, part: str) -> Call:
    whole, gone = PARTS[part]
    assert call.sql.count(whole) == 1, f"the statement says {whole!r} {call.sql.count(whole)} times"
    return call._replace(sql=call.sql.replace(whole, gone))


# -- the fence -------------------------------------------------------------------------------------


def rescue_and_claim_anew(store: Storage, job: Claimed) -> Claimed:
    store.end_lease(OLD)
    assert [r.job_id for r in store.run(rescue(SCHEMA, 3, 100))] == [job.job_id]
    [again] = store.claim(NEW)
    assert (again.job_id, again.attempt) == (job.job_id, job.attempt + 1)
    return again


def assert_unchanged_and_completable(store: Storage, before: dict[str, list[str]], again: Claimed) -> None:
    assert store.dump() == before
    fences = [(again.job_id, again.attempt)]
    assert store.run(complete(SCHEMA, NEW, fences, {})) == {again.job_id}
    assert store.place(again.job_id).table == "completed"


@pytest.mark.matrix
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_s02_an_outcome_that_is_sent_after_a_newer_claim_changes_nothing(
    store: Storage, outcome: str
) -> None:
    job = store.claimed(OLD)
    late = hold(OUTCOMES[outcome](job))
    again = rescue_and_claim_anew(store, job)
    before = store.dump()
    assert not store.call(late)
    assert_unchanged_and_completable(store, before, again)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_s02_an_outcome_that_waits_in_the_server_meanwhile_changes_nothing(
    store: Storage, other: Storage, outcome: str
) -> None:
    """Its snapshot still shows the old attempt; the rescue and the newer claim commit under it."""
    job = store.claimed(OLD)
    other.sql("begin")
    again = rescue_and_claim_anew(other, job)
    with in_background(other, store.pid, lambda: store.run(OUTCOMES[outcome](job))) as results:
        other.sql("commit")
        before = other.dump()
    assert not results[0]
    assert_unchanged_and_completable(store, before, again)


# Histories in which one part alone tells the old claim from what stands in `running` now. Each
# takes a job that OLD has claimed.


def another_job_of_the_old_worker_still_runs(store: Storage, job: Claimed) -> None:
    """A sweep that gives out one suspect at a time leaves the others where they are."""
    neighbour = store.claimed(OLD)
    assert neighbour.attempt == job.attempt
    store.end_lease(OLD)
    [rescued] = store.run(rescue(SCHEMA, 3, 100, leave=[neighbour.job_id]))
    assert rescued.job_id == job.job_id
    assert len(store.claim(NEW)) == 1


def the_old_worker_has_a_newer_attempt(store: Storage, job: Claimed) -> None:
    """A write whose reply was lost is sent again, after the job came back to the same worker."""
    store.run(settle(SCHEMA, OLD, "old", [settlement(job, "ready")], notify=False))
    [again] = store.claim(OLD)
    assert again.attempt == job.attempt + 1


def a_failover_lost_the_claim(store: Storage, job: Claimed) -> None:
    """The new primary never heard of the old claim, and gave the same attempt to another worker."""
    store.sql("delete from jobq.running")
    store.sql("insert into jobq.ready (job_id, queue, priority) values (%s, 'default', 0)", job.job_id)
    [again] = store.claim(NEW)
    assert (again.job_id, again.attempt) == (job.job_id, job.attempt)


HISTORIES: Final = {
    "job_id": another_job_of_the_old_worker_still_runs,
    "attempt": the_old_worker_has_a_newer_attempt,
    "worker_id": a_failover_lost_the_claim,
}


@pytest.mark.parametrize("part", HISTORIES)
@pytest.mark.parametrize("outcome", FENCED)
def test_each_part_of_the_fence_stops_a_late_outcome_by_itself(
    store: Storage, outcome: str, part: str
) -> None:
    job = store.claimed(OLD)
    late = hold(OUTCOMES[outcome](job))
    HISTORIES[part](store, job)
    before = store.dump()
    assert not store.call(late)
    assert store.dump() == before


@pytest.mark.parametrize("part", HISTORIES)
@pytest.mark.parametrize("outcome", FENCED)
def test_without_one_part_of_the_fence_a_late_outcome_ends_what_is_not_its_own(
    store: Storage, outcome: str, part: str
) -> None:
    job = store.claimed(OLD)
    late = without(hold(OUTCOMES[outcome](job)), part)
    HISTORIES[part](store, job)
    running = store.count("running")
    assert len(store.call(late)) == 1
    assert store.count("running") == running - 1


def test_s02_a_late_release_without_its_worker_would_take_the_new_ones_jobs(store: Storage) -> None:
    job = store.claimed(OLD)
    late = hold(OUTCOMES["release"](job))
    mutant = late._replace(sql=late.sql.replace("worker_id = $1::int8", "$1::int8 is not null"))
    assert mutant != late
    again = rescue_and_claim_anew(store, job)
    assert not store.call(late)
    assert store.place(job.job_id).table == "running"
    assert store.call(mutant)
    assert store.place(again.job_id).table == "ready", "the mutant does not show that the part is needed"


def test_s03_jobs_of_a_worker_whose_row_is_gone_are_rescued_and_its_outcome_is_late(store: Storage) -> None:
    job = store.claimed(OLD)
    late = hold(OUTCOMES["complete"](job))
    store.sql("delete from jobq.worker where id = %s", OLD)
    [rescued] = store.run(rescue(SCHEMA, 3, 100))
    assert (rescued.job_id, rescued.worker_id) == (job.job_id, OLD)
    [again] = store.claim(NEW)
    before = store.dump()
    assert not store.call(late)
    assert_unchanged_and_completable(store, before, again)
    assert store.value("select worker from jobq.attempt_error") == f"worker {OLD}"


def test_s04_a_restart_under_the_same_name_is_another_worker(store: Storage) -> None:
    """kill -9, and the supervisor starts the process again: same host, name and pid, another id."""
    job = store.claimed(OLD)
    late = hold(OUTCOMES["complete"](job))
    reborn = store.worker(3, name="old")
    assert store.run(rescue(SCHEMA, 3, 100)) == [], "the dead one's lease still lasts"
    store.end_lease(OLD)
    assert len(store.run(rescue(SCHEMA, 3, 100))) == 1
    [again] = store.claim(reborn)
    before = store.dump()
    assert not store.call(late)
    assert store.dump() == before
    assert store.run(complete(SCHEMA, reborn, [(again.job_id, again.attempt)], {})) == {job.job_id}


# -- what each outcome does ------------------------------------------------------------------------


class Expected(NamedTuple):
    table: str
    failures: int
    reason: str | None


EXPECTED: Final = {
    "complete": Expected("completed", 0, None),
    "retry": Expected("scheduled", 1, "retry"),
    "snooze": Expected("scheduled", 0, "snooze"),
    "cancel": Expected("cancelled", 0, "no longer wanted"),
    "discard": Expected("discarded", 1, "failed 25 of 25 times"),
    "hand back": Expected("ready", 0, None),
    "park": Expected("scheduled", 0, "unknown kind"),
    "release": Expected("ready", 0, None),
}


@pytest.mark.matrix
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_outcome_moves_its_job_and_nothing_else(store: Storage, outcome: str) -> None:
    job = store.claimed(OLD, priority=4, queue="mail")
    assert list(store.run(OUTCOMES[outcome](job))) == [job.job_id]
    place = store.place(job.job_id)
    assert (place.table, place.failures, place.reason) == EXPECTED[outcome]
    assert (place.attempt, place.crashes) == (1, 0)
    assert store.sql("select queue, priority from jobq.jobs") == [("mail", 4)]
    assert store.count("attempt_error") == (outcome in {"retry", "discard"})


@pytest.mark.matrix
def test_one_batch_settles_jobs_in_every_way_and_returns_those_it_had(store: Storage) -> None:
    store.enqueue(6)
    jobs = store.claim(OLD)
    gone = jobs[5]
    store.run(complete(SCHEMA, OLD, [(gone.job_id, gone.attempt)], {}))
    batch = [
        settlement(jobs[0], "scheduled", "retry", delay_s=60, failure=BOOM),
        settlement(jobs[1], "scheduled", "snooze", delay_s=3600),
        settlement(jobs[2], "ready"),
        settlement(jobs[3], "discarded", 'why "{not}"', failure=BOOM._replace(message='a\\b,{"c"}')),
        settlement(jobs[4], "cancelled", None),
        settlement(gone, "ready"),
    ]
    assert store.run(settle(SCHEMA, OLD, "old", batch, notify=True)) == {j.job_id for j in jobs[:5]}
    assert [store.place(j.job_id).table for j in jobs] == [
        "scheduled",
        "scheduled",
        "ready",
        "discarded",
        "cancelled",
        "completed",
    ]
    assert store.place(jobs[3].job_id).reason == 'why "{not}"'
    message = store.value("select message from jobq.attempt_error where job_id = %s", jobs[3].job_id)
    assert message == 'a\\b,{"c"}'
    waits = store.sql("select run_at - now() from jobq.scheduled order by run_at")
    assert [round(wait.total_seconds(), -1) for (wait,) in waits] == [60, 3600]


def test_results_go_to_their_own_jobs(store: Storage) -> None:
    store.enqueue(3)
    jobs = store.claim(OLD)
    results = {jobs[0].job_id: '{"a": [1, "ü"]}', jobs[2].job_id: "null"}
    store.run(complete(SCHEMA, OLD, [(j.job_id, j.attempt) for j in jobs], results))
    assert store.sql("select result from jobq.finished order by job_id") == [
        ({"a": [1, "ü"]},),
        (None,),
        (None,),
    ]
    assert store.sql("select result::text from jobq.finished order by job_id")[2] == ("null",)


def test_the_results_of_a_batch_are_parsed_once(store: Storage) -> None:
    """Parsed anew for each row, these would take half a minute."""
    store.enqueue(300)
    jobs = store.claim(OLD, 300)
    results = {job.job_id: str([0] * 3000) for job in jobs}
    store.sql("set statement_timeout = '5s'")
    done = store.run(complete(SCHEMA, OLD, [(job.job_id, job.attempt) for job in jobs], results))
    assert len(done) == 300
    assert store.value("select min(jsonb_array_length(result)) from jobq.finished") == 3000


def test_a_batch_whose_reply_was_lost_finds_what_it_finished(store: Storage) -> None:
    store.enqueue(3)
    jobs = store.claim(OLD)
    fences = [(j.job_id, j.attempt) for j in jobs]
    store.run(complete(SCHEMA, OLD, fences[:2], {}))
    assert store.run(find_finished(SCHEMA, OLD, fences)) == {f[0] for f in fences[:2]}
    assert store.run(find_finished(SCHEMA, NEW, fences)) == set()
    assert store.run(find_finished(SCHEMA, OLD, [(f[0], 2) for f in fences])) == set()


def test_release_keeps_what_it_is_told_to(store: Storage) -> None:
    store.enqueue(3)
    jobs = store.claim(OLD)
    assert store.run(release(SCHEMA, OLD, keep=[jobs[1].job_id])) == [jobs[0].job_id, jobs[2].job_id]
    assert store.place(jobs[1].job_id).table == "running"


def test_a_worker_that_ends_gives_its_jobs_back_only_together_with_its_end(
    store: Storage, other: Storage
) -> None:
    """Nobody can start a job of a worker that seems to be alive: until its end is known, it holds it."""
    job = store.claimed(OLD)
    ends = "select ended_at is not null, end_reason from jobq.worker where id = %s"
    store.run(release(SCHEMA, OLD, keep=[job.job_id]))
    assert store.sql(ends, OLD) == [(False, None)]
    store.sql("begin")
    store.sql("select from jobq.worker where id = %s for update", OLD)
    with in_background(store, other.pid, lambda: other.run(release(SCHEMA, OLD, ends=True))):
        assert store.place(job.job_id).table == "running"
        store.sql("commit")
    assert store.sql(ends, OLD) == [(True, "stopped")]
    assert store.place(job.job_id).table == "ready"


# -- the history of errors -------------------------------------------------------------------------


def fail(store: Storage, *, traceback: str = "") -> None:
    """Let every job in `ready` fail once and be ready again."""
    batch: list[Settlement] = [
        settlement(job, "ready", failure=BOOM._replace(message=f"no {job.attempt}", traceback=traceback))
        for job in store.claim(OLD)
    ]
    store.run(settle(SCHEMA, OLD, "old", batch, notify=False))


def crash(store: Storage) -> None:
    """Let the worker die with every job that is ready."""
    worker = store.worker(int(store.value("select max(id) + 1 from jobq.worker")), name="doomed")
    store.claim(worker)
    store.end_lease(worker)
    store.run(rescue(SCHEMA, 9, 100))


def kept(store: Storage, job_id: int) -> list[int]:
    rows = store.sql("select attempt from jobq.attempt_error where job_id = %s order by attempt", job_id)
    return [row[0] for row in rows]


def omitted(store: Storage, job_id: int) -> int:
    count: int = store.value(
        "select omitted from jobq.attempt_error where job_id = %s order by attempt desc limit 1", job_id
    )
    return count


@pytest.mark.matrix
def test_a_job_keeps_its_newest_errors_and_counts_the_others(store: Storage) -> None:
    [early] = store.enqueue()
    for _ in range(5):
        fail(store)
    [late] = store.enqueue()
    for failures in range(1, MAX_ERRORS_KEPT + 11):
        fail(store)
        assert kept(store, late) == list(range(max(1, failures - MAX_ERRORS_KEPT + 1), failures + 1))
        assert omitted(store, late) == max(0, failures - MAX_ERRORS_KEPT)
        assert len(kept(store, early)) + omitted(store, early) == failures + 5
        assert len(kept(store, early)) <= MAX_ERRORS_KEPT


def test_what_the_history_omits_stays_exact_when_crashes_stand_in_it(store: Storage) -> None:
    [job_id] = store.enqueue()
    for _ in range(MAX_ERRORS_KEPT):
        fail(store)
    crash(store)
    assert len(kept(store, job_id)) == MAX_ERRORS_KEPT + 1
    assert omitted(store, job_id) == 0
    fail(store)
    assert len(kept(store, job_id)) == MAX_ERRORS_KEPT
    assert omitted(store, job_id) == 2
    assert store.place(job_id) == ("ready", 22, 21, 1, None, None)


class Reads:
    """What claiming and listing a few live jobs touch, in pages: whatever else is slow, these are slow by."""

    def __init__(self, store: Storage) -> None:
        self._store = store
        self.marks = LaneMarks()

    def settled(self) -> tuple[int, int]:
        """Return the pages of a claim and of a list of all of them: the second time, when hints are set."""
        self._store.refresh(self.marks, time.monotonic())
        self._claim()
        self._list()
        return self._claim(), self._list()

    def _claim(self) -> int:
        self._store.sql("begin")
        pages = self._pages(hold(claim(SCHEMA, "default", self.marks.ranges(), 100, OLD)))
        self._store.sql("rollback")
        return pages

    def _list(self) -> int:
        pages = 0

        def execute(call: Call) -> Rows:
            nonlocal pages
            pages += self._pages(call)
            return self._store.call(call)

        run(list_jobs(SCHEMA, None, None, 50), execute)
        return pages

    def _pages(self, call: Call) -> int:
        plan = explain(self._store, call, "analyze, buffers, timing off,")
        return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def test_s65_hundreds_of_snoozes_and_failures_make_no_job_grow_and_no_claim_or_list_read_more(
    store: Storage,
) -> None:
    for table in ("job", "ready", "scheduled", "running", "attempt_error"):  # only when the test says so
        store.sql(f"alter table jobq.{table} set (autovacuum_enabled = off)")
    [job_id] = store.enqueue(max_attempts=500, args='{"n": 1}', priority=1)  # claimed before the others
    store.enqueue(20)
    row_size = store.value("select pg_column_size(j) from jobq.job j where id = %s", job_id)
    reads = Reads(store)
    before = reads.settled()

    def end_all(count: int, *how: Any, **more: Any) -> None:
        for number in range(count):
            if number % 20 == 0:
                store.refresh(reads.marks, time.monotonic())
            [job] = store.claim(OLD, 1, marks=reads.marks)
            assert job.job_id == job_id
            store.run(settle(SCHEMA, OLD, "old", [settlement(job, *how, **more)], notify=False))
            store.run(promote(SCHEMA, None, 100, notify=False))

    end_all(500, "scheduled", "snooze")
    assert store.count("attempt_error") == 0
    assert store.place(job_id) == ("ready", 500, 0, 0, None, None)
    traceback = random.Random(65).randbytes(25_000).hex()  # of 50 kB, which no compression makes small
    end_all(499, "scheduled", "retry", failure=BOOM._replace(traceback=traceback))
    assert store.place(job_id) == ("ready", 999, 499, 0, None, None)
    assert kept(store, job_id) == list(range(999 - MAX_ERRORS_KEPT + 1, 1000))
    assert omitted(store, job_id) == 499 - MAX_ERRORS_KEPT
    longest, total = store.sql(
        "select max(length(traceback)), sum(length(traceback)) from jobq.attempt_error"
    )[0]
    assert (longest, total) == (50_000, 50_000 * MAX_ERRORS_KEPT)
    row = "select pg_column_size(r) from jobq.{} r where {} = %s"
    assert store.value(row.format("job", "id"), job_id) == row_size
    assert store.value(row.format("ready", "job_id"), job_id) < 120

    dirty = reads.settled()
    assert dirty[0] <= 1.15 * before[0] + 5
    assert dirty[1] <= 2 * before[1], "until a vacuum comes, some of what it left behind is passed"
    store.sql("vacuum jobq.job, jobq.ready, jobq.scheduled, jobq.running, jobq.attempt_error")
    for was, now in zip(before, reads.settled(), strict=True):
        assert now <= 1.15 * was + 5


def test_s67_forty_thousand_snoozes_use_no_attempt_and_a_wait_may_be_a_century(store: Storage) -> None:
    [job_id] = store.enqueue(max_attempts=2)
    store.sql("update jobq.ready set attempt = 40000")
    [job] = store.claim(OLD)
    assert (job.attempt, job.failures) == (40_001, 0)
    longest = settlement(job, "scheduled", "retry", delay_s=MAX_WAIT.total_seconds(), failure=BOOM)
    assert store.run(settle(SCHEMA, OLD, "old", [longest], notify=False)) == {job_id}
    assert store.place(job_id) == ("scheduled", 40_001, 1, 0, None, "retry")
    wait = store.value("select run_at - now() from jobq.jobs")
    assert MAX_WAIT - timedelta(minutes=1) < wait <= MAX_WAIT
    promoted = store.run(promote(SCHEMA, None, 10, notify=False))
    assert promoted.jobs == 0
    assert promoted.next_due_s == pytest.approx(MAX_WAIT.total_seconds(), abs=60)


@pytest.mark.matrix
def test_s66_every_operation_works_past_two_to_the_31(store: Storage) -> None:
    base = 2**31 + 10
    store.sql(f"select setval('jobq.job_id_seq', {base})")
    worker = store.worker(2**63 - 1, name="large")
    jobs = [store.claimed(worker) for _ in OUTCOMES]
    for job, outcome in zip(jobs, OUTCOMES.values(), strict=True):
        assert job.job_id > base
        assert not store.run(outcome(job)), "another worker's fence"
    left = [(j.job_id, j.attempt) for j in jobs]
    assert store.run(complete(SCHEMA, worker, left[:1], {jobs[0].job_id: "1"})) == {left[0][0]}
    assert store.run(find_finished(SCHEMA, worker, left)) == {left[0][0]}
    batch = [settlement(jobs[1], "scheduled", "retry", failure=BOOM), settlement(jobs[2], "ready")]
    assert len(store.run(settle(SCHEMA, worker, "large", batch, notify=True))) == 2
    assert store.run(release(SCHEMA, worker, [left[3][0]])) == [fence[0] for fence in left[4:]]
    store.end_lease(worker)
    assert store.run(next_orphan(SCHEMA, [])) == left[3][0]
    assert [r.job_id for r in store.run(rescue(SCHEMA, 3, 10, leave=[left[0][0]]))] == [left[3][0]]
    assert store.run(promote(SCHEMA, None, 10, notify=True)).jobs == 1
    assert {job.job_id for job in store.claim(NEW)} == {fence[0] for fence in left[1:]}
    keyed = job_row(unique_key=b"k" * 16, unique_name="k")
    [first], [again] = (store.run(enqueue_rows([keyed], notify=True)) for _ in range(2))
    assert first.id == again.id > base
    assert store.run(enqueue_one(SCHEMA, job_row(), notify=True)).id > base
    assert store.value("select id from jobq.enqueue('noop')") > base
