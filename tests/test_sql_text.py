"""What users give is never part of a statement's text: values are parameters, the schema's name is quoted."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import errors

import jobq
from jobq._clients.migrate import migration_script
from jobq._direct import OwnAsyncConnection, OwnConnection
from jobq._statements.claim import CLAIM
from jobq._statements.duties import NEXT_ORPHAN
from jobq._statements.enqueue import ENQUEUE_ONE, enqueue_sql
from jobq._statements.schema import read_status
from jobq.cli.app import app
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import Storage
from tests.test_redaction import commands
from tests.test_secrets import ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Callable

MARK: Final = """'"; drop table public.victim; --$1 %s {schema} \\"""
HOUR: Final = timedelta(hours=1)
HOSTILE: Final = (
    'a"; drop table public.victim; --',
    "a'; drop table public.victim; --",
    "a\\'; drop table public.victim; --",
    "{schema}",
    "a`b",
    "$1",
    "%s",
    "a\nb",
    "a\0b",
)
ODD: Final = ("a; drop table public.victim; --", "select", "Mixed Case", "naïve.schéma", "x" * 63)


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of all statements that are sent from now on, whatever sends them."""
    seen: list[str] = []

    def recorded(cls: type, name: str, text_of: Callable[[Any], str]) -> None:
        original = getattr(cls, name)

        def record(self: Any, statement: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(text_of(statement))
            return original(self, statement, *args, **kwargs)

        monkeypatch.setattr(cls, name, record)

    for cursor in (psycopg.RawCursor, psycopg.AsyncRawCursor):
        recorded(cursor, "execute", str)
    for connection in (OwnConnection, OwnAsyncConnection):
        recorded(connection, "execute_call", lambda call: str(call.sql))
    return seen


@pytest.fixture
def victim(db: psycopg.Connection) -> psycopg.Connection:
    db.execute("create table public.victim ()")
    return db


def say_everywhere(client: jobq.Client) -> None:
    """Give a client the mark as every value that it takes."""
    which = jobq.JobFilter(queues=[MARK], kinds=[MARK], tags=[MARK], error=MARK)
    options: dict[str, Any] = {"queue": MARK, "tags": [MARK], "meta": {MARK: MARK}}
    for unique in (
        None,
        MARK,
        jobq.Unique(MARK, on_conflict="replace"),
        jobq.Unique(by_args=True, period=HOUR),
    ):
        client.enqueue(MARK, {MARK: MARK}, unique=unique, **options)
    jobs = client.enqueue_many([jobq.NewJob(MARK, [MARK], **options) for _ in range(5)])
    with client.pool.connection() as connection:
        client.enqueue(MARK, MARK, tx=connection, **options)
    client.list(which)
    client.bulk.count(which)
    said: Any = {"reason": MARK, "by": MARK}
    client.move(jobs[0].id, queue=MARK, **said)
    client.reschedule(jobs[0].id, run_at=datetime.now(UTC) + HOUR, **said)
    client.cancel(jobs[0].id, **said)
    client.retry(jobs[0].id, **said)
    client.delete(jobs[0].id, **said)
    for act in (client.bulk.cancel, client.bulk.retry, client.bulk.delete):
        act(which, **said)
    client.queues.pause(MARK, **said)
    client.queues.pause(kind=MARK, **said)
    client.queues.resume(MARK, **said)
    client.queues.resume(kind=MARK, **said)
    client.queues.set_retention(MARK, completed=HOUR, **said)
    client.redaction.add(MARK, kind=MARK, **said)
    client.redaction.remove(MARK, kind=MARK, **said)
    client.periodic.add(MARK, kind=MARK, args=MARK, every=HOUR, **options)
    client.periodic.pause(MARK, **said)
    client.periodic.resume(MARK, **said)
    client.periodic.trigger(MARK, **said)
    client.periodic.remove(MARK, **said)
    client.operator_log()
    client.queue_stats()


def test_no_value_of_a_client_is_part_of_a_statements_text(
    dsn: str, victim: psycopg.Connection, texts: list[str]
) -> None:
    with jobq.Client(dsn, max_ready={MARK: 1000}) as client:
        say_everywhere(client)
        assert client.operator_log()[0].reason == MARK
    assert len(set(texts)) > 40
    assert [text for text in texts if "victim" in text] == []
    victim.execute("select from public.victim")


async def test_nor_one_of_a_worker(dsn: str, victim: psycopg.Connection, texts: list[str]) -> None:
    jobs = jobq.Jobs()
    waiting = asyncio.Event()

    @jobs.handler(MARK, redact=[MARK], store_result=True, backoff=jobq.ConstantBackoff(timedelta(0)))
    async def run(job: jobq.Job, args: str) -> str:
        if args == "wait":
            waiting.set()
            await asyncio.sleep(60)
        if args == "snooze" and job.attempt == 1:
            raise jobq.Snooze(timedelta(0))
        if args == "cancel":
            raise jobq.Cancel(MARK)
        if args == "fail" and job.attempt == 1:
            raise ValueError(MARK)
        return MARK

    jobs.add_periodic(MARK, run, "ok", every=timedelta(seconds=1), queue=MARK)
    async with working(dsn, jobs, queues={MARK: 10}) as bench:
        made = [
            await bench.client.enqueue(run, do, queue=MARK)
            for do in ("ok", "snooze", "fail", "cancel", "wait")
        ]
        await asyncio.wait_for(waiting.wait(), 20)
        await bench.client.cancel(made[-1].id, reason=MARK)
        for one in made:
            await bench.ended(one.id, 20)
        ticked = "select from jobq.periodic_tick where job_id is not null"
        await eventually_async(lambda: bench.rows(ticked), 20, what="the schedule ticks")
    assert len(set(texts)) > 20
    assert [text for text in texts if "victim" in text] == []
    victim.execute("select from public.victim")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schemas_name_that_could_leave_its_quotes_is_refused_everywhere(
    dsn: str, victim: psycopg.Connection, name: str
) -> None:
    entries: tuple[Callable[[], object], ...] = (
        lambda: jobq.Client(dsn, schema=name),
        lambda: jobq.AsyncClient(dsn, schema=name),
        lambda: jobq.migrate(dsn, schema=name),
        lambda: migration_script(name),
    )
    for entry in entries:
        with pytest.raises(jobq.ConfigError, match="schema"):
            entry()
    if "\0" not in name:  # which no command line can hold
        for command in set(commands(app)) - {("bench",), ("completion",), ("demo",)}:
            arguments = [*command, *ARGUMENTS.get(command, ()), "--schema", name]
            result = CliRunner().invoke(app, arguments, env={"DATABASE_URL": dsn})
            assert result.exit_code == 2, (command, result.output)
            assert "schema=" in result.output
    victim.execute("select from public.victim")


@pytest.mark.parametrize("name", HOSTILE[:-1])
def test_and_it_would_not_leave_them(dsn: str, victim: psycopg.Connection, name: str) -> None:
    with Storage(dsn) as store:
        assert store.run(read_status(name)).version == 0
        for statement in (CLAIM, ENQUEUE_ONE, NEXT_ORPHAN):
            with pytest.raises((errors.InvalidSchemaName, errors.UndefinedTable)):
                store.sql(f"prepare p as {enqueue_sql(statement, name)}")
    victim.execute("select from public.victim")


@pytest.mark.parametrize("name", ODD)
async def test_a_schema_of_any_other_name_is_a_schema(
    dsn: str, victim: psycopg.Connection, name: str
) -> None:
    jobq.migrate(dsn, schema=name)
    with jobq.Client(dsn, schema=name) as client:
        say_everywhere(client)
    for command in (["doctor"], ["list"], ["stats"], ["migrate", "--check"]):
        result = CliRunner().invoke(app, [*command, "--schema", name], env={"DATABASE_URL": dsn})
        assert result.exit_code in {0, 1}, result.output
        assert "could not be checked" not in result.output
    victim.execute("select from public.victim")
