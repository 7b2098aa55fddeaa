"""Any sequence of operations against a small model: states, counters, order, keys and fences.

After each step the database and the model say the same of every job, so each stands in exactly one
table, and an outcome of an attempt that is over has changed nothing. At the end all jobs end.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

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

import jobq._statements.outcomes
from jobq._errors import JobConflict, UniqueConflict
from jobq._kinds.unique import Unique
from jobq._statements.cancel import Cancellation, cancel_job
from jobq._statements.control import apply_requests
from jobq._statements.duties import end, promote, rescue
from jobq._statements.operate import retry_job
from jobq._statements.outcomes import Settlement, complete, release, settle
from tests.support.storage import BOOM, SCHEMA, TABLES, Place, Storage, enqueue_rows, job_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._operation import Operation

CRASH_LIMIT: Final = 3
FINAL: Final = ("completed", "discarded", "cancelled")
OUTCOMES: Final = ("complete", "fail", "snooze", "park", "hand back", "cancel", "discard")

# What a job may be enqueued with: a key, and how it is held. The slot of a period ends in 2070.
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
PLAIN: Final = Unique("k")
KEYS: Final[tuple[tuple[bytes | None, Unique], ...]] = (
    (None, PLAIN),
    (None, PLAIN),
    (A, PLAIN),
    (B, PLAIN),
    (B, Unique("k", on_conflict="replace")),
    (A, Unique("k", until="started")),
    (A, Unique("k", until="started", on_conflict="replace")),
    (A, Unique("k", on_conflict="raise")),
    (C, Unique("k", period=timedelta(days=36_525))),
)


@dataclass
class Job:
    """What the model knows of a job; ``turn`` is the step at which it became ready."""

    id: int
    priority: int
    max_attempts: int
    key: bytes | None
    unique: Unique
    version: int  # of its arguments
    table: str
    turn: int
    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    worker: int | None = None
    is_unwanted: bool = False  # somebody asked that it be cancelled, while it ran

    @property
    def is_live(self) -> bool:
        return self.table not in FINAL

    @property
    def holds_its_key(self) -> bool:
        """Whether it does, if it was the last to take it."""
        if self.unique.period is not None:
            return True
        return self.waits_for_its_first_start if self.unique.until == "started" else self.is_live

    @property
    def waits_for_its_first_start(self) -> bool:
        return self.table in {"ready", "scheduled"} and self.attempt == 0

    @property
    def holder(self) -> int | None:
        return self.worker if self.table == "running" else None

    def ready(self, turn: int) -> None:
        self.table, self.turn, self.worker = "ready", turn, None

    def wait(self) -> None:
        self.table, self.worker = "scheduled", None


@dataclass(frozen=True)
class Claim:
    """A claim that was once made, whatever became of it."""

    job: Job = field(repr=False)
    job_id: int
    attempt: int
    worker: int

    @property
    def holds(self) -> bool:
        return (self.job.table, self.job.attempt, self.job.worker) == ("running", self.attempt, self.worker)


def outcome_of(claim: Claim, outcome: str) -> Operation[set[int]]:
    """Return what a worker does at the end of an attempt, from what it knew when it claimed."""
    if outcome == "complete":
        return complete(SCHEMA, claim.worker, [(claim.job_id, claim.attempt)], {})
    is_last = claim.job.failures + 1 >= claim.job.max_attempts
    settlement = Settlement(claim.job_id, claim.attempt, "ready")
    if outcome == "fail":
        settlement = settlement._replace(
            to="discarded" if is_last else "scheduled", reason="retry", failed=True, failure=BOOM
        )
    elif outcome in {"snooze", "park"}:
        reason = "snooze" if outcome == "snooze" else "unknown kind"
        settlement = settlement._replace(to="scheduled", reason=reason)
    elif outcome == "cancel":
        settlement = settlement._replace(to="cancelled", reason="no")
    elif outcome == "discard":
        settlement = settlement._replace(to="discarded", reason="no", failed=True, failure=BOOM)
    return settle(SCHEMA, claim.worker, "w", [settlement], notify=False)


class Histories(RuleBasedStateMachine):
    def __init__(self, store: Storage) -> None:
        super().__init__()
        self.store = store
        store.sql("; ".join(f"delete from jobq.{table}" for table in (*TABLES, "cancel_request")))
        self.jobs: dict[int, Job] = {}
        self.claims: list[Claim] = []
        self.newest: dict[bytes, Job] = {}  # who took each key last
        self.ids = itertools.count(1)
        self.versions = itertools.count(1)
        self.turns = itertools.count(1)
        self.unordered: set[int] = set()
        self.workers: list[int] = []
        for _ in range(2):
            self._start_worker()

    def _start_worker(self) -> None:
        self.workers.append(self.store.worker(next(self.ids)))

    def _holder(self, key: bytes | None) -> Job | None:
        newest = None if key is None else self.newest.get(key)
        return newest if newest is not None and newest.holds_its_key else None

    # -- clients and operators -----------------------------------------------------------------------

    @rule(
        asked=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        priority=st.sampled_from([0, 0, 5]),
        is_later=st.sampled_from([False, False, True]),
        max_attempts=st.integers(1, 3),
    )
    def enqueue(
        self, asked: list[tuple[bytes | None, Unique]], priority: int, max_attempts: int, *, is_later: bool
    ) -> None:
        versions = [next(self.versions) for _ in asked]
        rows = [
            job_row(
                args=f'{{"n": {version}}}',
                priority=priority,
                max_attempts=max_attempts,
                delay_s=3600.0 if is_later else None,
                unique_key=key,
                unique=unique,
            )
            for (key, unique), version in zip(asked, versions, strict=True)
        ]
        turn = next(self.turns)
        operation = enqueue_rows(rows, notify=False)
        keys = [key for key, _ in asked]
        if any(
            unique.on_conflict == "raise" and (self._holder(key) or key in keys[:n])
            for n, (key, unique) in enumerate(asked)
        ):
            with pytest.raises(UniqueConflict):
                self.store.run(operation)
            return
        made = self.store.run(operation)
        for (key, unique), version, answer in zip(asked, versions, made, strict=True):
            holder = self._holder(key)
            assert answer.inserted == (holder is None)
            if holder is None:
                table = "scheduled" if is_later else "ready"
                job = Job(answer.id, priority, max_attempts, key, unique, version, table, turn)
                self.jobs[job.id] = job
                if key is not None:
                    self.newest[key] = job
                continue
            assert answer.id == holder.id
            assert answer.replaced == (unique.on_conflict == "replace" and holder.waits_for_its_first_start)
            if answer.replaced:
                self._replace(holder, version, priority, turn, is_later=is_later)

    def _place(self, job: Job) -> tuple[int, int, int]:
        """Return a ready job's place in its lane; those of one call with replacements have no order."""
        return -job.priority, job.turn, 0 if job.turn in self.unordered else job.id

    def _replace(self, job: Job, version: int, priority: int, turn: int, *, is_later: bool) -> None:
        keeps_place = job.table == "ready" and job.priority == priority
        job.version, job.priority = version, priority
        if is_later:
            job.wait()
        elif not keeps_place:
            self.unordered.add(turn)
            job.ready(turn)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job = self._any_job(data)
        operation = cancel_job(SCHEMA, job.id, "not wanted")
        if job.table in {"ready", "scheduled"}:
            assert self.store.run(operation) is Cancellation.CANCELLED
            job.table = "cancelled"
        elif job.table == "running":
            assert self.store.run(operation) is Cancellation.REQUESTED
            job.is_unwanted = True
        else:
            with pytest.raises(JobConflict):
                self.store.run(operation)

    @rule()
    def apply_requests(self) -> None:
        """Nothing is left to do but to forget those whose job has ended."""
        assert self.store.run(apply_requests(SCHEMA)) == []
        asked = {job_id for (job_id,) in self.store.sql("select job_id from jobq.cancel_request")}
        assert asked == {job.id for job in self.jobs.values() if job.is_unwanted and job.table == "running"}

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        job = self._any_job(data)
        turn = next(self.turns)
        operation = retry_job(SCHEMA, job.id, notify=False)
        if job.is_live or (self._holder(job.key) and job.unique.period is None):
            with pytest.raises(JobConflict):
                self.store.run(operation)
            return
        self.store.run(operation)
        job.failures = job.crashes = 0
        job.is_unwanted = False
        job.ready(turn)
        if job.key is not None and job.holds_its_key and job.unique.period is None:
            self.newest[job.key] = job

    def _any_job(self, data: st.DataObject) -> Job:
        return self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]

    # -- workers -------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), limit=st.integers(1, 4))
    def claim(self, which: int, limit: int) -> None:
        worker = self.workers[which]
        ready = [job for job in self.jobs.values() if job.table == "ready"]
        ready.sort(key=self._place)
        claimed = self.store.claim(worker, limit)
        jobs = [self.jobs[row.job_id] for row in claimed]
        assert all(job.table == "ready" for job in jobs)
        assert [self._place(job) for job in jobs] == [self._place(job) for job in ready[:limit]]
        for row, job in zip(claimed, jobs, strict=True):
            job.table, job.worker, job.attempt = "running", worker, job.attempt + 1
            assert (row.attempt, row.failures, row.crashes) == (job.attempt, job.failures, job.crashes)
            assert row.args == f'{{"n": {job.version}}}'
            self.claims.append(Claim(job, job.id, job.attempt, worker))

    @precondition(lambda self: any(claim.holds for claim in self.claims))
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def outcome(self, data: st.DataObject, outcome: str) -> None:
        claim = data.draw(st.sampled_from([claim for claim in self.claims if claim.holds]))
        turn = next(self.turns)
        assert self.store.run(outcome_of(claim, outcome)) == {claim.job_id}
        self._settled(claim.job, outcome, turn)

    def _settled(self, job: Job, outcome: str, turn: int) -> None:
        job.failures += outcome in {"fail", "discard"}
        if outcome == "complete":
            job.table = "completed"
        elif outcome == "cancel" or job.is_unwanted:
            job.table = "cancelled"
        elif outcome == "discard" or (outcome == "fail" and job.failures >= job.max_attempts):
            job.table = "discarded"
        elif outcome == "hand back":
            job.ready(turn)
        else:
            job.wait()

    @precondition(lambda self: not all(claim.holds for claim in self.claims))
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def late_outcome(self, data: st.DataObject, outcome: str) -> None:
        """Report an attempt that was rescued, settled or handed back: it is nobody's business now."""
        claim = data.draw(st.sampled_from([claim for claim in self.claims if not claim.holds]))
        assert self.store.run(outcome_of(claim, outcome)) == set()

    @rule(which=st.integers(0, 1), keeps_one=st.booleans())
    def release(self, which: int, *, keeps_one: bool) -> None:
        worker, turn = self.workers[which], next(self.turns)
        held = [job for job in self.jobs.values() if job.worker == worker and job.table == "running"]
        keep = [job.id for job in held[:1]] if keeps_one else []
        given = self.store.run(release(SCHEMA, worker, keep))
        assert sorted(given) == sorted(job.id for job in held if job.id not in keep)
        for job_id in given:
            if self.jobs[job_id].is_unwanted:
                self.jobs[job_id].table = "cancelled"
            else:
                self.jobs[job_id].ready(turn)

    @rule(which=st.integers(0, 1))
    def crash(self, which: int) -> None:
        assert self.store.run(end(SCHEMA, self.workers.pop(which), "died"))
        self._start_worker()

    @rule()
    def rescue(self) -> None:
        turn = next(self.turns)
        orphans = [j for j in self.jobs.values() if j.table == "running" and j.worker not in self.workers]
        answer = self.store.run(rescue(SCHEMA, CRASH_LIMIT, 1000))
        assert {job.job_id for job in answer} == {job.id for job in orphans}
        for job in orphans:
            job.crashes += 1
            if job.is_unwanted:
                job.table = "cancelled"
            elif job.crashes == 1:
                job.ready(turn)
            elif job.crashes < CRASH_LIMIT:
                job.wait()
            else:
                job.table = "discarded"

    @rule()
    def promote(self) -> None:
        turn = next(self.turns)
        waiting = [job for job in self.jobs.values() if job.table == "scheduled"]
        later = datetime.now(UTC) + timedelta(days=1)
        assert self.store.run(promote(SCHEMA, None, 1000, notify=False, now=later)).jobs == len(waiting)
        for job in waiting:
            job.ready(turn)

    # -- what must hold ------------------------------------------------------------------------------

    @invariant()
    def each_job_stands_in_one_table_as_the_model_has_it(self) -> None:
        real = {job_id: [_known(place) for place in where] for job_id, where in self.store.places().items()}
        assert real == {
            job.id: [(job.table, job.attempt, job.failures, job.crashes, job.holder)]
            for job in self.jobs.values()
        }

    def teardown(self) -> None:
        """Whatever has happened, every job ends once workers go on."""
        for _ in range(CRASH_LIMIT + 1):
            self.rescue()
            self.promote()
            self.release(0, keeps_one=False)
            self.release(1, keeps_one=False)
            for job in self.store.claim(self.workers[0], 1000):
                self.store.run(complete(SCHEMA, self.workers[0], [(job.job_id, job.attempt)], {}))
                self.jobs[job.job_id].table = "completed"
        assert {job.table for job in self.jobs.values()} <= set(FINAL)
        places = self.store.places()
        assert {job_id: [place.table for place in where] for job_id, where in places.items()} == {
            job.id: [job.table] for job in self.jobs.values()
        }


def _known(place: Place) -> tuple[str, int, int, int, int | None]:
    """Return what the model knows too; it forgets who ran a job that has ended or waits."""
    worker_id = place.worker_id if place.table == "running" else None
    return (place.table, place.attempt, place.failures, place.crashes, worker_id)


def over(store: Storage) -> type[RuleBasedStateMachine]:
    """Return the machine over one database, as hypothesis makes it anew for each history."""

    class Bound(Histories):
        def __init__(self) -> None:
            super().__init__(store)

    return Bound


SETTINGS: Final = settings(max_examples=60, stateful_step_count=40, deadline=None, print_blob=False)


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as storage:
        yield storage


@pytest.mark.matrix
def test_no_sequence_of_operations_loses_doubles_or_corrupts_a_job(store: Storage) -> None:
    run_state_machine_as_test(over(store), settings=SETTINGS)


def test_without_the_fence_the_same_sequences_go_wrong(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = "and attempt = o.attempt and worker_id = $3::int8"
    nothing = "and o.attempt is not null and $3::int8 is not null"
    for name in ("COMPLETE", "SETTLE"):
        statement: str = getattr(jobq._statements.outcomes, name)
        assert fence in statement
        monkeypatch.setattr(jobq._statements.outcomes, name, statement.replace(fence, nothing))
    first_found = settings(
        SETTINGS, max_examples=500, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(over(store), settings=first_found)
