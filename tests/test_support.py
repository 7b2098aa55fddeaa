"""The tests' own tools: a tool that does not do what it says makes its tests worthless."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.conftest import APP_DATABASE
from tests.support.polling import eventually, eventually_async
from tests.support.skips import fail_unlisted_skip

if TYPE_CHECKING:
    from jobq.embedded import Databases, EmbeddedPostgres
    from tests.conftest import DurableServer, SpawnPython
    from tests.support.pgbouncer import PgBouncer
    from tests.support.proxy import TcpProxy


def _one(dsn: str, query: str = "select 1") -> object:
    with psycopg.connect(dsn, connect_timeout=5) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


# -- databases -------------------------------------------------------------------------------------


def test_a_test_database_is_migrated_and_another_one_is_not(dsn: str, empty_dsn: str) -> None:
    assert _one(dsn, "select count(*) from jobq.schema_version") != 0
    assert _one(empty_dsn, "select to_regnamespace('jobq')") is None


def test_test_databases_share_nothing(
    dsn: str, databases: Databases, template: str, server: EmbeddedPostgres
) -> None:
    other = databases.create(template=template)
    with psycopg.connect(dsn) as connection:
        connection.execute("create table mine ()")
    assert _one(server.dsn(other), "select to_regclass('mine')") is None
    databases.drop(other)


def test_a_database_in_use_can_be_dropped(databases: Databases, server: EmbeddedPostgres) -> None:
    name = databases.create()
    with psycopg.connect(server.dsn(name)) as connection:
        databases.drop(name)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    databases.drop(name)


def test_a_durable_server_has_fsync_and_a_migrated_database(durable_server: DurableServer) -> None:
    own = durable_server()
    assert _one(own.dsn(), "show fsync") == "on"
    assert _one(own.dsn(APP_DATABASE), "select count(*) from jobq.schema_version") != 0


# -- polling ---------------------------------------------------------------------------------------


def test_eventually_returns_the_first_true_value() -> None:
    values = iter([0, "", 7])
    assert eventually(lambda: next(values)) == 7


def test_eventually_gives_up_and_says_what_it_saw() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: rain \(last value: None\)"):
        eventually(lambda: None, 0.05, what="rain")


async def test_eventually_async_takes_functions_and_coroutines_and_gives_up() -> None:
    async def seven() -> int:
        return 7

    assert await eventually_async(seven) == 7
    assert await eventually_async(lambda: 8) == 8
    with pytest.raises(AssertionError, match="rain"):
        await eventually_async(lambda: None, 0.05, what="rain")


# -- processes -------------------------------------------------------------------------------------


def test_a_process_tells_its_output_and_exit_code(spawn_python: SpawnPython) -> None:
    process = spawn_python(
        "-c", "import os; print(os.environ['NAME']); raise SystemExit(3)", env={"NAME": "x"}
    )
    assert process.wait() == 3
    assert process.output == "x\n"


def test_a_process_that_ends_too_early_fails_the_wait_with_what_it_said(spawn_python: SpawnPython) -> None:
    process = spawn_python("-c", "raise SystemExit('oops')")
    with pytest.raises(AssertionError, match="oops"):
        process.wait_for_output("never")


def test_a_process_ends_with_all_its_group(spawn_python: SpawnPython) -> None:
    process = spawn_python(
        "-c",
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)",
    )
    child = int(process.wait_for_output("\n").split()[1])
    process.end()
    eventually(lambda: not _lives(child))
    assert not process.running


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:  # a zombie that nobody reaps is dead enough
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- the network -----------------------------------------------------------------------------------


def test_the_proxy_passes_both_ways(proxy: TcpProxy) -> None:
    assert _one(proxy.dsn, "select 42") == 42
    assert proxy.accepted == 1
    eventually(lambda: proxy.connections == 0)


async def test_a_silent_proxy_holds_everything_and_resets_nothing(proxy: TcpProxy) -> None:
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as connection:
        proxy.silence()
        query = asyncio.create_task(connection.execute("select 1"))
        done, _ = await asyncio.wait([query], timeout=0.2)
        assert not done
        proxy.resume()
        cursor = await asyncio.wait_for(query, 5)
        assert await cursor.fetchone() == (1,)


async def test_a_proxy_can_lose_only_the_replies(proxy: TcpProxy, db: psycopg.Connection) -> None:
    db.execute("create table seen (n int)")
    async with await psycopg.AsyncConnection.connect(proxy.dsn, autocommit=True) as connection:
        proxy.silence(to_server=False)
        insert = asyncio.create_task(connection.execute("insert into seen values (1)"))
        await eventually_async(lambda: db.execute("select * from seen").fetchall() == [(1,)])
        assert not insert.done()
        proxy.drop()
        with pytest.raises(psycopg.OperationalError):
            await insert


@pytest.mark.parametrize("reset", [True, False])
def test_a_proxy_drops_connections_and_takes_new_ones(proxy: TcpProxy, *, reset: bool) -> None:
    with psycopg.connect(proxy.dsn) as connection:
        proxy.drop(reset=reset)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    assert _one(proxy.dsn) == 1


def test_a_proxy_refuses_and_accepts_again_at_the_same_address(proxy: TcpProxy) -> None:
    dsn = proxy.dsn
    proxy.refuse()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        _one(dsn)
    proxy.accept()
    assert _one(dsn) == 1


def test_a_proxy_delays(proxy: TcpProxy) -> None:
    with psycopg.connect(proxy.dsn, autocommit=True) as connection:
        proxy.delay_s = 0.1
        started = time.monotonic()
        connection.execute("select 1")
        assert time.monotonic() - started >= 0.2  # there and back


def test_a_proxy_ends_connections_when_the_server_is_away(durable_server: DurableServer) -> None:
    from tests.support.proxy import TcpProxy

    own = durable_server()
    with TcpProxy(own.dsn()) as proxy:
        own.stop()
        with pytest.raises(psycopg.OperationalError):
            _one(proxy.dsn)
        own.start()
        assert _one(proxy.dsn) == 1


# -- PgBouncer -------------------------------------------------------------------------------------


def test_pgbouncer_shares_four_connections_by_transaction(pooled_dsn: str, pgbouncer: PgBouncer) -> None:
    clients = [psycopg.connect(pooled_dsn, autocommit=True, prepare_threshold=None) for _ in range(12)]
    try:
        pids = {client.execute("select pg_backend_pid()").fetchone() for client in clients}
    finally:
        for client in clients:
            client.close()
    assert 1 <= len(pids) <= 4, pgbouncer.log


def test_pgbouncer_loses_session_state(pooled_dsn: str) -> None:
    with (
        psycopg.connect(pooled_dsn, autocommit=True) as first,
        psycopg.connect(pooled_dsn, autocommit=True) as second,
    ):
        first.execute("set search_path = elsewhere")
        with second.transaction():  # holds the connection that had the setting
            second.execute("select 1")
            assert first.execute("show search_path").fetchone() != ("elsewhere",)


# -- skips -----------------------------------------------------------------------------------------


def _skipped(nodeid: str) -> pytest.TestReport:
    where = ("tests/test_x.py", 1, "Skipped: no such thing")
    return pytest.TestReport(nodeid, where, {}, "skipped", where, "setup")


def test_an_unlisted_skip_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.skips.expected_skips", lambda: ("tests/test_x.py::test_listed*",))
    assert fail_unlisted_skip(_skipped("tests/test_x.py::test_listed[1]")).outcome == "skipped"
    report = fail_unlisted_skip(_skipped("tests/test_x.py::test_other"))
    assert report.outcome == "failed"
    assert "no such thing" in str(report.longrepr)
