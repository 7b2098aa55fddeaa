"""Retention: what has reached its age goes, with all that belongs to it; nothing else does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq._errors import DatabaseUnavailable
from jobq._statements.duties import rescue
from jobq._statements.keys import FIRST_KEY, KeyRow, forget_keys, look_at_keys
from jobq._statements.leader import Deposed, Term, elect, resign
from jobq._statements.operate import retry_job
from jobq._statements.outcomes import Settlement, complete, settle
from jobq._statements.retention import (
    DEFAULT,
    Retention,
    Rule,
    Walk,
    read_retention,
    remove_finished,
    rules,
    set_retention,
)
from jobq._statements.trim import forget_log, forget_ticks, forget_workers
from jobq._worker.cleaner import LOG_KEPT_S, TICKS_KEPT_S, Cleaner, Trimmer
from jobq._worker.link import Link
from jobq._worker.stats import Counters
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import BOOM, SCHEMA, Storage, hold, in_background
from tests.test_plans import explain

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobq._operation import Operation

WORKER: Final = 1
DAY: Final = timedelta(days=1)
HOUR: Final = timedelta(hours=1)
COMPLETED: Final = Rule(86_400.0, ("completed",), (), ())
STATES: Final = ("completed", "discarded", "cancelled")
KEY: Final = b"0123456789abcdef"
OF_A_JOB: Final = ("job", "finished", "attempt_error", "unique_key")


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        store.worker(WORKER)
        yield store


@pytest.fixture
def term(store: Storage) -> Term:
    term = store.run(elect(SCHEMA, WORKER, "w", 600.0))
    assert term is not None
    return term


def clean(store: Storage, term: Term, limit: int = 2000) -> int:
    """Remove all that has reached its age, from the beginning; return how many jobs that were."""
    count = 0
    for rule in rules(store.run(read_retention(SCHEMA))):
        walk, is_full = Walk(rule), True
        while is_full:
            jobs, is_full, walk = store.run(remove_finished(SCHEMA, term, walk, limit))
            count += jobs
    return count


def generations(store: Storage) -> list[tuple[int, int]]:
    """Return the numbers of a key's rows, each with its job's id."""
    return store.sql("select generation, job_id from jobq.unique_key order by generation")


def finish(store: Storage, state: str = "completed", count: int = 1, **options: Any) -> list[int]:
    """Make jobs and end them as ``state``."""
    ids = store.enqueue(count, **options)
    jobs = store.claim(WORKER, count, queue=options.get("queue", "default"))
    fences = [(job.job_id, job.attempt) for job in jobs]
    if state == "completed":
        store.run(complete(SCHEMA, WORKER, fences, {}))
    else:
        failure = BOOM if state == "discarded" else None
        to: Any = state
        outcomes = [Settlement(*fence, to, "r", failure=failure) for fence in fences]
        store.run(settle(SCHEMA, WORKER, "w", outcomes, notify=False))
    return ids


def age(store: Storage, ids: Sequence[int], by: timedelta) -> None:
    """Let jobs have ended earlier."""
    store.sql("update jobq.finished set finished_at = finished_at - %s where job_id = any(%s)", by, list(ids))


def left(store: Storage, table: str = "finished") -> set[int]:
    column = "id" if table == "job" else "job_id"
    return {row[0] for row in store.sql(f"select {column} from jobq.{table}")}


# -- what goes, and when -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "kept"), [("completed", DAY), ("discarded", 7 * DAY), ("cancelled", 7 * DAY)]
)
def test_a_job_stays_to_its_age_and_goes_then(
    store: Storage, term: Term, state: str, kept: timedelta
) -> None:
    young, old = finish(store, state), finish(store, state)
    age(store, young, kept - timedelta(minutes=1))
    age(store, old, kept + timedelta(minutes=1))
    assert clean(store, term) == 1
    assert left(store) == left(store, "job") == set(young)


def test_all_that_belongs_to_a_job_goes_with_it(store: Storage, term: Term) -> None:
    [job_id] = finish(store, "discarded", unique_key=KEY, unique_name="k")
    store.sql(
        "insert into jobq.attempt_error (job_id, attempt, outcome, type, message, traceback, worker)"
        " select job_id, attempt + 1, outcome, type, message, traceback, worker from jobq.attempt_error"
    )
    assert {table: store.count(table) for table in OF_A_JOB} == {
        "job": 1, "finished": 1, "attempt_error": 2, "unique_key": 1,
    }  # fmt: skip
    age(store, [job_id], 8 * DAY)
    assert clean(store, term) == 1
    assert {table: store.count(table) for table in OF_A_JOB} == dict.fromkeys(OF_A_JOB, 0)


def test_errors_before_a_success_go_too(store: Storage, term: Term) -> None:
    store.enqueue()
    [job] = store.claim(WORKER)
    again = Settlement(job.job_id, job.attempt, "ready", "retry", failed=True, failure=BOOM)
    store.run(settle(SCHEMA, WORKER, "w", [again], notify=False))
    [job] = store.claim(WORKER)
    store.run(complete(SCHEMA, WORKER, [(job.job_id, job.attempt)], {}))
    assert store.count("attempt_error") == 1
    age(store, [job.job_id], 2 * DAY)
    clean(store, term)
    assert store.count("attempt_error") == 0


def test_what_lives_is_never_touched(store: Storage, term: Term) -> None:
    waiting = store.enqueue()
    [running] = store.claim(WORKER)
    waiting = store.enqueue(2)
    store.enqueue(delay_s=3600.0)
    store.sql("update jobq.job set created_at = now() - interval '1 year'")
    before = store.dump()
    assert clean(store, term) == 0
    assert store.dump() == before
    assert {running.job_id, *waiting} <= left(store, "job")


def test_settings_of_a_queue_go_before_those_of_all(store: Storage, term: Term) -> None:
    store.run(set_retention(SCHEMA, Retention("brief", completed=HOUR, discarded="keep")))
    store.run(set_retention(SCHEMA, Retention(None, completed=3 * DAY, cancelled=HOUR)))
    kept = {
        *finish(store, queue="default"),
        *finish(store, "discarded", queue="brief"),
    }
    gone = {
        *finish(store, queue="brief"),
        *finish(store, "cancelled", queue="default"),
        *finish(store, "cancelled", queue="brief"),
    }
    age(store, [*kept, *gone], 2 * DAY)
    assert clean(store, term, limit=2) == len(gone)
    assert left(store) == kept
    age(store, list(kept), 100 * DAY)
    assert clean(store, term) == 1
    [row] = store.sql("select state, queue from jobq.finished")
    assert row == ("discarded", "brief")


def test_an_age_of_nothing_removes_what_is_settled(store: Storage, term: Term) -> None:
    store.run(set_retention(SCHEMA, Retention(None, completed=timedelta(0))))
    fresh, settled = finish(store), finish(store)
    age(store, settled, timedelta(seconds=3))
    assert clean(store, term) == 1
    assert left(store) == set(fresh)


def test_a_queue_with_odd_names_is_told_apart(store: Storage, term: Term) -> None:
    names = ['a "b" {c},\\', "completed x", "x", "NULL", "ünï 🦄"]
    for number, name in enumerate(names):
        store.run(set_retention(SCHEMA, Retention(name, completed=(number + 1) * HOUR)))
    ids = {name: finish(store, queue=name)[0] for name in names}
    age(store, list(ids.values()), 3 * HOUR + timedelta(minutes=30))
    assert clean(store, term) == 3
    assert left(store) == {ids["NULL"], ids["ünï 🦄"]}


# -- unique keys -------------------------------------------------------------------------------------


def test_a_key_that_a_period_holds_stays_until_the_period_is_over(store: Storage, term: Term) -> None:
    [job_id] = finish(store, unique_key=KEY, unique_name="k")
    store.sql("update jobq.unique_key set held_until = now() + interval '1 hour'")
    age(store, [job_id], 2 * DAY)
    assert clean(store, term) == 1
    assert store.count("unique_key") == 1
    assert store.walk_keys(term) == 0
    assert store.run(forget_keys(SCHEMA, term, [KeyRow(KEY, 1)])) == 0, "whoever asks for it"
    store.sql("update jobq.unique_key set held_until = now() - interval '1 second'")
    assert store.walk_keys(term) == 1
    assert store.count("unique_key") == 0


def test_all_keys_are_walked_in_bites_and_those_of_jobs_stay(
    store: Storage, term: Term, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._statements.keys.BITE", 10)
    keys = [number.to_bytes(16, "big") for number in range(25)]
    for key in keys:
        store.enqueue(unique_key=key, unique_name="k")
    store.sql("update jobq.job set id = -id where id % 2 = 0")  # so that those keys have no job
    place, found, calls = FIRST_KEY, list[KeyRow](), 0
    while not calls or place != FIRST_KEY:
        stale, place = store.run(look_at_keys(SCHEMA, place))
        found, calls = found + stale, calls + 1
    assert calls == 3
    assert len(found) in {12, 13}
    assert store.run(forget_keys(SCHEMA, term, found)) == len(found)
    kept = {key for (key,) in store.sql("select key from jobq.unique_key")}
    assert kept == set(keys) - {row.key for row in found}
    assert store.run(forget_keys(SCHEMA, term, found)) == 0, "they are gone"


def test_a_later_generation_keeps_its_key_and_the_first_row_stays_while_there_is_one(
    store: Storage, term: Term
) -> None:
    [first] = finish(store, unique_key=KEY, unique_name="k")
    [second] = store.enqueue(unique_key=KEY, unique_name="k")
    age(store, [first], 2 * DAY)
    assert clean(store, term) == 1
    assert generations(store) == [(1, first), (2, second)]
    assert store.enqueue(unique_key=KEY, unique_name="k") == [second]


def test_a_key_that_an_open_transaction_counts_on_is_not_removed(store: Storage, term: Term) -> None:
    """Were it removed, the next enqueue would begin at generation 1, and both would hold the key."""
    [first] = finish(store, unique_key=KEY, unique_name="k")
    age(store, [first], 2 * DAY)
    with Storage(store.dsn) as other, Storage(store.dsn) as third:
        other.sql("begin")
        [second] = other.enqueue(unique_key=KEY, unique_name="k")
        assert clean(store, term) == 1
        assert store.walk_keys(term) == 0
        with in_background(store, third.pid, lambda: third.enqueue(unique_key=KEY, unique_name="k")) as made:
            other.sql("commit")
        assert made == [[second]], "it waited for the first one, and was told of it"
    assert store.walk_keys(term) == 0
    assert generations(store) == [(1, first), (2, second)]


def test_what_a_retry_left_of_a_key_goes_in_the_end(store: Storage, term: Term) -> None:
    [job_id] = finish(store, unique_key=KEY, unique_name="k")
    for _ in range(3):
        store.run(retry_job(SCHEMA, job_id, notify=False))
        [job] = store.claim(WORKER)
        store.run(complete(SCHEMA, WORKER, [(job.job_id, job.attempt)], {}))
    assert [number for number, _ in generations(store)] == [1, 2, 3, 4]
    assert store.walk_keys(term) == 2
    assert [number for number, _ in generations(store)] == [1, 4], "the first, and the job's own"
    age(store, [job_id], 2 * DAY)
    assert clean(store, term) == 1
    assert [number for number, _ in generations(store)] == [1]
    assert store.walk_keys(term) == 1
    assert store.count("unique_key") == 0


def test_of_a_hot_key_the_first_row_and_what_is_needed_stay(store: Storage, term: Term) -> None:
    ids = [finish(store, unique_key=KEY, unique_name="k")[0] for _ in range(8)]
    age(store, [ids[place] for place in (0, 2, 3, 5)], 2 * DAY)
    assert clean(store, term, limit=2) == 4
    assert [number for number, _ in generations(store)] == [1, 2, 5, 7, 8]
    age(store, ids, 2 * DAY)
    assert clean(store, term) == 4
    store.walk_keys(term)
    assert store.count("unique_key") == 0
    [again] = store.enqueue(unique_key=KEY, unique_name="k")
    assert generations(store) == [(1, again)]


@pytest.mark.parametrize("way", ["operation", "sql function", "retry"])
def test_whoever_takes_a_used_key_locks_the_row_that_he_counts_from(
    store: Storage, term: Term, way: str
) -> None:
    [first] = finish(store, unique_key=KEY, unique_name="k")
    if way == "sql function":  # which makes its key of a text
        store.sql("update jobq.unique_key set key = substring(sha256('k'), 1, 16)")
    with Storage(store.dsn) as other:
        other.sql("begin")
        if way == "operation":
            [second] = other.enqueue(unique_key=KEY, unique_name="k")
            assert second != first
        elif way == "sql function":
            assert other.sql("select inserted from jobq.enqueue('noop', unique_key => 'k')") == [(True,)]
        else:
            other.run(retry_job(SCHEMA, first, notify=False))
        free = store.sql("select job_id from jobq.unique_key where generation = 1 for update skip locked")
        other.sql("rollback")
    assert free == []


# -- batches, marks, others at work --------------------------------------------------------------------


def test_batches_end_where_they_should(store: Storage, term: Term) -> None:
    ids = finish(store, count=25)  # one statement, so one moment
    age(store, ids, 2 * DAY)
    later = finish(store, count=7)
    age(store, later, DAY + HOUR)
    [day, _] = rules(store.run(read_retention(SCHEMA)))
    walk, counts = Walk(day), []
    while True:
        removed = store.run(remove_finished(SCHEMA, term, walk, 10))
        counts.append(removed.jobs)
        walk = removed.walk
        if not removed.is_full:
            break
    assert counts == [10, 10, 10, 2]


def test_a_moment_with_more_rows_that_stay_than_a_batch_has_is_passed(store: Storage, term: Term) -> None:
    store.run(set_retention(SCHEMA, Retention("keep", completed="keep")))
    kept = finish(store, count=25, queue="keep")
    gone = finish(store, count=5)
    age(store, [*kept, *gone], 2 * DAY)
    store.sql("update jobq.finished set finished_at = '2020-01-01'")
    later = finish(store)
    age(store, later, 2 * DAY)
    assert clean(store, term, limit=4) == 6
    assert left(store) == set(kept)


def test_rows_that_stayed_at_the_mark_and_were_taken_by_others_hide_no_later_ones(
    store: Storage, term: Term
) -> None:
    store.run(set_retention(SCHEMA, Retention("slow", completed=3 * DAY)))
    [day, *_] = rules(store.run(read_retention(SCHEMA)))
    stay = finish(store, count=3, queue="slow")
    finish(store)
    store.sql("update jobq.finished set finished_at = now() - %s", 2 * DAY)
    removed = store.run(remove_finished(SCHEMA, term, Walk(day)))
    assert (removed.jobs, left(store), removed.walk.stay) == (1, set(stay), 3)
    store.sql("delete from jobq.finished where job_id = any(%s)", stay[:2])  # as an operator does
    later = finish(store, count=4)
    age(store, later, DAY + HOUR)
    assert store.run(remove_finished(SCHEMA, term, removed.walk)).jobs == 4
    assert left(store) == {stay[2]}


def test_a_walk_goes_on_from_its_mark_and_a_new_one_finds_what_stands_before_it(
    store: Storage, term: Term
) -> None:
    [day, _] = rules(store.run(read_retention(SCHEMA)))
    first = finish(store)
    age(store, first, 2 * DAY)
    removed = store.run(remove_finished(SCHEMA, term, Walk(day)))
    assert removed.jobs == 1
    late = finish(store)
    age(store, late, 3 * DAY)
    assert store.run(remove_finished(SCHEMA, term, removed.walk)).jobs == 0
    assert store.run(remove_finished(SCHEMA, term, removed.walk.skipping())).jobs == 0
    assert store.run(remove_finished(SCHEMA, term, Walk(day))).jobs == 1


def test_a_reader_delays_nothing(store: Storage, term: Term) -> None:
    ids = finish(store, count=50)
    age(store, ids, 2 * DAY)
    with psycopg.connect(store.dsn) as reader:
        reader.execute("begin isolation level repeatable read")
        reader.execute("select count(*) from jobq.jobs")
        store.sql("set statement_timeout = '5s'")
        assert clean(store, term) == 50
        assert reader.execute("select count(*) from jobq.jobs").fetchone() == (50,)


def test_a_retry_in_an_open_transaction_is_waited_for_and_wins(store: Storage, term: Term) -> None:
    """An operator's retry has locked the finished row: when it commits, nothing of the job is removed."""
    [job_id] = finish(store)
    age(store, [job_id], 2 * DAY)
    with Storage(store.dsn) as other:
        other.sql("begin")
        other.sql(
            "with x as (delete from jobq.finished where job_id = %s returning *)"
            " insert into jobq.ready (job_id, queue, priority, attempt)"
            " select job_id, queue, priority, attempt from x",
            job_id,
        )
        with (
            Storage(store.dsn) as cleaner,
            in_background(store, cleaner.pid, lambda: clean(cleaner, term)) as counts,
        ):
            other.sql("commit")
        assert counts == [0]
    assert store.place(job_id).table == "ready"
    assert left(store, "job") == {job_id}


def test_a_row_that_lost_its_payload_goes_all_the_same(store: Storage, term: Term) -> None:
    [job_id] = finish(store)
    age(store, [job_id], 2 * DAY)
    store.sql("delete from jobq.job")
    assert clean(store, term) == 1


def test_a_leader_whose_term_is_over_removes_nothing(store: Storage, term: Term) -> None:
    ids = finish(store, "discarded", unique_key=KEY, unique_name="k")
    age(store, ids, 30 * DAY)
    store.run(resign(SCHEMA, term))
    store.worker(2)
    assert store.run(elect(SCHEMA, 2, "other", 600.0)) == Term(2, term.number + 1)
    before = store.dump()
    [day, week] = rules(store.run(read_retention(SCHEMA)))
    operations: list[Operation[Any]] = [
        remove_finished(SCHEMA, term, Walk(day)),
        remove_finished(SCHEMA, term, Walk(week)),
        forget_keys(SCHEMA, term, [KeyRow(KEY, 1)]),
        forget_ticks(SCHEMA, term, 0.0),
        forget_log(SCHEMA, term, 0.0),
        forget_workers(SCHEMA, term, 0.0),
    ]
    for operation in operations:
        with pytest.raises(Deposed):
            store.run(operation)
    assert store.dump() == before


@pytest.mark.parametrize("keeps_its_place", [True, False], ids=["with marks", "without"])
def test_with_marks_a_removal_under_a_pinned_horizon_reads_no_more_after_many_others(
    store: Storage, term: Term, *, keeps_its_place: bool
) -> None:
    walk, hits = Walk(COMPLETED), []
    store.sql("analyze")
    with Storage(store.dsn) as reader:
        reader.sql("begin isolation level repeatable read")
        reader.sql("select 1 from jobq.ready limit 1")
        for round_ in range(40):
            ids = finish(store, count=500)
            age(store, ids, 2 * DAY - round_ * timedelta(minutes=1))
            last = store.value("select max(finished_at) from jobq.finished")
            call = hold(remove_finished(SCHEMA, term, walk))
            plan = explain(store, call, "analyze, buffers, timing off,")
            hits.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
            assert store.count("finished") == 0
            walk = Walk(COMPLETED, last) if keeps_its_place else walk
    first, final = sum(hits[2:7]), sum(hits[-5:])
    if keeps_its_place:
        assert final <= 1.02 * first, hits
    else:
        assert final > 1.08 * first, f"there was nothing for the marks to save: {hits}"


@pytest.mark.parametrize("step", ["forward", "behind"])
async def test_the_cleaner_removes_in_batches_and_comes_back_for_what_was_late(
    store: Storage, term: Term, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    ids = finish(store, count=25)
    age(store, ids, 2 * DAY)
    counters = Counters()
    link = Link(store.dsn, SCHEMA, "test", 5.0)
    cleaner = Cleaner(link, SCHEMA, counters, limit=10)
    rests = [await cleaner.run_once(term) for _ in range(4)]
    assert counters.removed == 25
    assert [rest is not None for rest in rests] == [True, True, False, False]
    late = finish(store)
    age(store, late, 3 * DAY)
    if step == "behind":
        for course in cleaner._courses:
            course.rescan_at = 0.0
    await cleaner.run_once(term)
    assert counters.removed == (26 if step == "behind" else 25)
    await link.close()


async def test_the_cleaner_obeys_new_settings(
    store: Storage, term: Term, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._worker.cleaner._SETTINGS_S", 0.0)
    link = Link(store.dsn, SCHEMA, "test", 5.0)
    counters = Counters()
    cleaner = Cleaner(link, SCHEMA, counters)
    age(store, finish(store), 2 * HOUR)
    age(store, finish(store, queue="brief"), 2 * HOUR)
    await cleaner.run_once(term)
    assert counters.removed == 0
    store.run(set_retention(SCHEMA, Retention("brief", completed=HOUR)))
    await cleaner.run_once(term)
    assert counters.removed == 1
    store.run(set_retention(SCHEMA, Retention(None, completed="keep", discarded="keep", cancelled="keep")))
    store.run(set_retention(SCHEMA, Retention("brief")))
    age(store, list(left(store)), 1000 * DAY)
    assert await cleaner.run_once(term) is None
    assert counters.removed == 1
    await link.close()


class SlowFromTheBeginning(Link):
    """A connection to a server that cannot come to the first finished row in time."""

    is_slow = True

    async def run(self, operation: Operation[Any]) -> Any:
        if self.is_slow:
            call = next(operation)
            if call.sql.startswith("\nwith led") and call.params[2] is None and call.params[-1] is None:
                raise DatabaseUnavailable("no answer in time")

            def rest() -> Operation[Any]:
                rows = yield call
                try:
                    operation.send(rows)
                except StopIteration as done:
                    return done.value
                raise AssertionError

            return await super().run(rest())
        return await super().run(operation)


async def test_a_way_to_the_first_row_that_is_too_long_is_left_for_later(store: Storage, term: Term) -> None:
    """A new leader under a pinned horizon: the entries of all that went before it stand in its way."""
    age(store, finish(store), 3 * DAY)
    age(store, finish(store), DAY + HOUR / 2)
    link = SlowFromTheBeginning(store.dsn, SCHEMA, "test", 5.0)
    counters = Counters()
    cleaner = Cleaner(link, SCHEMA, counters)
    for _ in range(2):  # one for each age
        with pytest.raises(DatabaseUnavailable):
            await cleaner.run_once(term)
    assert await cleaner.run_once(term) is None
    assert counters.removed == 1, "what ended within the hour before its age"
    link.is_slow = False
    for course in cleaner._courses:
        course.rescan_at = 0.0
    await cleaner.run_once(term)
    assert counters.removed == 2
    await link.close()


# -- what else has an end ------------------------------------------------------------------------------


def test_old_ticks_go(store: Storage, term: Term) -> None:
    store.sql(
        "insert into jobq.periodic_tick (name, tick, made_at)"
        " select 'n', now() - n * interval '1 day', now() - n * interval '1 day'"
        " from generate_series(1, 40) n"
    )
    assert store.run(forget_ticks(SCHEMA, term, TICKS_KEPT_S)) == 11
    assert store.run(forget_ticks(SCHEMA, term, TICKS_KEPT_S)) == 0
    assert store.value("select max(now() - made_at) < interval '30 days' from jobq.periodic_tick")


def test_old_entries_of_the_operators_log_go_in_bites(
    store: Storage, term: Term, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._statements.trim.BITE", 4)
    store.sql(
        "insert into jobq.operator_log (at, actor, action, target)"
        " select now() - (100 - n) * interval '1 day', 'a', 'b', '{}' from generate_series(1, 20) n"
    )
    counts = [store.run(forget_log(SCHEMA, term, LOG_KEPT_S)) for _ in range(4)]
    assert counts[:2] == [4, 4]
    assert counts[3] == 0
    assert store.value("select max(now() - at) < interval '90 days' from jobq.operator_log")


def test_s03_a_worker_that_still_holds_a_job_is_not_forgotten(store: Storage, term: Term) -> None:
    store.worker(2)
    job = store.claimed(2)
    store.end_lease(2)
    assert store.run(forget_workers(SCHEMA, term, 0.0)) == 0
    store.run(rescue(SCHEMA, 3, 100))
    assert store.run(forget_workers(SCHEMA, term, 3600.0)) == 0, "it ended just now"
    assert store.run(forget_workers(SCHEMA, term, 0.0)) == 1
    assert store.sql("select id from jobq.worker") == [(WORKER,)]
    assert store.place(job.job_id).table == "ready"


async def test_the_trimmer_does_all_of_it(store: Storage, term: Term) -> None:
    store.sql("insert into jobq.unique_key (key, generation, job_id) values (%s, 1, 4711)", KEY)
    store.sql("insert into jobq.periodic_tick (name, tick, made_at) values ('n', '2020-01-01', '2020-01-01')")
    store.sql(
        "insert into jobq.operator_log (at, actor, action, target) values ('2020-01-01', 'a', 'b', '{}')"
    )
    store.worker(2)
    store.sql("update jobq.worker set ended_at = '2020-01-01', end_reason = 'stopped' where id = 2")
    link = Link(store.dsn, SCHEMA, "test", 5.0)
    assert await Trimmer(link, SCHEMA).run_once(term) is None
    assert [store.count(table) for table in ("unique_key", "periodic_tick", "operator_log", "worker")] == [
        0, 0, 0, 1,
    ]  # fmt: skip
    await link.close()


# -- the client --------------------------------------------------------------------------------------------


async def test_settings_are_read_and_put_by_both_clients(dsn: str) -> None:
    all_queues = Retention(None, DAY, 7 * DAY, 7 * DAY)
    async with jobq.AsyncClient(dsn) as client:
        assert await client.queues.retention() == [all_queues]
        await client.queues.set_retention("mail", completed=timedelta(0), discarded="keep")
    with jobq.Client(dsn) as client_:
        mail = Retention("mail", timedelta(0), "keep", None)
        assert client_.queues.retention() == [all_queues, mail]
        client_.queues.set_retention(cancelled=HOUR)
        assert client_.queues.retention() == [Retention(None, DAY, 7 * DAY, HOUR), mail]
        client_.queues.set_retention("mail", reason="enough", by="me")
        client_.queues.set_retention()
        assert client_.queues.retention() == [all_queues]
        [_, second, _, first] = client_.operator_log()
    assert (first.action, first.target) == (
        "set retention",
        {"queue": "mail", "completed": 0, "discarded": "keep", "cancelled": None},
    )
    assert (second.actor, second.reason) == ("me", "enough")


@pytest.mark.parametrize(
    "bad",
    [
        {"completed": timedelta(seconds=-1)},
        {"completed": 3600},
        {"discarded": "never"},
        {"cancelled": timedelta(days=36_526)},
        {"queue": ""},
        {"queue": "x" * 129},
        {"queue": 5},
        {"queue": "a\0b"},
        {"reason": "x" * 1001},
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(dsn: str, bad: dict[str, Any]) -> None:
    with jobq.Client(dsn) as client, pytest.raises(jobq.ConfigError, match=next(iter(bad))):
        client.queues.set_retention(**bad)


async def test_a_worker_removes_what_has_reached_its_age(dsn: str, store: Storage) -> None:
    age(store, finish(store, count=30), 2 * DAY)
    async with working(dsn, jobq.Jobs()) as bench:
        await eventually_async(lambda: bench.worker.stats().removed == 30)
    assert store.count("finished") == store.count("job") == 0


# -- the pure part -----------------------------------------------------------------------------------------

AGES: Final = st.one_of(st.none(), st.just("keep"), st.sampled_from([HOUR, DAY, 7 * DAY]))
SETTINGS: Final = st.builds(Retention, st.just("q"), AGES, AGES, AGES)


@given(
    for_all=st.builds(Retention, st.none(), AGES, AGES, AGES),
    queues=st.dictionaries(st.sampled_from(["a", "b", "c d"]), SETTINGS),
)
def test_each_state_of_each_queue_has_the_age_that_is_said_of_it(
    for_all: Retention, queues: dict[str, Retention]
) -> None:
    whole = Retention(None, *(getattr(for_all, s) or getattr(DEFAULT, s) for s in STATES))
    all_rules = rules([whole, *(replace(one, queue=queue) for queue, one in queues.items())])
    assert len({rule.age_s for rule in all_rules}) == len(all_rules)
    for queue in ("a", "b", "c d", "unheard of"):
        for state in STATES:
            own = getattr(queues[queue], state) if queue in queues else None
            wanted = own if own is not None else getattr(whole, state)
            place = f"{state} {queue}"
            ages = [
                rule.age_s
                for rule in all_rules
                if (state in rule.states and place not in rule.exceptions) or place in rule.own
            ]
            assert ages == ([] if wanted == "keep" else [wanted.total_seconds()])
