"""`jobqctl worker` in bad weather: the real program, with handlers that do not behave."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from jobq._worker.exit_codes import AT_ONCE_S
from tests.support.polling import eventually

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import SpawnPython
    from tests.support.processes import PythonProcess
    from tests.support.proxy import TcpProxy

ROOT: Final = Path(__file__).parents[1]
STOP_MARGIN_S: Final = 8.0  # promised are the grace and 5 s; the rest is for a machine that others use too


class Stage:
    """One test's database, traces and worker."""

    def __init__(self, spawn: SpawnPython, dsn: str, db: psycopg.Connection, folder: Path) -> None:
        self._spawn, self._dsn, self.db, self._folder = spawn, dsn, db, folder

    def enqueue(self, kind: str, *, timeout: str = "1 hour") -> int:
        """Add a job; return its id, which is also the name of its traces."""
        row = self.db.execute("select nextval('jobq.job_id_seq') + 1").fetchone()
        assert row is not None
        path = str(self._folder / str(row[0]))
        row = self.db.execute(
            "select id from jobq.enqueue(%s, %s, timeout => %s)", [kind, json.dumps({"path": path}), timeout]
        ).fetchone()
        assert row is not None
        return int(row[0])

    def start(self, *options: str, dsn: str | None = None) -> PythonProcess:
        environment = {"DATABASE_URL": dsn or self._dsn}
        command = ["-m", "jobq.cli", "worker", "tests.support.stormy:jobs", *options]
        return self._spawn(*command, env=environment, cwd=ROOT)

    def traces(self, job_id: int) -> list[float]:
        """The times at which a job's handler was seen alive."""
        path = self._folder / str(job_id)
        return [float(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []

    def await_runs(self, *job_ids: int) -> None:
        eventually(lambda: all(map(self.traces, job_ids)), 20.0, what="all of them run")

    def job(self, job_id: int) -> tuple[str, int, int, int]:
        """State, attempt, failures and crashes."""
        row = self.db.execute(
            "select state, attempt, failures, crashes from jobq.jobs where id = %s", [job_id]
        ).fetchone()
        assert row is not None
        return row

    def ready_since(self, job_id: int) -> float:
        row = self.db.execute(
            "select date_part('epoch', run_at) from jobq.jobs where id = %s and state = 'ready'", [job_id]
        ).fetchone()
        assert row is not None
        return float(row[0])

    def running(self) -> int:
        row = self.db.execute("select count(*) from jobq.running").fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def stage(spawn_python: SpawnPython, dsn: str, db: psycopg.Connection, tmp_path: Path) -> Stage:
    return Stage(spawn_python, dsn, db, tmp_path)


def child_of(supervisor: PythonProcess) -> int:
    """The process id of the worker process that was started last."""
    return int(re.findall(r"started \(pid (\d+)\)", supervisor.output)[-1])


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Stops


def test_s15_a_process_full_of_handlers_that_ignore_their_time_limit_is_replaced(stage: Stage) -> None:
    stubborn = [stage.enqueue("thread", timeout="0.3 seconds") for _ in range(5)]
    supervisor = stage.start("--queue", "default=5", "--grace", "1")
    stage.await_runs(*stubborn)
    quick = [stage.enqueue("quick") for _ in range(10)]
    assert not any(map(stage.traces, quick)), "all slots are taken"
    eventually(lambda: {stage.job(job_id)[0] for job_id in quick} == {"completed"}, 60.0, what="they ran")
    assert "hold as many slots again as a queue has: the worker stops" in supervisor.output
    assert supervisor.output.count("started (pid") >= 2


@pytest.mark.parametrize("kind", ["swallow", "thread", "process"])
def test_s22_handlers_that_ignore_their_cancellation_end_with_their_process(stage: Stage, kind: str) -> None:
    job_id = stage.enqueue(kind)
    supervisor = stage.start("--grace", "1")
    stage.await_runs(job_id)
    stopped_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.output
    assert time.monotonic() - stopped_at < 1.0 + STOP_MARGIN_S
    assert stage.running() == 0
    assert stage.job(job_id) == ("ready", 1, 0, 0)
    # whatever it did, it did before anybody else could have started the job
    last = stage.traces(job_id)
    assert max(last) <= stage.ready_since(job_id)
    time.sleep(0.2)  # nothing to wait for: it is its absence that counts
    assert stage.traces(job_id) == last


def test_s18_every_job_has_left_running_before_the_exit_recorded_or_handed_back(stage: Stage) -> None:
    job_ids = [stage.enqueue(kind) for kind in ("second", "polite", "swallow", "thread", "polite", "second")]
    supervisor = stage.start("--grace", "2")
    stage.await_runs(*job_ids)
    stopped_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.output
    assert time.monotonic() - stopped_at < 2.0 + STOP_MARGIN_S
    assert stage.running() == 0
    done, back = ("completed", 1, 0, 0), ("ready", 1, 0, 0)
    assert [stage.job(job_id) for job_id in job_ids] == [done, back, back, back, back, done]


@pytest.mark.parametrize("kind", ["swallow", "thread", "process"])
def test_s24_a_second_signal_ends_at_once_and_the_job_is_claimable(stage: Stage, kind: str) -> None:
    job_id = stage.enqueue(kind)
    supervisor = stage.start("--grace", "60")
    stage.await_runs(job_id)
    supervisor.terminate()
    supervisor.wait_for_output("SIGTERM: stopping")
    time.sleep(2 * AT_ONCE_S)  # sooner it would be taken for the same signal
    again_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait(5.0) == 128 + signal.SIGTERM, supervisor.output
    assert time.monotonic() - again_at < 3.0
    assert stage.job(job_id) == ("ready", 1, 0, 0)
    assert max(stage.traces(job_id)) <= stage.ready_since(job_id)
    assert "Traceback" not in supervisor.output


def test_a_service_manager_that_signals_every_process_at_once_gets_a_graceful_stop(stage: Stage) -> None:
    job_id = stage.enqueue("second")
    supervisor = stage.start("--grace", "10")
    stage.await_runs(job_id)
    os.kill(child_of(supervisor), signal.SIGTERM)
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.output
    assert stage.job(job_id) == ("completed", 1, 0, 0)


def test_a_second_signal_to_a_worker_process_itself_is_meant_and_costs_its_jobs_nothing(stage: Stage) -> None:
    job_id = stage.enqueue("thread")
    supervisor = stage.start("--grace", "60")
    stage.await_runs(job_id)
    child = child_of(supervisor)
    os.kill(child, signal.SIGTERM)
    supervisor.wait_for_output("stops: 1 handlers run")
    os.kill(child, signal.SIGTERM)
    eventually(lambda: stage.job(job_id) == ("running", 2, 0, 0), 20.0)
    assert f"(pid {child}) ended with code 143; another one starts in" in supervisor.output


def test_a_worker_process_that_is_stopped_alone_is_replaced(stage: Stage) -> None:
    supervisor = stage.start()
    supervisor.wait_for_output("works on")
    os.kill(child_of(supervisor), signal.SIGTERM)
    eventually(lambda: supervisor.output.count("works on") == 2, 20.0)
    assert "ended with code 0; another one starts in" in supervisor.output


def test_a_stop_while_the_database_is_away_ends_in_time(stage: Stage, proxy: TcpProxy) -> None:
    job_ids = [stage.enqueue("swallow"), stage.enqueue("polite")]
    supervisor = stage.start("--grace", "1", dsn=proxy.dsn)
    stage.await_runs(*job_ids)
    proxy.silence()
    stopped_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 1, supervisor.output
    assert time.monotonic() - stopped_at < 1.0 + STOP_MARGIN_S
    assert "come back when their leases end" in supervisor.output


def test_an_idle_worker_stops_at_once(stage: Stage) -> None:
    supervisor = stage.start("--processes", "2")
    eventually(lambda: supervisor.output.count("works on") == 2, 20.0)
    stopped_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.output
    assert time.monotonic() - stopped_at < 3.0
    assert stage.db.execute("select distinct end_reason from jobq.worker").fetchall() == [("stopped",)]


def test_when_the_supervisor_is_killed_its_workers_stop_in_order(stage: Stage) -> None:
    done, back = stage.enqueue("second"), stage.enqueue("polite")
    supervisor = stage.start("--grace", "2")
    stage.await_runs(done, back)
    child = child_of(supervisor)
    supervisor.kill()
    eventually(lambda: not is_alive(child), 30.0)
    assert stage.job(done) == ("completed", 1, 0, 0)
    assert stage.job(back) == ("ready", 1, 0, 0)


def test_when_the_supervisor_is_killed_a_worker_that_cannot_stop_ends_itself(stage: Stage) -> None:
    job_id = stage.enqueue("thread")
    supervisor = stage.start("--grace", "1")
    stage.await_runs(job_id)
    child = child_of(supervisor)
    supervisor.kill()
    eventually(lambda: not is_alive(child), 1.0 + STOP_MARGIN_S)


# Deaths


def test_the_jobs_of_a_killed_worker_are_run_by_the_next_one_long_before_its_lease_ends(
    stage: Stage,
) -> None:
    job_id = stage.enqueue("polite")
    supervisor = stage.start("--grace", "0")
    stage.await_runs(job_id)
    first = child_of(supervisor)
    os.kill(first, signal.SIGKILL)
    eventually(lambda: stage.job(job_id) == ("running", 2, 0, 1), 20.0)
    eventually(lambda: len(stage.traces(job_id)) == 2, 20.0)
    assert child_of(supervisor) != first
    assert f"(pid {first}) was killed by SIGKILL; another one starts in" in supervisor.output


def test_after_a_kill_the_jobs_of_a_supervised_worker_run_side_by_side_again(stage: Stage) -> None:
    job_ids = [stage.enqueue("second") for _ in range(40)]
    supervisor = stage.start("--queue", "default=20")
    stage.await_runs(*job_ids[:20])
    os.kill(child_of(supervisor), signal.SIGKILL)
    killed_at = time.monotonic()
    eventually(lambda: {stage.job(job_id)[0] for job_id in job_ids} == {"completed"}, 30.0)
    took_s = time.monotonic() - killed_at
    jobs = [stage.job(job_id) for job_id in job_ids]
    assert took_s < 8.0, "two rounds of a second, a new process, and what a busy machine adds"
    assert [job[1:] for job in jobs] == [(2, 0, 1)] * 20 + [(1, 0, 0)] * 20


def test_what_a_killed_process_had_only_prefetched_is_no_suspect(stage: Stage) -> None:
    quick = [stage.enqueue("quick") for _ in range(150)]
    poison = stage.enqueue("sigkill")
    quick += [stage.enqueue("quick") for _ in range(150)]
    stage.start("--queue", "default=1")  # the others are held while it runs
    eventually(lambda: {stage.job(job_id)[0] for job_id in quick} == {"completed"}, 30.0)
    eventually(lambda: stage.job(poison)[0] == "discarded", 30.0)
    [(held,)] = stage.db.execute(
        "select count(*) from jobq.finished where attempt > 1 and job_id <> %s", [poison]
    ).fetchall()
    assert held > 10
    suspected = stage.db.execute("select job_id from jobq.finished where crashes > 0").fetchall()
    assert suspected == [(poison,)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exit", "sigkill"])
def test_two_jobs_that_kill_their_process_are_discarded_and_their_18_neighbours_complete(
    stage: Stage, kind: str
) -> None:
    innocents = [stage.enqueue("brief") for _ in range(9)]
    poisons = [stage.enqueue(kind) for _ in range(2)]
    innocents += [stage.enqueue("brief") for _ in range(9)]
    stage.start("--queue", "default=20")
    eventually(lambda: {stage.job(poison)[0] for poison in poisons} == {"discarded"}, 60.0)
    eventually(lambda: {stage.job(job_id)[0] for job_id in innocents} == {"completed"}, 60.0)
    for poison in poisons:
        assert stage.job(poison)[1:] == (3, 0, 3)
        assert len(stage.traces(poison)) == 3
    # They met both of the crashes before which nobody knows who it was.
    assert max(stage.job(job_id)[3] for job_id in innocents) <= 2
    assert max(stage.job(job_id)[1] for job_id in innocents) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exit", "sigkill"])
def test_a_job_that_kills_its_process_is_discarded_and_its_19_neighbours_complete(
    stage: Stage, kind: str
) -> None:
    innocents = [stage.enqueue("brief") for _ in range(10)]
    poison = stage.enqueue(kind)
    innocents += [stage.enqueue("brief") for _ in range(9)]
    supervisor = stage.start("--queue", "default=20")
    eventually(lambda: stage.job(poison)[0] == "discarded", 60.0)
    eventually(lambda: {stage.job(job_id)[0] for job_id in innocents} == {"completed"}, 60.0)
    _, attempts, failures, crashes = stage.job(poison)
    assert (failures, crashes) == (0, 3)
    assert attempts == 3, "never claimed only to be put back"
    assert len(stage.traces(poison)) == 3
    supervisor.wait_for_output(f"discarded {kind}: crashed")


@pytest.mark.slow
def test_a_worker_whose_event_loop_stays_blocked_is_replaced(stage: Stage) -> None:
    blocker, other = stage.enqueue("block", timeout="0.5 s"), stage.enqueue("brief")
    supervisor = stage.start("--lease", "3", "--heartbeat", "0.5", "--grace", "0.5")
    eventually(lambda: stage.job(blocker)[0] == "discarded", 60.0)
    eventually(lambda: stage.job(other)[0] == "completed", 20.0)
    assert stage.job(blocker)[2:] == (0, 3)
    assert "a handler blocked its event loop for too long" in supervisor.output
