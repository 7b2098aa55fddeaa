"""Migrations: at once, again, in any schema, with few rights, on an old or a newer schema."""

from __future__ import annotations

import asyncio
import subprocess
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import ConnectionPool

import jobq
from jobq._clients.migrate import migration_script, pending
from jobq._driver_errors import map_error
from jobq._statements.schema import all_migrations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq.embedded import EmbeddedPostgres
    from tests.conftest import SpawnPython


def version(dsn: str, schema: str = "jobq") -> list[tuple[int]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(f'select version from "{schema}".schema_version'.encode()).fetchall()


@pytest.mark.matrix
def test_s52_twenty_processes_migrate_an_empty_database_at_once(
    empty_dsn: str, spawn_python: SpawnPython
) -> None:
    code = f"import jobq; print('applied', len(jobq.migrate({empty_dsn!r})))"
    processes = [spawn_python("-c", code) for _ in range(20)]
    assert [process.wait(60) for process in processes] == [0] * 20
    applied = [int(process.output.split("applied ")[1].split()[0]) for process in processes]
    assert sum(applied) == len(all_migrations())  # each by one process; it need not be the same one


async def test_s52_a_pool_of_one_serves(empty_dsn: str) -> None:
    with ConnectionPool(empty_dsn, min_size=1, max_size=1, open=True) as pool:
        assert jobq.migrate(pool)
        assert jobq.migrate(pool) == []
    async with jobq.AsyncClient(empty_dsn, schema="other", pool_max_size=1) as client:
        assert await asyncio.gather(*(client.migrate() for _ in range(5))) != []
        await client.check_schema()


def test_s52_migrations_go_through_a_transaction_pooler(pooled_dsn: str) -> None:
    assert jobq.migrate(pooled_dsn, schema="pooled")
    assert jobq.migrate(pooled_dsn, schema="pooled") == []


def test_migrate_takes_a_connection_and_leaves_it_usable(empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn) as connection:
        assert jobq.migrate(connection)
        assert connection.execute("select 1").fetchone() == (1,)


def test_migrate_says_what_it_takes(empty_dsn: str) -> None:
    with pytest.raises(jobq.ConfigError):
        jobq.migrate(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("schema", ["Mixed Case", "jobq_2", "schéma", "x" * 63, "select"])
async def test_any_schema_will_do(empty_dsn: str, schema: str) -> None:
    async with jobq.AsyncClient(empty_dsn, schema=schema) as client:
        await client.migrate()
        job = await client.enqueue("k", {"n": 1}, unique="u")
        assert (await client.get(job.id)).state == "ready"


@pytest.mark.parametrize("schema", ["", "x" * 64, 'a"b', "a'b", "a\x00b", "pg_x", "a{b", "a%b"])
def test_a_schema_name_that_cannot_be_is_refused(empty_dsn: str, schema: str) -> None:
    with pytest.raises(jobq.ConfigError):
        jobq.migrate(empty_dsn, schema=schema)
    with pytest.raises(jobq.ConfigError):
        jobq.AsyncClient(empty_dsn, schema=schema)


@pytest.fixture
def owner_dsn(server: EmbeddedPostgres, empty_dsn: str) -> Iterator[str]:
    """A role that owns one empty schema, and has no other right in the database."""
    name = str(conninfo_to_dict(empty_dsn)["dbname"])
    role = f"owner_{name}"
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute(f'create role "{role}" login'.encode())
        admin.execute(f'create schema mine authorization "{role}"'.encode())
        admin.execute("revoke all on schema public from public")
        admin.execute(f'revoke all on database "{name}" from public'.encode())
        admin.execute(f'grant connect on database "{name}" to "{role}"'.encode())
    yield server.dsn(name, user=role)
    with psycopg.connect(empty_dsn, autocommit=True) as admin:
        admin.execute(f'drop owned by "{role}" cascade'.encode())
        admin.execute(f'drop role "{role}"'.encode())


@pytest.mark.matrix
async def test_s70_a_role_that_owns_only_its_schema_migrates_enqueues_and_works(owner_dsn: str) -> None:
    jobs = jobq.Jobs()
    done = asyncio.Event()

    @jobs.handler("k")
    async def k(job: jobq.Job, args: dict[str, Any]) -> None:
        done.set()

    async with jobq.AsyncClient(owner_dsn, schema="mine") as client:
        await client.migrate()
        await client.enqueue(k, {"a": 1})
        worker = jobq.Worker(client, jobs)
        run = asyncio.create_task(worker.run(handle_signals=False))
        await asyncio.wait_for(done.wait(), 10)
        await worker.stop()
        assert (await run).completed == 1


async def test_s70_without_a_schema_the_error_says_what_to_run(empty_dsn: str) -> None:
    async with jobq.AsyncClient(empty_dsn) as client:
        with pytest.raises(jobq.SchemaMissing, match="jobqctl migrate"):
            await client.check_schema()
        with pytest.raises(jobq.SchemaMissing, match="jobqctl migrate"):
            await client.enqueue("k", {})
        with pytest.raises(jobq.SchemaMissing, match="jobqctl migrate"):
            await jobq.Worker(client, jobq.Jobs()).run(handle_signals=False)


@pytest.mark.parametrize(
    ("schema", "advice"),
    [
        ("jobq", "`jobqctl migrate`"),
        ("other", "`jobqctl migrate --schema other`"),
        ("two words", "`jobqctl migrate --schema 'two words'`"),
        ("a.b", "`jobqctl migrate --schema a.b`"),
    ],
)
async def test_the_advice_names_the_schema(empty_dsn: str, schema: str, advice: str) -> None:
    async with jobq.AsyncClient(empty_dsn, schema=schema) as client:
        for verb in (client.check_schema(), client.enqueue("k", {}), client.get(1)):
            with pytest.raises(jobq.SchemaMissing) as told:
                await verb
            assert advice in str(told.value)


class Told(Exception):
    """A server's error as any driver brings it."""

    def __init__(self, sqlstate: str, text: str) -> None:
        super().__init__(text)
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    ("told", "advice"),
    [
        (Told("42P01", 'relation "other.job" does not exist'), "migrate --schema other`"),
        (Told("42P01", "la relation « other.job » n'existe pas"), "migrate --schema other`"),
        (Told("42P01", "Relation »other.job« existiert nicht"), "migrate --schema other`"),
        (Told("42P01", 'relation "orders" does not exist'), "with --schema, where it is not jobq"),
        (Told("42883", "function other.enqueue(text) does not exist"), "migrate --schema other`"),
        (Told("42703", 'column "x" of relation "job" does not exist'), "with --schema, where it is not jobq"),
        (Told("42P01", 'relation "jobq.job" does not exist'), "run `jobqctl migrate`,"),
    ],
)
def test_the_advice_is_good_in_the_servers_language(told: Told, advice: str) -> None:
    assert advice in str(map_error(told))


async def test_s70_a_schema_from_the_future_is_served_as_long_as_it_says_so(dsn: str) -> None:
    newest = all_migrations()[-1].version
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            "insert into jobq.schema_version (version, compatible_from) values (%s, %s)", [newest + 1, newest]
        )
        async with jobq.AsyncClient(dsn) as client:
            await client.check_schema()
            await client.enqueue("k", {})
            assert await client.migrate() == []
            admin.execute(
                "update jobq.schema_version set compatible_from = %s where version = %s",
                [newest + 1, newest + 1],
            )
            with pytest.raises(jobq.SchemaTooNew, match="upgrade jobq"):
                await client.check_schema()


async def test_s70_a_schema_from_the_past_is_migrated_or_refused(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(
            "delete from jobq.schema_version where version = (select max(version) from jobq.schema_version)"
        )
        async with jobq.AsyncClient(dsn) as client:
            with pytest.raises((jobq.SchemaOutdated, jobq.SchemaMissing), match="jobqctl migrate"):
                await client.check_schema()


def test_the_printed_script_does_what_migrate_does(server: EmbeddedPostgres, empty_dsn: str) -> None:
    assert pending(empty_dsn) == [migration.name for migration in all_migrations()]
    psql = [str(server.program("psql")), "--no-psqlrc", "--quiet", "--dbname", empty_dsn]
    subprocess.run(psql, input=migration_script(), text=True, check=True, timeout=30)
    assert pending(empty_dsn) == []
    assert jobq.migrate(empty_dsn) == []


def test_nothing_of_the_schema_is_public(dsn: str, db: psycopg.Connection[Any]) -> None:
    open_tables = db.execute(
        "select relname from pg_class c, aclexplode(c.relacl) a"
        " where relnamespace = 'jobq'::regnamespace and a.grantee = 0"
    ).fetchall()
    open_functions = db.execute(
        "select p.oid::regprocedure::text from pg_proc p"
        " left join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a on true"
        " where pronamespace = 'jobq'::regnamespace and a.grantee = 0"
    ).fetchall()
    assert (open_tables, open_functions) == ([], [])
