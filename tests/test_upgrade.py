"""Upgrades: a second migration on a schema in use, under locks, by many at once, interrupted."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool

import jobq
from jobq._clients.migrate import migrate_async, migration_script, pending
from jobq._statements import schema as _schema
from jobq._statements.schema import OLDEST_SERVER, SchemaStatus, code_version, refuse_server
from tests.support.polling import eventually
from tests.support.versions import migrate_with, unpack_version_before
from tests.support.workers import Site

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq.embedded import Databases, EmbeddedPostgres
    from tests.conftest import SpawnPython

CODE = code_version()
NEXT = CODE + 1
UPGRADE = f"""-- compatible_from: {CODE}
alter table {{schema}}.job add column upgraded boolean;
select pg_sleep(0.2);
"""


@pytest.fixture
def upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A jobq of tomorrow: this one's migrations and one more. Returns its folder."""
    folder = tmp_path / "migrations"
    shutil.copytree(Path(jobq.__file__).parent / "migrations", folder)
    (folder / f"{NEXT:04}_tomorrow.sql").write_text(UPGRADE)
    monkeypatch.setattr(_schema, "MIGRATIONS_FOLDER", str(folder))
    return folder


def versions(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select version from jobq.schema_version order by version").fetchall()
    return [row[0] for row in rows]


def test_s52_twenty_processes_upgrade_at_once_and_one_migrates(
    dsn: str, upgrade: Path, spawn_python: SpawnPython
) -> None:
    code = f"""
import jobq, jobq._statements.schema
jobq._statements.schema.MIGRATIONS_FOLDER = {str(upgrade)!r}
print("applied", len(jobq.migrate({dsn!r})))
"""
    processes = [spawn_python("-c", code) for _ in range(20)]
    assert [process.wait(60) for process in processes] == [0] * 20
    applied = [int(process.output.split("applied ")[1].split()[0]) for process in processes]
    assert sorted(applied) == [0] * 19 + [1]
    assert versions(dsn)[-1] == NEXT


@pytest.mark.parametrize("way", ["pool of one", "pooler"])
async def test_s52_an_upgrade_goes_through_a_pool_of_one_and_through_a_pooler(
    dsn: str, pooled_dsn: str, upgrade: Path, way: str
) -> None:
    target = dsn if way == "pool of one" else pooled_dsn
    options = {} if way == "pool of one" else {"prepare_threshold": None}
    async with AsyncConnectionPool(target, min_size=1, max_size=1, open=False, kwargs=options) as pool:
        applied = await asyncio.gather(*(migrate_async(pool) for _ in range(4)))
        async with pool.connection() as connection:
            assert not connection.autocommit
    assert sorted(applied) == [[], [], [], [f"{NEXT:04}_tomorrow"]]


async def test_s70_old_code_goes_on_while_the_schema_is_upgraded(
    dsn: str, upgrade: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with jobq.AsyncClient(dsn) as client:
        before = await client.enqueue("k", {"n": 1})
        assert pending(dsn) == [f"{NEXT:04}_tomorrow"]
        with pytest.raises(jobq.SchemaOutdated, match=rf"version {CODE}.*needs {NEXT}.*jobqctl migrate"):
            await client.check_schema()
        jobq.migrate(dsn)
        monkeypatch.undo()  # today's code again
        await client.check_schema()
        assert await client.migrate() == []
        after = await client.enqueue_many([jobq.NewJob("k", {"n": 2}), jobq.NewJob("k", {}, unique="u")])
        assert [(await client.get(job.id)).state for job in (before, *after)] == ["ready"] * 3
        await client.cancel(before.id)
        await client.retry(before.id)


# Each table that a worker's statements use has one more column.
WIDER: Final = f"""-- compatible_from: {CODE}
alter table {{schema}}.job add column upgraded boolean;
alter table {{schema}}.ready add column upgraded boolean;
alter table {{schema}}.scheduled add column upgraded boolean;
alter table {{schema}}.running add column upgraded boolean;
alter table {{schema}}.finished add column upgraded boolean;
alter table {{schema}}.attempt_error add column upgraded boolean;
alter table {{schema}}.worker add column upgraded boolean;
"""


def assert_goes_on_through(upgrade: Callable[[], object], site: Site, code: Path | None = None) -> None:
    """Upgrade while a worker of old code runs jobs and claims others: none of it may notice."""

    def add(kind: str, count: int = 1, args: str = "{}") -> list[int]:
        # By SQL, for new code refuses the old schema.
        by_sql = "select (jobq.enqueue(%s, %s)).id from generate_series(1, %s)"
        return [job_id for (job_id,) in site.sql(by_sql, kind, args, count)]

    worker = site.start(code=code, lease=15.0, heartbeat=1.0)  # whatever a busy machine does to the upgrade
    for done in (12, 24):  # so that its statements are prepared
        add("wait", 10)
        add("fail_once")
        add("snooze_once", args='{"s": 0}')
        site.await_finished(done)
    running = add("gate", 10, '{"gate": "open"}')
    site.await_started(running)
    coming = add("wait", 100, '{"s": 0.02}')
    before = versions(site.dsn)
    upgrade()
    assert versions(site.dsn) == [*before, before[-1] + 1]
    assert {site.job(job_id) for job_id in running} == {("running", 1, 0, 0)}
    [failed], [snoozed] = site.enqueue("fail_once"), site.enqueue("snooze_once", s=0.0)
    later = site.enqueue("wait", 5)
    site.await_finished(24 + 100 + 2 + 5)
    site.open("open")
    site.await_finished(24 + 100 + 2 + 5 + 10)
    assert {site.job(job_id) for job_id in running + coming + later} == {("completed", 1, 0, 0)}
    assert (site.job(failed), site.job(snoozed)) == (("completed", 2, 1, 0), ("completed", 2, 0, 0))
    assert len(site.notes("start")) == 24 + 4 + 100 + 2 + 2 + 5 + 10, "each once, or twice"
    assert (worker.stats()["lost_leases"], len(worker.ids)) == (0, 1)
    worker.stop()
    assert "Traceback" not in worker.output
    assert "ERROR" not in worker.output


def test_s70_a_worker_of_today_and_the_jobs_that_it_runs_go_on_through_the_next_upgrade(
    spawn_python: SpawnPython, dsn: str, tmp_path: Path, upgrade: Path
) -> None:
    (upgrade / f"{NEXT:04}_tomorrow.sql").write_text(WIDER)
    site = Site(spawn_python, dsn, tmp_path)
    assert_goes_on_through(lambda: jobq.migrate(dsn, attempts=100), site)


def test_s70_a_worker_of_the_version_before_and_the_jobs_that_it_runs_go_on_through_the_last_upgrade(
    spawn_python: SpawnPython, empty_dsn: str, tmp_path: Path
) -> None:
    code = unpack_version_before(tmp_path / "old")
    migrate_with(code, empty_dsn)
    site = Site(spawn_python, empty_dsn, tmp_path)
    assert_goes_on_through(lambda: jobq.migrate(empty_dsn, attempts=100), site, code)


def test_a_migration_waits_for_a_lock_without_stopping_those_behind_it(
    dsn: str, upgrade: Path, db: psycopg.Connection
) -> None:
    with psycopg.connect(dsn) as reader:
        reader.execute("select count(*) from jobq.job")
        applied: list[list[str]] = []
        thread = threading.Thread(target=lambda: applied.append(jobq.migrate(dsn, lock_timeout_s=0.1)))
        thread.start()
        waiting = "select count(*) from pg_locks where not granted and mode = 'AccessExclusiveLock'"
        for _ in range(2):  # it has given up once and come again
            eventually(lambda: db.execute(waiting).fetchone() == (1,))
            eventually(lambda: db.execute(waiting).fetchone() == (0,))
            db.execute("select count(*) from jobq.job")
    thread.join(30)
    assert applied == [[f"{NEXT:04}_tomorrow"]]


def test_a_migration_that_never_gets_its_lock_says_what_to_do(dsn: str, upgrade: Path) -> None:
    with psycopg.connect(dsn) as reader:
        reader.execute("select count(*) from jobq.job")
        with pytest.raises(jobq.DatabaseError, match=r"tomorrow.*2 tries.*pg_stat_activity"):
            jobq.migrate(dsn, lock_timeout_s=0.05, attempts=2)
    assert versions(dsn)[-1] == CODE


def test_a_migration_that_fails_leaves_nothing_behind(dsn: str, upgrade: Path) -> None:
    (upgrade / f"{NEXT + 1:04}_broken.sql").write_text(
        "-- compatible_from: 1\ncreate table {schema}.half ();\nselect 1/0;\n"
    )
    with psycopg.connect(dsn) as connection:
        with pytest.raises(jobq.DatabaseError, match="division by zero"):
            jobq.migrate(connection)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert not connection.autocommit
        assert connection.execute("select to_regclass('jobq.half')").fetchone() == (None,)
    assert versions(dsn)[-1] == NEXT  # the one before it stands


async def test_an_interrupted_migration_leaves_the_connection_free(dsn: str, upgrade: Path) -> None:
    (upgrade / f"{NEXT:04}_tomorrow.sql").write_text("-- compatible_from: 1\nselect pg_sleep(60);\n")
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        task = asyncio.create_task(migrate_async(connection))
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as watch:
            while True:
                cursor = await watch.execute(
                    "select count(*) from pg_stat_activity where wait_event = 'PgSleep' and pid = %s",
                    [connection.info.backend_pid],
                )
                if await cursor.fetchone() == (1,):
                    break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert not connection.autocommit
    assert versions(dsn)[-1] == CODE


def test_a_connection_in_a_transaction_is_refused(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        connection.execute("select 1")
        with pytest.raises(jobq.TransactionError, match="commit or roll back"):
            jobq.migrate(connection)
        connection.rollback()
        assert jobq.migrate(connection)


def test_a_database_that_is_not_utf8_is_refused(
    server: EmbeddedPostgres, databases: Databases, db: psycopg.Connection
) -> None:
    try:
        db.execute("create database latin encoding 'SQL_ASCII' template template0 locale 'C'")
        with pytest.raises(jobq.SchemaError, match=r"SQL_ASCII.*UTF8"):
            jobq.migrate(server.dsn("latin"))
    finally:
        databases.drop("latin")


def test_an_old_server_is_refused() -> None:
    with pytest.raises(jobq.SchemaError, match=r"PostgreSQL 13\.9; jobq needs 14"):
        refuse_server(SchemaStatus("d", 0, 0, 130_009, "UTF8", schema_exists=False))
    refuse_server(SchemaStatus("d", 0, 0, OLDEST_SERVER, "UTF8", schema_exists=False))


def test_the_script_can_start_where_a_schema_stands(
    server: EmbeddedPostgres, dsn: str, upgrade: Path
) -> None:
    script = migration_script(after=CODE)
    assert "create table" not in script
    assert f"values ({NEXT}, {CODE})" in script


def test_each_migration_keeps_the_promise_to_the_code_before_it() -> None:
    for migration in _schema.all_migrations():
        assert migration.compatible_from <= max(1, migration.version - 1), migration.name
    assert [migration.version for migration in _schema.all_migrations()] == list(range(1, CODE + 1))


def test_schemas_of_one_database_do_not_know_each_other(empty_dsn: str) -> None:
    jobq.migrate(empty_dsn, schema="one")
    jobq.migrate(empty_dsn, schema="two")
    with jobq.Client(empty_dsn, schema="one") as one, jobq.Client(empty_dsn, schema="two") as two:
        assert one.enqueue("k", {}, unique="u").inserted
        assert two.enqueue("k", {}, unique="u").inserted
