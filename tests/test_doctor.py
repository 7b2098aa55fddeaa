"""`jobqctl doctor`: each thing that hurts is found, named, and comes with a remedy."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import make_conninfo

from jobq import Client, JobFilter
from jobq._doctor import CHECKS, Context, Finding, Level, server, tables
from jobq._operation import in_schema
from jobq._sessions import SyncSession
from jobq.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result


def doctor(dsn: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"DATABASE_URL": dsn})


@pytest.fixture
def check(dsn: str) -> Iterator[Callable[..., list[Finding]]]:
    """Run one check by its name; return what it finds."""
    session = SyncSession.open(dsn, schema="jobq", name="doctor")

    def run(name: str, *, clock_s: Callable[[], float] = time.time) -> list[Finding]:
        return session.run(CHECKS[name](Context("jobq", clock_s, session.pooled)))

    yield run
    session.close()


def only(findings: list[Finding], level: Level, *words: str) -> Finding:
    (finding,) = findings
    assert finding.level is level, finding
    for word in words:
        assert word in finding.message, finding
    assert finding.remedy or level in {Level.OK, Level.NOTE}
    return finding


@pytest.mark.matrix
def test_a_new_queue_is_in_order_but_for_its_throwaway_server(dsn: str) -> None:
    result = doctor(dsn, "--json")
    findings = json.loads(result.output)
    assert [found["check"] for found in findings if found["level"] == "unknown"] == []
    hurts = {(found["check"], found["level"]) for found in findings if found["level"] != "ok"}
    assert hurts == {("settings", "problem"), ("workers", "warning"), ("leader", "note")}
    assert {found["check"] for found in findings} == set(CHECKS)
    assert result.exit_code == 1


def test_quiet_shows_only_what_is_not_in_order(dsn: str) -> None:
    assert " ok " not in doctor(dsn, "--quiet").output
    assert "→ Start one: jobqctl worker" in doctor(dsn, "--quiet").output


def test_without_a_schema_it_says_what_to_run(empty_dsn: str) -> None:
    result = doctor(empty_dsn)
    assert result.exit_code == 1
    assert "jobqctl migrate" in result.output


def test_s75_whoever_pins_the_horizon_is_named(
    dsn: str, db: psycopg.Connection, check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(check("vacuum horizon"), Level.OK)
    monkeypatch.setattr(server, "_HORIZON_WARNING_S", 0.0)
    with psycopg.connect(dsn, application_name="a report") as pinning:
        pinning.execute("set transaction isolation level repeatable read")
        pinning.execute("select 1 as the_report")
        found = only(check("vacuum horizon"), Level.WARNING, f"pid {pinning.info.backend_pid}", "a report")
        assert "the_report" in found.message
        assert "pg_terminate_backend" in found.remedy
    db.execute("begin")
    db.execute("create table pinned ()")
    db.execute("prepare transaction 'left behind'")
    try:
        prepared = only(check("vacuum horizon"), Level.WARNING, "'left behind'")
        assert "rollback prepared" in prepared.remedy
    finally:
        db.execute("rollback prepared 'left behind'")


def test_a_clock_that_is_off_is_told_in_its_direction(check: Callable[..., list[Finding]]) -> None:
    only(check("clock"), Level.OK)
    only(check("clock", clock_s=lambda: time.time() + 5), Level.WARNING, "ahead of")
    only(check("clock", clock_s=lambda: time.time() - 90), Level.PROBLEM, "1 min 30 s behind")


def test_a_databases_clock_that_was_set_back_is_told(
    check: Callable[..., list[Finding]], dsn: str, db: psycopg.Connection
) -> None:
    with Client(dsn) as client:
        client.enqueue("k", {})
        client.bulk.cancel(JobFilter(kinds=["k"]))
    only(check("clock"), Level.OK)
    db.execute("update jobq.finished set finished_at = finished_at + interval '1 hour'")
    [_, found] = check("clock")
    only([found], Level.WARNING, "was set back, by 1 h")
    assert "docs/operation.md" in found.remedy


@pytest.mark.parametrize(
    ("setting", "value", "level"),
    [
        ("synchronous_commit", "off", Level.WARNING),
        ("default_transaction_read_only", "on", Level.PROBLEM),
        ("statement_timeout", "100ms", Level.WARNING),
        ("lock_timeout", "10ms", Level.WARNING),
        ("array_nulls", "off", Level.PROBLEM),
    ],
)
def test_settings_of_the_role_that_lose_or_stop_jobs(
    dsn: str, setting: str, value: str, level: Level
) -> None:
    session = SyncSession.open(
        make_conninfo(dsn, options=f"-c {setting}={value}"), schema="jobq", name="doctor"
    )
    try:
        findings = session.run(CHECKS["settings"](Context("jobq", time.time, pooled=False)))
    finally:
        session.close()
    (found,) = [finding for finding in findings if finding.message.startswith(setting)]
    assert found.level is level


def test_connections_that_workers_need_are_counted(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    only(check("connections"), Level.OK, "0 live workers")
    add_workers(db, 1)
    only(check("connections"), Level.OK, "1 live worker needs 5")
    db.execute("delete from jobq.worker")
    add_workers(db, 1000)
    only(check("connections"), Level.WARNING, "1,000 live workers need 5,000")


def test_a_transaction_pooler_is_noticed(pooled_dsn: str) -> None:
    findings = json.loads(doctor(pooled_dsn, "--json").output)
    (found,) = [finding for finding in findings if finding["check"] == "pooler"]
    assert found["level"] == "note"
    assert "listen_dsn" in found["remedy"]


def test_jobs_in_two_tables_without_payload_and_without_state(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    for name in ("one table a job", "payloads", "states"):
        only(check(name), Level.OK)
    twice = enqueue(db)
    db.execute(
        "insert into jobq.scheduled (job_id, run_at, reason, queue, priority)"
        " values (%s, now(), 'scheduled', 'default', 0)",
        [twice],
    )
    db.execute("insert into jobq.ready (job_id, queue, priority) values (4711, 'default', 0)")
    lost = enqueue(db)
    db.execute("delete from jobq.ready where job_id = %s", [lost])
    only(check("one table a job"), Level.PROBLEM, f"{twice} (ready and scheduled)")
    only(check("payloads"), Level.PROBLEM, "4711 (ready)")
    only(check("states"), Level.PROBLEM, str(lost))


def test_rows_of_another_cluster_are_found(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    only(check("restored rows"), Level.OK)
    db.execute("select jobq.enqueue('k')")
    db.execute("update jobq.ready set xid = '999999999999'")
    only(check("restored rows"), Level.WARNING, "1 ready job with")


def test_every_index_is_expected_and_a_missing_one_is_named(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    hot = [
        "job",
        "ready",
        "scheduled",
        "running",
        "finished",
        "attempt_error",
        "unique_key",
        "worker",
        "periodic",
        "periodic_tick",
    ]
    found = db.execute(
        "select indexname from pg_indexes where schemaname = 'jobq' and tablename = any (%s)", [hot]
    ).fetchall()
    assert {name for (name,) in found} == set(tables.INDEXES)
    only(check("indexes"), Level.OK)
    db.execute("drop index jobq.ready_lane")
    only(check("indexes"), Level.PROBLEM, "ready_lane is missing")


def test_dead_rows_that_vacuum_does_not_remove_are_found(
    db: psycopg.Connection, check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    only(check("dead rows"), Level.OK)
    monkeypatch.setattr(tables, "_DEAD_ROWS", 10)
    db.execute("alter table jobq.running set (autovacuum_enabled = off)")
    db.execute(
        "insert into jobq.running (job_id, worker_id, queue, priority, attempt, failures, crashes)"
        " select i, 1, 'q', 0, 1, 0, 0 from generate_series(1, 50) i"
    )
    db.execute("delete from jobq.running")
    db.execute("select pg_stat_clear_snapshot()")
    deadline = time.monotonic() + 15  # statistics arrive when the session pleases
    while check("dead rows")[0].level is Level.OK and time.monotonic() < deadline:
        time.sleep(0.2)
        db.execute("select 1")
    only(check("dead rows"), Level.WARNING, "running holds 50 dead rows")


def test_stale_workers_deaf_listeners_and_a_missing_leader_are_found(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    only(check("workers"), Level.WARNING, "none is alive")
    only(check("leader"), Level.NOTE, "none, for no worker is alive")
    add_workers(db, 1)
    only(check("workers"), Level.OK, "1 alive, of version test")
    only(check("listeners"), Level.NOTE, "w1")
    only(check("leader"), Level.PROBLEM, "1 worker is alive")
    db.execute("update jobq.leader set worker = 'w1', lease_until = clock_timestamp() + interval '1 minute'")
    only(check("leader"), Level.OK, "w1")
    db.execute("update jobq.worker set lease_until = clock_timestamp() - interval '5 minutes'")
    only(check("workers"), Level.WARNING, "w1", "5 min")
    db.execute("delete from jobq.leader")
    only(check("leader"), Level.PROBLEM, "lost its row")


def test_queues_that_nobody_serves_that_are_paused_and_that_lag(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    only(check("queues"), Level.OK, "0 with ready jobs")
    db.execute("select jobq.enqueue('k', queue => 'mail')")
    only(check("queues"), Level.WARNING, "'mail'", "no live worker")
    add_workers(db, 1, queue="mail")
    only(check("queues"), Level.OK, "1 with ready jobs")
    db.execute("update jobq.ready set ready_at = now() - interval '10 minutes'")
    only(check("queues"), Level.WARNING, "10 min")
    db.execute("insert into jobq.pause (scope, name) values ('queue', 'mail')")
    only(check("queues"), Level.NOTE, "paused")


def test_unknown_kinds_and_schedules_with_problems(
    db: psycopg.Connection, check: Callable[..., list[Finding]]
) -> None:
    only(check("kinds"), Level.OK)
    only(check("schedules"), Level.OK)
    db.execute("select jobq.enqueue('new_kind', run_at => now() + interval '1 hour')")
    db.execute("update jobq.scheduled set reason = 'unknown kind'")
    only(check("kinds"), Level.WARNING, "1 of 'new_kind'")
    db.execute(
        "insert into jobq.periodic"
        " (name, kind, args, cron, tz, catch_up, catch_up_max, overlap, is_dynamic, problem)"
        " values ('nightly', 'k', '{}', '0 3 * * *', 'UTC', 'one', 1, 'allow', true, 'no such zone')"
    )
    only(check("schedules"), Level.WARNING, "'nightly': no such zone")


def test_a_check_that_is_not_allowed_is_unknown_and_the_others_go_on(
    dsn: str, db: psycopg.Connection
) -> None:
    role = db.info.dbname + "_reader"
    db.execute(f"create role {role} login".encode())
    try:
        db.execute(f"grant usage on schema jobq to {role}".encode())
        db.execute(f"grant select on jobq.schema_version, jobq.worker to {role}".encode())
        findings = json.loads(doctor(make_conninfo(dsn, user=role), "--json").output)
    finally:
        db.execute(f"drop owned by {role}".encode())
        db.execute(f"drop role {role}".encode())
    levels = {found["check"]: found["level"] for found in findings}
    assert levels["payloads"] == "unknown"
    assert levels["rights"] == "note"
    assert levels["workers"] == "warning"
    assert set(levels) == set(CHECKS)


def test_a_job_that_runs_here_keeps_the_doctor_calm(dsn: str) -> None:
    with Client(dsn) as client:
        client.enqueue("k", {})
    result = doctor(dsn, "--quiet")
    assert "two tables" not in result.output
    assert "unknown" not in result.output


def enqueue(db: psycopg.Connection) -> int:
    row = db.execute("select id from jobq.enqueue('k')").fetchone()
    assert row is not None
    return int(row[0])


def add_workers(db: psycopg.Connection, count: int, *, queue: str = "default") -> None:
    db.execute(
        in_schema(
            "insert into {schema}.worker"
            " (id, name, host, pid, version, queues, kinds, started_at, lease_until)"
            " select i, 'w' || i, 'h', i, 'test', array[%s], '{}', clock_timestamp() - interval '1 minute',"
            " clock_timestamp() + interval '1 minute' from generate_series(1, %s) i",
            "jobq",
        ).encode(),
        [queue, count],
    )
