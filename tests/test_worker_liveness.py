"""Workers that die, freeze, block or lose their lease: real processes, real signals."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

import jobq
from jobq._marks import LaneMarks
from jobq._operation import Call, Operation
from jobq._statements import duties
from jobq._statements.claim import claim
from jobq._statements.duties import Registration
from jobq._statements.outcomes import complete
from jobq._worker.exit_codes import EXIT_BLOCKED
from jobq._worker.lease import Lease
from tests.support.polling import eventually
from tests.support.storage import SCHEMA, Storage
from tests.support.workers import BRISK, Site

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import SpawnPython

LEASE_S: Final[float] = BRISK["lease"]
SWEEP_S: Final[float] = BRISK["rescue_interval"] * 1.2
NOISE_S: Final = 5.0  # what a busy machine may add


@pytest.fixture
def site(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> Site:
    return Site(spawn_python, dsn, tmp_path)


# Death


@pytest.mark.parametrize("new_attempt_ends_first", [True, False])
def test_s02_a_worker_that_was_frozen_past_its_lease_changes_nothing_and_goes_on(
    site: Site, new_attempt_ends_first: bool
) -> None:
    frozen = site.start()
    [job_id] = site.enqueue("gate", gate="a")
    site.await_started([job_id])
    frozen.pause()
    other = site.start()
    site.await_started([job_id], times=2)
    if new_attempt_ends_first:
        site.open("a")
        site.await_state(job_id, "completed")
    frozen.resume()
    eventually(lambda: frozen.stats()["lost_leases"] == 1, what="its outcome is dropped and counted")
    eventually(lambda: len(frozen.ids) > 1, what="it takes a new identity")
    site.open("a")
    assert site.await_state(job_id, "completed") == ("completed", 2, 0, 1)
    assert site.sql("select worker_id from jobq.finished")[0][0] in other.ids
    assert "dropped: its lease had ended" in frozen.output
    assert "blocks the event loop" not in frozen.output, "nothing in it was at fault"

    other.stop()
    [after] = site.enqueue("wait")
    site.await_state(after, "completed")
    [start] = site.notes("start", after)
    assert start.worker_id in frozen.ids[1:]
    frozen.stop()


def test_s03_jobs_of_a_killed_worker_whose_row_was_removed_are_rescued(site: Site) -> None:
    killed = site.start()
    [job_id] = site.enqueue("gate", gate="a")
    site.await_started([job_id])
    killed.kill()
    site.sql("delete from jobq.worker")
    site.open("a")
    site.start()
    assert site.await_state(job_id, "completed") == ("completed", 2, 0, 1)


def test_s04_a_job_of_a_killed_worker_starts_elsewhere_within_a_lease_and_a_sweep(site: Site) -> None:
    killed = site.start()
    [job_id] = site.enqueue("gate", gate="a")
    site.await_started([job_id])
    killed.kill()
    killed_at = time.time()
    again = site.start()  # the same host and command at once, as a supervisor would do it
    site.await_started([job_id], times=2)
    site.open("a")
    assert site.await_state(job_id, "completed") == ("completed", 2, 0, 1)
    first, second = site.notes("start", job_id)
    assert second.at - killed_at < LEASE_S + SWEEP_S + NOISE_S
    assert (first.worker_id, second.worker_id) == (killed.ids[0], again.ids[0])


def test_one_job_that_kills_its_worker_is_discarded_and_the_nineteen_beside_it_complete(site: Site) -> None:
    [poison] = site.enqueue("die", s=0.1)
    innocents = site.enqueue("wait", 19, s=0.3)
    worker = site.start(lease=1.0, heartbeat=0.3)
    starts = 1

    def all_ended() -> bool:
        nonlocal worker, starts
        if not worker.process.running:
            assert starts < 5, worker.output
            worker, starts = site.start(lease=1.0, heartbeat=0.3, wait=False), starts + 1
        counts = site.counts()
        return counts.get("completed", 0) + counts.get("discarded", 0) == 20

    eventually(all_ended, 30.0, what="all end")
    assert starts == 4
    state, _, failures, crashes = site.job(poison)
    assert (state, failures, crashes) == ("discarded", 0, 3)
    assert len(site.notes("start", poison)) == 3
    [(reason,)] = site.sql("select reason from jobq.finished where job_id = %s", poison)
    assert reason == "its worker died with it 3 times"
    for innocent in innocents:
        state, _, failures, crashes = site.job(innocent)
        assert (state, failures) == ("completed", 0)
        assert crashes <= 1, "only the first crash met it"


@pytest.mark.slow
def test_two_jobs_that_kill_their_worker_are_discarded_and_the_eighteen_beside_them_complete(
    site: Site,
) -> None:
    innocents = site.enqueue("wait", 9, s=0.3)
    poisons = site.enqueue("die", 2, s=0.1)
    innocents += site.enqueue("wait", 9, s=0.3)
    worker = site.start(lease=1.0, heartbeat=0.3)
    starts = 1

    def all_ended() -> bool:
        nonlocal worker, starts
        if not worker.process.running:
            assert starts < 7, worker.output
            worker, starts = site.start(lease=1.0, heartbeat=0.3, wait=False), starts + 1
        counts = site.counts()
        return counts.get("completed", 0) + counts.get("discarded", 0) == 20

    eventually(all_ended, 60.0, what="all end")
    assert starts == 6, "one death for both of them, then two for each"
    for poison in poisons:
        state, attempt, failures, crashes = site.job(poison)
        assert (state, failures, crashes) == ("discarded", 0, 3)
        assert attempt == len(site.notes("start", poison)) == 3, "never claimed only to be put back"
    for innocent in innocents:
        state, attempt, failures, crashes = site.job(innocent)
        assert (state, failures) == ("completed", 0)
        assert crashes <= 1, "only the first crash met it"
        assert attempt <= 2


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("below", "one_above", "crashes", "expected"),
    [
        (1, False, [0, 1, 0, 2, 1], [0, 2]),  # one that must be alone is here: no other suspect
        (2, False, [0, 1, 0, 2, 1], [0, 1, 2, 4]),  # suspects are here: none that must be alone
        (2, True, [0, 1, 0, 2, 1], [0, 1, 2, 4]),  # the first suspect decides…
        (2, True, [0, 2, 0, 2, 1], [0, 1, 2]),  # …and where it must be alone, it comes alone
        (1, True, [0, 2, 1, 0, 1], [0, 1, 3]),
        (1, True, [1, 1, 1], [0]),
        (2, True, [1, 1, 1], [0, 1, 2]),
        (2, True, [2, 0, 0], [0, 1, 2]),
    ],
)
def test_a_claim_takes_no_suspect_that_could_not_start(
    dsn: str, below: int, one_above: bool, crashes: list[int], expected: list[int]
) -> None:
    with Storage(dsn) as store:
        store.worker(1)
        job_ids = [store.enqueue()[0] for _ in crashes]
        for job_id, count in zip(job_ids, crashes, strict=True):
            store.sql("update jobq.ready set crashes = %s where job_id = %s", count, job_id)
        ranges = LaneMarks().ranges()
        claimed = store.run(claim(SCHEMA, "default", ranges, 10, 1, below=below, one_above=one_above))
        assert [job_ids.index(job.job_id) for job in claimed] == expected
        left = set(job_ids) - {job.job_id for job in claimed}
        assert {store.place(job_id).attempt for job_id in left} <= {0}, "what is left was never claimed"


# A blocked loop


def test_s06_a_handler_that_blocks_the_loop_for_three_leases_runs_once_and_is_named(site: Site) -> None:
    blocked = site.start()
    [job_id] = site.enqueue("block", s=3 * LEASE_S)
    site.await_started([job_id])
    idle = site.start()
    assert site.await_state(job_id, "completed") == ("completed", 1, 0, 0)
    assert len(site.notes("start", job_id)) == 1
    assert len(blocked.ids) == len(idle.ids) == 1
    assert f"job {job_id} (block) blocks the event loop" in blocked.output
    assert "in hold_the_loop" in blocked.output, "the stack says where"
    assert blocked.output.count("blocks the event loop") == 1, "once is enough"
    blocked.stop()


@pytest.mark.parametrize("kind", ["block", "block_by_task"])
def test_s06_a_loop_that_is_blocked_for_ever_ends_its_process_and_its_jobs_are_rescued(
    site: Site, kind: str
) -> None:
    blocked = site.start(grace=0.2)
    [job_id] = site.enqueue(kind, s=60.0, options={"timeout": timedelta(seconds=0.5)})
    assert blocked.process.wait(10.0) == EXIT_BLOCKED, blocked.output
    site.start(queues={"other": 1})  # rescues everybody's jobs and runs none of these
    assert site.await_state(job_id, "ready") == ("ready", 1, 0, 1)


# The lease


def test_s07_jobs_of_three_leases_keep_their_worker_while_it_renews_twice_a_lease(site: Site) -> None:
    leases = 3
    workers = [site.start(heartbeat=0.6), site.start(heartbeat=0.6)]
    job_ids = site.enqueue("wait", 20, s=leases * LEASE_S)
    site.await_started(job_ids)
    before = [worker.stats()["renewals"] for worker in workers]
    site.await_finished(20)
    after = [worker.stats()["renewals"] for worker in workers]
    for was, now in zip(before, after, strict=True):
        assert now - was >= 2 * leases, "each of them, whether it has jobs or not"
    assert len(site.notes("start")) == 20
    assert {site.job(job_id) for job_id in job_ids} == {("completed", 1, 0, 0)}


class PassingTime:
    """The lease's clock and its event at once: what it waits for passes at once, here and in the database.

    There, all that was stamped moves into the past.
    """

    def __init__(self, store: Storage, until_s: float, look: Callable[[], None]) -> None:
        self.now_s = 0.0
        self.lease: Lease | None = None
        self._store = store
        self._until_s = until_s
        self._look = look

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._store.sql(
            "update jobq.worker set heartbeat_at = heartbeat_at - %s, lease_until = lease_until - %s",
            *[timedelta(seconds=seconds)] * 2,
        )
        self._look()
        assert self.lease is not None
        self.lease._stopping = self.now_s >= self._until_s

    def clear(self) -> None:
        """Nobody sets it."""


def test_s07_the_slowest_heartbeat_that_fits_a_lease_of_a_minute_keeps_its_jobs(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In time that passes at once: a real lease and its rows, and what another's rescue makes of them."""
    # The test's server may be younger than the lease: its start would count as a renewal.
    text = duties.EXPIRE.replace("pg_postmaster_start_time()", "timestamptz 'epoch'")
    monkeypatch.setattr(duties, "EXPIRE", text)
    lease_s, leases = 60.0, 3
    config = jobq.WorkerConfig(lease=timedelta(seconds=lease_s), heartbeat=timedelta(seconds=lease_s / 3))
    renewed_at = [0.0]
    with Storage(dsn) as store:

        def look_as_a_rescuer() -> None:
            assert store.run(duties.expire(SCHEMA)).workers == []
            assert store.run(duties.rescue(SCHEMA, 3, 100)) == []
            assert lease.current is not None, "it may claim all along"
            if lease.renewals == len(renewed_at):
                renewed_at.append(clock.now_s)

        clock = PassingTime(store, leases * lease_s, look_as_a_rescuer)
        template = Registration(0, "w", "host", 1, "0", ["default"], [])
        lease = clock.lease = Lease(dsn, SCHEMA, template, config, lambda _: None, lambda _: None)
        monkeypatch.setattr("jobq._worker.lease.time", clock)
        monkeypatch.setattr(lease, "_wake", clock)
        lease._register(lease._open())
        [identity] = lease.identities
        store.enqueue(20)
        fences = [(job.job_id, job.attempt) for job in store.claim(identity.id)]
        identity.known.update(fences)
        lease._keep()
        assert len(store.run(complete(SCHEMA, identity.id, fences, {}))) == 20
    assert lease.identities == [identity]
    assert lease.renewals >= 2 * leases
    in_a_lease = zip(renewed_at, renewed_at[2:], strict=False)
    assert all(later - first <= lease_s for first, later in in_a_lease), renewed_at


def test_s07_a_heartbeat_that_does_not_fit_its_lease_is_refused_at_start() -> None:
    with pytest.raises(jobq.ConfigError, match=r"heartbeat: must be at most a third of the lease"):
        jobq.WorkerConfig(lease=timedelta(seconds=2), heartbeat=timedelta(seconds=1))
    with pytest.raises(jobq.ConfigError, match="lease: must be longer than 0"):
        jobq.WorkerConfig(lease=timedelta(0), heartbeat=timedelta(0))


def test_s08_a_worker_whose_row_is_locked_past_its_lease_stops_its_handlers_in_time(site: Site) -> None:
    worker = site.start()
    [job_id] = site.enqueue("gate", gate="never")
    site.await_started([job_id])
    with psycopg.connect(site.dsn) as blocker:
        blocker.execute("select from jobq.worker for update")
        locked_at = time.time()
        eventually(lambda: site.notes("stopped", job_id), what="the handler is told to stop")
        site.await_state(job_id, "ready")  # handed back, for nobody else can have it
        [later] = site.enqueue("wait")
        # Past the end of the lease, and it still claims nothing.
        eventually(lambda: time.time() > locked_at + LEASE_S + 0.5, what="the lease is over")
        assert site.job(later)[0] == "ready"
        assert worker.process.running
    [stopped] = site.notes("stopped", job_id)
    assert stopped.at < locked_at + LEASE_S
    site.await_state(later, "completed")  # and it goes on
    assert worker.output.count("the lease is about to end or has ended") == 1
    assert site.job(job_id)[2:] == (0, 0)


def test_s08_a_worker_that_may_not_write_its_row_is_fenced_and_comes_back_under_a_new_id(site: Site) -> None:
    role = sql.Identifier(f"worker_{time.time_ns()}")
    with psycopg.connect(site.dsn, autocommit=True) as admin:
        for statement in (
            "create role {} login",
            "grant usage on schema jobq to {}",
            "grant all on all tables in schema jobq to {}",
            "grant all on all sequences in schema jobq to {}",
            "grant all on all functions in schema jobq to {}",
        ):
            admin.execute(sql.SQL(statement).format(role))
        worker = site.start(dsn=make_conninfo(site.dsn, user=role.as_string().strip('"')))
        [job_id] = site.enqueue("gate", gate="a")
        site.await_started([job_id])
        admin.execute(sql.SQL("revoke update on jobq.worker from {}").format(role))
        other = site.start()
        site.await_started([job_id], times=2)
        [stopped] = site.notes("stopped", job_id)
        first, second = site.notes("start", job_id)
        assert stopped.at < second.at, "nobody else may start it before it stops here"
        assert (first.worker_id, second.worker_id) == (worker.ids[0], other.ids[0])
        site.open("a")
        site.await_state(job_id, "completed")

        admin.execute(sql.SQL("grant update on jobq.worker to {}").format(role))
        other.stop()
        [later] = site.enqueue("wait")
        site.await_state(later, "completed")
    assert site.notes("start", later)[0].worker_id == worker.ids[-1]
    worker.stop()


async def test_a_worker_whose_lease_thread_fails_ends_with_its_error(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(lease: Lease) -> float:
        message = "a fault of ours"
        raise RuntimeError(message)

    monkeypatch.setattr(Lease, "_beat", fail)
    async with jobq.AsyncClient(dsn) as client:
        config = jobq.WorkerConfig(lease=timedelta(seconds=1), heartbeat=timedelta(seconds=0.1))
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await jobq.Worker(client, jobq.Jobs(), config).run(handle_signals=False)


async def test_a_start_that_fails_half_way_leaves_no_lease_behind(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(schema: str, queue: str) -> Operation[int]:
        yield Call("select 1")
        message = "no right to it"
        raise jobq.DatabaseError(message)

    monkeypatch.setattr("jobq._worker.parts.restamp", fail)
    async with jobq.AsyncClient(dsn) as client:
        with pytest.raises(jobq.DatabaseError, match="no right"):
            await jobq.Worker(client, jobq.Jobs()).run(handle_signals=False)
    assert db.execute("select end_reason from jobq.worker").fetchall() == [("stopped",)]


def test_s13_in_a_rolling_restart_the_draining_worker_claims_nothing_and_finishes_its_job(site: Site) -> None:
    draining = site.start(grace=20.0)
    [job_id] = site.enqueue("gate", gate="a")
    site.await_started([job_id])
    draining.process.terminate()
    draining.process.wait_for_output("stops in order")
    later = site.enqueue("wait", 20)
    successor = site.start()
    site.await_finished(20)
    assert {note.worker_id for note in site.notes("start") if note.job_id in later} == {successor.ids[0]}
    assert site.job(job_id)[:2] == ("running", 1), "the newcomer leaves it alone"
    site.open("a")
    assert draining.process.wait() == 0
    assert site.job(job_id) == ("completed", 1, 0, 0)
    assert len(site.notes("start", job_id)) == 1


# Promotion and marks


def test_due_jobs_start_soon_after_their_time_on_an_idle_worker(site: Site) -> None:
    site.start(poll=30.0, promote_interval=0.15)
    delays = [timedelta(seconds=0.5 + n * 0.037) for n in range(50)]
    with jobq.Client(site.dsn) as client:
        client.enqueue_many([jobq.NewJob("wait", {}, delay=delay) for delay in delays])
    due = dict(site.sql("select job_id, date_part('epoch', run_at) from jobq.scheduled"))
    site.await_finished(50)
    starts = {note.job_id: note.at for note in site.notes("start")}
    late = [starts[job_id] - due[job_id] for job_id in due]
    assert len(late) > 25, "most of them waited for their time"
    assert min(late) >= -0.05
    assert statistics.median(late) < 0.25
    assert max(late) < 1.0


def test_retries_and_snoozes_come_back_and_any_worker_promotes_for_all(site: Site) -> None:
    site.start()
    failing, snoozing = site.enqueue("fail_once")[0], site.enqueue("snooze_once", s=0.3)[0]
    assert site.await_state(failing, "completed") == ("completed", 2, 1, 0)
    assert site.await_state(snoozing, "completed") == ("completed", 2, 0, 0)

    [elsewhere] = site.enqueue("wait", options={"queue": "other", "delay": timedelta(seconds=0.2)})
    site.await_state(elsewhere, "ready")  # promoted by a worker that does not serve the queue


def test_a_job_whose_transaction_was_open_for_seconds_starts_at_once_after_its_commit(site: Site) -> None:
    site.start(rescans=False)
    with psycopg.connect(site.dsn) as slow, jobq.Client(site.dsn) as client:
        late = client.enqueue("wait", {}, tx=slow).id
        until = time.monotonic() + 3.0
        others = 0
        while time.monotonic() < until:
            client.enqueue("wait", {})
            others += 1
            site.await_finished(others)
        slow.commit()
        committed_at = time.time()
        site.await_state(late, "completed")
    [start] = site.notes("start", late)
    assert start.at - committed_at < 1.0
