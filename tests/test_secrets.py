"""The password of a connection string is nowhere that people or programs look, whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import jobq
from jobq._messages import shown_query
from jobq.cli.app import app
from jobq.cli.settings import ProcessSettings
from tests.support.inprocess import working
from tests.support.polling import eventually, eventually_async
from tests.support.proxy import TcpProxy
from tests.test_redaction import commands

if TYPE_CHECKING:
    from jobq.embedded import EmbeddedPostgres
    from tests.conftest import SpawnPython

SECRET: Final = "Tr0ub4dor"

# What people write by mistake, and where nobody answers. Port 1 is closed.
WRONG: Final = (
    f"postgresql://u:{SECRET}@127.0.0.1:1/d",
    f"postgresql://u:{SECRET}@127.0.0.1:port/d",
    f"postgresql://u:{SECRET}/x@127.0.0.1:1/d",
    f"postgresql://u:x@{SECRET}@127.0.0.1:1/d",
    f"postgresql://u:x@{SECRET}/y@127.0.0.1:1/d",
    f"postgresql://u:x@{SECRET},y@127.0.0.1:1/d",
    f"postgresql://u@{SECRET}@127.0.0.1:1/d",
    f"postgresql://u:{SECRET}%zz@127.0.0.1:1/d",
    f"postgresql://127.0.0.1:1/d?user=u&password={SECRET}",
    f"postgresql://127.0.0.1:1/d?password=x&{SECRET}",
    f"postgresql://u:x?y@{SECRET}@127.0.0.1:1/d",
    f"host=127.0.0.1 port=1 user=u password={SECRET}",
    f"host=127.0.0.1 port=1 password=my {SECRET}",
    f"mysql://u:{SECRET}@127.0.0.1:1/d",
    f"u:{SECRET}@127.0.0.1:1",
)

# Arguments that make a command get as far as the database.
ARGUMENTS: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    ("cancel",): ("1",),
    ("delete",): ("1",),
    ("enqueue",): ("k",),
    ("move",): ("1", "--to-queue", "q"),
    ("pause",): ("--queue", "q"),
    ("periodic", "pause"): ("p",),
    ("periodic", "remove"): ("p",),
    ("periodic", "resume"): ("p",),
    ("periodic", "trigger"): ("p",),
    ("reschedule",): ("1", "--delay", "1h"),
    ("resume",): ("--queue", "q"),
    ("retry",): ("1",),
    ("show",): ("1",),
    ("worker",): ("myapp:jobs",),
}
WITHOUT_DATABASE: Final = {("bench",), ("completion",)}


@pytest.fixture
def address(server: EmbeddedPostgres, dsn: str) -> str:
    """The test's database by TCP, with the password that it needs there."""
    return server.dsn(str(conninfo_to_dict(dsn)["dbname"]), tcp=True)


def password_of(address: str) -> str:
    password = str(conninfo_to_dict(address)["password"])
    assert len(password) > 10
    return password


# The command line


@pytest.mark.parametrize("command", sorted(set(commands(app)) - WITHOUT_DATABASE), ids=" ".join)
def test_no_command_shows_the_password_of_an_address_that_is_wrong(command: tuple[str, ...]) -> None:
    for wrong in WRONG:
        for variable, options in ((wrong, ()), (None, ("--dsn", wrong))):
            arguments = [*command, *ARGUMENTS.get(command, ()), *options]
            result = CliRunner().invoke(app, arguments, env={"DATABASE_URL": variable})
            assert result.exit_code in {1, 2}, (wrong, result.output)
            assert "connection string" in result.output or "cannot be reached" in result.output, result.output
            assert SECRET not in result.output, wrong


def test_nor_of_one_that_the_server_refuses(server: EmbeddedPostgres) -> None:
    wrong = make_conninfo(server.dsn(tcp=True), password=SECRET)
    for arguments in (["list"], ["worker", "myapp:jobs"], ["doctor"], ["migrate"]):
        result = CliRunner().invoke(app, arguments, env={"DATABASE_URL": wrong})
        assert result.exit_code == 1
        assert "password authentication failed" in result.output
        assert SECRET not in result.output


# The library


@pytest.mark.parametrize("wrong", WRONG)
async def test_no_error_of_a_client_has_it(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(jobq.Error) as refused:
        jobq.Client(wrong).open()
    with pytest.raises(jobq.Error) as refused_async:
        await jobq.AsyncClient(wrong).open()
    with pytest.raises(jobq.Error) as not_migrated:
        jobq.migrate(wrong)
    for caught in (refused, refused_async, not_migrated):
        assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in caplog.text


async def test_nothing_that_is_logged_through_an_outage_has_it(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients, their pools, and a worker, whose server goes away, refuses, and comes back."""
    caplog.set_level(logging.DEBUG)
    jobs = jobq.Jobs()
    said: list[str] = []

    @jobs.handler("k", max_attempts=1)
    def connects(job: jobq.Job, args: None) -> None:
        psycopg.connect(make_conninfo(proxy.dsn, port="1"))

    with TcpProxy(address) as proxy, jobq.Client(proxy.dsn, pool_min_size=2) as sync_client:
        async with working(proxy.dsn, jobs) as bench:
            failed = await bench.client.enqueue("k", None, max_attempts=1)
            await eventually_async(lambda: is_finished(address, failed.id), what="the handler fails")
            said += [str(error) for error in sync_client.errors(failed.id)]
            proxy.refuse()
            proxy.drop()
            with pytest.raises(jobq.DatabaseUnavailable) as caught:
                jobq.Client(proxy.dsn).open()
            said.append("".join(traceback.format_exception(caught.value)))
            waiting = asyncio.create_task(asyncio.to_thread(sync_client.workers))
            await eventually_async(lambda: "the database is away" in caplog.text, what="the worker notices")
            await eventually_async(
                lambda: "error connecting in 'jobq'" in caplog.text, what="the pool notices"
            )
            proxy.accept()
            assert await waiting
            made = await eventually_async(lambda: enqueued(bench.client), 30, what="the client is back")
            assert isinstance(made, int)
            await eventually_async(lambda: is_finished(address, made), 30, what="the worker is back")
            said += map(repr, (bench.client, bench.client.pool, bench.worker, bench.worker.stats()))
        said += map(repr, (sync_client, sync_client.pool))
    text = caplog.text + "".join(said)
    assert "psycopg" in text
    assert password_of(address) not in text


async def enqueued(client: jobq.AsyncClient) -> int | None:
    with contextlib.suppress(jobq.DatabaseUnavailable):
        return (await client.enqueue("k", None, max_attempts=1)).id
    return None


def is_finished(address: str, job_id: int) -> bool:
    with psycopg.connect(address) as connection:
        return connection.execute("select from jobq.finished where job_id = %s", [job_id]).rowcount == 1


def test_settings_of_a_process_do_not_print_it() -> None:
    settings = ProcessSettings("a:b", f"postgresql://u:{SECRET}@h/d", "jobq", {}, 1.0, 1.0, 1.0, 3, "info")
    assert SECRET not in repr(settings)
    assert ProcessSettings.from_line(settings.to_line()) == settings


# Processes

APPLICATION: Final = """
import os, jobq
jobs = jobq.Jobs()
@jobs.handler("k", run_in="process", max_attempts=1)
def k(job, args):
    raise ValueError("it failed")
"""


def test_neither_output_nor_command_lines_nor_probes_of_a_worker_have_it(
    spawn_python: SpawnPython, address: str, tmp_path: Path
) -> None:
    (tmp_path / "myapp.py").write_text(APPLICATION)
    options = ("--processes", "2", "--log-level", "debug", "--log-format", "json", "--http", "127.0.0.1:0")
    worker = spawn_python(
        *("-m", "jobq.cli", "worker", "myapp:jobs", *options), env={"DATABASE_URL": address}, cwd=tmp_path
    )
    output = worker.wait_for_output("serving /livez")
    port = int(output.partition("127.0.0.1:")[2].partition('"')[0].split()[0])
    with jobq.Client(address) as client:
        failed = client.enqueue("k", None, max_attempts=1)
        eventually(lambda: client.get(failed.id).state is jobq.JobState.DISCARDED, 30, what="the job fails")
    found = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in descendants(worker.pid)]
    assert len(found) >= 4, "a supervisor, two workers, and a handler's process"
    found += [answer(port, path) for path in ("/livez", "/readyz", "/metrics", "/?password=none")]
    with psycopg.connect(address) as connection:
        rows = connection.execute("select concat(application_name, ' ', query) from pg_stat_activity")
        found += [row[0] for row in rows]
        ours = "datname = current_database() and pid <> pg_backend_pid()"
        connection.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {ours}".encode())
    for pid in descendants(worker.pid)[-1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    doctor = CliRunner().invoke(app, ["doctor"], env={"DATABASE_URL": address})
    worker.terminate()
    worker.wait()
    text = "\n".join([*found, doctor.output, worker.output])
    assert "jobq claims" in text
    assert password_of(address) not in text


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, those last that were started last."""
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def answer(port: int, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


# Queries of others, which may set a password


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("alter role r  password 'x'", "alter role r password …"),
        ("select E'a\\'x' from t", "select E…"),
        ("do $body$ begin x $body$", "do …"),
        ("select $1,\n\t$2", "select $1, $2"),
        ("select 1" + "0" * 100, "select 1" + "0" * 42 + "…"),
    ],
)
def test_queries_are_shown_as_far_as_their_first_literal(query: str, shown: str) -> None:
    assert shown_query(query, 50) == shown


def test_the_doctor_shows_no_literals_of_others(dsn: str, db: psycopg.Connection) -> None:
    with psycopg.connect(dsn) as other:
        other.execute("select pg_current_xact_id()")
        other.execute(f"select from jobq.job where kind = '{SECRET}'".encode())
        settings = {"DATABASE_URL": dsn}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jobq._doctor.server._HORIZON_WARNING_S", -1.0)
            result = CliRunner().invoke(app, ["doctor"], env=settings)
    assert "select from jobq.job where kind = …" in result.output
    assert SECRET not in result.output
