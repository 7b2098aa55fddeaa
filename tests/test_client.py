"""The clients' verbs, and what they refuse."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg_pool import AsyncConnectionPool, ConnectionPool

import jobq
from jobq._clients.base import ClientBase
from jobq._clients.bulk import AsyncBulk, Bulk
from jobq._clients.periodic import AsyncPeriodic, Periodic
from jobq._clients.queues import AsyncQueues, Queues
from jobq.cli.app import app

if TYPE_CHECKING:
    from tests.conftest import SpawnPython

EMAIL = jobq.JobType("send_email", dict, queue="mail", priority=2)


@dataclass(frozen=True)
class Args:
    to: str


@dataclass
class Note:
    text: str


def verbs(client: type) -> dict[str, Any]:
    """Return what each colour says in its own way; what both inherit is the same."""
    found = inspect.getmembers(client, inspect.isfunction)
    return {name: value for name, value in found if name[0] != "_" and not hasattr(ClientBase, name)}


COLOURS = [
    (jobq.AsyncClient, jobq.Client),
    (AsyncQueues, Queues),
    (AsyncPeriodic, Periodic),
    (AsyncBulk, Bulk),
]


@pytest.mark.parametrize(("first", "second"), COLOURS, ids=lambda cls: cls.__name__)
def test_both_clients_have_the_same_verbs_signatures_and_docstrings(first: type, second: type) -> None:
    one, two = verbs(first), verbs(second)
    assert set(one) == set(two)
    assert one
    for name, verb in one.items():
        assert inspect.signature(verb) == inspect.signature(two[name]), name
        assert inspect.getdoc(verb) == inspect.getdoc(two[name]), name
        assert inspect.getdoc(verb), name
        assert inspect.iscoroutinefunction(verb), name
    if first is jobq.AsyncClient:
        assert inspect.signature(jobq.AsyncClient) == inspect.signature(jobq.Client)
        assert {"get", "cancel", "retry", "list", "enqueue", "queue_stats", "operator_log"} <= set(one)


def test_both_clients_have_the_same_namespaces() -> None:
    def namespaces(client: type) -> dict[str, str | None]:
        found = inspect.getmembers_static(client, lambda value: isinstance(value, functools.cached_property))
        return {name: value.__doc__ for name, value in found}

    assert namespaces(jobq.AsyncClient) == namespaces(jobq.Client)
    assert {"bulk", "queues", "periodic"} <= set(namespaces(jobq.Client))


@pytest.mark.matrix
def test_a_job_is_stored_as_it_was_enqueued(dsn: str) -> None:
    before = datetime.now(UTC)
    with jobq.Client(dsn, max_attempts=3) as client:
        job = client.enqueue(EMAIL, {"to": "ü", "n": 10**40}, tags=["x"], meta={"m": 1}, timeout=None)
        info = client.get(job.id)
    assert job.inserted
    assert (info.kind, info.queue, info.priority, info.max_attempts) == ("send_email", "mail", 2, 3)
    assert (info.state, info.reason, info.attempt) == (jobq.JobState.READY, None, 0)
    assert (info.args, info.tags, info.meta, info.timeout_s) == (
        {"to": "ü", "n": 10**40},
        ("x",),
        {"m": 1},
        None,
    )
    assert abs(info.created_at - before) < timedelta(seconds=30)


async def test_enqueue_many_answers_in_input_order(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        enqueued = await client.enqueue_many(
            jobq.NewJob(f"kind-{n % 3}", {"n": n}, priority=n % 19 - 9, queue=f"q{n % 2}")
            for n in range(20_000)
        )
        assert len({job.id for job in enqueued}) == 20_000
        for n in (0, 1, 777, 19_999):
            info = await client.get(enqueued[n].id)
            assert (info.args, info.kind, info.priority) == ({"n": n}, f"kind-{n % 3}", n % 19 - 9)
        assert await client.enqueue_many([]) == []


@pytest.mark.parametrize("args_type", [Note, dict])
async def test_line_breaks_and_quotes_come_back_from_a_bulk_call(dsn: str, args_type: type[Any]) -> None:
    texts = ["a\nb", "\\n", '"', "\r\n\t", "\u2028\x85\x0b", "", "{}", "ü\\"]
    kind: jobq.JobType[Any] = jobq.JobType("note", args_type)
    async with jobq.AsyncClient(dsn) as client:
        enqueued = await client.enqueue_many(jobq.NewJob(kind, args_type(text=text)) for text in texts)
        assert len(enqueued) == len(texts)
        assert [(await client.get(job.id)).args for job in enqueued] == [{"text": text} for text in texts]


async def test_s50_a_key_twice_in_one_bulk_call_maps_to_the_kept_job(dsn: str) -> None:
    async with jobq.AsyncClient(dsn) as client:
        new = [jobq.NewJob("k", {"n": n}, unique=f"key-{n}") for n in range(20_000)]
        new[15_000] = jobq.NewJob("k", {"n": -1}, unique="key-3")
        enqueued = await client.enqueue_many(new)
        assert enqueued[15_000] == jobq.Enqueued(enqueued[3].id, inserted=False)
        assert sum(job.inserted for job in enqueued) == 19_999
        again = await client.enqueue("k", {}, unique="key-7")
        assert again == jobq.Enqueued(enqueued[7].id, inserted=False)


async def test_bulk_is_all_or_nothing_and_names_the_culprit(dsn: str, db: psycopg.Connection[Any]) -> None:
    async with jobq.AsyncClient(dsn) as client:
        new = [jobq.NewJob("k", {"n": n}) for n in range(100)]
        with pytest.raises(jobq.ArgumentsEncodeError, match=r"item 57: \$\.a\[1\]") as caught:
            await client.enqueue_many([*new[:57], jobq.NewJob("k", {"a": [0, float("nan")]}), *new])
        assert caught.value.index == 57
    assert db.execute("select count(*) from jobq.job").fetchone() == (0,)


def test_a_held_key_makes_no_second_job_until_its_job_has_ended(dsn: str) -> None:
    with jobq.Client(dsn) as client:
        first = client.enqueue("k", {"n": 1}, unique="invoice-42")
        second = client.enqueue("k", {"n": 2}, unique="invoice-42")
        assert second == jobq.Enqueued(first.id, inserted=False)
        client.cancel(first.id)
        third = client.enqueue("k", {"n": 3}, unique="invoice-42")
        assert third.inserted
        with pytest.raises(jobq.JobConflict, match=f"job {third.id} holds its unique key"):
            client.retry(first.id)
        client.cancel(third.id)
        client.retry(first.id)
        assert client.enqueue("k", {}, unique="invoice-42") == jobq.Enqueued(first.id, inserted=False)


def test_of_many_concurrent_holders_one_wins_and_rollbacks_free_the_key(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    results: list[jobq.Enqueued] = []
    failures: list[BaseException] = []
    start = threading.Barrier(32)

    def insert(n: int) -> None:
        try:
            with psycopg.connect(dsn) as connection:
                start.wait()
                got = client.enqueue("k", {"n": n}, unique="one", tx=connection)
                if n % 2:
                    connection.rollback()
                else:
                    connection.commit()
                    results.append(got)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    with jobq.Client(dsn) as client:
        threads = [threading.Thread(target=insert, args=(n,)) for n in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert failures == []
    live = db.execute("select id from jobq.jobs").fetchall()
    assert len(live) == 1
    assert len(results) == 16
    assert {job.id for job in results if job.inserted} == {live[0][0]}


BAD_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "nul": ({"a": {"b": ["x\x00"]}}, r"\$\.a\.b\[0\]"),
    "nul-key": ({"a\x00": 1}, r"\$"),
    "surrogate": ({"a": "\ud800"}, r"\$\.a"),
    "nan": ({"a": float("nan")}, r"\$\.a"),
    "inf": ({"a": [float("-inf")]}, r"\$\.a\[0\]"),
    "bytes": ({"a": b"x"}, r"\$\.a"),
    "set": ({"a": {1}}, r"\$\.a"),
    "naive": ({"a": datetime(2026, 1, 1)}, r"\$\.a"),  # noqa: DTZ001 - the very thing that is refused
    "large": ({"a": "x" * 1_048_577}, r"1048576|1,048,576|1 MiB"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_s62_what_cannot_come_back_is_refused_with_its_path(dsn: str, name: str) -> None:
    bad, path = BAD_ARGUMENTS[name]
    with jobq.Client(dsn) as client:
        with pytest.raises(jobq.ArgumentsEncodeError, match=path):
            client.enqueue("k", bad)
        with pytest.raises(jobq.ArgumentsEncodeError, match="item 1"):
            client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob("k", bad)])
        with pytest.raises(jobq.ArgumentsEncodeError):
            client.enqueue("k", {}, meta=bad)
        assert client.enqueue("k", {"a": 10**40, "s": "\u2028 \U0001f600"}).inserted


def test_s64_large_integers_keep_their_digits(dsn: str, db: psycopg.Connection[Any]) -> None:
    with jobq.Client(dsn) as client:
        job = client.enqueue("k", {"id": 1970670598291982290})
        assert client.get(job.id).args == {"id": 1970670598291982290}
    for command in (["show", str(job.id)], ["show", str(job.id), "--json"], ["list", "--json"]):
        shown = CliRunner().invoke(app, [*command, "--dsn", dsn])
        assert "1970670598291982290" in shown.output, shown.output
    assert db.execute("select args ->> 'id' from jobq.jobs").fetchone() == ("1970670598291982290",)


@pytest.mark.matrix
def test_s66_ids_beyond_32_bits_work_everywhere(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("select setval('jobq.job_id_seq', %s)", [2**31 + 10])
    with jobq.Client(dsn) as client:
        single = client.enqueue("k", {})
        (bulk, unique) = client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob("k", {}, unique="u")])
        assert single.id > 2**31
        for job in (single, bulk, unique):
            client.cancel(job.id, reason="x")
            client.retry(job.id)
            assert client.get(job.id).state == "ready"
            assert client.errors(job.id) == []


def test_s71_instants_are_right_whatever_the_roles_time_zone(dsn: str, db: psycopg.Connection[Any]) -> None:
    db.execute("alter role current_user set timezone = 'Asia/Tokyo'")
    try:
        with jobq.Client(dsn) as client:
            zone = timezone(timedelta(hours=-7))
            due = datetime.now(zone).replace(microsecond=123456) + timedelta(hours=1)
            at = client.get(client.enqueue("k", {}, run_at=due).id)
            later = client.get(client.enqueue("k", {}, delay=timedelta(seconds=10)).id)
            now = client.get(client.enqueue("k", {}).id)
            assert at.run_at == due
            assert later.run_at is not None
            assert timedelta(seconds=9.99) < later.run_at - later.created_at < timedelta(seconds=10.01)
            assert (at.state, later.state, now.state) == ("scheduled", "scheduled", "ready")
            past = client.enqueue("k", {}, run_at=datetime.now(UTC) - timedelta(days=1))
            assert client.get(past.id).state == "ready"
            with pytest.raises(jobq.ConfigError, match="run_at"):
                client.enqueue("k", {}, run_at=datetime(2030, 1, 1))  # noqa: DTZ001 - refused
            with pytest.raises(jobq.ConfigError, match=r"run_at.*delay|delay.*run_at"):
                client.enqueue("k", {}, run_at=due, delay=timedelta(1))
    finally:
        db.execute("alter role current_user reset timezone")


@pytest.mark.parametrize(
    "queue", ["q" * 128, "日本語のキュー", "a b.c/d:e'\"$1%s"], ids=["long", "multibyte", "odd"]
)
async def test_s34_notifications_stay_small_whatever_is_enqueued(dsn: str, queue: str) -> None:
    jobs = jobq.Jobs()
    done = 0
    all_done = asyncio.Event()

    @jobs.handler("k")
    async def k(job: jobq.Job, args: dict[str, Any]) -> None:
        nonlocal done
        done += 1
        if done == 2001:
            all_done.set()

    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(queues={queue: 20}))
        run = asyncio.create_task(worker.run(handle_signals=False))
        await client.enqueue(k, {"large": "x" * 20_000}, queue=queue)
        await client.enqueue_many(jobq.NewJob(k, {"n": n}, queue=queue) for n in range(2000))
        await asyncio.wait_for(all_done.wait(), 20)
        await worker.stop()
        await run


def test_cancel_and_retry_refuse_what_makes_no_sense(dsn: str, db: psycopg.Connection[Any]) -> None:
    with jobq.Client(dsn) as client:
        job = client.enqueue("k", {}, delay=timedelta(hours=1))
        with pytest.raises(jobq.JobConflict, match="scheduled"):
            client.retry(job.id)
        client.cancel(job.id, reason="no longer wanted")
        info = client.get(job.id)
        assert (info.state, info.reason) == ("cancelled", "no longer wanted")
        with pytest.raises(jobq.JobConflict, match="cancelled"):
            client.cancel(job.id)
        for verb in (client.get, client.cancel, client.retry):
            with pytest.raises(jobq.JobNotFound, match="999"):
                verb(999)
        running = client.enqueue("k", {})
        db.execute(
            "with x as (delete from jobq.ready returning *) insert into jobq.running"
            " (job_id, worker_id, queue, priority, attempt, failures, crashes)"
            " select job_id, 1, queue, priority, 1, 0, 0 from x"
        )
        assert client.cancel(running.id) is jobq.Cancellation.REQUESTED
        with pytest.raises(jobq.JobConflict, match="running"):
            client.retry(running.id)


def test_s79_a_client_that_is_open_at_a_fork_refuses_in_the_child_and_serves_the_parent(
    dsn: str, spawn_python: SpawnPython
) -> None:
    code = f"""
import os, sys, warnings, jobq
warnings.simplefilter("ignore", DeprecationWarning)
with jobq.Client({dsn!r}) as client:
    client.enqueue("parent", {{}})
    children = []
    for n in range(4):
        pid = os.fork()
        if pid == 0:
            try:
                client.enqueue("child", {{}})
            except jobq.ClientClosed as error:
                assert "fork" in str(error)
            else:
                os._exit(9)
            with jobq.Client({dsn!r}) as own:
                own.enqueue("child", {{}})
            sys.exit(0)
        children.append(pid)
    for n in range(50):
        client.enqueue("parent", {{}})
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 4, codes
    for n in range(50):
        client.enqueue("parent", {{}})
print("done", flush=True)
"""
    process = spawn_python("-c", code)
    assert process.wait(60) == 0, process.output
    with psycopg.connect(dsn) as connection:
        rows = connection.execute("select kind, count(*) from jobq.job group by 1 order by 1").fetchall()
    assert rows == [("child", 4), ("parent", 101)]


def test_s79_async_clients_and_given_pools_refuse_in_a_child_too(
    dsn: str, db: psycopg.Connection[Any], spawn_python: SpawnPython
) -> None:
    code = f"""
import asyncio, os, warnings, jobq, psycopg
from psycopg_pool import AsyncConnectionPool
warnings.simplefilter("ignore", DeprecationWarning)

async def refused(client):
    try:
        await client.enqueue("child", {{}})
    except jobq.ClientClosed as error:
        assert "fork" in str(error)
    else:
        os._exit(9)
    async with await psycopg.AsyncConnection.connect({dsn!r}) as own:
        await client.enqueue("child", {{}}, tx=own)  # on a connection of the child's

async def main(client):
    await client.enqueue("parent", {{}})
    pid = os.fork()
    if pid == 0:
        asyncio.run(refused(client))
        os._exit(0)
    await client.enqueue("parent", {{}})
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    await client.enqueue("parent", {{}})

async def both():
    async with jobq.AsyncClient({dsn!r}) as client:
        await main(client)
    async with AsyncConnectionPool({dsn!r}, min_size=1, open=False) as pool, jobq.AsyncClient(pool) as client:
        await main(client)

asyncio.run(both())
"""
    process = spawn_python("-c", code)
    assert process.wait(60) == 0, process.output
    rows = db.execute("select kind, count(*) from jobq.job group by 1 order by 1").fetchall()
    assert rows == [("child", 2), ("parent", 6)]


def test_a_client_that_is_not_open_says_so(dsn: str) -> None:
    client = jobq.Client(dsn)
    with pytest.raises(jobq.ClientClosed, match="with"):
        client.enqueue("k", {})
    with client:
        client.enqueue("k", {})
    with pytest.raises(jobq.ClientClosed):
        client.enqueue("k", {})


async def test_a_pool_of_ones_own_is_used_and_left_open(dsn: str) -> None:
    async with AsyncConnectionPool[psycopg.AsyncConnection[Any]](
        dsn, max_size=2, min_size=1, open=False
    ) as pool:
        async with jobq.AsyncClient(pool) as client:
            assert client.pool is pool
            job = await client.enqueue("k", {})
            assert (await client.get(job.id)).state == "ready"
        assert not pool.closed
    with (
        ConnectionPool[psycopg.Connection[Any]](dsn, min_size=1, open=True) as sync_pool,
        jobq.Client(sync_pool) as sync_client,
    ):
        assert sync_client.get(job.id).state == "ready"
        with pytest.raises(jobq.ConfigError, match="AsyncConnectionPool"):
            jobq.AsyncClient(sync_pool)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_an_unreachable_database_is_said_to_be_unavailable() -> None:
    with pytest.raises(jobq.DatabaseUnavailable):
        await asyncio.wait_for(jobq.AsyncClient("host=127.0.0.1 port=1 connect_timeout=1").open(), 60)


def test_the_sql_function_makes_the_same_jobs(dsn: str, db: psycopg.Connection[Any]) -> None:
    row = db.execute(
        "select id, inserted from jobq.enqueue('report', '{\"month\": 3}', queue => 'reports', priority => 4)"
    ).fetchone()
    assert row
    (job_id, inserted) = row
    with jobq.Client(dsn) as client:
        info = client.get(job_id)
        assert inserted
        assert (info.kind, info.queue, info.priority, info.args) == ("report", "reports", 4, {"month": 3})
        assert (info.max_attempts, info.timeout_s) == (25, 3600.0)
        held = client.enqueue("k", {}, unique="é")
        row = db.execute(
            "select id, inserted from jobq.enqueue('k', '{}', unique_key => 'e' || U&'\\0301')"
        ).fetchone()
        assert row == (held.id, False)


def test_json_of_the_view_is_exact(dsn: str, db: psycopg.Connection[Any]) -> None:
    with jobq.Client(dsn) as client:
        client.enqueue("k", {"x": 1970670598291982290})
    row = db.execute("select to_jsonb(jobs)::text from jobq.jobs").fetchone()
    assert row
    assert json.loads(row[0])["args"]["x"] == 1970670598291982290


def test_what_a_kinds_jobs_share_is_each_clients_own(dsn: str) -> None:
    plain = jobq.JobType("k", dict, priority=3)
    rich = jobq.JobType("rich", dict, meta={"m": 1}, tags=["t"])
    later = jobq.JobType("later", dict, delay=timedelta(hours=1))
    keyed = jobq.JobType("keyed", dict, unique="one")
    with jobq.Client(dsn) as one, jobq.Client(dsn, queue="other", max_attempts=2) as two:
        for _ in range(2):  # the second time everything is known
            first, second = (client.get(client.enqueue(plain, {}).id) for client in (one, two))
            assert (first.queue, first.priority, first.max_attempts) == ("default", 3, 25)
            assert (second.queue, second.priority, second.max_attempts) == ("other", 3, 2)
            job = one.get(one.enqueue(rich, {"a": 1}).id)
            assert (job.meta, job.tags, job.args) == ({"m": 1}, ("t",), {"a": 1})
            assert one.get(one.enqueue(later, {}).id).state == "scheduled"
            assert one.get(one.enqueue(plain, {}, priority=5).id).priority == 5
            with pytest.raises(jobq.ArgumentsEncodeError):
                one.enqueue(plain, {"a": float("nan")})
        assert [one.enqueue(keyed, {}).inserted for _ in range(2)] == [True, False]


def test_kinds_without_end_are_not_all_remembered(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobq._clients.base._MAX_TEMPLATES", 3)
    with jobq.Client(dsn) as client:
        for n in range(10):
            assert client.get(client.enqueue(jobq.JobType(f"k{n}", dict), {}).id).kind == f"k{n}"
        assert len(client._templates) <= 3


def test_a_middleware_that_comes_late_sees_every_further_job(dsn: str) -> None:
    kind = jobq.JobType("k", dict)
    with jobq.Client(dsn) as client:
        client.enqueue(kind, {})
        client.use(lambda job: job.replace(args={"changed": True}))
        assert client.get(client.enqueue(kind, {}).id).args == {"changed": True}
