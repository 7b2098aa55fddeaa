"""The faults: each is made again and again until the stage's time is over, and taken back."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from typing import TYPE_CHECKING, Final

import psycopg

from jobq._embedded.pidfile import children_of
from tests.chaos.misbehaviour import MISDEEDS, NEVER_END
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq.embedded import EmbeddedPostgres
    from tests.chaos.stage import Stage
    from tests.support.processes import PythonProcess
    from tests.support.proxy import TcpProxy

LEASE_S: Final = 2.5  # of the stage's workers
_STOP_S: Final = 15.0  # the grace, and what a busy machine may add
_WAYS: Final[tuple[dict[str, bool], ...]] = ({}, {"to_server": False}, {"from_server": False})


# -- workers ----------------------------------------------------------------------------------------


def kill_workers(stage: Stage) -> None:
    """Kill -9 a worker at random, and start another in its place."""
    while not stage.is_over():
        stage.pause(0.3, 1.2)
        victim = stage.rng.choice(stage.workers)
        victim.kill()
        stage.count("kill -9")
        stage.retire(victim)


def kill_started_workers(stage: Stage) -> None:
    """Kill -9 workers that have begun to work, and no others: however slowly they start, somebody works."""
    while not stage.is_over():
        stage.pause(0.3, 1.2)
        kill_started(stage)


def kill_started(stage: Stage) -> PythonProcess:
    """Kill -9 one worker that has begun to work, and start another in its place."""
    started = eventually(lambda: [one for one in stage.workers if "works on" in one.output], 60.0)
    victim = stage.rng.choice(started)
    victim.kill()
    stage.count("kill -9")
    stage.retire(victim)
    return victim


def freeze_workers(stage: Stage) -> None:
    """SIGSTOP a worker for longer than its lease, then SIGCONT: it wakes with jobs that others have."""
    while not stage.is_over():
        victim = _busy(stage)
        victim.signal(signal.SIGSTOP)
        time.sleep(LEASE_S + stage.rng.uniform(1.0, 2.0))
        victim.signal(signal.SIGCONT)
        stage.count("frozen")
        stage.pause(0.2, 0.5)


def _busy(stage: Stage) -> PythonProcess:
    """Return a worker with a job in its hands, so that freezing it takes jobs along."""
    held = "select distinct pid from jobq.worker where id in (select worker_id from jobq.running)"

    def busy() -> list[PythonProcess]:
        pids = {pid for (pid,) in stage.sql(held)}
        return [worker for worker in stage.workers if worker.pid in pids]

    return stage.rng.choice(eventually(busy, 20.0, what="jobs run"))


def stop_workers_in_storms(stage: Stage) -> None:
    """SIGTERM all workers but one at once, as a rolling deploy in a hurry, new ones beside them."""
    while not stage.is_over():
        stage.pause(0.8, 1.5)
        leaving = stage.rng.sample(stage.workers, len(stage.workers) - 1)
        for worker in leaving:
            stage.retire(worker)
            worker.terminate()
            stage.count("SIGTERM")
        for worker in leaving:
            code = worker.wait(_STOP_S)
            # one that is told before it has begun to listen dies of the signal, with nothing in its hands
            assert code in {0, -signal.SIGTERM}, f"ended with {code}:\n{worker.output}"
        stage.workers[-1].wait_for_output("works on", 30.0)


def kill_children(stage: Stage) -> None:
    """Kill -9 a process of the supervisor at random; it starts another."""
    while not stage.is_over():
        stage.pause(0.5, 1.2)
        [supervisor] = stage.workers
        children = children_of(supervisor.pid)
        if children:
            # it may have ended by itself just now
            with contextlib.suppress(ProcessLookupError):
                os.kill(stage.rng.choice(children), signal.SIGKILL)
                stage.count("kill -9")


# -- handlers ---------------------------------------------------------------------------------------


def misbehave(stage: Stage) -> None:
    """Have handlers do, one after the other, what no handler should; at last stop those that never end."""
    for misdeed in itertools.cycle([*MISDEEDS, NEVER_END]):
        stage.pause(0.8, 1.5)
        if stage.is_over():
            break
        stage.make("misbehave", do=misdeed)
        stage.count(f"({misdeed})")
    # all have done their worst: one that never ends is begun once, and ends with its process
    waiting = "select count(*) from jobq.jobs where kind = 'misbehave' and state = 'ready' and attempt = 0"
    eventually(lambda: stage.sql(waiting) == [(0,)], 30.0, what="every misdeed is done")
    for supervisor in list(stage.workers):
        stage.retire(supervisor)
        supervisor.terminate()
        assert supervisor.wait(_STOP_S) == 0, supervisor.output


# -- the network ------------------------------------------------------------------------------------


def silence_network(proxy: TcpProxy) -> Callable[[Stage], None]:
    """Let the network between workers and server fall silent: no RST, no answer, one way or both."""

    def fault(stage: Stage) -> None:
        for way in itertools.cycle(_WAYS):
            stage.pause(0.5, 1.0)
            if stage.is_over():
                return
            proxy.silence(**way)
            time.sleep(stage.rng.uniform(0.5, LEASE_S + 2.0))
            proxy.drop(reset=stage.rng.random() < 0.5)
            proxy.resume()
            stage.count("silences")

    return fault


# -- the server -------------------------------------------------------------------------------------


def restart_server(server: EmbeddedPostgres) -> Callable[[Stage], None]:
    """Restart it: in order, at once, and by kill -9 of its first process."""

    def fault(stage: Stage) -> None:
        while not stage.is_over():
            for how in ("fast", "immediate", "kill -9"):
                stage.pause(0.8, 1.5)
                began = time.monotonic()
                if how == "kill -9":
                    server.kill()
                else:
                    server.stop("fast" if how == "fast" else "immediate")
                time.sleep(stage.rng.uniform(0.0, 1.0))
                server.start()
                stage.await_answers()
                stage.note_longest("s longest outage", time.monotonic() - began)
                stage.count(f"restarts ({how})")

    return fault


def terminate_backends(stage: Stage) -> None:
    """End a server process of a worker or producer at random, twenty times a second."""
    while not stage.is_over():
        stage.pause(0.02, 0.08)
        rows = stage.sql(
            "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
            " and datname = current_database() and backend_type = 'client backend' order by random() limit 1"
        )
        stage.count("backends ended", len(rows))


def use_up_connections(stage: Stage) -> None:
    """Take every connection that the server has, end half of jobq's, and take those too."""
    while not stage.is_over():
        with contextlib.ExitStack() as stack:
            taken = _take_all(stack, stage.dsn)
            ended = taken[0].execute(_END_HALF).fetchall()
            taken += _take_all(stack, stage.dsn)
            stage.count("connections taken", len(taken))
            stage.count("backends ended", len(ended))
            stage.pause(0.5, 2.0)
        stage.pause(0.5, 1.0)


_END_HALF: Final = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where application_name like 'jobq%' and random() < 0.5"
)


def _take_all(stack: contextlib.ExitStack, dsn: str) -> list[psycopg.Connection]:
    taken: list[psycopg.Connection] = []
    with contextlib.suppress(psycopg.OperationalError):  # there is no more
        while True:
            taken.append(stack.enter_context(psycopg.connect(dsn, autocommit=True)))
    return taken
