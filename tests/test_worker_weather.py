"""Workers and a database that restarts, goes away, falls silent, or whose answers are lost."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psycopg
import pytest

import jobq
from jobq._operation import Call
from jobq._postgres import execute, sync_cursor
from tests.conftest import APP_DATABASE
from tests.support.inprocess import working
from tests.support.polling import eventually
from tests.support.workers import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import DurableServer, SpawnPython
    from tests.support.proxy import TcpProxy

STOP_MARGIN_S = 8.0  # promised are the grace and 5 s; the rest is for a machine that others use too


@pytest.fixture
def site(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> Site:
    return Site(spawn_python, dsn, tmp_path)


@contextlib.contextmanager
def held_up(site: Site, part: str, table: str, proxy: TcpProxy) -> Iterator[None]:
    """Let a statement that a worker's part sends in the block take effect after it, but lose its reply.

    It is held up by a lock on ``table``. Lost is every reply that the server sends from the end of
    the block on, until ``proxy`` resumes.
    """
    # After this each part has its connection, and has prepared its statements (that waits for locks, too).
    warm_up = site.enqueue("snooze_once", s=0.0)
    site.await_state(warm_up[0], "completed")
    with psycopg.connect(site.dsn) as blocker:
        blocker.execute(f"lock table jobq.{table} in exclusive mode".encode())
        yield
        waiting = "select count(*) from pg_locks where not granted and pid = any (%s)"
        eventually(lambda: site.sql(waiting, site.backends(part)) == [(1,)], what=f"{part} wait for {table}")
        proxy.silence(to_server=False)


def cut(proxy: TcpProxy) -> None:
    """End every connection with what its replies were, and let new ones through."""
    proxy.drop()
    proxy.resume()


def starts(site: Site) -> Counter[int]:
    """Return how often each job was started."""
    return Counter(note.job_id for note in site.notes("start"))


def await_finished_with_one_listener_each(site: Site, count: int) -> None:
    """Wait until so many jobs have ended and both workers listen, each over one connection all along.

    The server may take a moment to let one go that its worker has closed.
    """
    by_worker = (
        "select application_name, array_agg(pid order by pid) from pg_stat_activity"
        " where datname = current_database() and application_name like 'jobq listener %' group by 1"
    )
    together_since: dict[tuple[int, ...], float] = {}

    def all_ended() -> bool:
        listeners: list[list[int]] = [pids for _, pids in site.sql(by_worker)]
        for several in (tuple(pids) for pids in listeners if len(pids) > 1):
            since = together_since.setdefault(several, time.monotonic())
            assert time.monotonic() - since < 1.0, f"one worker listens over {several}"
        finished: int = site.sql("select count(*) from jobq.finished")[0][0]
        return finished >= count and [len(pids) for pids in listeners] == [1, 1]

    eventually(all_ended, 20.0, what=f"{count} jobs end, and both listen")


def connected_twice(site: Site) -> list[str]:
    """Return which parts of which workers have more than one connection."""
    rows = site.sql(
        "select application_name from pg_stat_activity"
        " where datname = current_database() and application_name like 'jobq %'"
        " group by 1 having count(*) > 1"
    )
    return [name for (name,) in rows]


# Lost replies


def test_a_claim_whose_reply_is_lost_gives_its_jobs_back_uncounted_and_runs_each_once(
    site: Site, proxy: TcpProxy
) -> None:
    worker = site.start(dsn=proxy.dsn, prefetch=0)
    with held_up(site, "claims", "running", proxy):
        job_ids = site.enqueue("wait", 50)
    eventually(lambda: site.counts().get("running") == 20, what="the claim has happened all the same")
    cut(proxy)
    site.await_finished(1 + 50)
    assert {starts(site)[job_id] for job_id in job_ids} == {1}
    jobs = [site.job(job_id) for job_id in job_ids]
    assert {(state, failures, crashes) for state, _, failures, crashes in jobs} == {("completed", 0, 0)}
    assert sum(attempt == 2 for _, attempt, _, _ in jobs) == 20
    assert "20 jobs of a claim without a reply were handed back" in worker.output
    assert len(worker.ids) == 2
    eventually(
        lambda: site.sql("select count(*) from jobq.worker where ended_at is null") == [(1,)],
        what="the old identity, which holds nothing, is over",
    )
    worker.stop()


def test_completions_whose_reply_is_lost_are_found_and_not_called_lost(site: Site, proxy: TcpProxy) -> None:
    worker = site.start(dsn=proxy.dsn)
    job_ids = site.enqueue("gate", 10, gate="a")
    site.await_started(job_ids)
    with held_up(site, "outcomes", "finished", proxy):
        site.open("a")
    # The handlers see the gate one after the other: what ended after the statement waits for its reply.
    eventually(lambda: site.counts().get("completed", 0) > 1, what="completions have happened all the same")
    cut(proxy)
    site.await_finished(1 + 10)
    eventually(lambda: worker.stats()["unrecorded"] == 0, what="the worker knows, too")
    stats = worker.stats()
    assert (stats["completed"], stats["lost_leases"], stats["uncertain"]) == (1 + 10, 0, 0)
    assert {starts(site)[job_id] for job_id in job_ids} == {1}


def test_a_snooze_whose_reply_is_lost_is_uncertain_and_not_called_lost(site: Site, proxy: TcpProxy) -> None:
    worker = site.start(dsn=proxy.dsn)
    with held_up(site, "outcomes", "scheduled", proxy):
        [job_id] = site.enqueue("snooze_once", s=0.5)
    eventually(
        lambda: site.sql("select reason from jobq.scheduled") == [("snooze",)],
        what="the snooze has happened all the same",
    )
    cut(proxy)
    assert site.await_state(job_id, "completed") == ("completed", 2, 0, 0)
    stats = worker.stats()
    assert (stats["uncertain"], stats["lost_leases"]) == (1, 0)


# Absence


@pytest.mark.parametrize(
    ("away_s", "config"),
    [
        (6.0, {"lease": 4.5}),
        pytest.param(60.0, {"lease": 30.0, "heartbeat": 5.0, "rescue_interval": 5.0}, marks=pytest.mark.slow),
    ],
)
def test_no_finished_outcome_is_lost_while_the_database_is_away_for_longer_than_a_lease(
    spawn_python: SpawnPython,
    durable_server: DurableServer,
    tmp_path: Path,
    away_s: float,
    config: dict[str, Any],
) -> None:
    server = durable_server()
    site = Site(spawn_python, server.dsn(APP_DATABASE), tmp_path)
    workers = [site.start(**config), site.start(**config)]
    job_ids = site.enqueue("gate", 40, gate="a")
    site.await_started(job_ids)
    assert len({note.pid for note in site.notes()}) == 2, "both of them have jobs"
    server.stop("immediate")  # at once: the handlers are to end before their lease does
    away_since = time.monotonic()
    site.open("a")
    eventually(lambda: len(site.notes("end")) == 40, what="the handlers end meanwhile")
    eventually(lambda: time.monotonic() > away_since + away_s, away_s + 5.0, what="the time is over")
    assert all(worker.process.running for worker in workers)
    server.start()
    await_finished_with_one_listener_each(site, 40)
    assert {site.job(job_id) for job_id in job_ids} == {("completed", 1, 0, 0)}
    assert starts(site) == dict.fromkeys(job_ids, 1)
    eventually(lambda: len(site.backends("leader")) == 1, what="one leads again")
    eventually(lambda: connected_twice(site) == [], what="no part of a worker has two connections")

    later = site.enqueue("wait", 10)
    site.await_finished(50)  # and they go on
    assert starts(site) == dict.fromkeys(job_ids + later, 1)
    assert [worker.stats()["lost_leases"] for worker in workers] == [0, 0]


@pytest.mark.slow
def test_a_worker_that_starts_right_after_an_outage_declares_no_living_worker_dead(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    lease_s = 14.0
    server = durable_server()
    site = Site(spawn_python, server.dsn(APP_DATABASE), tmp_path)
    living, killed = site.start(lease=lease_s), site.start(lease=lease_s)
    job_ids = site.enqueue("gate", 40, gate="a")
    site.await_started(job_ids)
    by_pid = {note.job_id: note.pid for note in site.notes()}
    assert len(set(by_pid.values())) == 2, "both of them have jobs"
    server.stop("immediate")
    away_since = time.monotonic()
    killed.kill()
    site.open("a")
    eventually(lambda: len(site.notes("end")) == 20, what="its handlers end meanwhile")
    living.pause()  # it cannot renew before the newcomer has looked
    eventually(lambda: time.monotonic() > away_since + lease_s + 0.5, 25.0, what="all leases are over")
    back_at = time.monotonic()
    server.start()
    newcomer = site.start(lease=lease_s)
    works_at = time.monotonic()
    # Its own leniency lasts for half a lease: then what holds it back is what it asks of the server.
    patient_s = lease_s / 2 + 0.5
    eventually(lambda: time.monotonic() > works_at + patient_s, 10.0, what="it has looked again and again")
    dead = "select id from jobq.worker where end_reason = 'lease ended'"
    found = site.sql(dead)
    assert time.monotonic() < back_at + lease_s, "too slow a machine: this proves nothing"
    assert found == []
    living.resume()
    site.await_finished(40, 30.0)
    for job_id in job_ids:
        of_the_dead = by_pid[job_id] == killed.process.pid
        assert site.job(job_id) == (("completed", 2, 0, 1) if of_the_dead else ("completed", 1, 0, 0))
    assert site.sql(dead) == [(killed.ids[0],)]
    assert (living.stats()["lost_leases"], newcomer.stats()["lost_leases"]) == (0, 0)


def test_a_worker_that_starts_lets_others_renew_before_it_calls_them_dead(site: Site) -> None:
    """After a failover, too, of which the server that took over says nothing."""
    paused = site.start(lease=30.0, heartbeat=0.5)  # it never doubts that it holds it
    [job_id] = site.enqueue("gate", gate="a")
    site.await_started([job_id])
    paused.pause()
    site.sql(
        "update jobq.worker set lease_until = now() - interval '1 minute',"
        " heartbeat_at = now() - interval '72 seconds'"  # so it was one of 12 s, of which it has half
    )
    site.start(lease=3.0, heartbeat=1.0, rescue_interval=0.1)
    works_at = time.monotonic()
    eventually(lambda: time.monotonic() > works_at + 1.0, what="it has swept several times")
    assert site.sql("select count(*) from jobq.worker where ended_at is not null") == [(0,)]
    paused.resume()
    eventually(lambda: time.monotonic() > works_at + 6.5, what="the newcomer's leniency is over")
    site.open("a")
    assert site.await_state(job_id, "completed") == ("completed", 1, 0, 0)
    assert len(paused.ids) == 1


def test_outcomes_that_cannot_be_recorded_stop_the_claiming_at_their_bound(site: Site) -> None:
    worker = site.start(pending_outcomes=40, prefetch=0, queues={"default": 10})
    with psycopg.connect(site.dsn) as blocker:
        blocker.execute("lock table jobq.finished in exclusive mode")
        job_ids = site.enqueue("wait", 300)
        eventually(lambda: worker.stats()["unrecorded"] >= 40, what="the buffer is full")
        eventually(lambda: worker.stats()["busy"] == 0, what="what was claimed has run")
        held = worker.stats()
        assert held["unrecorded"] <= 40 + 2 * 10
        seen_at = time.monotonic()
        eventually(lambda: time.monotonic() > seen_at + 0.5, what="several polls pass")
        assert worker.stats()["claimed"] == held["claimed"]
    site.await_finished(300)
    assert starts(site) == dict.fromkeys(job_ids, 1)


async def test_a_worker_claims_again_as_soon_as_its_outcomes_are_below_their_bound(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._worker.fetcher._LONGEST_PAUSE_S", 3600.0)  # so that it has to be told
    jobs = jobq.Jobs()

    @jobs.handler("nothing")
    async def nothing(job: jobq.Job, args: None) -> None: ...

    async with jobq.AsyncClient(dsn) as client:
        enqueued = await client.enqueue_many(jobq.NewJob(nothing, None) for _ in range(50))
    bounds = {"pending_outcomes": 1, "completion_batch": 1, "prefetch": 0, "queues": {"default": 1}}
    async with working(dsn, jobs, **bounds, poll=timedelta(hours=1)) as bench:
        for one in enqueued:
            assert (await bench.ended(one.id, 60.0))["state"] == "completed"


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_restarts_under_load_loses_no_job_and_repeats_none(
    spawn_python: SpawnPython,
    durable_server: DurableServer,
    tmp_path: Path,
    mode: Literal["fast", "immediate"],
) -> None:
    server = durable_server()
    site = Site(spawn_python, server.dsn(APP_DATABASE), tmp_path)
    config: dict[str, Any] = {"lease": 9.0, "heartbeat": 1.0}
    workers = [site.start(**config), site.start(**config)]
    job_ids = site.enqueue("wait", 1500, s=0.02)
    for done in (200, 700):
        site.await_finished(done)
        server.restart(mode)
    site.await_finished(1500)
    assert site.counts() == {"completed": 1500}
    assert starts(site) == dict.fromkeys(job_ids, 1)
    for worker in workers:
        assert worker.stop()["unrecorded"] == 0
    assert sum(worker.final_stats()["lost_leases"] for worker in workers) == 0


# Locks

PATIENCE_S = 6.0  # longer than any single try at the start


@pytest.mark.parametrize("table", ["ready", "worker"])
def test_a_worker_that_starts_while_a_table_is_altered_waits_and_says_for_what(
    site: Site, table: str
) -> None:
    with psycopg.connect(site.dsn) as altering:
        altering.execute(f"alter table jobq.{table} add column probe integer".encode())
        worker = site.start(wait=False)
        said = worker.process.wait_for_output("cannot start yet")
        locked_at = time.monotonic()
        assert f"table {table} is locked by server process {altering.info.backend_pid} for" in said
        [job_id] = site.enqueue("wait") if table == "worker" else [0]
        eventually(lambda: time.monotonic() > locked_at + PATIENCE_S, what="several tries are over")
        assert worker.process.running
        waiting = "select count(*) from pg_locks where not granted and relation = %s::regclass"
        assert site.sql(waiting, f"jobq.{table}")[0][0] <= 1, (
            "what was given up does not pile up in the server"
        )
        altering.rollback()
    worker.process.wait_for_output("works on")
    [later] = site.enqueue("wait")
    for one in filter(None, (job_id, later)):
        assert site.await_state(one, "completed") == ("completed", 1, 0, 0)
    assert worker.output.count("cannot start yet") == 1, "once is enough"
    assert "the worker's start goes on after" in worker.output
    assert "CRITICAL" not in worker.output
    worker.stop()


@pytest.mark.parametrize("table", ["ready", "worker"])
def test_a_worker_that_waits_to_start_can_be_stopped(site: Site, table: str) -> None:
    with psycopg.connect(site.dsn) as altering:
        altering.execute(f"lock table jobq.{table} in access exclusive mode".encode())
        worker = site.start(wait=False)
        worker.process.wait_for_output("cannot start yet")
        asked_at = time.monotonic()
        worker.process.terminate()
        assert worker.process.wait(10.0) == 0, worker.output
        assert time.monotonic() - asked_at < STOP_MARGIN_S
    assert "Traceback" not in worker.output


# Silence


def test_s21_a_worker_whose_network_falls_silent_stops_in_time(site: Site, proxy: TcpProxy) -> None:
    worker = site.start(dsn=proxy.dsn, grace=0.5)
    [job_id] = site.enqueue("gate", gate="never")
    site.await_started([job_id])
    proxy.silence()  # with polls every 100 ms, some claim is or will be under way
    asked_at = time.monotonic()
    worker.process.terminate()
    assert worker.process.wait(15.0) == 0, worker.output
    assert time.monotonic() - asked_at < 0.5 + STOP_MARGIN_S


def test_s21_a_worker_gives_up_a_silent_connection_and_goes_on_over_a_new_one(
    site: Site, proxy: TcpProxy
) -> None:
    worker = site.start(dsn=proxy.dsn)
    before = proxy.accepted
    proxy.silence()
    job_ids = site.enqueue("wait", 30)
    # Its claims, its duties and its lease: each gives its connection up and tries a new one.
    eventually(lambda: proxy.accepted >= before + 3, 10.0, what="new connections are tried")
    proxy.resume()  # also what the dead connections had sent: late claims
    site.await_finished(30)
    assert starts(site) == dict.fromkeys(job_ids, 1)
    assert {site.job(job_id)[2] for job_id in job_ids} == {0}
    worker.stop()


def test_a_promotion_that_was_refused_is_tried_again_in_a_second(site: Site) -> None:
    worker = site.start()
    site.sql("alter table jobq.scheduled rename to elsewhere")
    worker.process.wait_for_output("promotion was refused")
    site.sql("alter table jobq.elsewhere rename to scheduled")
    [job_id] = site.enqueue("snooze_once", s=0.0)
    site.await_state(job_id, "completed", timeout_s=5.0)
    worker.stop()


async def test_a_worker_that_finds_another_server_takes_a_new_identity_and_has_hung_jobs_handed_back(
    dsn: str,
) -> None:
    jobs = jobq.Jobs()
    ran: list[tuple[int, int]] = []

    @jobs.handler("k")
    async def k(job: jobq.Job, args: dict[str, Any]) -> None:
        ran.append((job.id, job.worker_id))

    async with working(dsn, jobs) as bench:
        # As after a failover that lost the outcome of a job: it stands there as running, and nobody runs it.
        lost = await bench.client.enqueue("k", {})
        await bench.ended(lost.id)
        assert bench.worker._parts is not None
        identity = bench.worker._parts.lease.current
        assert identity is not None
        assert identity.server is not None
        bench.rows(
            "with f as (delete from jobq.finished where job_id = %s returning *)"
            " insert into jobq.running (job_id, worker_id, queue, priority, attempt, failures, crashes)"
            " select job_id, worker_id, queue, priority, attempt, failures, crashes from f returning job_id",
            lost.id,
        )
        identity.server -= 1
        await bench.client.enqueue("k", {})
        assert (await bench.ended(lost.id))["attempt"] == 2
    assert ran[0] == (lost.id, identity.id)
    assert {worker_id for _, worker_id in ran[1:]} == {ran[1][1]} != {identity.id}


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres"])
def test_a_worker_reads_moments_and_numbers_whatever_the_databases_output_style(
    dsn: str, db: psycopg.Connection, spawn_python: SpawnPython, tmp_path: Path, style: str
) -> None:
    name = str(db.info.dbname)
    for setting in (f"datestyle = '{style}'", "intervalstyle = 'iso_8601'", "extra_float_digits = -10"):
        db.execute(f'alter database "{name}" set {setting}'.encode())
    site = Site(spawn_python, dsn, tmp_path)
    worker = site.start()
    [job_id] = site.enqueue("snooze_once", s=0.3)  # whose next time the promotion reads
    assert site.await_state(job_id, "completed") == ("completed", 2, 0, 0)
    worker.stop()


@pytest.mark.parametrize("way", ["dsn", "pooled_dsn"])
async def test_a_worker_records_all_outcomes_where_nulls_in_arrays_are_texts(
    request: pytest.FixtureRequest, db: psycopg.Connection, way: str
) -> None:
    """Through a pooler it can set nothing for its own sessions."""
    db.execute(f'alter database "{db.info.dbname}" set array_nulls = off'.encode())
    jobs = jobq.Jobs()

    @jobs.handler("snoozes")
    async def snoozes(job: jobq.Job, args: dict[str, Any]) -> None:
        if job.attempt == 1:
            raise jobq.Snooze(timedelta(0))

    @jobs.handler("fails")
    async def fails(job: jobq.Job, args: dict[str, Any]) -> None:
        raise ValueError("as it must")

    async with working(request.getfixturevalue(way), jobs) as bench:
        kinds = ("snoozes", "fails") * 5
        made = await bench.client.enqueue_many([jobq.NewJob(kind, {}, max_attempts=1) for kind in kinds])
        ended = [(await bench.ended(one.id))["state"] for one in made]
        assert ended == ["completed", "discarded"] * 5
        assert [error["message"] for error in bench.errors(made[1].id)] == ["as it must"]
        assert bench.errors(made[0].id) == []


def test_a_client_says_where_nulls_in_arrays_are_texts(dsn: str, db: psycopg.Connection) -> None:
    db.execute(f'alter database "{db.info.dbname}" set array_nulls = off'.encode())
    job = jobq.NewJob("k", {})
    others: list[dict[str, Any]] = [
        {"delay": timedelta(1)},
        {"run_at": datetime.now(UTC)},
        {"meta": {"a": 1}},
        {"tags": ["a"]},
        {"unique": "a"},
    ]
    with jobq.Client(dsn) as client:
        for options in others:
            with pytest.raises(jobq.DatabaseError, match="array_nulls"):
                client.enqueue_many([job, jobq.NewJob("k", {}, **options)])
        with pytest.raises(jobq.DatabaseError, match="array_nulls"):
            client.periodic.add("p", kind="k", cron="0 0 1 1 *")
        with pytest.raises(jobq.DatabaseError, match="array_nulls"):
            client.periodic.add("p", kind="k", every=timedelta(hours=1))
        assert not client.list().jobs
        assert not client.periodic.list()
        with pytest.raises(jobq.Error) as other, psycopg.connect(dsn) as connection:
            execute(sync_cursor(connection), Call("select 'x'::int4"))
    assert "array_nulls" not in str(other.value)


def test_a_client_reads_moments_whatever_the_databases_output_style(dsn: str, db: psycopg.Connection) -> None:
    db.execute(f"alter database \"{db.info.dbname}\" set datestyle = 'German'".encode())
    with jobq.Client(dsn) as client:
        job_id = client.enqueue("k", {}).id
        [row] = db.execute("select extract(epoch from created_at)::float8 from jobq.job").fetchall()
        assert client.get(job_id).created_at.timestamp() == row[0]
        [listed] = client.list(jobq.JobFilter()).jobs
        assert listed.id == job_id
        assert client.queue_stats()[0].ready == 1
        client.queues.pause(queue="q")
        assert len(client.queues.pauses()) == len(client.operator_log()) == 1
