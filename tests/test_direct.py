"""A client's own connections: statements past psycopg's cursors, and what others may do in between."""

from __future__ import annotations

import contextlib
import signal
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import psycopg_pool
import pytest
from psycopg.adapt import Loader

import jobq
from jobq._operation import Call, Constants, Operation, Rows
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from psycopg.abc import Buffer

T = TypeVar("T")

PREPARED = "select count(*)::int4 from pg_prepared_statements where name like 'jobq\\_%'"


def ask(sql: str, *params: Any, replan: bool = False) -> Operation[Rows]:
    rows = yield Call(sql, params, replan)
    return rows


@pytest.fixture
def client(dsn: str) -> Iterator[jobq.Client]:
    """One of one connection, so that every statement meets what the one before has left."""
    with jobq.Client(dsn, pool_max_size=1) as client:
        yield client


@pytest.fixture
async def async_client(dsn: str) -> AsyncIterator[jobq.AsyncClient]:
    async with jobq.AsyncClient(dsn, pool_max_size=1) as client:
        yield client


def prepared(client: jobq.Client) -> int:
    return int(client._run(ask(PREPARED))[0][0])


# -- what is sent, and what comes back ---------------------------------------------------------------


async def test_values_come_back_as_they_went(client: jobq.Client, async_client: jobq.AsyncClient) -> None:
    now = datetime.now(UTC)
    sql = (
        "select $1::text, $2::int8, $3::float8, $4::bool, $5::text, $6::bytea, $7::timestamptz,"
        " $8::text[], $9::text::jsonb"
    )
    values = ("ü\\'\"", -(2**62), 1e-7, True, None, b"\0\xff\\", now, ["a,b", None, '"'], '{"a":1}')
    expected = [(*values[:-1], {"a": 1})]
    for _ in range(2):  # prepared, and prepared already
        for replan in (False, True):
            assert client._run(ask(sql, *values, replan=replan)) == expected
            assert await async_client._run(ask(sql, *values, replan=replan)) == expected


class Odd(Loader):
    """Reads everything as something else."""

    def load(self, data: Buffer) -> str:
        return f"odd {bytes(data)!r}"


def _make_odd(connection: psycopg.Connection[Any]) -> None:
    for name in ("int8", "text", "timestamptz", "bool", "jsonb"):
        connection.adapters.register_loader(name, Odd)


def test_what_a_user_registers_on_a_connection_changes_none_of_our_reading(client: jobq.Client) -> None:
    with client.pool.connection() as connection:
        _make_odd(connection)
        assert connection.execute("select 1::int8").fetchone() == ("odd b'1'",)
    made = client.enqueue("k", {"a": 1})
    job = client.get(made.id)
    assert (job.id, job.state, job.args, job.created_at.tzinfo) == (made.id, "ready", {"a": 1}, UTC)


def test_nor_does_what_is_registered_in_a_pool_that_is_given(dsn: str) -> None:
    with (
        psycopg_pool.ConnectionPool[psycopg.Connection[Any]](
            dsn, min_size=1, max_size=1, configure=_make_odd, open=True
        ) as pool,
        jobq.Client(pool) as client,
    ):
        with pool.connection() as connection:
            made = client.enqueue("k", {"a": 1}, tx=connection)
            assert connection.execute("select 1::int8").fetchone() == ("odd b'1'",)
        job = client.get(made.id)
        assert (job.id, job.state, job.args, job.created_at.tzinfo) == (made.id, "ready", {"a": 1}, UTC)


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_a_session_in_sql_ascii_is_read_and_written_as_utf8(dsn: str, given: bool) -> None:
    pool: psycopg_pool.ConnectionPool[psycopg.Connection[Any]] | None = None
    if given:
        pool = psycopg_pool.ConnectionPool(dsn, min_size=1, max_size=1, open=True)
    with jobq.Client(pool or dsn, pool_max_size=1) as client:
        with client.pool.connection() as connection:
            connection.execute("set client_encoding = 'sql_ascii'")
        kind = jobq.JobType("ä", dict, queue="é")
        for unique in (None, "日本"):
            made = client.enqueue(kind, {"a": "日本"}, tags=["ü"], unique=unique)
            job = client.get(made.id)
            assert (job.kind, job.queue, job.args, job.tags) == ("ä", "é", {"a": "日本"}, ("ü",))
    if pool is not None:
        pool.close()


async def test_statements_without_rows_have_none(client: jobq.Client, async_client: jobq.AsyncClient) -> None:
    for sql in ("select set_config('a.b', 'c', false) where false", "set a.b = 'c'", ""):
        assert list(client._run(ask(sql))) == []
        assert list(await async_client._run(ask(sql))) == []


def test_of_several_statements_the_first_ones_rows_count_and_any_ones_error(client: jobq.Client) -> None:
    assert client._run(ask("select 1; select 2")) == [(1,)]
    with pytest.raises(jobq.DatabaseError, match="division by zero"):
        client._run(ask("select 1; select 1 / 0"))
    assert client._run(ask("select 3")) == [(3,)]


@pytest.mark.parametrize("value", ["a\0b", ["a\0b"]], ids=["text", "array"])
def test_a_nul_is_refused_and_not_taken_for_the_end(client: jobq.Client, value: object) -> None:
    with pytest.raises(jobq.DatabaseError, match="NUL"):
        client._run(ask("select $1::text", value))
    assert client._run(ask("select $1::text", "ab")) == [("ab",)]


def test_another_client_encoding_carries_what_it_can(dsn: str) -> None:
    with jobq.Client(f"{dsn}&client_encoding=latin1", pool_max_size=1) as client:
        kind = jobq.JobType("k", dict, queue="é")
        for _ in range(2):  # the second time its constants are known, and not in this encoding
            job = client.get(client.enqueue(kind, {"a": "ü"}).id)
            assert (job.queue, job.args) == ("é", {"a": "ü"})
        with pytest.raises(jobq.DatabaseError, match="client_encoding"):
            client.enqueue(kind, {"a": "日本"})
        assert client.enqueue(kind, {}).inserted
    with jobq.Client(dsn) as other:
        assert other.get(other.enqueue(kind, {"a": "日本"}).id).queue == "é"


def test_constants_are_all_parameters_but_the_first(client: jobq.Client) -> None:
    def operation(first: str) -> Operation[Rows]:
        rows = yield Call("select $1::text, $2::int4, $3::bool", (first, *same.values), constants=same)
        return rows

    same = Constants(7, False)
    for first in "abc":
        assert client._run(operation(first)) == [(first, 7, False)]


# -- what is prepared --------------------------------------------------------------------------------


def test_a_statement_is_prepared_once_and_one_to_be_planned_anew_never(client: jobq.Client) -> None:
    for n in range(3):
        client._run(ask("select $1::int4", n))
        client._run(ask("select $1::int4 + 1", n, replan=True))
        client._run(ask("select 1"))
    assert prepared(client) == 1


def others_use(connection: psycopg.Connection[Any], what: Sequence[Any]) -> None:
    for statement in what:
        connection.execute(statement)
    connection.commit()


@pytest.mark.parametrize(
    ("what", "left"),
    [(["select 1"], 1), (["deallocate all"], 0), (["select 1"] * 6, 1)],
    ids=["nothing", "deallocate", "prepares"],
)
def test_whatever_others_do_with_the_connection_our_statements_work_on(
    client: jobq.Client, caplog: pytest.LogCaptureFixture, what: Sequence[Any], left: int
) -> None:
    for n in range(3):
        assert client._run(ask("select $1::int4", n)) == [(n,)]
        with client.pool.connection() as connection:
            others_use(connection, what)
        assert prepared(client) == left
    assert caplog.records == []


def test_a_rollback_of_others_takes_our_statements_away_and_they_are_prepared_again(
    client: jobq.Client,
) -> None:
    for n in range(3):
        assert client._run(ask("select $1::int4", n)) == [(n,)]
        with contextlib.suppress(ZeroDivisionError), client.pool.connection() as connection:
            connection.execute("select 1", prepare=True)
            raise ZeroDivisionError  # psycopg rolls back, and deallocates all
        assert prepared(client) == 0


async def test_so_it_is_for_those_who_await(async_client: jobq.AsyncClient) -> None:
    for n in range(3):
        assert await async_client._run(ask("select $1::int4", n)) == [(n,)]
        with contextlib.suppress(ZeroDivisionError):
            async with async_client.pool.connection() as connection:
                await connection.execute("select 1", prepare=True)
                raise ZeroDivisionError
        assert (await async_client._run(ask(PREPARED)))[0][0] == 0


def test_settings_of_others_are_seen(client: jobq.Client) -> None:
    moment = "select '2026-01-01 00:00+00'::timestamptz where $1::bool"
    assert client._run(ask(moment, True))[0][0].utcoffset().total_seconds() == 0
    with client.pool.connection() as connection:
        others_use(connection, ["set timezone = 'Asia/Tokyo'", "set client_encoding = 'latin1'"])
    (at,) = client._run(ask(moment, True))[0]
    assert (at.utcoffset().total_seconds(), at) == (9 * 3600, datetime(2026, 1, 1, tzinfo=UTC))
    assert client._run(ask("select $1::text", "ü")) == [("ü",)]


def test_a_plan_that_a_migration_has_outdated_costs_one_call(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    db.execute("create table t as select 1::int4 as a")
    assert client._run(ask("select * from t where $1::bool", True)) == [(1,)]
    db.execute("alter table t alter a type text")
    with pytest.raises(jobq.DatabaseError, match="cached plan"):
        client._run(ask("select * from t where $1::bool", True))
    assert client._run(ask("select * from t where $1::bool", True)) == [("1",)]


def test_endless_texts_are_not_all_prepared(client: jobq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobq._direct._MAX_PREPARED", 5)
    for n in range(10):
        assert client._run(ask(f"select $1::int4 + {n}", 1)) == [(1 + n,)]
    assert prepared(client) == 5


# -- interrupted -------------------------------------------------------------------------------------


def test_ctrl_c_ends_the_statement_and_the_client_goes_on(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    sleeping = "select from pg_stat_activity where query like '%pg_sleep(30)%' and pid <> pg_backend_pid()"

    def interrupt() -> None:
        eventually(lambda: bool(db.execute(sleeping).fetchall()))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it is ignored
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client._run(ask("select pg_sleep(30) where $1::bool", True))
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert client.enqueue("k", {}).inserted
    active = "select from pg_stat_activity where query like '%pg_sleep(30)%' and state = 'active'"
    assert db.execute(f"{active} and pid <> pg_backend_pid()").fetchall() == []


def test_notices_and_notifications_reach_their_handlers(
    client: jobq.Client, db: psycopg.Connection[Any]
) -> None:
    heard: list[str] = []
    with client.pool.connection() as connection:
        connection.add_notice_handler(lambda notice: heard.append(notice.message_primary or ""))
        connection.add_notify_handler(lambda notify: heard.append(notify.payload))
        others_use(connection, ["listen c"])
    db.execute("notify c, 'a notification'")
    client._run(ask("do $$begin raise notice 'a notice'; end$$"))
    assert sorted(heard) == ["a notice", "a notification"]
