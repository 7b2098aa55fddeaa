"""The supervisor: restarts, stops, and what becomes of the jobs; with real processes and a real database."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from jobq._supervisor.supervisor import (
    LONGEST_PAUSE_AT_WORK_S,
    LONGEST_PAUSE_S,
    describe_end,
    restart_pause,
)
from jobq._worker.exit_codes import EXIT_BLOCKED, EXIT_CONFIG, EXIT_LINGERING
from tests.support.polling import eventually

if TYPE_CHECKING:
    import psycopg

    from tests.conftest import SpawnPython
    from tests.support.processes import PythonProcess
    from tests.support.proxy import TcpProxy

STOP_MARGIN_S: Final = 8.0  # promised are the grace and 5 s; the rest is for a machine that others use too


class Fake:
    """A supervisor of fake children, see `tests.support.fakechild`."""

    def __init__(self, spawn: SpawnPython, dsn: str, folder: Path) -> None:
        self._spawn, self._dsn, self._folder = spawn, dsn, folder

    def start(
        self, *acts: str, processes: int = 1, grace_s: float = 1.0, supervisor_dsn: str = ""
    ) -> PythonProcess:
        """Start it; ``supervisor_dsn`` is its own way to the database, where that is not the children's."""
        return self._spawn(
            "-m",
            "tests.support.supervise",
            supervisor_dsn or self._dsn,
            self._dsn,
            str(self._folder),
            str(processes),
            str(grace_s),
            *acts,
        )

    @property
    def starts(self) -> list[tuple[float, int]]:
        """When each child was started, and its process id."""
        path = self._folder / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(float(when), int(pid)) for when, pid in map(str.split, lines)]

    def heard(self) -> str:
        path = self._folder / "heard"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def fake(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> Fake:
    return Fake(spawn_python, dsn, tmp_path)


def enqueue(db: psycopg.Connection, jobs: int) -> None:
    for _ in range(jobs):
        db.execute("select jobq.enqueue('kind')")


def states(db: psycopg.Connection) -> list[tuple[str, int, int]]:
    return db.execute("select state, attempt, crashes from jobq.jobs order by id").fetchall()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def cpu_s(pid: int) -> float:
    """The CPU time that a process itself has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


# Decisions


def test_the_pause_before_a_restart_doubles_up_to_a_cap_and_is_jittered() -> None:
    rng = random.Random(1)
    for deaths, nominal in [(1, 0.1), (2, 0.2), (5, 1.6), (9, 25.6), (10, 30.0), (10_000, 30.0)]:
        pauses = [restart_pause(deaths, rng) for _ in range(50)]
        assert nominal / 2 <= min(pauses) < max(pauses) <= nominal <= LONGEST_PAUSE_S


@pytest.mark.parametrize(
    ("code", "ending", "text"),
    [
        (-9, None, "was killed by SIGKILL"),
        (-99, None, "was killed by signal 99"),
        (EXIT_BLOCKED, None, "blocked its event loop"),
        (EXIT_LINGERING, EXIT_LINGERING, "handlers would not stop"),
        (EXIT_CONFIG, EXIT_CONFIG, "was told to run what cannot work, as it says above"),
        (0, None, "in the middle of its work"),
        (0, 0, "ended with code 0"),
    ],
)
def test_the_log_says_in_words_how_a_process_ended(code: int, ending: int | None, text: str) -> None:
    assert text in describe_end(code, ending)


# Deaths


def test_a_process_that_is_killed_is_replaced_and_its_jobs_come_back_at_the_price_of_a_crash(
    fake: Fake, db: psycopg.Connection
) -> None:
    enqueue(db, 3)
    supervisor = fake.start("claim 2, die", "await")
    supervisor.wait_for_output("waiting")
    eventually(lambda: states(db) == [("ready", 1, 1), ("ready", 1, 1), ("ready", 0, 0)])
    assert "was killed by SIGKILL; another one starts in" in supervisor.output
    assert db.execute("select end_reason from jobq.worker").fetchall() == [("died",)]
    supervisor.terminate()
    assert supervisor.wait() == 0


@pytest.mark.parametrize(
    ("begun", "crashes"),
    [
        ("begin 2", [1, 1, 0, 0]),
        ("begin 0", [1, 1, 1, 1]),  # more than can be noted: nobody knows
        ("claim 0", [1, 1, 1, 1]),  # nothing: then what they brought with them may have killed it
    ],
)
def test_what_a_dead_process_had_not_begun_comes_back_at_no_price(
    fake: Fake, db: psycopg.Connection, begun: str, crashes: list[int]
) -> None:
    enqueue(db, 4)
    supervisor = fake.start(f"claim 4, {begun}, die", "await")
    supervisor.wait_for_output("waiting")
    eventually(lambda: states(db) == [("ready", 1, count) for count in crashes])
    assert db.execute("select count(*) from jobq.attempt_error").fetchone() == (sum(crashes),)


@pytest.mark.parametrize("code", [0, 1, EXIT_BLOCKED, EXIT_LINGERING, 143])
def test_an_exit_that_was_not_announced_is_a_crash_whatever_its_code(
    fake: Fake, db: psycopg.Connection, code: int
) -> None:
    enqueue(db, 1)
    supervisor = fake.start(f"claim 1, exit {code}", "await")
    supervisor.wait_for_output("waiting")
    eventually(lambda: states(db) == [("ready", 1, 1)])


def test_a_process_that_announces_that_it_lingers_costs_its_jobs_nothing(
    fake: Fake, db: psycopg.Connection
) -> None:
    enqueue(db, 2)
    supervisor = fake.start(f"claim 2, end {EXIT_LINGERING}", "await")
    supervisor.wait_for_output("waiting")
    eventually(lambda: states(db) == [("ready", 1, 0), ("ready", 1, 0)])
    assert db.execute("select end_reason from jobq.worker").fetchall() == [("stopped",)]


def test_a_job_at_its_crash_limit_is_left_to_a_worker_which_knows_whom_to_tell(
    fake: Fake, db: psycopg.Connection
) -> None:
    enqueue(db, 2)
    db.execute("update jobq.ready set crashes = 2 where job_id = (select min(job_id) from jobq.ready)")
    supervisor = fake.start("claim 2, die", "await")
    supervisor.wait_for_output("waiting")
    eventually(lambda: states(db) == [("running", 1, 2), ("ready", 1, 1)])


def test_a_process_that_dies_again_and_again_is_started_less_and_less_often(fake: Fake) -> None:
    fake.start("exit 1")
    eventually(lambda: len(fake.starts) >= 5, 30.0)
    times = [when for when, _ in fake.starts[:5]]
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[0] >= 0.05
    assert pauses[3] >= 0.4


def test_processes_that_worked_and_died_however_often_are_soon_there_again(fake: Fake) -> None:
    supervisor = fake.start("claim 0, exit 1")
    eventually(lambda: len(fake.starts) >= 9, 60.0)
    told = [float(pause) for pause in re.findall(r"another one starts in ([\d.]+) s", supervisor.output)]
    assert max(told) <= LONGEST_PAUSE_AT_WORK_S
    assert min(told[6:]) >= LONGEST_PAUSE_AT_WORK_S / 2


def test_one_that_fails_to_start_is_not_held_up_by_deaths_at_work_before(fake: Fake) -> None:
    supervisor = fake.start(*["claim 0, exit 1"] * 4, "exit 1", "await")
    supervisor.wait_for_output("waiting")
    told = [float(pause) for pause in re.findall(r"another one starts in ([\d.]+) s", supervisor.output)]
    assert told[3] >= 0.4
    assert told[4] <= 0.1


def test_an_application_that_cannot_be_loaded_is_tried_once_and_not_by_every_process(fake: Fake) -> None:
    supervisor = fake.start(f"end {EXIT_CONFIG}", processes=5)
    assert supervisor.wait() == 2
    assert len(fake.starts) == 1
    assert "giving up" in supervisor.output


def test_a_supervisor_sleeps_while_its_first_process_waits_to_be_started_again(fake: Fake) -> None:
    supervisor = fake.start("exit 1", processes=5)
    eventually(lambda: len(fake.starts) >= 5, 30.0)  # from here on the pauses are longer than a second
    before = cpu_s(supervisor.pid)
    eventually(lambda: len(fake.starts) >= 6, 30.0)
    assert cpu_s(supervisor.pid) - before < 0.3


def test_an_application_that_has_worked_before_is_tried_again(fake: Fake) -> None:
    supervisor = fake.start("claim 0, die", f"end {EXIT_CONFIG}", "await")
    supervisor.wait_for_output("waiting")
    assert supervisor.running


def test_all_processes_start_once_the_first_has_registered(fake: Fake) -> None:
    fake.start("claim 0, await", processes=3)
    eventually(lambda: len(fake.starts) == 3, 30.0)


def test_the_jobs_come_back_when_the_database_does(
    fake: Fake, db: psycopg.Connection, proxy: TcpProxy
) -> None:
    enqueue(db, 1)
    proxy.refuse()
    proxy.drop()
    # the child has a way of its own, the supervisor's is closed
    supervisor = fake.start("claim 1, die", "await", supervisor_dsn=proxy.dsn)
    supervisor.wait_for_output("cannot be given back yet")
    assert states(db) == [("running", 1, 0)]
    proxy.accept()
    eventually(lambda: states(db) == [("ready", 1, 1)])


# Stops


def test_a_stop_is_asked_for_by_word_so_that_nobody_is_signalled_twice(fake: Fake) -> None:
    supervisor = fake.start("claim 0, await")
    supervisor.wait_for_output("waiting")
    supervisor.terminate()
    assert supervisor.wait() == 0
    assert fake.heard() == "stop"


def test_a_child_whose_handlers_would_not_stop_makes_no_failure_of_an_orderly_stop_but_is_warned_of(
    fake: Fake, db: psycopg.Connection
) -> None:
    enqueue(db, 1)
    supervisor = fake.start(f"claim 1, linger {EXIT_LINGERING}")
    supervisor.wait_for_output("waiting")
    supervisor.terminate()
    assert supervisor.wait() == 0
    assert states(db) == [("ready", 1, 0)]
    assert re.search("WARNING worker process 1 .* since handlers would not stop", supervisor.output)


def test_when_the_supervisor_is_killed_its_children_hear_of_it(fake: Fake) -> None:
    supervisor = fake.start("claim 0, await")
    supervisor.wait_for_output("waiting")
    (_, child), *_ = fake.starts
    supervisor.kill()
    eventually(lambda: fake.heard() == "end of the supervisor", 30.0)
    eventually(lambda: not is_alive(child), 30.0)


def test_a_child_that_ignores_everything_is_killed_after_the_grace_and_its_jobs_handed_back(
    fake: Fake, db: psycopg.Connection
) -> None:
    enqueue(db, 2)
    supervisor = fake.start("claim 2, ignore", grace_s=1.0)
    supervisor.wait_for_output("ignoring")
    stopped_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 0
    assert time.monotonic() - stopped_at < 1.0 + STOP_MARGIN_S
    assert states(db) == [("ready", 1, 0), ("ready", 1, 0)]
    assert "has not ended in time and is killed" in supervisor.output


def test_a_second_signal_ends_all_at_once_and_hands_back(fake: Fake, db: psycopg.Connection) -> None:
    enqueue(db, 1)
    supervisor = fake.start("claim 1, ignore", grace_s=60.0)
    supervisor.wait_for_output("ignoring")
    supervisor.terminate()
    supervisor.wait_for_output("SIGTERM: stopping")
    supervisor.signal(signal.SIGINT)
    assert supervisor.wait(5.0) == 128 + signal.SIGINT
    assert states(db) == [("ready", 1, 0)]


def test_a_stop_with_the_database_away_and_a_child_that_ignores_everything_ends_in_time(
    fake: Fake, db: psycopg.Connection, proxy: TcpProxy
) -> None:
    enqueue(db, 1)
    supervisor = fake.start("claim 1, ignore", supervisor_dsn=proxy.dsn)
    supervisor.wait_for_output("ignoring")
    proxy.silence()
    stopped_at = time.monotonic()
    supervisor.terminate()
    assert supervisor.wait() == 1
    assert time.monotonic() - stopped_at < 1.0 + STOP_MARGIN_S
    assert "come back when their leases end" in supervisor.output


def test_a_child_that_was_killed_leaves_no_process_of_its_group_behind(
    fake: Fake, db: psycopg.Connection
) -> None:
    supervisor = fake.start("claim 0, spawn, die", "await")
    supervisor.wait_for_output("waiting")
    helper = int(supervisor.output.partition("spawned ")[2].split()[0])
    eventually(lambda: not is_alive(helper))
