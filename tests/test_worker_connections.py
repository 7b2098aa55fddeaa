"""A worker's connections: notifications, reconnecting, poolers, and pools that others use up."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from psycopg_pool import AsyncConnectionPool

import jobq
from jobq._statements.enqueue import notify_channel
from jobq._worker.link import Link
from jobq._worker.listener import Listener
from tests.conftest import APP_DATABASE
from tests.support.inprocess import working
from tests.support.polling import eventually, eventually_async
from tests.support.ports import free_ports
from tests.support.workers import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import DurableServer, SpawnPython

RARELY_S = 30.0  # a poll interval at which only a notification can make a worker prompt
PROMPT_S = 2.0  # generous: the machine is busy, and the bench knows better
CONNECTIONS = 5  # of a worker's own: claims, outcomes, duties, lease, listener


@pytest.fixture
def site(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> Site:
    return Site(spawn_python, dsn, tmp_path)


def await_armed(site: Site, queues: int = 1) -> None:
    """Wait until listeners hold the locks that ask for notifications of so many queues."""
    armed = "select count(*) from pg_locks where locktype = 'advisory' and granted and pid = any (%s)"
    eventually(
        lambda: site.sql(armed, site.backends("listener")) == [(queues,)], what=f"{queues} queues are armed"
    )


def await_prompt_start(site: Site, job_id: int) -> None:
    enqueued_at = time.time()
    site.await_started([job_id])
    [start] = site.notes("start", job_id)
    assert start.at - enqueued_at < PROMPT_S


@contextlib.contextmanager
def heard(site: Site) -> Iterator[list[str]]:
    """Collect the notifications of the block: complete after it, for a later one has come by then."""
    with psycopg.connect(site.dsn, autocommit=True) as ear:
        channel = notify_channel("jobq")
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
        collected: list[str] = []
        yield collected
        ear.execute("select pg_notify(%s, 'the end')", [channel])
        for notice in ear.notifies(timeout=10.0):
            if notice.payload == "the end":
                return
            if notice.payload.isprintable():  # a listener's test of itself is not
                collected.append(notice.payload)
        pytest.fail("the last notification did not come")


# Notifications


def test_an_idle_worker_starts_a_job_as_soon_as_it_is_enqueued(site: Site) -> None:
    worker = site.start(poll=RARELY_S)
    for _ in range(10):
        await_armed(site)
        await_prompt_start(site, site.enqueue("wait")[0])
    assert worker.stats()["listening"]


def test_a_job_is_found_whatever_the_moment_at_which_the_worker_goes_to_sleep(site: Site) -> None:
    site.start(poll=RARELY_S)
    with jobq.Client(site.dsn) as client:
        for n in range(40):
            job_id = client.enqueue("wait", {}).id
            await_prompt_start(site, job_id)
            time.sleep(n * 0.003)  # the worker arms itself 30 to 70 ms after its last job


async def test_a_job_that_came_just_before_the_listener_was_armed_does_not_wait_for_the_poll(
    dsn: str,
) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("noop")
    async def noop(job: jobq.Job, args: dict[str, Any]) -> None: ...

    with psycopg.connect(dsn, autocommit=True) as blocker:
        blocker.execute("select pg_advisory_lock(hashtext('jobq'), hashtext('default'))")
        async with working(dsn, jobs, poll=timedelta(seconds=RARELY_S)) as bench:
            waiting = "select from pg_locks where locktype = 'advisory' and not granted"
            await eventually_async(lambda: bench.rows(waiting), what="the listener arms itself")
            assert bench.worker._parts is not None
            [line] = bench.worker._parts.lines
            line.interval_s, line.next_poll_at = RARELY_S, time.monotonic() + RARELY_S
            async with jobq.AsyncClient(dsn, notify=False) as silent:  # as an enqueue that saw nobody wait
                job_id = (await silent.enqueue(noop, {})).id
            blocker.execute("select pg_advisory_unlock_all()")
            await bench.ended(job_id, timeout_s=5.0)


def test_s35_a_busy_worker_is_not_notified_and_a_bulk_enqueue_notifies_once(site: Site) -> None:
    site.start(queues={"default": 1}, poll=RARELY_S)
    await_armed(site)
    with heard(site) as notices:
        site.enqueue("gate", 1000, gate="a")
    assert notices == ["default"]

    eventually(lambda: site.notes("start"), what="the worker is busy")
    await_armed(site, queues=0)
    with heard(site) as notices, jobq.Client(site.dsn) as client:
        for _ in range(50):
            client.enqueue("wait", {})
    assert notices == []


def test_s35_the_notifications_of_many_writers_are_coalesced_and_none_of_their_jobs_is_missed(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    """All are in their statements at once, each over a connection of its own."""
    writers = 200
    server = durable_server(settings={"max_connections": str(writers + 60)})
    site = Site(spawn_python, server.dsn(APP_DATABASE), tmp_path)
    site.start(queues={"default": 5}, prefetch=0, poll=RARELY_S)
    waiting = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'jobq' and wait_event_type = 'Lock'"
    )

    def write() -> list[str]:
        """Let all of them write; return the notifications."""
        with heard(site) as notices:
            with psycopg.connect(site.dsn) as blocker:
                blocker.execute("lock table jobq.ready in share mode")
                writes = [threads.submit(client.enqueue, "wait", {}) for _ in range(writers)]
                eventually(lambda: site.sql(waiting) == [(writers,)], 30.0, what="all of them write")
            for one in writes:
                one.result(20.0)
        return notices

    with (
        jobq.Client(site.dsn, pool_min_size=writers, pool_max_size=writers) as client,
        ThreadPoolExecutor(writers) as threads,
    ):
        await_armed(site)
        # How many of them find it still waiting depends on how soon it wakes.
        assert set(write()) == {"default"}
        site.await_finished(writers)
        site.await_started(site.enqueue("gate", 5, gate="a"))
        await_armed(site, queues=0)
        # Two who ask at the same moment whether somebody waits may take each other for him.
        assert len(write()) < writers / 2, "it is busy, and will look by itself"
    site.open("a")
    site.await_finished(2 * writers + 5)
    assert site.counts() == {"completed": 2 * writers + 5}


def test_s35_without_notifications_polling_finds_every_job(site: Site) -> None:
    site.start(poll=0.2)
    with heard(site) as notices, jobq.Client(site.dsn, notify=False) as client:
        for _ in range(20):
            client.enqueue("wait", {})
            client.enqueue_many([jobq.NewJob("wait", {})] * 5)
    assert notices == []
    site.await_finished(20 * 6)


# Reconnecting


def test_s30_a_listener_whose_backend_was_killed_comes_back_while_the_pool_is_used_up(site: Site) -> None:
    queues = {"default": 5, "other": 5}
    site.start(queues=queues, poll=RARELY_S, client={"pool_max_size": 2})
    holding = site.enqueue("hold_pooled", 4, s=5.0)  # two hold the pool's connections, two wait for them
    site.await_started(holding)
    await_armed(site, queues=2)
    [killed] = site.backends("listener")
    site.sql("select pg_terminate_backend(%s)", killed)
    eventually(lambda: site.backends("listener") not in ([], [killed]), what="the listener is back")
    await_armed(site, queues=2)
    for queue in queues:
        await_prompt_start(site, site.enqueue("wait", options={"queue": queue})[0])
    assert not site.notes("end", holding[-1]), "the pool was used up all along"
    site.await_finished(6)


@contextlib.contextmanager
def watched(site: Site, killed: set[int]) -> Iterator[Counter[str]]:
    """Look all through the block how many connections live at once: the most of them, by part.

    Args:
        site: whose.
        killed: those that have been told to go, and may take a moment for it.
    """
    most: Counter[str] = Counter()
    is_over = threading.Event()
    living = (
        "select pid, split_part(application_name, ' ', 2) from pg_stat_activity"
        " where datname = current_database() and starts_with(application_name, 'jobq ')"
    )

    def watch() -> None:
        with psycopg.connect(site.dsn, autocommit=True) as connection:
            while not is_over.wait(0.001):
                found = connection.execute(living).fetchall()
                parts = Counter(part for pid, part in found if pid not in killed)
                most["all"] = max(most["all"], parts.total())
                for part, count in parts.items():
                    most[part] = max(most[part], count)

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(watch)
        try:
            yield most
        finally:
            is_over.set()
        watching.result(10.0)


def test_s31_a_listener_killed_fifty_times_is_never_there_twice(site: Site) -> None:
    worker = site.start(poll=RARELY_S)
    await_armed(site)
    eventually(lambda: worker.stats()["is_leader"], what="all its connections are there")
    total = len(site.backends(""))
    killed: set[int] = set()

    def new_listener() -> list[int]:
        return [pid for pid in site.backends("listener") if pid not in killed]

    with watched(site, killed) as most:
        for _ in range(50):
            pids = eventually(new_listener, what="the listener comes back")
            killed.update(pids)
            site.sql("select pg_terminate_backend(pid) from unnest(%s) pid", pids)
        await_armed(site)
    assert most["listener"] == 1
    assert most["all"] <= total
    assert len(site.backends("listener")) == 1
    assert len(site.backends("")) <= total
    await_prompt_start(site, site.enqueue("wait")[0])
    assert worker.stats()["listening"]
    assert worker.output.count("lost its connection") <= 51


async def test_s31_a_listener_without_a_server_waits_longer_each_time_and_never_as_long_as_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"host=127.0.0.1 port={free_ports()} dbname=nobody"
    waits: list[float] = []
    tries = 20

    async def note(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) % tries == 0:
            raise StopAsyncIteration

    monkeypatch.setattr("jobq._worker.listener.asyncio.sleep", note)
    for _ in range(2):
        link, other = (Link(address, "jobq", name, 5.0) for name in ("test listener", "test duties"))
        listener = Listener(link, other, "jobq", lambda _: None, lambda: None)
        with pytest.raises(StopAsyncIteration):
            await listener.run()
    monkeypatch.undo()
    first, second = waits[:tries], waits[tries:]
    for failures, pair in enumerate(zip(first, second, strict=True)):
        nominal_s = min(0.05 * 2**failures, 5.0)
        assert 0.5 * nominal_s <= min(pair) < max(pair) <= nominal_s, "each has its own chance"
    assert len(set(first[-10:])) == 10, "at the cap, too"


def test_every_connection_of_a_worker_comes_back_and_none_is_left_over(site: Site) -> None:
    worker = site.start()
    site.await_finished(len(site.enqueue("wait")))
    parts = ("claims", "outcomes", "duties", "lease", "listener")
    for _ in range(5):
        for part in parts:
            eventually(lambda part=part: len(site.backends(part)) == 1, what=f"{part} are connected")  # type: ignore[misc]
            site.sql("select pg_terminate_backend(pid) from unnest(%s) pid", site.backends(part))
        done = site.sql("select count(*) from jobq.finished")[0][0]
        site.enqueue("wait", 20)
        site.await_finished(done + 20)
    assert sum(len(site.backends(part)) for part in parts) <= CONNECTIONS
    assert {note.job_id: note.attempt for note in site.notes("end")}.keys() == {
        row[0] for row in site.sql("select job_id from jobq.finished where state = 'completed'")
    }
    assert worker.stats()["lost_leases"] == 0
    worker.stop()
    assert site.backends("") == []


# Poolers


def test_s36_through_a_transaction_pooler_the_worker_says_once_that_it_polls(
    site: Site, pooled_dsn: str
) -> None:
    worker = site.start(dsn=pooled_dsn)
    worker.process.wait_for_output("no notifications")
    site.enqueue("wait", 20)
    site.await_finished(20)
    assert worker.output.count("no notifications") == 1
    assert "Give the client a direct listen_dsn" in worker.output
    assert not worker.stats()["listening"]
    worker.stop()


def test_s36_a_direct_way_for_the_listener_makes_it_prompt_behind_a_pooler(
    site: Site, pooled_dsn: str
) -> None:
    worker = site.start(dsn=pooled_dsn, client={"listen_dsn": site.dsn}, poll=RARELY_S)
    for _ in range(5):
        await_armed(site)
        with jobq.Client(pooled_dsn) as client:
            job_id = client.enqueue("wait", {}).id
        await_prompt_start(site, job_id)
    assert "no notifications" not in worker.output


def test_s37_four_workers_share_a_transaction_pooler_of_four_connections(site: Site, pooled_dsn: str) -> None:
    workers = [site.start(dsn=pooled_dsn, wait=False, lease=6.0, heartbeat=1.0) for _ in range(4)]
    for worker in workers:
        worker.process.wait_for_output("works on")
    with jobq.Client(pooled_dsn) as client:
        for _ in range(10):
            client.enqueue_many([jobq.NewJob("wait", {"s": 0.01})] * 95 + [jobq.NewJob("fail_once", {})] * 5)
    stuck_since: dict[tuple[int, object], float] = {}
    longest_s = 0.0

    def all_ended() -> bool:
        nonlocal longest_s
        idle = site.sql(
            "select pid, xact_start from pg_stat_activity"
            " where state like 'idle in transaction%%' and datname = current_database()"
        )
        for pid, began_at in idle:
            since = stuck_since.setdefault((pid, began_at), time.monotonic())
            longest_s = max(longest_s, time.monotonic() - since)
        return bool(site.sql("select count(*) = 1000 from jobq.finished")[0][0])

    eventually(all_ended, 30.0, what="all end")
    assert site.counts() == {"completed": 1000}
    assert longest_s < 1.0, "a transaction that stays idle keeps a server connection from the others"
    for worker in workers:
        assert "prepared statement" not in worker.output
        assert "ERROR" not in worker.output
        worker.stop()


# Pools


async def test_s39_a_pool_is_whole_after_waits_that_were_cancelled_at_random(dsn: str) -> None:
    rng = random.Random(39)
    async with jobq.AsyncClient(dsn, pool_min_size=3, pool_max_size=3) as client:
        tasks = [asyncio.create_task(client.enqueue("noop", {})) for _ in range(500)]
        for victim in rng.sample(tasks, 100):
            await asyncio.sleep(0)
            victim.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        faults = [o for o in outcomes if isinstance(o, BaseException)]
        assert all(isinstance(fault, asyncio.CancelledError) for fault in faults), faults

        async with asyncio.timeout(10.0), contextlib.AsyncExitStack() as stack:  # all three at once
            for _ in range(3):
                connection = await stack.enter_async_context(client.pool.connection())
                await connection.execute("select 1")
        stopping_at = time.monotonic()
    assert time.monotonic() - stopping_at < 5.0


def test_s40_handlers_that_use_up_the_pool_do_not_keep_the_worker_from_its_work(site: Site) -> None:
    worker = site.start(queues={"default": 10}, client={"pool_max_size": 2})
    before = worker.stats()["renewals"]
    site.enqueue("hold_pooled", 10, s=0.6)
    # Completions come in while the other handlers still wait for their turn with the pool.
    eventually(lambda: 0 < site.counts().get("completed", 0) < 10, what="some have completed")
    site.await_finished(10)
    assert site.counts() == {"completed": 10}
    assert worker.stats()["renewals"] > before
    assert worker.stats()["lost_leases"] == 0


async def test_s41_no_connection_is_idle_in_a_transaction_while_a_handler_runs(dsn: str) -> None:
    jobs = jobq.Jobs()
    started, may_end = asyncio.Event(), asyncio.Event()

    @jobs.handler("long")
    async def long(job: jobq.Job, args: dict[str, Any]) -> None:
        started.set()
        await may_end.wait()

    with psycopg.connect(dsn, autocommit=True) as admin:
        name = sql.Identifier(admin.info.dbname)
        admin.execute(sql.SQL("alter database {} set idle_in_transaction_session_timeout = 200").format(name))
    pool: AsyncConnectionPool[psycopg.AsyncConnection[Any]]
    pool = AsyncConnectionPool(dsn, min_size=1, max_size=2, open=False)  # not in autocommit
    async with pool, jobq.AsyncClient(pool) as client:
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(poll=timedelta(milliseconds=50)))
        run = asyncio.create_task(worker.run(handle_signals=False))
        job_id = (await client.enqueue(long, {})).id
        async with asyncio.timeout(10.0):
            await started.wait()
        with psycopg.connect(dsn, autocommit=True) as watcher:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                idle = watcher.execute(
                    "select application_name, query from pg_stat_activity"
                    " where state like 'idle in transaction%' and datname = current_database()"
                    " and state_change < clock_timestamp() - interval '100 ms'"
                ).fetchall()
                assert idle == []
                await asyncio.sleep(0.02)
        may_end.set()
        await eventually_async(lambda: worker.stats().completed == 1, what="it is recorded")
        assert (await client.get(job_id)).state == jobq.JobState.COMPLETED
        await worker.stop()
        await run
