"""A job is part of the caller's transaction, whatever library made the connection.

One body for every kind of connection: each case says only how its library begins, commits, rolls back
and makes a savepoint; what must be true is written once.
"""

from __future__ import annotations

import asyncio
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
import psycopg2.extras
import pytest
import sqlalchemy
import sqlalchemy.ext.asyncio as sqlalchemy_async
import sqlalchemy.orm
from django.conf import settings
from django.db import connection, connections, transaction
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row

import jobq
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from tests.conftest import SpawnPython

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:django")

EMAIL = jobq.JobType("send_email", dict)
atomic: Any = transaction.atomic  # Django has no annotations


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
    with psycopg.Connection[dict[str, Any]].connect(dsn, row_factory=dict_row) as connection:
        yield Case(connection, connection.transaction, connection.transaction)


@contextlib.asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Case]:
    async with await psycopg.AsyncConnection[dict[str, Any]].connect(dsn, row_factory=dict_row) as connection:
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


def _sqlalchemy_async_session(
    driver: str, *, scoped: bool = False
) -> Callable[[str], AbstractAsyncContextManager[Case]]:
    @contextlib.asynccontextmanager
    async def case(dsn: str) -> AsyncIterator[Case]:
        engine = sqlalchemy_async.create_async_engine(_url(dsn, driver))
        maker = sqlalchemy_async.async_sessionmaker(engine)
        session: Any = maker()
        if scoped:
            session = sqlalchemy_async.async_scoped_session(maker, scopefunc=asyncio.current_task)
        try:
            yield Case(session, session.begin, session.begin_nested)
        finally:
            await session.close()
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


def _django(
    *, proxy: bool = False, options: dict[str, Any] | None = None
) -> Callable[[str], AbstractAsyncContextManager[Case]]:
    @contextlib.asynccontextmanager
    async def case(dsn: str) -> AsyncIterator[Case]:
        parts = conninfo_to_dict(dsn)
        if not settings.configured:
            settings.configure(DATABASES={}, USE_TZ=True)
            django.setup()
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": parts["dbname"],
            "USER": parts["user"],
            "HOST": parts["host"],
            "PORT": parts["port"],
            "OPTIONS": options or {},
        }
        databases: Any = connections.databases
        databases["default"] = connections.configure_settings({"default": database})["default"]
        with _django_allows_the_loop():
            wrapper = connections["default"]
            try:
                yield Case(connection if proxy else wrapper, atomic, atomic)
            finally:
                wrapper.close()
                del connections["default"]

    return case


@contextlib.contextmanager
def _django_allows_the_loop() -> Any:
    """Django refuses its sync connection where a loop runs; the tests' bodies are coroutines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        yield


@contextlib.asynccontextmanager
async def psycopg2_connection(dsn: str) -> AsyncIterator[Case]:
    connection = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)

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
    "sqlalchemy-async-scoped-session": _sqlalchemy_async_session("asyncpg", scoped=True),
    "sqlalchemy-async-connection-psycopg": _sqlalchemy_async_connection("psycopg"),
    "sqlalchemy-async-connection-asyncpg": _sqlalchemy_async_connection("asyncpg"),
    "django": _django(),
    "django-proxy": _django(proxy=True),
    "django-server-side-binding": _django(options={"server_side_binding": True}),
    "psycopg2": psycopg2_connection,
}
ASYNC = {name for name in CASES if "async" in name}  # asyncpg too


class Caller:
    """The client that goes with a case, its verbs awaited whatever its colour."""

    def __init__(self, client: jobq.AsyncClient | jobq.Client) -> None:
        self._client = client

    async def enqueue(self, *args: Any, **options: Any) -> jobq.Enqueued:
        answer: Any = self._client.enqueue(*args, **options)
        enqueued: jobq.Enqueued = await answer if inspect.isawaitable(answer) else answer
        return enqueued

    async def enqueue_many(self, *args: Any, **options: Any) -> list[jobq.Enqueued]:
        answer: Any = self._client.enqueue_many(*args, **options)
        enqueued: list[jobq.Enqueued] = await answer if inspect.isawaitable(answer) else answer
        return enqueued


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
    row = db.execute(f"select count(*) from jobq.jobs where {where}".encode()).fetchone()
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
            for n in range(20_000)
        ]
        async with entered(case.transaction()):
            enqueued = await caller.enqueue_many(new, tx=case.tx)
            assert count(db) == 0
        assert count(db) == 19_999
        assert enqueued[9] == jobq.Enqueued(enqueued[5].id, inserted=False)
        row = db.execute("select args ->> 'n' from jobq.jobs where id = %s", [enqueued[1234].id]).fetchone()
        assert row == ("1234",)
        assert count(db, "state = 'scheduled'") == 2000


async def test_every_flavour_of_unique_key_travels_in_the_callers_transaction(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    hour = timedelta(hours=1)
    flavours = [
        jobq.Unique("r", on_conflict="replace", max_wait=hour),
        jobq.Unique("e", on_conflict="raise"),
        jobq.Unique(by_args=True, period=hour),
        jobq.Unique(by_args=["n"], by_queue=True, until="started"),
    ]
    new = [jobq.NewJob(EMAIL, {"n": n}, unique=unique) for n, unique in enumerate(flavours)]
    async with set_up(dsn, case_name) as (case, caller):
        async with entered(case.transaction()):
            made = [
                await caller.enqueue(EMAIL, {"n": n}, tx=case.tx, unique=unique)
                for n, unique in enumerate(flavours)
            ]
            assert all(one.inserted for one in made)
            again = await caller.enqueue_many([new[0], *new[2:]], tx=case.tx)
            assert [one.id for one in again] == [made[n].id for n in (0, 2, 3)]
            assert [one.replaced for one in again] == [True, False, False]
            with pytest.raises(jobq.UniqueConflict) as caught:
                await caller.enqueue_many([jobq.NewJob(EMAIL, {}), new[1]], tx=case.tx)
            assert caught.value.job_id == made[1].id
            assert count(db) == 0
        assert count(db) == len(new)


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


async def test_a_statement_that_fails_is_told_and_the_connection_lives_on_after_its_rollback(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    client_class: Any = jobq.AsyncClient if case_name in ASYNC else jobq.Client
    nowhere = Caller(client_class(dsn, schema="nowhere"))
    async with set_up(dsn, case_name) as (case, caller):
        with contextlib.suppress(Undo):
            async with entered(case.transaction()):
                with pytest.raises(jobq.SchemaMissing, match="jobqctl migrate"):
                    await nowhere.enqueue(EMAIL, {}, tx=case.tx)
                with pytest.raises(jobq.TransactionError):
                    await caller.enqueue(EMAIL, {}, tx=case.tx)
                raise Undo
        async with entered(case.transaction()):
            await caller.enqueue(EMAIL, {}, tx=case.tx)
        assert count(db) == 1


async def test_a_key_that_another_transaction_holds_is_waited_for_and_its_holder_is_named(
    dsn: str, db: psycopg.Connection[Any], case_name: str
) -> None:
    async with set_up(dsn, case_name) as (case, caller):
        with psycopg.connect(dsn) as other, jobq.Client(dsn) as client:
            first = client.enqueue(EMAIL, {"n": 1}, unique="k", tx=other)
            committed = threading.Event()

            def commit_when_waited_for() -> None:
                eventually(lambda: db.execute(_WAITERS).fetchone() == (1,))
                committed.set()  # before it: who waits may be quicker than our next line
                other.commit()

            thread = threading.Thread(target=commit_when_waited_for)
            thread.start()
            try:
                async with entered(case.transaction()):
                    second = await caller.enqueue(EMAIL, {"n": 2}, unique="k", tx=case.tx)
                    assert committed.is_set()
            finally:
                thread.join()
        assert second == jobq.Enqueued(first.id, inserted=False)
        assert count(db) == 1


_WAITERS = "select count(*) from pg_locks where locktype = 'transactionid' and not granted"


@pytest.mark.parametrize("scoped", [False, True], ids=["session", "scoped"])
def test_s51_a_session_that_has_not_begun_begins_by_itself_and_waits_for_its_commit(
    dsn: str, db: psycopg.Connection[Any], scoped: bool
) -> None:
    engine = sqlalchemy.create_engine(_url(dsn, "psycopg"))
    maker = sqlalchemy.orm.sessionmaker(engine)
    session: Any = sqlalchemy.orm.scoped_session(maker) if scoped else maker()
    with jobq.Client(dsn) as client:
        client.enqueue(EMAIL, {"gone": 1}, tx=session)
        assert count(db) == 0
        session.rollback()
        client.enqueue(EMAIL, {"kept": 1}, tx=session)
        assert count(db) == 0
        session.commit()
        assert count(db) == 1
    session.close()
    engine.dispose()


async def test_s51_an_inner_atomic_block_that_fails_takes_only_its_own_jobs(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    async with set_up(dsn, "django") as (case, caller):
        with atomic():
            await caller.enqueue(EMAIL, {"kept": 1}, tx=case.tx)
            with contextlib.suppress(Undo), atomic():
                await caller.enqueue(EMAIL, {"gone": 1}, tx=case.tx)
                with atomic():
                    await caller.enqueue(EMAIL, {"gone": 2}, tx=case.tx)
                raise Undo
            # Django's own rule: a block that is to be rolled back takes no statement.
            with contextlib.suppress(Undo), atomic():
                transaction.set_rollback(True)
                with pytest.raises(jobq.TransactionError):
                    await caller.enqueue(EMAIL, {"gone": 3}, tx=case.tx)
                raise Undo
        assert count(db) == 1
        assert count(db, "args ? 'kept'") == 1


def test_django_over_psycopg2_serves_as_well(
    dsn: str, db: psycopg.Connection[Any], spawn_python: SpawnPython
) -> None:
    parts = conninfo_to_dict(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        **{upper: parts[name] for upper, name in _DJANGO_NAMES.items()},
    }
    code = f"""
import sys
sys.modules["psycopg"] = None  # Django takes psycopg2 where there is no psycopg
from django.conf import settings
settings.configure(DATABASES={{"default": {database!r}}}, USE_TZ=True)
import django
django.setup()
from django.db import connection, transaction
from django.db.backends.postgresql.psycopg_any import is_psycopg3
connection.ensure_connection()
assert not is_psycopg3
del sys.modules["psycopg"]
import jobq
client = jobq.Client({dsn!r})
with transaction.atomic():
    client.enqueue("kept", {{"percent": "100 % $1 %s"}}, tx=connection, tags=["a,b"])
    client.enqueue_many([jobq.NewJob("kept", {{"n": n}}, unique=str(n)) for n in range(100)], tx=connection)
    try:
        with transaction.atomic():
            client.enqueue("gone", {{}}, tx=connection)
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
connection.close()
"""
    process = spawn_python("-W", "ignore::DeprecationWarning", "-c", code)
    assert process.wait() == 0, process.output
    assert (count(db, "kind = 'kept'"), count(db, "kind = 'gone'")) == (101, 0)


_DJANGO_NAMES = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}


@pytest.mark.parametrize("name", ["psycopg", "asyncpg", "asyncpg-pool-proxy", "django"])
async def test_with_no_transaction_open_a_connection_in_autocommit_makes_the_job_as_all_else_at_once(
    dsn: str, db: psycopg.Connection[Any], name: str
) -> None:
    async with set_up(dsn, name) as (case, caller):
        if isinstance(case.tx, psycopg.Connection):
            case.tx.autocommit = True
        await caller.enqueue(EMAIL, {}, tx=case.tx)
        made = await caller.enqueue(EMAIL, {}, tx=case.tx, unique="one")
        assert count(db) == 2
        assert await caller.enqueue(EMAIL, {}, tx=case.tx, unique="one") == jobq.Enqueued(
            made.id, inserted=False
        )


@pytest.mark.parametrize(
    "name",
    ["psycopg", "psycopg-async", "psycopg2", "asyncpg", "asyncpg-pool-proxy", "django", "django-proxy"],
)
async def test_what_needs_several_statements_is_a_transaction_there_by_itself(
    dsn: str, db: psycopg.Connection[Any], name: str
) -> None:
    """Nobody sees the keys that a call takes before it finds that it must raise."""
    slot = jobq.Unique("slot", period=timedelta(days=36_525))
    async with set_up(dsn, name) as (case, caller):
        if name == "psycopg-async":
            await case.tx.set_autocommit(True)
        elif name in {"psycopg", "psycopg2"}:
            case.tx.autocommit = True
        held = await caller.enqueue(EMAIL, {}, tx=case.tx, unique="held")
        raising = jobq.Unique("held", on_conflict="raise")
        new = [jobq.NewJob(EMAIL, {}, unique=slot), jobq.NewJob(EMAIL, {}, unique=raising)]
        with pytest.raises(jobq.UniqueConflict):
            await caller.enqueue_many(new, tx=case.tx)
        assert db.execute("select job_id from jobq.unique_key").fetchall() == [(held.id,)]
        assert (await caller.enqueue(EMAIL, {}, tx=case.tx, unique=slot)).inserted
        assert count(db) == 2


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

    eventually(lambda: db.execute(backends).fetchone() == (0,))
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
