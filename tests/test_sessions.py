"""Dedicated connections: what they run, how they are interrupted, and when they are given up."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import jobq
from jobq._driver_errors import sqlstate_of
from jobq._operation import Call, atomic
from jobq._postgres import execute, sync_cursor
from jobq._sessions import AsyncSession, SyncSession
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from jobq._operation import Operation, Rows
    from tests.support.proxy import TcpProxy

CANCELLED_ROUNDS: Final = 300


def one(call: Call) -> Operation[Rows]:
    return (yield call)


def test_a_session_says_who_it_is_and_what_it_will_not_wait_for(dsn: str) -> None:
    session = SyncSession.open(dsn, schema="jobq", name="jobq test", plan_settings=True)
    try:
        names = "application_name", "statement_timeout", "lock_timeout", "enable_seqscan", "TimeZone"
        shown = {name: session.run(one(Call(f"show {name}")))[0][0] for name in names}
        assert shown == {
            "application_name": "jobq test",
            "statement_timeout": "25s",
            "lock_timeout": "10s",
            "enable_seqscan": "off",
            "TimeZone": "UTC",
        }
        assert not session.pooled
    finally:
        session.close()


def test_a_session_reads_arrays_with_nulls_whatever_the_database_does(
    dsn: str, db: psycopg.Connection
) -> None:
    db.execute(f'alter database "{db.info.dbname}" set array_nulls = off'.encode())
    session = SyncSession.open(dsn, schema="jobq", name="jobq test")
    try:
        assert session.run(one(Call("select ($1::text[])[1]", ([None],)))) == [(None,)]
    finally:
        session.close()


def test_behind_a_pooler_a_session_sets_and_prepares_nothing(pooled_dsn: str, dsn: str) -> None:
    session = SyncSession.open(pooled_dsn, schema="jobq", name="jobq test", plan_settings=True)
    try:
        assert session.pooled
        for n in range(20):
            assert session.run(one(Call("select $1::int4", (n,)))) == [(n,)]
        assert session.run(one(Call("show enable_seqscan"))) == [("on",)]
        assert session.run(one(Call("select count(*) from pg_prepared_statements"))) == [(0,)]
    finally:
        session.close()


def test_a_silent_server_is_given_up_in_time(proxy: TcpProxy) -> None:
    session = SyncSession.open(proxy.dsn, schema="jobq", name="test", time_limit_s=0.3)
    started = time.monotonic()
    proxy.silence()
    with pytest.raises(jobq.DatabaseUnavailable, match="no answer within"):
        session.run(one(Call("select 1")))
    assert time.monotonic() - started < 5
    assert session.closed
    with pytest.raises(jobq.DatabaseUnavailable):
        session.run(one(Call("select 1")))


async def test_a_silent_server_is_given_up_in_time_by_the_loop_too(proxy: TcpProxy) -> None:
    session = await AsyncSession.open(proxy.dsn, schema="jobq", name="test", time_limit_s=0.3)
    started = time.monotonic()
    proxy.silence()
    with pytest.raises(jobq.DatabaseUnavailable, match="no answer within"):
        await session.run(one(Call("select 1")))
    assert time.monotonic() - started < 5
    assert session.closed


def _interrupted() -> Operation[None]:
    yield Call("insert into jobq.unique_key values (decode(repeat('00', 16), 'hex'), 1, 1)")
    raise ZeroDivisionError


async def test_an_operation_that_breaks_off_in_its_transaction_leaves_nothing_open(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    sync = SyncSession.open(dsn, schema="jobq", name="test")
    with pytest.raises(ZeroDivisionError):
        sync.run(atomic(_interrupted()))
    session = await AsyncSession.open(dsn, schema="jobq", name="test")
    with pytest.raises(ZeroDivisionError):
        await session.run(atomic(_interrupted()))
    with jobq.Client(dsn) as client:
        with pytest.raises(ZeroDivisionError):
            client._run(atomic(_interrupted()))
        client.enqueue("k", {})
    async with jobq.AsyncClient(dsn) as async_client:
        with pytest.raises(ZeroDivisionError):
            await async_client._run(atomic(_interrupted()))
        await async_client.enqueue("k", {})
    assert sync.closed
    assert session.closed
    assert db.execute("select count(*) from jobq.unique_key").fetchone() == (0,)


async def test_a_session_runs_one_operation_at_a_time(dsn: str) -> None:
    session = await AsyncSession.open(dsn, schema="jobq", name="test")
    order: list[str] = []

    def operation(name: str) -> Operation[None]:
        for step in range(3):
            yield Call("select pg_sleep(0.01)")
            order.append(f"{name}{step}")

    await asyncio.gather(*(session.run(operation(name)) for name in "abc"))
    await session.close()
    assert order == [f"{name}{step}" for name in "abc" for step in range(3)]


def is_active(connection: psycopg.AsyncConnection[Any]) -> bool:
    return connection.info.transaction_status is TransactionStatus.ACTIVE


async def test_a_session_that_is_closed_is_freed_only_when_nobody_waits_in_it(dsn: str) -> None:
    """Else psycopg goes on with memory that is gone, once the descriptor is another connection's."""
    session = await AsyncSession.open(dsn, schema="jobq", name="test")
    for _ in range(10):
        waiting = [asyncio.create_task(session.run(one(Call("select pg_sleep(20)")))) for _ in range(2)]
        await eventually_async(functools.partial(is_active, session.connection))
        async with asyncio.timeout(5.0):
            await session.close()
            following = await AsyncSession.open(dsn, schema="jobq", name="test")
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert session.closed
        assert [type(error) for error in ended] == [jobq.DatabaseUnavailable] * 2
        session = following
    await session.close()


def test_a_session_that_cannot_connect_says_so_and_is_not_left_open(proxy: TcpProxy, dsn: str) -> None:
    proxy.refuse()
    with pytest.raises(jobq.DatabaseUnavailable):
        SyncSession.open(proxy.dsn, schema="jobq", name="test")
    with pytest.raises(jobq.ConfigError):
        SyncSession.open("nonsense", schema="jobq", name="test")
    assert proxy.connections == 0


# -- interrupted -------------------------------------------------------------------------------------


async def test_a_statement_that_is_cancelled_leaves_a_session_that_works(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    session = await AsyncSession.open(dsn, schema="jobq", name="test")
    waiting = asyncio.create_task(session.run(one(Call("select pg_sleep(30) where $1::bool", (True,)))))
    await eventually_async(functools.partial(is_active, session.connection))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await session.run(one(Call("select $1::int4", (1,)))) == [(1,)]
    sleeping = "select from pg_stat_activity where state = 'active' and query like '%pg_sleep(30)%'"
    assert db.execute(f"{sleeping} and pid <> pg_backend_pid()").fetchall() == []
    await session.close()


async def test_wherever_a_statement_is_cancelled_nobody_reads_its_answer(dsn: str) -> None:
    """Whether it is prepared already or not, and however often its cancellation is cancelled."""
    rng = random.Random(7)
    session = await AsyncSession.open(dsn, schema="jobq", name="test")
    for n in range(CANCELLED_ROUNDS):
        sql = f"select $1::int4 -- {n}" if rng.random() < 0.5 else "select $1::int4"
        task = asyncio.create_task(session.run(one(Call(sql, (n,)))))
        for _ in range(rng.choice((1, 2))):
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        if session.closed:
            session = await AsyncSession.open(dsn, schema="jobq", name="test")
        for text in ("select $1::int4", sql):
            assert await session.run(one(Call(text, (-n,)))) == [(-n,)]
    await session.close()


# -- errors ------------------------------------------------------------------------------------------


def told(error: jobq.Error) -> tuple[object, ...]:
    return type(error), str(error), type(error.__cause__), sqlstate_of(error)


@pytest.mark.parametrize(
    "call",
    [
        Call("select 1 / $1::int4", (0,)),
        Call("select $1::int4", ("one",)),
        Call("selekt"),
        Call("select 1; select 1/0"),
        Call("insert into jobq.unique_key values (decode(repeat('00', 16), 'hex'), $1::int4, 1)", (None,)),
        Call("select * from nowhere.job where id = $1::int8", (1,)),
        Call("select nothing($1::int8)", (1,)),
        Call("select $1::text", ("\0",)),
        Call("select pg_terminate_backend(pg_backend_pid()) where $1::bool", (True,)),
    ],
    ids=lambda call: call.sql[:30],
)
async def test_an_error_is_told_as_it_is_through_psycopgs_cursor(dsn: str, call: Call) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection, pytest.raises(jobq.Error) as by_cursor:
        execute(sync_cursor(connection), call)
    sync = SyncSession.open(dsn, schema="jobq", name="test")
    with pytest.raises(jobq.Error) as by_sync:
        sync.run(one(call))
    session = await AsyncSession.open(dsn, schema="jobq", name="test")
    with pytest.raises(jobq.Error) as by_async:
        await session.run(one(call))
    assert told(by_sync.value) == told(by_async.value) == told(by_cursor.value)
    is_lost = "terminate" in call.sql
    assert (sync.closed, session.closed) == (is_lost, is_lost)
    sync.close()
    await session.close()
