"""Lists and bulk actions: what a filter chooses, in which steps, and what an interruption leaves."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import psycopg
import pytest

import jobq
from jobq._operation import Call, in_schema, run
from jobq._statements.bulk import APPLIES_TO, BulkRun, count_jobs, delete_job, move_job, reschedule_job
from jobq._statements.bulk_sql import Settings, When
from jobq._statements.filter import WALK, JobFilter, Place, Query, list_jobs, window
from jobq._statements.operator_log import Entry
from jobq._statements.outcomes import complete, settle
from tests.support.polling import eventually
from tests.support.storage import BOOM, SCHEMA, Storage, hold, in_background, settlement
from tests.test_plans import explain, whole_scans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._operation import Rows
    from jobq._statements.bulk import Action, BulkResult
    from jobq.embedded import Databases, EmbeddedPostgres

WORKER: Final = 1


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        store.worker(WORKER)
        yield store


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn) as client:
        yield client


def bulk(
    store: Storage, action: Action, batch: int = 1000, settings: Settings | None = None, **chosen: Any
) -> BulkResult:
    job = BulkRun(SCHEMA, action, JobFilter(**chosen), Entry(action, {}), settings or Settings(), batch)
    while (step := job.step()) is not None:
        store.run(step)
    return job.result


def finish(
    store: Storage,
    count: int,
    to: Literal["completed", "discarded", "cancelled"] = "discarded",
    **options: Any,
) -> list[int]:
    """Enqueue jobs and let them end; those that are discarded or cancelled have failed with BOOM."""
    ids = store.enqueue(count, **options)
    claimed = store.claim(WORKER, count, queue=options.get("queue", "default"))
    assert [job.job_id for job in claimed] == ids
    if to == "completed":
        store.run(complete(SCHEMA, WORKER, [(job.job_id, job.attempt) for job in claimed], {}))
    else:
        ends = [settlement(job, to, failure=BOOM) for job in claimed]
        store.run(settle(SCHEMA, WORKER, "w", ends, notify=False))
    return ids


def listed(store: Storage, limit: int = 1000, **chosen: Any) -> list[int]:
    """Return the ids that a filter chooses, page by page."""
    ids: list[int] = []
    after: str | None = None
    while True:
        page = store.run(list_jobs(SCHEMA, JobFilter(**chosen), after, limit))
        assert len(page.jobs) <= limit
        ids += [job.id for job in page.jobs]
        after = page.next
        if after is None:
            return ids


# -- filter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"ids": "12"}, "ids"),
        ({"ids": [True]}, "ids"),
        ({"ids": range(200_000)}, "ids"),
        ({"queues": "mail"}, "queues"),
        ({"kinds": [""]}, "kinds"),
        ({"tags": ["a" * 200]}, "tags"),
        ({"states": ["done"]}, "states"),
        ({"older_than": 5}, "older_than"),
        ({"newer_than": timedelta(-1)}, "newer_than"),
        ({"error": ""}, "error"),
        ({"error": "\0"}, "error"),
        ({"worker": "w"}, "worker"),
    ],
)
def test_a_filter_says_what_cannot_be(what: dict[str, Any], named: str) -> None:
    with pytest.raises(jobq.ConfigError, match=named):
        JobFilter(**what)


def test_a_filter_describes_what_was_given() -> None:
    chosen = JobFilter(states=["ready"], tags=("a",), older_than=timedelta(minutes=1), ids=range(150))
    described = chosen.described()
    assert json.loads(json.dumps(described))["states"] == ["ready"]
    assert described["older_than"] == 60.0
    assert described["ids"][-1] == "and 50 more"
    assert JobFilter().is_empty
    assert not chosen.is_empty


def test_each_criterion_chooses_what_it_says(store: Storage) -> None:
    [mail] = store.enqueue(queue="mail")
    [report] = store.enqueue(kind="report")
    [tagged] = store.enqueue(tags='{"a","b"}')
    [later] = store.enqueue(delay_s=60.0)
    [failed] = finish(store, 1, queue="bad")
    [done] = finish(store, 1, "completed", queue="good")
    [claimed] = [job.job_id for job in store.claim(WORKER, queue="mail")]
    assert claimed == mail
    assert listed(store) == [mail, tagged, report, later, failed, done]
    assert listed(store, queues=["mail", "bad"]) == [mail, failed]
    assert listed(store, kinds=["report"]) == [report]
    assert listed(store, tags=["b"]) == [tagged]
    assert listed(store, tags=["a", "c"]) == []
    assert listed(store, states=["scheduled", jobq.JobState.COMPLETED]) == [later, done]
    assert listed(store, error="VALUEERROR: bo") == [failed]
    assert listed(store, error="%") == []
    assert listed(store, worker=WORKER) == [mail, failed, done]
    assert listed(store, ids=[done, later, 4711]) == [later, done]
    assert listed(store, ids=[]) == []
    assert listed(store, ids=[done, later], states=["completed"]) == [done]


def test_age_counts_from_the_end_or_else_from_the_enqueue(store: Storage) -> None:
    [waits] = store.enqueue()
    [ended, just_ended] = finish(store, 2, queue="q")
    store.sql("update jobq.job set created_at = now() - interval '2 days'")
    store.sql("update jobq.finished set finished_at = now() - interval '1 day' where job_id = %s", ended)
    hour = timedelta(hours=1)
    assert listed(store, older_than=hour) == [waits, ended]
    assert listed(store, newer_than=hour) == [just_ended]
    assert listed(store, older_than=hour, newer_than=36 * hour) == [ended]


# -- lists ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 1000])
def test_pages_of_any_size_show_each_job_once(store: Storage, limit: int) -> None:
    ready = store.enqueue(5)
    scheduled = store.enqueue(5, delay_s=60.0)
    ended = finish(store, 5, queue="q")  # at one and the same moment
    ended_later = finish(store, 3, queue="q")
    expected = [*reversed(ready), *reversed(scheduled), *reversed(ended_later), *reversed(ended)]
    assert listed(store, limit) == expected
    assert listed(store, limit, ids=expected) == expected[:10] + sorted(expected[10:], reverse=True)


def test_a_page_shows_a_job_as_get_does(store: Storage, client: jobq.Client) -> None:
    store.enqueue(meta='{"m": 1}', tags='{"t"}', args='{"a": [1]}', timeout_s=1.5)
    store.enqueue(delay_s=60.0)
    store.enqueue(queue="q")
    store.claim(WORKER, queue="q")
    finish(store, 1, queue="r")
    page = client.list()
    assert len(page.jobs) == 4
    assert page.next is None
    for job in page.jobs:
        assert job == client.get(job.id)


@pytest.mark.parametrize("after", ["", "x", "ready", "ready.x.", "done.1.", 5, "ready.1.\0"])
def test_a_cursor_that_is_none_says_so(client: jobq.Client, after: Any) -> None:
    with pytest.raises(jobq.ConfigError, match="after"):
        client.list(after=after)


def test_a_cursor_belongs_to_its_filter(client: jobq.Client) -> None:
    with pytest.raises(jobq.ConfigError, match="same filter"):
        client.list(JobFilter(states=["completed"]), after="ready.5.")
    for limit in (0, 1001, "5"):
        with pytest.raises(jobq.ConfigError, match="limit"):
            client.list(limit=limit)  # type: ignore[arg-type]


def test_one_page_looks_through_a_bounded_number_of_jobs(
    store: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._statements.filter.LOOKED_THROUGH", 900)
    [rare] = store.enqueue(kind="rare")
    store.enqueue(2000)
    store.sql("analyze")
    page = store.run(list_jobs(SCHEMA, JobFilter(kinds=["rare"]), None, 50))
    assert page.jobs == ()
    assert page.next is not None
    assert listed(store, kinds=["rare"]) == [rare]


# -- counting ------------------------------------------------------------------------------------------


def test_a_count_is_exact_or_says_that_it_is_not(client: jobq.Client, store: Storage) -> None:
    store.enqueue(30)
    finish(store, 20, queue="q")
    assert client.bulk.count(JobFilter()) == jobq.BulkCount(50, is_exact=True)
    assert client.bulk.count(JobFilter(queues=["q"])) == jobq.BulkCount(20, is_exact=True)
    few = client.bulk.count(JobFilter(), limit=10)
    assert not few.is_exact
    assert few.jobs >= 10
    assert client.bulk.count(JobFilter(kinds=["noop"]), action="cancel").jobs == 30
    assert client.bulk.count(JobFilter(kinds=["noop"]), action="retry").jobs == 20
    with pytest.raises(jobq.ConfigError, match="action"):
        client.bulk.count(JobFilter(), action="explode")  # type: ignore[arg-type]


# -- one job -------------------------------------------------------------------------------------------


def test_a_deleted_job_takes_all_with_it_and_frees_its_key(client: jobq.Client, store: Storage) -> None:
    waiting = client.enqueue("k", {}, unique="a")
    [failed] = finish(store, 1, queue="q")
    for job_id in (waiting.id, failed):
        client.delete(job_id, by="me", reason="test data")
        with pytest.raises(jobq.JobNotFound):
            client.get(job_id)
    assert store.places() == {}
    assert store.count("attempt_error") == 0
    assert client.enqueue("k", {}, unique="a").inserted
    with pytest.raises(jobq.JobNotFound):
        client.delete(failed)


def test_what_runs_is_neither_deleted_nor_moved_nor_rescheduled(client: jobq.Client, store: Storage) -> None:
    job_id = store.claimed(WORKER).job_id
    with pytest.raises(jobq.JobConflict, match="is running"):
        client.delete(job_id)
    with pytest.raises(jobq.JobConflict, match="is running"):
        client.move(job_id, queue="q")
    with pytest.raises(jobq.JobConflict, match="is running"):
        client.reschedule(job_id, delay=timedelta(0))
    assert store.place(job_id).table == "running"
    assert client.operator_log() == []


def test_a_job_is_rescheduled_to_later_and_to_now(client: jobq.Client, store: Storage) -> None:
    [job_id] = store.enqueue()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    client.reschedule(job_id, run_at=tomorrow)
    assert client.get(job_id).state is jobq.JobState.SCHEDULED
    assert client.get(job_id).run_at == tomorrow
    client.reschedule(job_id, delay=timedelta(hours=1))
    run_at = client.get(job_id).run_at
    assert run_at is not None
    assert run_at < tomorrow - timedelta(hours=22)
    client.reschedule(job_id, run_at=datetime(2001, 1, 1, tzinfo=UTC))  # behind every promoter's mark
    run_at = client.get(job_id).run_at
    assert run_at is not None
    assert datetime.now(UTC) - run_at < timedelta(minutes=1)
    store.sql("update jobq.scheduled set run_at = 'infinity'")
    [ready] = store.enqueue()
    client.reschedule(ready, delay=timedelta(0))  # it is due already
    assert store.place(ready).table == "ready"
    assert len(client.operator_log()) == 4
    naive = datetime(2001, 1, 1)  # noqa: DTZ001 - the mistake under test
    impossible: list[dict[str, Any]] = [{}, {"run_at": tomorrow, "delay": timedelta(1)}, {"run_at": naive}]
    for wrong in impossible:
        with pytest.raises(jobq.ConfigError):
            client.reschedule(job_id, **wrong)


def test_a_moved_job_is_found_at_the_end_of_its_new_lane(client: jobq.Client, store: Storage) -> None:
    """In its old place it would stand before the mark that a worker keeps of that lane."""
    [moved] = store.enqueue()
    [there] = store.enqueue(queue="q", priority=3)
    client.move(moved, queue="q", priority=3)
    rows = store.sql("select job_id from jobq.ready where queue = 'q' and priority = 3 order by xid")
    assert [job_id for (job_id,) in rows] == [there, moved]
    [scheduled] = store.enqueue(delay_s=60.0)
    client.move(scheduled, priority=-2)
    assert (client.get(scheduled).queue, client.get(scheduled).priority) == ("default", -2)
    impossible: list[dict[str, Any]] = [{}, {"priority": 10}, {"queue": ""}]
    for wrong in impossible:
        with pytest.raises(jobq.ConfigError):
            client.move(moved, **wrong)


# -- many jobs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 7, 1000])
def test_every_job_is_changed_once_whatever_the_batch(store: Storage, batch: int) -> None:
    ready, scheduled = store.enqueue(9), store.enqueue(9, delay_s=60.0)
    other = store.enqueue(4, queue="other")
    running = [store.claimed(WORKER, queue="run").job_id for _ in range(3)]
    result = bulk(store, "move", batch, Settings(queue="q"), queues=["default"])
    assert result.changed == 18
    later = datetime.now(UTC) + timedelta(hours=1)
    result = bulk(store, "reschedule", batch, Settings(when=When(later)), queues=["q"])
    assert result.changed == 18
    assert {store.place(job_id).table for job_id in ready + scheduled} == {"scheduled"}
    result = bulk(store, "cancel", batch, queues=["q", "run"])
    assert (result.changed, result.requested) == (18, 3)
    assert {store.place(job_id).table for job_id in ready + scheduled} == {"cancelled"}
    assert {job_id for (job_id,) in store.sql("select job_id from jobq.cancel_request")} == set(running)
    assert bulk(store, "retry", batch, queues=["q"]).changed == 18
    assert bulk(store, "delete", batch, queues=["q", "run"]).changed == 18
    assert set(store.places()) == {*other, *running}


def test_an_action_refuses_what_it_cannot_mean(client: jobq.Client) -> None:
    with pytest.raises(jobq.ConfigError, match="every job"):
        client.bulk.delete(JobFilter())
    with pytest.raises(jobq.ConfigError, match="none of these"):
        client.bulk.delete(JobFilter(states=["running"]))
    with pytest.raises(jobq.ConfigError, match="batch"):
        client.bulk.cancel(JobFilter(ids=[1]), batch=1001)
    with pytest.raises(jobq.ConfigError, match="reschedule"):
        client.bulk.reschedule(JobFilter(ids=[1]))
    with pytest.raises(jobq.ConfigError, match="move"):
        client.bulk.move(JobFilter(ids=[1]))
    assert client.operator_log() == []
    assert client.bulk.delete(JobFilter(ids=[])).changed == 0  # no ids are no jobs


def test_completed_jobs_are_retried_only_when_they_are_named(client: jobq.Client, store: Storage) -> None:
    [done] = finish(store, 1, "completed")
    [failed] = finish(store, 1)
    assert client.bulk.count(JobFilter(kinds=["noop"]), action="retry").jobs == 1
    assert client.bulk.retry(JobFilter(kinds=["noop"])).changed == 1
    assert store.place(failed).table == "ready"
    assert client.bulk.retry(JobFilter(states=["completed"])).changed == 1
    assert store.place(done) == ("ready", 1, 0, 0, None, None)


def test_s48_of_eleven_in_bulk_one_meets_its_key_and_ten_are_retried(
    client: jobq.Client, store: Storage
) -> None:
    first = client.enqueue("k", {}, unique="u")
    [claimed] = store.claim(WORKER)
    store.run(settle(SCHEMA, WORKER, "w", [settlement(claimed, "discarded", failure=BOOM)], notify=False))
    others = finish(store, 10, queue="q")
    second = client.enqueue("k", {}, unique="u")
    assert second.inserted
    with pytest.raises(jobq.JobConflict, match=f"job {second.id} holds its unique key"):
        client.retry(first.id)
    result = client.bulk.retry(JobFilter(states=["discarded"]), by="me", reason="fixed")
    assert (result.changed, result.conflicts) == (10, 1)
    assert result.conflicting == (jobq.BulkConflict(first.id, second.id),)
    assert {store.place(job_id).table for job_id in others} == {"ready"}
    assert store.place(first.id).table == "discarded"
    assert client.operator_log()[0].jobs == 10


def test_of_two_with_one_key_in_a_batch_the_newest_is_retried(client: jobq.Client, store: Storage) -> None:
    ids: list[int] = []
    for _ in range(2):
        ids.append(client.enqueue("k", {}, unique="u").id)
        [claimed] = store.claim(WORKER)
        store.run(settle(SCHEMA, WORKER, "w", [settlement(claimed, "cancelled")], notify=False))
    result = client.bulk.retry(JobFilter(ids=ids))
    assert (result.changed, result.conflicting) == (1, (jobq.BulkConflict(ids[0], ids[1]),))
    assert store.place(ids[1]).table == "ready"


def test_an_action_that_is_interrupted_has_done_whole_batches_and_is_taken_up(
    client: jobq.Client, store: Storage
) -> None:
    store.enqueue(10)
    seen: list[BulkResult] = []

    def stop_at_five(result: BulkResult) -> None:
        seen.append(result)
        if result.changed >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.bulk.cancel(JobFilter(kinds=["noop"]), batch=3, on_progress=stop_at_five)
    assert [one.changed for one in seen] == [3, 6]
    assert store.count("finished") == 6
    assert client.operator_log()[0].jobs == 6
    assert client.bulk.cancel(JobFilter(kinds=["noop"]), batch=3).changed == 4
    assert [entry.jobs for entry in client.operator_log()] == [4, 6]


async def test_the_async_client_does_the_same(dsn: str, store: Storage) -> None:
    store.enqueue(4)
    seen: list[int] = []
    async with jobq.AsyncClient(dsn) as client:
        result = await client.bulk.cancel(
            JobFilter(kinds=["noop"]), batch=3, on_progress=lambda done: seen.append(done.changed)
        )
        assert result.changed == 4
        assert seen[0] == 3
        assert (await client.bulk.count(JobFilter(states=["cancelled"]))).jobs == 4
        assert (await client.bulk.retry(JobFilter(states=["cancelled"]))).changed == 4
        assert (await client.bulk.reschedule(JobFilter(kinds=["noop"]), delay=timedelta(1))).changed == 4
        assert (await client.bulk.move(JobFilter(kinds=["noop"]), priority=1)).changed == 4
        assert (await client.bulk.delete(JobFilter(kinds=["noop"]))).changed == 4
        assert (await client.list()).jobs == ()


def test_a_job_that_somebody_else_moves_at_this_moment_is_left_to_him(store: Storage, dsn: str) -> None:
    [first, second] = store.enqueue(2)
    with Storage(dsn) as other:
        store.sql("begin")
        assert [job.job_id for job in store.claim(WORKER, 1)] == [first]
        job = BulkRun(SCHEMA, "cancel", JobFilter(states=["ready"]), Entry("cancel", {}), Settings(), 100)
        step = job.step()
        assert step is not None
        with in_background(store, other.pid, lambda: other.run(step)):
            store.sql("commit")
        assert job.result.changed == 1
    assert store.place(first).table == "running"
    assert store.place(second).table == "cancelled"


# -- cost ----------------------------------------------------------------------------------------------

ROWS: Final = 60_000


@pytest.fixture(scope="module")
def large(server: EmbeddedPostgres, databases: Databases, template: str) -> Iterator[str]:
    """Many finished and scheduled jobs, few of them discarded, and statistics of an empty moment."""
    name = databases.create(template=template)
    dsn = server.dsn(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in ("job", "ready", "scheduled", "running", "finished", "attempt_error"):
            connection.execute(f"alter table jobq.{table} set (autovacuum_enabled = off)".encode())
        connection.execute("analyze")
        connection.execute(
            f"""
            insert into jobq.job (id, kind, args, max_attempts)
                select n, case when n % 1000 = 0 then 'rare' else 'k' end, '{{}}', 25
                from generate_series(1, {2 * ROWS}) n;
            insert into jobq.scheduled (job_id, run_at, reason, queue, priority)
                select n, now() + n * interval '1 second', 'scheduled', 'default', 0
                from generate_series(1, {ROWS}) n;
            insert into jobq.finished
                (job_id, state, finished_at, queue, priority, worker_id, attempt, failures, crashes)
                select {ROWS} + n, case when n % 5000 = 0 then 'discarded' else 'completed' end,
                       now() - n * interval '1 second', 'default', 0, 1, 1, 0, 0
                from generate_series(1, {ROWS}) n;
            """.encode()
        )
    yield dsn
    databases.drop(name)


def buffers(store: Storage, call: Call) -> int:
    """Return how many pages a statement touches."""
    plan = explain(store, call, "analyze, buffers,")
    touched: int = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    return touched


@pytest.mark.parametrize("plan_settings", [True, False])
@pytest.mark.parametrize(
    ("chosen", "most"),
    [
        ({}, 6_000),
        ({"states": ["discarded"]}, 200),
        ({"states": ["completed"]}, 6_000),
        ({"kinds": ["rare"]}, 90_000),
        ({"ids": [5, 70_000]}, 60),
        ({"newer_than": timedelta(seconds=60)}, 20_000),
    ],
    ids=["all", "discarded", "completed", "a rare kind", "ids", "newer"],
)
def test_a_page_touches_few_pages_whatever_the_statistics(
    large: str, plan_settings: bool, chosen: dict[str, Any], most: int
) -> None:
    with Storage(large, plan_settings=plan_settings) as store:
        total = 0

        def measured(call: Call) -> Rows:
            nonlocal total
            total += buffers(store, call)
            return store.call(call)

        page = run(list_jobs(SCHEMA, JobFilter(**chosen), None, 50), measured)
    assert page.jobs or "newer_than" in chosen
    assert total <= most


@pytest.mark.parametrize("state", WALK)
def test_a_step_reads_its_window_by_an_index(large: str, state: jobq.JobState) -> None:
    """Deep in the walk, where what was passed must not be read again."""
    with Storage(large, plan_settings=False) as store:
        query = Query()
        ended = store.value("select (now() - interval '1 hour')::text") if state.is_terminal else ""
        step = window(query, JobFilter(kinds=["k"]), Place(state, ROWS // 2, ended), 100)
        sql = in_schema(f"with {step.ctes} select count(*) from m", SCHEMA)
        plan = explain(store, Call(sql, query.params))
    assert [scan for scan in whole_scans(plan) if not scan.endswith(("on running", "on ready"))] == []


def test_every_action_has_its_states_and_each_single_action_is_one() -> None:
    assert set(APPLIES_TO) == {"cancel", "retry", "delete", "reschedule", "move"}
    for operation in (
        delete_job(SCHEMA, 1),
        move_job(SCHEMA, 1, "q", None),
        reschedule_job(SCHEMA, 1, None, timedelta(0)),
    ):
        assert "operator_log" in hold(operation).sql
    assert hold(count_jobs(SCHEMA, JobFilter(), None, None)).replan


def test_a_batch_that_postgresql_ends_to_break_a_deadlock_is_done_again(
    dsn: str, client: jobq.Client, db: psycopg.Connection
) -> None:
    first, second = (one.id for one in client.enqueue_many(jobq.NewJob("k", {}) for _ in range(2)))
    lock = "select from jobq.ready where job_id = %s for update"
    waiting = "select count(*) from pg_locks where not granted"
    with psycopg.connect(dsn) as other, ThreadPoolExecutor(1) as elsewhere:
        other.execute("set deadlock_timeout = '1h'")  # so that it is the batch that notices
        other.execute(lock, [second])
        moved = elsewhere.submit(client.bulk.move, JobFilter(ids=[first, second]), priority=3)
        eventually(lambda: db.execute(waiting).fetchone() == (1,), what="it has the first, and waits")
        db.commit()
        other.execute(lock, [first])  # it is there when the batch was ended
        other.commit()
        assert moved.result(60).changed == 2
    assert {client.get(job_id).priority for job_id in (first, second)} == {3}
