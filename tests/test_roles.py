"""The documented roles: each can do what it is for and nothing else, and runs nobody else's functions."""

from __future__ import annotations

import asyncio
import contextlib
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg import errors
from psycopg.conninfo import make_conninfo

import jobq
from jobq import Unique
from tests.support.inprocess import working
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = Path(__file__).parents[1] / "docs" / "roles.md"
BLOCKS: Final = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
ROLES: Final = ("jobq_owner", "jobq_worker", "jobq_enqueue", "jobq_operator", "jobq_read")
HOUR: Final = timedelta(hours=1)


@pytest.fixture
def roles(empty_dsn: str) -> Iterator[str]:
    """A database made as the page says. Gives its superuser's address."""
    create, grant, drop = BLOCKS
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(create.encode())
        try:
            jobq.migrate(as_role(empty_dsn, "jobq_owner"))
            for _ in range(2):  # it can be repeated
                with psycopg.connect(as_role(empty_dsn, "jobq_owner")) as owner:
                    owner.execute(grant.encode())
            yield empty_dsn
        finally:
            connection.execute(drop.encode())


def as_role(dsn: str, role: str) -> str:
    return make_conninfo(dsn, user=role)


def run_as(dsn: str, role: str, text: str, *params: object) -> list[tuple[Any, ...]]:
    with psycopg.connect(as_role(dsn, role), autocommit=True) as connection:
        cursor = connection.execute(text.encode(), params or None)
        return cursor.fetchall() if cursor.description else []


def tables(dsn: str) -> list[str]:
    rows = run_as(
        dsn,
        "jobq_owner",
        "select relname from pg_class where relnamespace = 'jobq'::regnamespace"
        " and relkind in ('r', 'v') order by 1",
    )
    return [row[0] for row in rows]


def rights(dsn: str, role: str) -> dict[str, set[str]]:
    """Return which rights a role has on which whole tables."""
    names = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
    found: dict[str, set[str]] = {}
    for table in tables(dsn):
        for name in names:
            [(has,)] = run_as(
                dsn, "jobq_owner", "select has_table_privilege(%s, %s, %s)", role, f"jobq.{table}", name
            )
            if has:
                found.setdefault(name, set()).add(table)
    return found


# What each is for


def test_the_owner_has_nothing_left_to_migrate_and_owns_all_of_it(roles: str) -> None:
    assert jobq.migrate(as_role(roles, "jobq_owner")) == []
    owners = "select distinct relowner::regrole::text from pg_class where relnamespace = 'jobq'::regnamespace"
    assert run_as(roles, "jobq_owner", owners) == [("jobq_owner",)]


def test_an_enqueuer_makes_jobs_of_every_sort(roles: str) -> None:
    flavours = [
        Unique("k"),
        Unique("s", until="started"),
        Unique("p", period=HOUR),
        Unique("r", on_conflict="raise"),
    ]
    with jobq.Client(as_role(roles, "jobq_enqueue"), max_ready=1000) as client:
        client.check_schema()
        assert client.enqueue("k", {"n": 1}).inserted
        client.enqueue("k", {"n": 1}, delay=HOUR)
        assert len(client.enqueue_many([jobq.NewJob("k", {"n": n}) for n in range(3)])) == 3
        for unique in flavours:
            first = client.enqueue("k", {}, unique=unique)
            with contextlib.suppress(jobq.UniqueConflict):
                assert client.enqueue("k", {}, unique=unique) == jobq.Enqueued(first.id, inserted=False)
        with client.pool.connection() as connection:
            client.enqueue("k", {}, tx=connection)
        [(_, inserted)] = run_as(
            roles, "jobq_enqueue", "select * from jobq.enqueue('k', unique_key => 'sql')"
        )
        assert inserted


async def test_a_worker_runs_schedules_cleans_and_leads(roles: str, caplog: pytest.LogCaptureFixture) -> None:
    jobs = jobq.Jobs()
    ticked = asyncio.Event()

    @jobs.handler("do", backoff=jobq.ConstantBackoff(timedelta(0)), redact=["card"])
    async def do(job: jobq.Job, args: dict[str, str]) -> None:
        if args.get("do") == "snooze" and job.attempt == 1:
            raise jobq.Snooze(timedelta(milliseconds=10))
        if args.get("do") == "fail" and job.attempt == 1:
            message = "once"
            raise ValueError(message)
        if args.get("do") == "wait":
            await asyncio.sleep(60)

    @jobs.handler("tick")
    async def tick(job: jobq.Job, args: None) -> None:
        ticked.set()

    jobs.add_periodic("tick", tick, every=timedelta(seconds=1))

    with jobq.Client(as_role(roles, "jobq_operator")) as operator:
        operator.queues.set_retention("default", completed=timedelta(0))
        async with working(as_role(roles, "jobq_worker"), jobs) as bench:
            made = [await bench.client.enqueue("do", {"do": what}) for what in ("", "snooze", "fail", "wait")]
            await bench.client.enqueue("do", {}, unique="k")
            await asyncio.wait_for(ticked.wait(), 20)
            await asyncio.to_thread(operator.cancel, made[3].id)
            await bench.ended(made[3].id, 20)
            gone = "select count(*) from jobq.job where id = any (%s)"
            ids = [job.id for job in made[:3]]
            await eventually_async(
                lambda: bench.rows(gone, ids) == [{"count": 0}], 30, what="retention removes"
            )
            assert [worker.name for worker in await bench.client.workers()] != []
            assert await bench.client.redaction.fields() == [jobq.RedactedField("do", "card")]
    assert "permission denied" not in caplog.text


def test_an_operator_does_all_that_operators_do(roles: str) -> None:
    with jobq.Client(as_role(roles, "jobq_operator")) as client:
        a, b, c, _ = client.enqueue_many([jobq.NewJob("k", {"n": n}) for n in range(4)])
        client.enqueue("k", {}, unique=Unique("r", on_conflict="replace"))
        client.enqueue("k", {"x": 1}, unique=Unique("r", on_conflict="replace"))
        client.cancel(a.id)
        client.retry(a.id)
        client.reschedule(b.id, run_at=datetime.now(UTC) + HOUR)
        client.move(b.id, queue="other")
        client.delete(c.id)
        client.queues.pause(queue="other", reason="why", by="me")
        client.queues.resume(queue="other")
        client.queues.set_retention("default", completed=HOUR)
        assert client.redaction.add("iban") == client.redaction.remove("iban") == ["iban"]
        client.periodic.add("p", kind="k", args={}, every=HOUR)
        client.periodic.pause("p")
        client.periodic.resume("p")
        client.periodic.trigger("p")
        client.periodic.remove("p")
        everything = jobq.JobFilter(kinds=["k"])
        assert client.bulk.count(everything).jobs > 0
        client.bulk.cancel(everything)
        client.bulk.delete(everything)
        assert client.operator_log() != []
        assert client.queue_stats() is not None


def test_a_reader_reads_everything(roles: str) -> None:
    with jobq.Client(as_role(roles, "jobq_enqueue")) as client:
        job_id = client.enqueue("k", {"secret": 1}).id
    with jobq.Client(as_role(roles, "jobq_read")) as client:
        assert client.get(job_id).args == {"secret": 1}
        assert [one.id for one in client.list(jobq.JobFilter()).jobs] == [job_id]
        assert client.queue_stats()[0].ready == 1
        assert [*client.workers(), *client.operator_log(), *client.periodic.list()] == []
        assert client.queues.pauses() == []
        assert client.redaction.load().job(client.get(job_id)).args == {"secret": "***"}


# And nothing else


def test_no_role_but_the_owner_can_change_the_schema(roles: str) -> None:
    for role in ROLES[1:]:
        for text in (
            "create table jobq.mine ()",
            "drop table jobq.ready",
            "alter table jobq.ready add column mine int",
            "truncate jobq.ready",
            (
                "create trigger t before insert on jobq.ready"
                " execute function suppress_redundant_updates_trigger()"
            ),
            "update jobq.schema_version set version = 0",
            "delete from jobq.schema_version",
            "create or replace function jobq.enqueue(kind text) returns int language sql as 'select 1'",
        ):
            with pytest.raises(errors.InsufficientPrivilege):
                run_as(roles, role, text)


def test_a_reader_can_write_nothing(roles: str) -> None:
    assert rights(roles, "jobq_read") == {"SELECT": set(tables(roles))}
    for text in ("select nextval('jobq.job_id_seq')", "select jobq.enqueue('k')"):
        with pytest.raises(errors.InsufficientPrivilege):
            run_as(roles, "jobq_read", text)


def test_an_enqueuer_can_neither_read_nor_change_what_is_there(roles: str) -> None:
    assert rights(roles, "jobq_enqueue") == {
        "SELECT": {"schema_version", "unique_key"},
        "INSERT": {"job", "ready", "scheduled", "unique_key"},
    }
    for text in (
        "select args from jobq.job",
        "select * from jobq.jobs",
        "select result from jobq.finished",
        "select message from jobq.attempt_error",
        "update jobq.unique_key set job_id = 1",
        "update jobq.ready set priority = 9",
        "delete from jobq.unique_key",
    ):
        with pytest.raises(errors.InsufficientPrivilege):
            run_as(roles, "jobq_enqueue", text)


def test_a_worker_does_no_operators_work_and_an_operator_no_workers(roles: str) -> None:
    written: dict[str, set[str]] = {}
    for role in ("jobq_worker", "jobq_operator"):
        has = rights(roles, role)
        assert has.keys() == {"SELECT", "INSERT", "UPDATE", "DELETE"}
        written[role] = has["INSERT"] | has["UPDATE"] | has["DELETE"]
    assert not written["jobq_worker"] & {"pause", "retention", "schema_version", "jobs"}
    assert not written["jobq_operator"] & {"running", "worker", "leader", "schema_version", "jobs"}
    assert "operator_log" not in rights(roles, "jobq_worker")["INSERT"]
    assert "cancel_request" not in rights(roles, "jobq_worker")["INSERT"]
    assert "redaction" not in rights(roles, "jobq_worker")["DELETE"] | rights(roles, "jobq_worker")["UPDATE"]
    assert "operator_log" not in rights(roles, "jobq_operator")["DELETE"]


# Search paths

EVIL: Final = """
create table public.seen (what text);
grant insert, select on public.seen to public;
create function public.note(what text) returns void language plpgsql as
    $$ begin insert into public.seen values (what || ' as ' || current_user); end $$;
create function public.evil_eq(jobq.short_name, text) returns boolean language plpgsql as
    $$ begin perform public.note('=(short_name, text)'); return $1::text = $2; end $$;
create operator public.= (leftarg = jobq.short_name, rightarg = text, function = public.evil_eq);
create function public.evil_eq(jobq.priority, smallint) returns boolean language plpgsql as
    $$ begin perform public.note('=(priority, smallint)'); return $1::int = $2::int; end $$;
create operator public.= (leftarg = jobq.priority, rightarg = smallint, function = public.evil_eq);
create function public.statement_timestamp() returns timestamptz language plpgsql as
    $$ begin perform public.note('statement_timestamp'); return '-infinity'; end $$;
create function public.octet_length(jobq.short_name) returns int language plpgsql as
    $$ begin perform public.note('octet_length'); return 1; end $$;
create function public.unnest(text[]) returns setof text language plpgsql as
    $$ begin perform public.note('unnest'); return query select pg_catalog.unnest($1); end $$;
create function public.unnest(bigint[]) returns setof bigint language plpgsql as
    $$ begin perform public.note('unnest'); return query select pg_catalog.unnest($1); end $$;
create function public.nextval(text) returns bigint language plpgsql as
    $$ begin perform public.note('nextval'); return pg_catalog.nextval($1::regclass); end $$;
create function public.to_jsonb(text[]) returns jsonb language plpgsql as
    $$ begin perform public.note('to_jsonb'); return pg_catalog.to_jsonb($1); end $$;
create function public.cardinality(text[]) returns int language plpgsql as
    $$ begin perform public.note('cardinality'); return pg_catalog.cardinality($1); end $$;
create table public.ready (job_id bigint);
create table public.job (id bigint);
"""


async def strangers_calls(roles: str) -> list[tuple[Any, ...]]:
    """Let worker and operator work beside what an enqueuer made in `public`; return what was called."""
    with psycopg.connect(roles, autocommit=True) as connection:
        connection.execute("grant create on schema public to public")  # as every server before 15 has it
    run_as(roles, "jobq_enqueue", EVIL)
    jobs = jobq.Jobs()

    @jobs.handler("k")
    async def k(job: jobq.Job, args: dict[str, int]) -> None:
        pass

    jobs.add_periodic("tick", k, {}, every=timedelta(seconds=1))

    with jobq.Client(as_role(roles, "jobq_operator")) as operator:
        async with working(as_role(roles, "jobq_worker"), jobs) as bench:
            job_id = (await bench.client.enqueue("k", {})).id
            await bench.ended(job_id)
            ticked = "select from jobq.finished where job_id <> %s"
            await eventually_async(lambda: bench.rows(ticked, job_id), 20, what="the schedule makes a job")
        other = operator.enqueue("k", {}, queue="other", tags=["t"]).id
        operator.move(other, queue="third")
        assert operator.list(jobq.JobFilter(queues=["third"], tags=["t"])).jobs[0].tags == ("t",)
        operator.bulk.cancel(jobq.JobFilter(queues=["third"]))
        operator.retry(other)
        operator.queue_stats()
        operator.workers()
    run_as(roles, "jobq_operator", "select jobq.enqueue('k', tags => '{t}', unique_key => 'u')")
    return run_as(roles, "jobq_owner", "select distinct what from public.seen")


async def test_what_an_enqueuer_leaves_in_public_is_called_by_nobody_else(roles: str) -> None:
    assert await strangers_calls(roles) == []


@pytest.mark.matrix
async def test_nor_with_the_search_path_that_a_role_has_by_itself(roles: str) -> None:
    with psycopg.connect(roles, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(f"alter role {role} reset search_path".encode())
    assert await strangers_calls(roles) == []


@pytest.mark.parametrize("path", ["public, pg_catalog", "public", "pg_temp, public, pg_catalog"])
def test_migrations_run_by_the_owner_call_nothing_of_a_hostile_schema(empty_dsn: str, path: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as connection:
        connection.execute(
            "create table public.seen (what text);"
            "create function public.statement_timestamp() returns timestamptz language plpgsql as"
            " $$ begin insert into public.seen values ('called'); return now(); end $$;"
            "create function public.octet_length(text) returns int language plpgsql as"
            " $$ begin insert into public.seen values ('called'); return 1; end $$;"
            "create type public.text as enum ('not a text')"
        )
        dsn = make_conninfo(empty_dsn, options=f"-csearch_path={path.replace(' ', '')}")
        jobq.migrate(dsn)
        with jobq.Client(empty_dsn) as client:
            client.enqueue("k", {"n": 1})
        assert connection.execute("select * from public.seen").fetchall() == []
        kinds = connection.execute(
            "select distinct format_type(atttypid, null) from pg_attribute"
            " where attrelid = 'jobq.ready'::regclass and attnum > 0"
        ).fetchall()
        assert "public.text" not in {kind for (kind,) in kinds}
