"""A load that is held for long: the top speed is measured, and then half of it held while all is watched.

Both parts have processes and a database of their own, so that neither the memory nor the tables of the
second begin with what the first has left.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple

import psycopg

import jobq
from jobq._embedded.pidfile import children_of
from jobq.embedded import Databases
from tests.chaos import reckoning
from tests.chaos.auditor import Audit, Problem
from tests.chaos.flatness import EARLY, not_flat, pickup_by_minute, rows_of, table
from tests.chaos.ledger import (
    COMPLETED,
    HELD,
    MADE,
    REPLACED,
    ROLLED_BACK,
    STARTED,
    Pace,
    Totals,
    read_ledgers,
)
from tests.chaos.stage import DRAIN_S, PATH, ROOT, SEED, WORKERS, Load, report
from tests.chaos.vitals import DONE, Vitals
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from jobq.embedded import EmbeddedPostgres
    from tests.chaos.flatness import Row
    from tests.chaos.vitals import Sample
    from tests.conftest import SpawnPython

SLOTS: Final = 20
LOAD: Final = Load(
    run_s=(0.0,) * 7 + (0.001, 0.005, 0.02),  # short, so that the queue is what is loaded
    open_s=(0.0,) * 300 + (0.05, 0.3),
    many=60,
)
PRODUCERS: Final = 8  # each waits for its own commits: so many, that they share the flushes of the disk
_FULL: Final = 1_000  # jobs under way beyond which the producers wait, at top speed
_LOOK_S: Final = 0.005
_START_S: Final = 60.0
_HELD: Final = 0.9  # of the pace that was asked for
_STOP_S: Final = 40.0  # the default grace, and what a busy machine may add


class Plan(NamedTuple):
    """How long, and how much. What takes minutes in a long run takes seconds in a short one.

    Attributes:
        seconds: for which the load is held.
        most: jobs a second at the most, however fast the machine is.
    """

    seconds: float
    most: float = math.inf

    @property
    def top_speed_s(self) -> float:
        """For how long the top speed is measured, after half as long at that speed."""
        return min(max(self.seconds / 60, 2.0), 20.0)

    @property
    def kept_s(self) -> float:
        """How long retention keeps what has completed; it removes nothing younger than 2 s."""
        return min(max(self.seconds / 30, 2.0), 60.0)

    @property
    def every_s(self) -> float:
        """How often everything is measured."""
        return min(max(self.seconds / 300, 0.25), 5.0)

    @property
    def settings(self) -> dict[str, str]:
        """The server's: its defaults, of which autovacuum's pause of a minute is too long for short runs."""
        return {"autovacuum_naptime": f"{min(max(round(self.seconds / 30), 1), 60)}s"}


class Crowd:
    """A supervisor with its workers, and producers that wait for a pace; all count what they do.

    Args:
        spawn: starts processes.
        dsn: the database.
        folder: for the ledgers.
        kept_s: how long retention keeps what has completed.
        leak: a fault of the application's, see `leaks`.
    """

    def __init__(
        self, spawn: SpawnPython, dsn: str, folder: Path, kept_s: float, leak: str | None = None
    ) -> None:
        folder.mkdir()
        self._dsn = dsn
        self._folder = folder
        self.pace = Pace(folder / "pace")
        with self._client() as client:
            client.queues.set_retention(completed=timedelta(seconds=kept_s))
        env = {"JOBQ_CHAOS_LEDGER": str(folder / "worker"), "JOBQ_CHAOS_LEAK": leak or ""}
        env |= {"JOBQ_CHAOS_LEAK_DSN": dsn, "PYTHONPATH": PATH}
        options = ["--dsn", dsn, "--processes", str(WORKERS), "--queue", f"default={SLOTS}"]
        command = ["-m", "jobq.cli", "worker", "tests.chaos.steady_app:jobs", *options]
        self.supervisor = spawn(*command, cwd=ROOT, env=env)
        self.producers = [
            spawn("-m", "tests.chaos.producer", json.dumps(self._settings(number)), cwd=ROOT)
            for number in range(PRODUCERS)
        ]

    def _settings(self, number: int) -> dict[str, object]:
        files = {"ledger": f"{self._folder / 'producer'} {number}.ledger", "pace": f"{self._folder / 'pace'}"}
        return {"dsn": self._dsn, "seed": SEED + number, **files, **LOAD._asdict()}

    def _client(self) -> jobq.Client:
        return jobq.Client(self._dsn, pool_min_size=0, pool_max_size=1)

    def await_all(self) -> None:
        """Wait until everybody is there."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            eventually(
                lambda: reckoning.workers(connection) == WORKERS, _START_S, what="all workers are there"
            )
        for producer in self.producers:
            producer.wait_for_output("PRODUCES", _START_S)

    def processes(self) -> dict[str, int]:
        """Return all ids, by the names that the processes have here."""
        children = children_of(self.supervisor.pid)
        assert len(children) == WORKERS, self.supervisor.output
        workers = {f"worker {number}": pid for number, pid in enumerate(children, start=1)}
        producers = {f"producer {number}": one.pid for number, one in enumerate(self.producers, start=1)}
        return {**workers, "supervisor": self.supervisor.pid, **producers}

    def made(self) -> Totals:
        """Return what the producers have counted so far."""
        return read_ledgers(self._folder.glob("producer *.ledger"))

    def done(self) -> Totals:
        """Return what the workers have counted so far."""
        return read_ledgers(self._folder.glob("worker *.ledger"))

    def run_at_top_speed(self, seconds: float) -> None:
        """Have as many jobs made as are finished, so that neither side crowds the other out."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            under_way = self.made()[MADE].count - self.done()[COMPLETED].count
            self.pace.set(math.inf if under_way < _FULL else 0.0)
            time.sleep(_LOOK_S)

    def stop_producers(self) -> None:
        """Stop the producers and the schedule, and wait until nothing is left to do."""
        with self._client() as client:
            client.periodic.pause(reckoning.SCHEDULE)
        for producer in self.producers:
            producer.terminate()
        for producer in self.producers:
            assert producer.wait(_STOP_S) == 0, producer.output
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            eventually(lambda: reckoning.waiting(connection) == 0, DRAIN_S, what="all is worked off")

    def stop_workers(self) -> None:
        """Stop the supervisor, and with it the workers."""
        self.supervisor.terminate()
        assert self.supervisor.wait(_STOP_S) == 0, self.supervisor.output


class Endurance:
    """One run.

    Args:
        spawn: starts processes.
        server: with a migrated database for the load, and room for another.
        dsn: that database.
        folder: for what the processes count.
        plan: how long, and how much.
        leak: a fault of the application's, see `leaks`.
    """

    def __init__(
        self,
        spawn: SpawnPython,
        server: EmbeddedPostgres,
        dsn: str,
        folder: Path,
        plan: Plan,
        *,
        leak: str | None = None,
    ) -> None:
        self._spawn = spawn
        self._server = server
        self._dsn = dsn
        self._folder = folder
        self._plan = plan
        self._leak = leak

    def run(self) -> Audit:
        """Measure the top speed, and hold half of it."""
        top = self.measure_top_speed()
        return self.hold(min(top / 2, self._plan.most), {"jobs/s top speed": round(top)})

    def measure_top_speed(self) -> float:
        """Return how many jobs a second are made and completed when nobody holds anybody back."""
        seconds = self._plan.top_speed_s
        with Databases(self._server.dsn()) as databases:
            name = databases.create()
            jobq.migrate(self._server.dsn(name))
            crowd = Crowd(self._spawn, self._server.dsn(name), self._folder / "top speed", 0.0)
            crowd.await_all()
            crowd.run_at_top_speed(seconds / 2)
            done, began = crowd.done()[COMPLETED].count, time.monotonic()
            crowd.run_at_top_speed(seconds)
            top = (crowd.done()[COMPLETED].count - done) / (time.monotonic() - began)
            crowd.stop_producers()
            crowd.stop_workers()
            databases.drop(name)
        return top

    def hold(self, pace: float, known: dict[str, float]) -> Audit:
        """Hold a pace, reconcile, and print what was seen.

        Args:
            pace: in jobs a second.
            known: figures to print with the others.
        """
        samples, account = self._watch(pace)
        rows = rows_of(samples)
        problems = [*reckoning.reckon(account), *_unless_held(rows, pace), *_unless_flat(rows)]
        made, done, books = account.producers, account.workers, account.books
        minutes = pickup_by_minute(samples)
        figures = {
            "s": self._plan.seconds,
            **known,
            "jobs/s asked for": round(pace),
            "acknowledged": made[MADE].count,
            "rolled back": made[ROLLED_BACK].count,
            "keys held": made[HELD].count,
            "replaced": made[REPLACED].count,
            "completed": done[COMPLETED].count,
            "starts": done[STARTED].count,
            "ticks": len(books.ticks),
            "removed by retention": books.left,
            "ms pickup p99 in the worst minute": round(max(p99 for _, p99 in minutes), 1),
        }
        verdict = Audit(figures, problems)
        told = ", ".join(f"{p50:.1f}/{p99:.0f}" for p50, p99 in minutes)
        report(verdict, f"{table(rows)}\npickup p50/p99 of each minute, ms: {told}")
        return verdict

    def _watch(self, pace: float) -> tuple[list[Sample], reckoning.Account]:
        """Hold a pace, in jobs a second; return what was measured, and what was counted."""
        plan, dsn = self._plan, self._dsn
        crowd = Crowd(self._spawn, dsn, self._folder / "load", plan.kept_s, self._leak)
        crowd.await_all()
        crowd.pace.set(pace / PRODUCERS)
        with Vitals(dsn, crowd.processes(), crowd.made, crowd.done) as watch:
            samples = watch.watch(plan.seconds, plan.every_s)
        crowd.stop_producers()
        with psycopg.connect(dsn, autocommit=True) as connection:
            living = reckoning.workers(connection)
            crowd.stop_workers()
            books = reckoning.read_books(connection, WORKERS - living, watch.keys_doubled)
        return samples, reckoning.Account(crowd.made(), crowd.done(), books)


def _unless_held(rows: list[Row], pace: float) -> Iterator[Problem]:
    """The load that was asked for was there, after the first fifth: else nothing is shown by all the rest."""
    [done] = [row for row in rows if row.key.what == DONE]
    if statistics.mean(done.fifths[EARLY:]) < _HELD * pace:
        yield Problem("the_load_is_held", [f"{pace:.0f} jobs/s were asked for: {done}"])


def _unless_flat(rows: list[Row]) -> Iterator[Problem]:
    """What was there after the first fifth is there at the end, and no more."""
    if grown := not_flat(rows):
        yield Problem("it_stays_as_it_was", grown)
