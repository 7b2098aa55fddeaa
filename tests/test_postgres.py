"""Between operations and psycopg: parameters, errors by name, and connections that do not hang."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg2
import pytest
import sqlalchemy
import sqlalchemy.exc
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row, tuple_row
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import jobq
from jobq._driver_errors import first_line, is_transient, map_error, sqlstate_of
from jobq._operation import Call
from jobq._postgres import (
    CONNECTION_DEFAULTS,
    connection_string,
    execute,
    is_broken,
    reconnect_delay,
    sync_cursor,
)
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._operation import Operation, Rows


def one(call: Call) -> Operation[Rows]:
    return (yield call)


# -- connection strings ----------------------------------------------------------------------------


def test_a_connection_string_gets_defaults_for_what_it_leaves_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    parts = conninfo_to_dict(connection_string("postgresql://u@h/d", name="jobq worker"))
    assert parts.items() >= {**CONNECTION_DEFAULTS, "user": "u", "host": "h", "dbname": "d"}.items()
    assert parts["fallback_application_name"] == "jobq worker"


def test_what_a_connection_string_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "77")
    parts = conninfo_to_dict(connection_string("host=h keepalives=0 application_name=mine", name="jobq"))
    assert (parts["keepalives"], parts["application_name"]) == ("0", "mine")
    assert "connect_timeout" not in parts, "libpq reads PGCONNECT_TIMEOUT itself"


@pytest.mark.parametrize("text", ["nonsense", "postgresql://h/d?no_such_option=1"])
def test_a_connection_string_that_cannot_be_read_is_refused_by_the_client_at_once(text: str) -> None:
    for client in (jobq.Client, jobq.AsyncClient):
        with pytest.raises(jobq.ConfigError, match="connection string"):
            client(text)
    with pytest.raises(jobq.ConfigError, match="connection string"):
        jobq.Client("host=h", listen_dsn=text)


def test_waits_between_tries_grow_to_five_seconds_with_jitter() -> None:
    rng = random.Random(1)
    for failures, nominal in {1: 0.05, 2: 0.1, 3: 0.2, 7: 3.2, 8: 5.0, 9: 5.0, 10_000: 5.0}.items():
        waits = [reconnect_delay(failures, rng) for _ in range(200)]
        assert 0.5 * nominal <= min(waits) < 0.6 * nominal
        assert 0.9 * nominal < max(waits) <= nominal


# -- parameters and rows ---------------------------------------------------------------------------

TOKYO = timezone(timedelta(hours=9))
VALUES: dict[str, tuple[str, Any]] = {
    "text": ("text", "ü \" \\ ' {,} % $1 \U0001f600"),
    "empty": ("text", ""),
    "null-word": ("text", "NULL"),
    "int": ("int8", 2**63 - 1),
    "negative": ("int2", -9),
    "float": ("float8", 0.1),
    "true": ("bool", True),
    "false": ("bool", False),
    "bytes": ("bytea", bytes(range(256))),
    "time": ("timestamptz", datetime(2026, 3, 29, 1, 2, 3, 456789, tzinfo=UTC)),
    "time-elsewhere": ("timestamptz", datetime(2026, 3, 29, 1, 2, 3, tzinfo=TOKYO)),
    "none": ("text", None),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", VALUES)
def test_parameters_arrive_as_they_were_alone_and_in_lists(dsn: str, name: str) -> None:
    kind, value = VALUES[name]
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = sync_cursor(connection)
        for prepare in (False, True):
            call = Call(f"select $1::{kind}", (value,))
            assert execute(cursor, call, prepare=prepare) == [(value,)]
            call = Call(f"select t from unnest($1::{kind}[]) t", ([value, None, value],))
            assert execute(cursor, call, prepare=prepare) == [(value,), (None,), (value,)]
            assert (
                execute(cursor, Call(f"select t from unnest($1::{kind}[]) t", ([],)), prepare=prepare) == []
            )


def test_rows_are_tuples_whatever_the_connection_makes_of_them(dsn: str) -> None:
    with psycopg.Connection[dict[str, Any]].connect(dsn, row_factory=dict_row) as connection:
        connection.cursor_factory = psycopg.ClientCursor[Any]
        assert execute(sync_cursor(connection), Call("select 1, $1::text", ("a",))) == [(1, "a")]
        assert not execute(sync_cursor(connection), Call("do $$ begin end $$; do $$ begin end $$"))
        assert connection.execute("select 1 as one").fetchone() == {"one": 1}


def test_in_the_callers_pipeline_a_job_has_its_id_at_once(dsn: str) -> None:
    with psycopg.connect(dsn) as connection, connection.pipeline():
        connection.execute("create table t (x int)")
        job = jobq.Client(dsn).enqueue("k", {}, tx=connection)
        connection.execute("insert into t values (1)")
        connection.commit()
    with jobq.Client(dsn) as client:
        assert client.get(job.id).state == "ready"


@pytest.mark.parametrize("autocommit", [False, True])
async def test_in_the_callers_pipeline_a_call_of_several_statements_is_as_everywhere(
    dsn: str, autocommit: bool
) -> None:
    raising = jobq.Unique("held", on_conflict="raise")
    new = [jobq.NewJob("k", {}, unique="free"), jobq.NewJob("k", {}, unique=raising)]
    with psycopg.connect(dsn, autocommit=autocommit) as connection, connection.pipeline():
        client = jobq.Client(dsn)
        held = client.enqueue("k", {}, unique="held", tx=connection)
        with pytest.raises(jobq.UniqueConflict, match=f"job {held.id}"):
            client.enqueue_many(new, tx=connection)
        with pytest.raises(jobq.DatabaseError, match="division by zero"):
            execute(sync_cursor(connection), Call("select 1 / $1::int4", (0,)))
        connection.rollback()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit) as theirs, theirs.pipeline():
        [made] = await jobq.AsyncClient(dsn).enqueue_many(new[:1], tx=theirs)
        assert made.inserted
        await theirs.commit()


# -- errors ----------------------------------------------------------------------------------------

SERVER_ERRORS: dict[str, tuple[str, type[jobq.Error]]] = {
    "no-table": ("select * from jobq.nothing", jobq.SchemaMissing),
    "no-schema": ("create table nothing.x ()", jobq.SchemaMissing),
    "no-column": ("select nothing from jobq.job", jobq.SchemaOutdated),
    "no-function": ("select jobq.nothing()", jobq.SchemaOutdated),
    "check": ("insert into jobq.unique_key values ('\\x00', 1, 1)", jobq.DatabaseError),
    "syntax": ("selec", jobq.DatabaseError),
    "time-limit": ("set statement_timeout = 1; select pg_sleep(10)", jobq.DatabaseUnavailable),
    "killed": ("select pg_terminate_backend(pg_backend_pid())", jobq.DatabaseUnavailable),
    "read-only": (
        "set default_transaction_read_only = on; commit; create table x ()",
        jobq.DatabaseUnavailable,
    ),
    "division": ("select 1/0", jobq.DatabaseError),
}


@pytest.mark.parametrize("name", SERVER_ERRORS)
def test_a_servers_error_has_one_meaning_whichever_library_brings_it(dsn: str, name: str) -> None:
    statement, expected = SERVER_ERRORS[name]
    with pytest.raises(expected) as caught, psycopg.connect(dsn) as connection:
        execute(sync_cursor(connection), Call(statement))
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, psycopg.Error)

    two = psycopg2.connect(dsn)
    with pytest.raises(psycopg2.Error) as brought, two.cursor() as cursor:
        cursor.execute(statement)
    two.close()
    assert type(map_error(brought.value)) is expected

    parts = conninfo_to_dict(dsn)
    url = sqlalchemy.URL.create(
        "postgresql+psycopg",
        username=str(parts["user"]),
        database=str(parts["dbname"]),
        query={"host": str(parts["host"]), "port": str(parts["port"])},
    )
    engine = sqlalchemy.create_engine(url)
    with pytest.raises(sqlalchemy.exc.DBAPIError) as wrapped, engine.connect() as wrapping:
        wrapping.exec_driver_sql(statement)
    engine.dispose()
    assert type(map_error(wrapped.value)) is expected


def test_an_error_says_what_the_server_said_in_one_line() -> None:
    error = psycopg.errors.UndefinedTable("relation does not exist\nLINE 1: select\n        ^")
    assert first_line(error) == "relation does not exist"
    assert str(map_error(error)).startswith("relation does not exist: ")
    assert first_line(ConnectionResetError()) == "ConnectionResetError"
    assert type(map_error(ConnectionResetError())) is jobq.DatabaseUnavailable
    assert type(map_error(TimeoutError())) is jobq.DatabaseUnavailable
    already = jobq.JobNotFound("x")
    assert map_error(already) is already


def test_an_error_that_wraps_itself_ends_the_search() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert sqlstate_of(error) is None
    assert type(map_error(error)) is jobq.DatabaseError


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (psycopg.errors.SerializationFailure("x"), True),
        (psycopg.errors.DeadlockDetected("x"), True),
        (psycopg.errors.CheckViolation("x"), False),
        (jobq.DatabaseUnavailable("x"), True),
        (jobq.SchemaMissing("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_succeed_when_it_is_sent_again_is_known(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient
    with pytest.raises(jobq.Error) as mapped:
        raise map_error(error) from error
    assert is_transient(mapped.value) is transient


# -- connections that die --------------------------------------------------------------------------


@pytest.fixture
def connection(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


def test_a_connection_that_its_server_closed_is_known_without_a_query(
    connection: psycopg.Connection[Any], db: psycopg.Connection[Any]
) -> None:
    assert not is_broken(connection)
    db.execute("select pg_terminate_backend(%s, 5000)", [connection.info.backend_pid])
    eventually(lambda: is_broken(connection))


def test_a_notification_is_no_farewell(
    connection: psycopg.Connection[Any], db: psycopg.Connection[Any]
) -> None:
    connection.execute("listen c")
    for n in range(10):
        db.execute("select pg_notify('c', %s)", [f"{n}"])
    assert not is_broken(connection)
    assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.matrix
async def test_clients_go_through_a_transaction_pooler(pooled_dsn: str, dsn: str) -> None:
    async def work(client: jobq.AsyncClient, n: int) -> None:
        for _ in range(10):
            await client.enqueue("k", {"n": n})
            await client.enqueue("k", {"n": n}, unique=f"{n}")
            await client.enqueue_many([jobq.NewJob("k", {})] * 3)

    async with jobq.AsyncClient(pooled_dsn, pool_max_size=8) as client:
        await asyncio.gather(*(work(client, n) for n in range(8)))
    with jobq.Client(pooled_dsn) as sync_client:
        for n in range(20):
            sync_client.enqueue("k", {"n": n})
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select count(*) from jobq.job").fetchone() == (8 * (10 + 1 + 30) + 20,)


@pytest.mark.parametrize("given", [False, True], ids=["own-pool", "given-pool"])
async def test_clients_survive_the_death_of_every_idle_connection(
    dsn: str, db: psycopg.Connection[Any], given: bool
) -> None:
    kill = (
        "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    async with contextlib.AsyncExitStack() as stack:
        async_target: Any = dsn
        sync_target: Any = dsn
        if given:
            async_target = await stack.enter_async_context(AsyncConnectionPool(dsn, min_size=3, open=False))
            sync_target = stack.enter_context(ConnectionPool(dsn, min_size=3, open=True))
        client = await stack.enter_async_context(jobq.AsyncClient(async_target, pool_min_size=3))
        sync_client = stack.enter_context(jobq.Client(sync_target, pool_min_size=3))
        for _ in range(3):
            await client.enqueue("k", {})
            sync_client.enqueue("k", {})
            row = db.execute(kill).fetchone()
            assert row is not None
            assert row[0] >= 2
    assert db.execute("select count(*) from jobq.job").fetchone() == (6,)


@pytest.mark.parametrize("colour", ["sync", "async"])
async def test_who_takes_a_connection_from_the_pool_gets_psycopgs_defaults(dsn: str, colour: str) -> None:
    idle = psycopg.pq.TransactionStatus.IDLE
    if colour == "sync":
        with jobq.Client(dsn, pool_max_size=1) as client:
            for _ in range(2):
                client.enqueue("k", {})
                with client.pool.connection() as taken:
                    assert (taken.autocommit, taken.row_factory) == (False, tuple_row)
                    assert taken.info.transaction_status == idle
                    client.enqueue("gone", {}, tx=taken)
                    taken.rollback()
            assert len(client.enqueue_many([jobq.NewJob("k", {}, unique="u")])) == 1
    else:
        async with jobq.AsyncClient(dsn, pool_max_size=1) as async_client:
            for _ in range(2):
                await async_client.enqueue("k", {})
                async with async_client.pool.connection() as taken_async:
                    assert (taken_async.autocommit, taken_async.row_factory) == (
                        False,
                        tuple_row,
                    )
                    assert taken_async.info.transaction_status == idle
                    await async_client.enqueue("gone", {}, tx=taken_async)
                    await taken_async.rollback()
            assert len(await async_client.enqueue_many([jobq.NewJob("k", {}, unique="u")])) == 1
    with psycopg.connect(dsn) as reader:
        kinds = reader.execute("select kind, count(*) from jobq.jobs group by 1").fetchall()
    assert kinds == [("k", 3)]


def test_threads_share_a_client(dsn: str, db: psycopg.Connection[Any]) -> None:
    failures: list[BaseException] = []

    def insert(client: jobq.Client) -> None:
        try:
            for n in range(50):
                client.enqueue("k", {"n": n})
                client.enqueue_many([jobq.NewJob("k", {"n": n}, unique=f"{n}")])
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    with jobq.Client(dsn, pool_max_size=3) as client:
        threads = [threading.Thread(target=insert, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert failures == []
    assert db.execute("select count(*) from jobq.job").fetchone() == (8 * 50 + 50,)


async def test_an_enqueue_that_is_cancelled_gives_its_connection_back(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with jobq.AsyncClient(dsn, pool_max_size=1) as client:
        with psycopg.connect(dsn) as blocker:
            blocker.execute("lock table jobq.job in exclusive mode")
            waiting = asyncio.create_task(client.enqueue("k", {}, unique="u"))
            await asyncio.to_thread(eventually, _someone_waits(db))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        again = await asyncio.wait_for(client.enqueue("k", {}, unique="u"), 10)
        assert again.inserted
        assert client.pool.get_stats()["pool_size"] <= 1
    assert db.execute("select count(*) from jobq.job").fetchone() == (1,)


def _someone_waits(db: psycopg.Connection[Any]) -> Callable[[], bool]:
    return lambda: bool(db.execute("select from pg_locks where not granted").fetchall())
