"""A job is part of the caller's transaction, whatever library made the connection.

One body for every kind of connection: each case says only how its library begins, commits, rolls back
and makes a savepoint; what must be true is written once.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg
import django
import psycopg
import psycopg2
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio as sqlalchemy_async
import sqlalchemy.orm
from django.conf import settings
from django.db import connections, transaction
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

import jobq
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.support.processes import SpawnPython

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:django")

EMAIL = jobq.JobType("send_email", dict)


class Undo(Exception):
    """Raised inside a block to have it rolled back."""


@dataclass
class Case:
    """One library's connection.

    Attributes:
        tx: what is passed as ``tx=``.
        transaction: opens a transaction; an exception rolls it back.
        savepoint: the same inside a transaction.
    """

    tx: Any
    transaction: Callable[[], Any]
    savepoint: Callable[[], Any]


@contextlib.asynccontextmanager
async def entered(block: Any) -> AsyncIterator[None]:
    """Enter a context manager of either colour."""
    if hasattr(block, "__aenter__"):
        async with block:
            yield
    else:
        with block:
            yield


def _url(dsn: str, driver: str) -> sqlalchemy.URL:
    parts = conninfo_to_dict(dsn)
    query = {"host": str(parts["host"]), "port": str(parts["port"])}
    return sqlalchemy.URL.create(
        f"postgresql+{driver}", username=str(parts["user"]), database=str(parts["dbname"]), query=query
    )


@contextlib.asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Case]:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        yield Case(connection, connection.transaction, connection.transaction)


@contextlib.asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Case]:
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as connection:
        yield Case(connection, connection.transaction, connection.transaction)


def _asyncpg_kwargs(dsn: str) -> dict[str, Any]:
    parts = conninfo_to_dict(dsn)
    return {
        "host": parts["host"],
        "port": int(str(parts["port"])),
        "user": parts["user"],
        "database": parts["dbname"],
    }


@contextlib.asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Case]:
    connection = await asyncpg.connect(**_asyncpg_kwargs(dsn))
    try:
        # The common codec that would encode our documents a second time.
        await connection.set_type_codec("jsonb", encoder=repr, decoder=str, schema="pg_catalog")
        yield Case(connection, connection.transaction, connection.transaction)
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def asyncpg_pool_proxy(dsn: str) -> AsyncIterator[Case]:
    async with (
        asyncpg.create_pool(min_size=1, max_size=1, **_asyncpg_kwargs(dsn)) as pool,
        pool.acquire() as connection,
    ):
        yield Case(connection, connection.transaction, connection.transaction)


def _sqlalchemy_session(
    driver: str, *, scoped: bool = False
) -> Callable[[str], AbstractAsyncContextManager[Case]]:
    @contextlib.asynccontextmanager
    async def case(dsn: str) -> AsyncIterator[Case]:
        engine = sqlalchemy.create_engine(_url(dsn, driver))
        maker = sqlalchemy.orm.sessionmaker(engine)
        session: Any = sqlalchemy.orm.scoped_session(maker) if scoped else maker()
        try:
            yield Case(session, session.begin, session.begin_nested)
        finally:
            session.close()
            engine.dispose()

    return case


def _sqlalchemy_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[Case]]:
    @contextlib.asynccontextmanager
    async def case(dsn: str) -> AsyncIterator[Case]:
        engine = sqlalchemy.create_engine(_url(dsn, driver))
        with engine.connect() as connection:
            yield Case(connection, connection.begin, connection.begin_nested)
        engine.dispose()

    return case


def _sqlalchemy_async_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[Case]]:
    @contextlib.asynccontextmanager
    async def case(dsn: str) -> AsyncIterator[Case]:
        engine = sqlalchemy_async.create_async_engine(_url(dsn, driver))
        async with sqlalchemy_async.AsyncSession(engine) as session:
            yield Case(session, session.begin, session.begin_nested)
        await engine.dispose()

    return case


def _sqlalchemy_async_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[Case]]:
    @contextlib.asynccontextmanager
    async def case(dsn: str) -> AsyncIterator[Case]:
        engine = sqlalchemy_async.create_async_engine(_url(dsn, driver))
        async with engine.connect() as connection:
            yield Case(connection, connection.begin, connection.begin_nested)
        await engine.dispose()

    return case


@contextlib.asynccontextmanager
async def django_connection(dsn: str) -> AsyncIterator[Case]:
    parts = conninfo_to_dict(dsn)
    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    connections.databases["default"] = connections.configure_settings(
        {
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": parts["dbname"],
                "USER": parts["user"],
                "HOST": parts["host"],
                "PORT": parts["port"],
            }
        }
    )["default"]
    with _django_allows_the_loop():
        connection = connections["default"]
        try:
            yield Case(connection, transaction.atomic, transaction.atomic)
        finally:
            connection.close()
            del connections["default"]


@contextlib.contextmanager
def _django_allows_the_loop() -> Any:
    """Django refuses its sync connection where a loop runs; the tests' bodies are coroutines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield


@contextlib.asynccontextmanager
async def psycopg2_connection(dsn: str) -> AsyncIterator[Case]:
    connection = psycopg2.connect(dsn)

    @contextlib.contextmanager
    def savepoint() -> Any:
        with connection.cursor() as cursor:
            cursor.execute("savepoint s")
            try:
                yield
            except BaseException:
                cursor.execute("rollback to savepoint s")
                raise

    try:
        yield Case(connection, lambda: connection, savepoint)
    finally:
        connection.close()


CASES: dict[str, Callable[[str], AbstractAsyncContextManager[Case]]] = {
    "psycopg": psycopg_sync,
    "psycopg-async": psycopg_async,
    "asyncpg": asyncpg_connection,
    "asyncpg-pool-proxy": asyncpg_pool_proxy,
    "sqlalchemy-session-psycopg": _sqlalchemy_session("psycopg"),
    "sqlalchemy-session-psycopg2": _sqlalchemy_session("psycopg2"),
    "sqlalchemy-scoped-session": _sqlalchemy_session("psycopg", scoped=True),
    "sqlalchemy-connection-psycopg": _sqlalchemy_connection("psycopg"),
    "sqlalchemy-connection-psycopg2": _sqlalchemy_connection("psycopg2"),
    "sqlalchemy-async-session-psycopg": _sqlalchemy_async_session("psycopg"),
    "sqlalchemy-async-session-asyncpg": _sqlalchemy_async_session("asyncpg"),
    "sqlalchemy-async-connection-psycopg": _sqlalchemy_async_connection("psycopg"),
    "sqlalchemy-async-connection-asyncpg": _sqlalchemy_async_connection("asyncpg"),
    "django": django_connection,
    "psycopg2": psycopg2_connection,
}
ASYNC = {name for name in CASES if "async" in name}


class Caller:
    """The client that goes with a case, its verbs awaited whatever its colour."""

    def __init__(self, client: jobq.AsyncClient | jobq.Client) -> None:
        self._client = client

    async def enqueue(self, *args: Any, **options: Any) -> jobq.Enqueued:
        answer: Any = self._client.enqueue(*args, **options)
        return await answer if inspect.isawaitable(answer) else answer

    async def enqueue_many(self, *args: Any, **options: Any) -> list[jobq.Enqueued]:
        answer: Any = self._client.enqueue_many(*args, **options)
        return await answer if inspect.isawaitable(answer) else answer


@pytest.fixture(params=CASES)
def case_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.asynccontextmanager
async def set_up(dsn: str, name: str) -> AsyncIterator[tuple[Case, Caller]]:
    async with CASES[name](dsn) as case, contextlib.AsyncExitStack() as stack:
        if name in ASYNC:
            client: Any = await stack.enter_async_context(jobq.AsyncClient(dsn))
        else:
            client = stack.enter_context(jobq.Client(dsn))
        yield case, Caller(client)


def count(db: psycopg.Connection[Any], where: str = "true") -> int:
    row = db.execute(f"select count(*) from jobq.jobs where {where}").fetchone()  # type: ignore[call-overload]
    assert row
    return int(row[0])


@pytest.mark.matrix
async def test_s51_a_job_exists_if_and_only_if_its_transaction_commits(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    async with set_up(dsn, case_name) as (case, caller):
        async with entered(case.transaction()):
            await caller.enqueue(EMAIL, {"to": "é % $1 ' \\ \"", "n": 2**70}, tx=case.tx, tags=["a,b", "{}"])
            assert count(db) == 0
        assert count(db) == 1
        row = db.execute("select args, tags from jobq.jobs").fetchone()
        assert row == ({"to": "é % $1 ' \\ \"", "n": 2**70}, ["a,b", "{}"])

        with contextlib.suppress(Undo):
            async with entered(case.transaction()):
                await caller.enqueue(EMAIL, {}, tx=case.tx)
                raise Undo
        assert count(db) == 1


async def test_s51_a_rollback_to_a_savepoint_takes_the_job_with_it_and_nothing_else(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    async with set_up(dsn, case_name) as (case, caller):
        async with entered(case.transaction()):
            await caller.enqueue(EMAIL, {"kept": 1}, tx=case.tx)
            with contextlib.suppress(Undo):
                async with entered(case.savepoint()):
                    await caller.enqueue(EMAIL, {"gone": 1}, tx=case.tx)
                    raise Undo
            async with entered(case.savepoint()):
                await caller.enqueue(EMAIL, {"kept": 2}, tx=case.tx)
        assert count(db) == 2
        assert count(db, "args ? 'gone'") == 0


async def test_bulk_scheduled_and_unique_jobs_travel_in_the_callers_transaction(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    async with set_up(dsn, case_name) as (case, caller):
        new = [
            jobq.NewJob(EMAIL, {"n": n}, priority=n % 3, unique="k" if n in {5, 9} else None, delay=_delay(n))
            for n in range(2000)
        ]
        async with entered(case.transaction()):
            enqueued = await caller.enqueue_many(new, tx=case.tx)
            assert count(db) == 0
        assert count(db) == 1999
        assert enqueued[9] == jobq.Enqueued(enqueued[5].id, inserted=False)
        row = db.execute("select args ->> 'n' from jobq.jobs where id = %s", [enqueued[1234].id]).fetchone()
        assert row == ("1234",)
        assert count(db, "state = 'scheduled'") == 200


def _delay(n: int) -> Any:
    return timedelta(hours=1) if n % 10 == 0 else None


async def test_what_is_refused_leaves_the_callers_transaction_whole(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    async with set_up(dsn, case_name) as (case, caller):
        async with entered(case.transaction()):
            await caller.enqueue(EMAIL, {"kept": 1}, tx=case.tx)
            for bad in ({"x": "\x00"}, {"x": float("nan")}, {"x": "\ud800"}, {"x": b""}):
                with pytest.raises(jobq.ArgumentsEncodeError):
                    await caller.enqueue(EMAIL, bad, tx=case.tx)
            with pytest.raises(jobq.ConfigError):
                await caller.enqueue(EMAIL, {}, tx=case.tx, priority=10)
            await caller.enqueue(EMAIL, {"kept": 2}, tx=case.tx)
        assert count(db) == 2


async def test_the_callers_connection_is_left_as_it_was(dsn: str) -> None:
    async with set_up(dsn, "psycopg") as (case, caller):
        connection: psycopg.Connection[Any] = case.tx
        before = (connection.row_factory, connection.autocommit, connection.prepare_threshold)
        await caller.enqueue(EMAIL, {}, tx=connection)
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert (connection.row_factory, connection.autocommit, connection.prepare_threshold) == before
        assert connection.execute("select 1 as one").fetchone() == {"one": 1}
        connection.rollback()


async def test_a_failed_transaction_is_refused_before_anything_is_sent(dsn: str) -> None:
    async with set_up(dsn, "psycopg") as (case, caller):
        with pytest.raises(psycopg.errors.DivisionByZero):
            case.tx.execute("select 1/0")
        with pytest.raises(jobq.TransactionError, match="roll it back"):
            await caller.enqueue(EMAIL, {}, tx=case.tx)
        case.tx.rollback()


@pytest.mark.parametrize("name", sorted(CASES))
async def test_each_client_names_the_other_for_a_connection_of_the_other_colour(dsn: str, name: str) -> None:
    async with CASES[name](dsn) as case:
        if name in ASYNC:
            with jobq.Client(dsn) as client, pytest.raises(jobq.TransactionError, match="AsyncClient"):
                client.enqueue(EMAIL, {}, tx=case.tx)
        else:
            async with jobq.AsyncClient(dsn) as client:
                with pytest.raises(jobq.TransactionError, match=r"jobq\.Client"):
                    await client.enqueue(EMAIL, {}, tx=case.tx)


@pytest.mark.parametrize(
    "tx", [object(), 1, "postgresql://", [], dict], ids=["object", "int", "dsn", "list", "type"]
)
async def test_any_other_object_is_told_what_is_accepted(dsn: str, tx: object) -> None:
    async with jobq.AsyncClient(dsn) as client:
        with (
            pytest.raises(jobq.TransactionError, match=r"SQLAlchemy.*asyncpg"),
            contextlib.suppress(TypeError),
        ):
            await client.enqueue(EMAIL, {}, tx=tx)
    with (
        jobq.Client(dsn) as sync_client,
        pytest.raises(jobq.TransactionError, match=r"psycopg2.*AsyncSession"),
    ):
        sync_client.enqueue(EMAIL, {}, tx=tx)


def test_s51_a_client_killed_before_its_commit_leaves_nothing(
    dsn: str, db: psycopg.Connection[Any], spawn_python: SpawnPython
) -> None:
    code = f"""
import psycopg, jobq, time
with jobq.Client({dsn!r}) as client, psycopg.connect({dsn!r}) as connection:
    client.enqueue("k", {{}}, tx=connection)
    print("written", flush=True)
    time.sleep(60)
"""
    process = spawn_python("-c", code)
    process.wait_for_output("written")
    process.kill()
    backends = (
        "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    )

    eventually(lambda: db.execute(backends).fetchone() == (0,))  # type: ignore[call-overload]
    assert count(db) == 0


def test_s51_a_reader_that_polls_hot_never_sees_an_uncommitted_job(dsn: str) -> None:
    seen: list[int] = []
    committed: set[int] = set()
    stop = threading.Event()

    def look() -> None:
        with psycopg.connect(dsn, autocommit=True) as reader:
            while not stop.is_set():
                before = set(committed)
                ids = {row[0] for row in reader.execute("select job_id from jobq.ready").fetchall()}
                seen.extend(ids - before - committed - pending)

    pending: set[int] = set()
    reader = threading.Thread(target=look)
    reader.start()
    try:
        with jobq.Client(dsn) as client, psycopg.connect(dsn) as connection:
            for n in range(300):
                job = client.enqueue("k", {}, tx=connection)
                if n % 2:
                    pending.add(job.id)  # from here on it may be seen
                    connection.commit()
                    committed.add(job.id)
                else:
                    connection.rollback()
    finally:
        stop.set()
        reader.join()
    assert seen == []


def test_none_of_the_callers_libraries_is_a_dependency(spawn_python: SpawnPython) -> None:
    libraries = {"asyncpg", "sqlalchemy", "django", "psycopg2", "pydantic"}
    code = f"import jobq, sys; print(sorted({libraries} & set(sys.modules)))"
    process = spawn_python("-c", code)
    assert process.wait() == 0
    assert "[]" in process.output
    assert "asyncpg" in sys.modules  # where it was imported, it is seen
