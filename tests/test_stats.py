"""What queues hold and how far behind they are: exact where it is little, bounded where it is much."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest

import jobq
from jobq._operation import Call, run
from jobq._statements import stats as _stats
from jobq._statements.outcomes import complete, settle
from tests.support.storage import SCHEMA, Storage, settlement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._operation import Rows
    from jobq.embedded import Databases, EmbeddedPostgres

PAGES: Final = 1_000  # what all statements together may touch
WORKER: Final = 7


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as store:
        yield store


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    with jobq.Client(dsn, pool_max_size=2) as client:
        yield client


def stats_of(client: jobq.Client, queue: str = "default") -> jobq.QueueStats:
    (found,) = [stats for stats in client.queue_stats() if stats.queue == queue]
    return found


# -- exact -----------------------------------------------------------------------------------------


def test_an_empty_schema_has_no_queues(client: jobq.Client) -> None:
    assert client.queue_stats() == []
    assert client.workers() == []


def test_each_state_of_each_queue_is_counted(store: Storage, client: jobq.Client) -> None:
    store.worker(WORKER)
    store.enqueue(4, delay_s=100.0)
    store.enqueue(3, queue="mail")
    let_four_run(store)
    store.enqueue(2)
    found = {stats.queue: stats for stats in client.queue_stats()}
    assert list(found) == ["default", "mail"]
    default, mail = found["default"], found["mail"]
    assert (default.scheduled, default.ready, default.running) == (4, 2, 1)
    assert (default.completed, default.discarded, default.cancelled) == (1, 1, 1)
    assert (default.completed_last_hour, default.discarded_last_hour) == (1, 1)
    assert (mail.ready, mail.scheduled, mail.running, mail.completed) == (3, 0, 0, 0)
    assert default.estimated == mail.estimated == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        default.ready = 1  # type: ignore[misc]


def let_four_run(store: Storage) -> None:
    """Let four jobs be claimed: one completes, one is discarded, one cancelled, and one runs."""
    store.enqueue(4)
    first, second, third, _ = store.claim(WORKER)
    store.run(complete(SCHEMA, WORKER, [(first.job_id, first.attempt)], {}))
    ways = [settlement(second, "discarded", "r"), settlement(third, "cancelled", "r")]
    store.run(settle(SCHEMA, WORKER, "w", ways, notify=False))


def test_what_ended_before_the_clock_was_set_back_is_not_in_the_last_hour(
    store: Storage, client: jobq.Client
) -> None:
    store.worker(WORKER)
    let_four_run(store)
    store.sql("update jobq.finished set finished_at = finished_at + interval '1 day'")
    store.sql("update jobq.worker set heartbeat_at = heartbeat_at + interval '1 day'")
    store.enqueue()
    store.sql("update jobq.ready set ready_at = ready_at + interval '1 day'")
    found = stats_of(client)
    assert (found.completed, found.completed_last_hour, found.lag_s) == (1, 0, 0.0)
    [worker] = client.workers()
    assert worker.heartbeat_age_s == 0.0


def test_what_ended_earlier_is_not_in_the_last_hour(store: Storage, client: jobq.Client) -> None:
    store.worker(WORKER)
    let_four_run(store)
    store.sql("update jobq.finished set finished_at = now() - interval '61 minutes'")
    found = stats_of(client)
    assert (found.completed, found.completed_last_hour) == (1, 0)
    assert (found.discarded, found.discarded_last_hour) == (1, 0)


def test_a_burst_in_the_last_hour_is_estimated_well_and_few_discarded_among_it_are_counted(
    store: Storage, client: jobq.Client
) -> None:
    store.sql(
        "insert into jobq.finished (job_id, state, finished_at, claimed_at, queue, priority, worker_id,"
        " attempt, failures, crashes)"
        " select n, case n when 7000 then 'discarded' else 'completed' end,"
        " now() - interval '70 s' + n * interval '1 ms', now(), 'default', 0, 1, 1, 0, 0"
        " from generate_series(1, 20000) n"
    )
    found = stats_of(client)
    assert "completed_last_hour" in found.estimated
    assert found.completed_last_hour == pytest.approx(20_000, rel=0.1)
    assert (found.discarded, found.discarded_last_hour) == (1, 1)
    assert not {"discarded", "discarded_last_hour"} & set(found.estimated)


def test_the_lag_is_the_time_since_the_oldest_job_became_ready(store: Storage, client: jobq.Client) -> None:
    made, _ = store.enqueue(2, priority=3)
    store.enqueue(1, priority=-3)
    store.enqueue(1, queue="other", delay_s=50.0)
    store.sql("update jobq.ready set ready_at = now() - interval '5 minutes' where job_id = %s", made)
    store.sql("update jobq.job set created_at = now() - interval '5 days'")
    assert stats_of(client).lag_s == pytest.approx(300, abs=10)
    assert stats_of(client, "other").lag_s == 0.0


def test_jobs_of_an_unknown_kind_are_counted_apart(store: Storage, client: jobq.Client) -> None:
    store.worker(WORKER)
    job = store.claimed(WORKER)
    store.run(
        settle(SCHEMA, WORKER, "w", [settlement(job, "scheduled", "unknown kind", delay_s=10)], notify=False)
    )
    store.enqueue(3, delay_s=5.0)
    assert (stats_of(client).scheduled, stats_of(client).unknown_kinds) == (4, 1)


def test_a_pause_and_the_workers_of_a_queue_are_told(store: Storage, client: jobq.Client) -> None:
    store.worker(WORKER)
    store.sql("insert into jobq.pause (scope, name, reason) values ('queue', 'mail', 'smtp is down')")
    store.sql(
        "insert into jobq.pause (scope, name, until) values ('queue', 'soon', now() + interval '1 minute')"
    )
    store.sql(
        "insert into jobq.pause (scope, name, until) values ('queue', 'over', now() - interval '1 minute')"
    )
    store.sql("insert into jobq.pause (scope, name) values ('kind', 'noop')")
    found = {stats.queue: stats for stats in client.queue_stats()}
    assert list(found) == ["default", "mail", "soon"]
    assert (found["default"].workers, found["default"].paused) == (1, False)
    assert (found["mail"].paused, found["mail"].paused_until) == (True, None)
    assert found["mail"].pause_reason == "smtp is down"
    assert found["soon"].paused_until is not None
    store.end_lease(WORKER)
    assert "default" not in {stats.queue for stats in client.queue_stats()}


async def test_both_clients_tell_the_same(dsn: str, store: Storage, client: jobq.Client) -> None:
    store.worker(WORKER)
    let_four_run(store)
    async with jobq.AsyncClient(dsn) as other:
        assert await other.queue_stats() == client.queue_stats()
        assert [one.id for one in await other.workers()] == [one.id for one in client.workers()] == [WORKER]


def test_a_schema_with_an_odd_name_has_stats_too(empty_dsn: str) -> None:
    with jobq.Client(empty_dsn, schema="An odd näme") as client:
        client.migrate()
        client.enqueue("noop", {})
        assert stats_of(client).ready == 1
        assert client.workers() == []


def test_one_that_fails_leaves_the_connection_as_it_was(client: jobq.Client, store: Storage) -> None:
    store.sql("alter table jobq.pause rename to gone")
    with pytest.raises(jobq.SchemaMissing):
        client.queue_stats()
    assert client.enqueue("noop", {}).inserted
    store.sql("alter table jobq.gone rename to pause")
    assert stats_of(client).ready == 1


# -- workers ---------------------------------------------------------------------------------------


def test_workers_are_listed_with_what_they_run(store: Storage, client: jobq.Client) -> None:
    for worker_id in (1, 2, 3, 4):
        store.worker(worker_id, name=f"host:{worker_id}")
    store.enqueue(3)
    store.claim(1, 2)
    store.claim(2, 1)
    store.end_lease(3)
    store.sql(
        "update jobq.worker set ended_at = now() - interval '2 hours', end_reason = 'stopped' where id = 4"
    )
    store.sql("update jobq.worker set heartbeat_at = now() - interval '20 s' where id = 1")
    first, second, third = sorted(client.workers(), key=lambda one: one.id)
    assert [(one.id, one.running, one.is_live) for one in (first, second, third)] == [
        (1, 2, True), (2, 1, True), (3, 0, False)
    ]  # fmt: skip
    assert (first.name, first.host, first.pid, first.queues, first.kinds) == (
        "host:1",
        "host",
        1,
        ("default",),
        (),
    )
    assert first.heartbeat_age_s == pytest.approx(20, abs=5)
    assert first.lease_until > first.started_at
    assert (second.ended_at, second.end_reason) == (None, None)
    assert third.ended_at is not None
    assert third.end_reason == "lease ended"
    assert len(client.workers(ended_within=timedelta(hours=3))) == 4
    assert {one.id for one in client.workers(ended_within=timedelta(0))} == {1, 2}


@pytest.mark.parametrize("wrong", [timedelta(seconds=-1), 60, None])
def test_a_wrong_time_is_refused(client: jobq.Client, wrong: Any) -> None:
    with pytest.raises(jobq.ConfigError, match="ended_within"):
        client.workers(ended_within=wrong)


# -- bounded ---------------------------------------------------------------------------------------

READY: Final = 300_000
FINISHED: Final = 1_000_000
KEPT_S: Final = 20 * 3600  # so that one in twenty ended within the last hour

FILL: Final = f"""
insert into jobq.ready (job_id, queue, priority, xid, ready_at)
    select n, case when n % 10 = 0 then 'mail' else 'default' end, n % 3 - 1, '1',
           now() - interval '1 hour' + n * interval '1 ms'
    from generate_series(1, {READY}) n;
insert into jobq.finished (job_id, state, finished_at, queue, priority, attempt, failures, crashes)
    select 10 * {READY} + n, case when n % 1000 = 0 then 'discarded' else 'completed' end,
           now() - ({FINISHED} - n) * interval '1 second' * {KEPT_S} / {FINISHED}, 'default', 0, 1, 0, 0
    from generate_series(1, {FINISHED}) n;
insert into jobq.finished (job_id, state, queue, priority, attempt, failures, crashes)
    select 100 * {READY} + n, 'cancelled', 'mail', 0, 1, 0, 0 from generate_series(1, 20) n;
insert into jobq.scheduled (job_id, run_at, reason, queue, priority)
    select 2 * {READY} + n, now() + interval '1 hour' + n * interval '1 s', 'scheduled', 'default', 0
    from generate_series(1, 50000) n;
"""
PARKED: Final = """
insert into jobq.scheduled (job_id, run_at, reason, queue, priority)
    select -n, now() + interval '9 s', 'unknown kind', 'mail', 0 from generate_series(1, 3) n
"""


@pytest.fixture(scope="module", params=["statistics", "none", "of an empty moment"])
def large(
    request: pytest.FixtureRequest, server: EmbeddedPostgres, databases: Databases, template: str
) -> Iterator[str]:
    """The address of a database with large tables, whose statistics are as the parameter says."""
    name = databases.create(template=template)
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        for table in ("ready", "finished", "scheduled", "running"):
            connection.execute(f"alter table jobq.{table} set (autovacuum_enabled = off)".encode())
        if request.param == "of an empty moment":
            connection.execute("insert into jobq.ready (job_id, queue, priority) values (1, 'x', 0)")
            connection.execute("delete from jobq.ready")
            connection.execute("analyze jobq.ready, jobq.finished, jobq.scheduled, jobq.running")
        connection.execute(FILL.encode())
        if request.param == "statistics":
            connection.execute("analyze jobq.ready, jobq.finished, jobq.scheduled, jobq.running")
    yield server.dsn(name)
    databases.drop(name)


class Meter:
    """Runs an operation's statements and adds up the pages that they touch.

    On a plain connection, as a pool has it; each prepared as a client's soon is.
    """

    def __init__(self, store: Storage) -> None:
        self.store = store
        self.pages = 0

    def execute(self, call: Call) -> Rows:
        if " from " in call.sql or "\nfrom " in call.sql:
            self.pages += _pages(self.store, call)
        return self.store.call(call)


def _pages(store: Storage, call: Call) -> int:
    store.sql("prepare measured as " + call.sql)
    try:
        values = ", ".join("'{" + ",".join(value) + "}'" for value in call.params)
        execute = f"execute measured({values})" if values else "execute measured"
        answer = store.value(f"explain (analyze, buffers, timing off, format json) {execute}")
    finally:
        store.sql("deallocate measured")
    plan = (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.slow
def test_much_is_estimated_within_a_bound_of_pages(large: str) -> None:
    with Storage(large, plan_settings=False) as store:
        store.sql(PARKED)
        meter = Meter(store)
        found = {stats.queue: stats for stats in run(_stats.queue_stats(SCHEMA), meter.execute)}
        discarded_lately = store.value(
            "select count(*) from jobq.finished"
            " where state = 'discarded' and finished_at > now() - interval '1 hour'"
        )
    assert 100 < meter.pages <= PAGES, meter.pages
    default, mail = found["default"], found["mail"]
    assert default.ready == pytest.approx(0.9 * READY, rel=0.05)
    assert mail.ready == pytest.approx(0.1 * READY, rel=0.1)
    assert default.completed == pytest.approx(FINISHED, rel=0.05)
    assert default.completed_last_hour == pytest.approx(FINISHED / 20, rel=0.1)
    assert default.scheduled == pytest.approx(50_000, rel=0.05)
    assert 150 < default.discarded < 3_000
    # what is few is exact, among however many others
    assert default.discarded_last_hour == discarded_lately
    assert (mail.cancelled, mail.unknown_kinds, default.unknown_kinds) == (20, 3, 0)
    assert default.lag_s == pytest.approx(3600, abs=600)
    assert set(default.estimated) == {
        "ready", "scheduled", "completed", "discarded", "completed_last_hour"
    }  # fmt: skip


@pytest.mark.slow
def test_a_plan_made_when_all_was_empty_does_no_harm(dsn: str) -> None:
    """A client keeps its prepared statements, and with them the plans of an empty schema."""
    with (
        jobq.Client(dsn, pool_min_size=1, pool_max_size=1) as client,
        psycopg.connect(dsn, autocommit=True) as db,
    ):
        tables = "select relname from pg_class where relnamespace = 'jobq'::regnamespace and relkind = 'r'"
        for (table,) in db.execute(tables).fetchall():  # autovacuum reads as well
            db.execute(f"alter table jobq.{table} set (autovacuum_enabled = off)".encode())
        for _ in range(12):
            assert client.queue_stats() == []
        before = _read(db)
        client.queue_stats()
        small = _read(db) - before
        db.execute(FILL.encode())
        before = _read(db)
        client.queue_stats()
        assert _read(db) - before <= PAGES + small


def _read(db: psycopg.Connection[Any]) -> int:
    """Return how many blocks of our tables and indexes have been read so far."""
    row = None
    for _ in range(2):  # the pool's session reports at its next statement at the latest
        db.execute("select pg_stat_clear_snapshot(), pg_sleep(1.1)")
        row = db.execute(
            "select sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read + idx_blks_hit, 0))"
            " from pg_statio_user_tables where schemaname = 'jobq'"
        ).fetchone()
    assert row is not None
    return int(row[0])


# -- a pinned horizon --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_dead_of_a_pinned_horizon_cost_no_more_than_a_time_limit(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was claimed stands dead before the lanes' heads; the newest blocks hold what lives."""
    with Storage(dsn, plan_settings=False) as store, Storage(dsn) as reader:
        store.sql("alter table jobq.ready set (autovacuum_enabled = off)")
        reader.sql("set idle_in_transaction_session_timeout = 0")
        reader.sql("begin isolation level repeatable read")
        reader.sql("select 1 from jobq.job limit 1")
        store.sql(FILL.partition(";")[0])
        store.sql("delete from jobq.ready")
        store.enqueue(500)
        store.sql("update jobq.ready set ready_at = now() - interval '10 minutes'")
        monkeypatch.setattr(_stats, "LANES_TIME_LIMIT_MS", 5)
        (found,) = store.run(_stats.queue_stats(SCHEMA))
        assert found.ready == 500
        assert found.lag_s == pytest.approx(600, abs=30)
        assert found.estimated == ("lag_s", "ready")
        monkeypatch.setattr(_stats, "LANES_TIME_LIMIT_MS", 60_000)
        (found,) = store.run(_stats.queue_stats(SCHEMA))
        assert found.estimated == ("ready",)


def test_rate_and_lanes_are_asked_only_where_tables_are_large(store: Storage) -> None:
    store.enqueue(100)
    asked: list[str] = []

    def execute(call: Call) -> Rows:
        asked.append(call.sql)
        return store.call(call)

    run(_stats.queue_stats(SCHEMA), execute)
    assert len([sql for sql in asked if "from" in sql]) == 2
