"""The stage of one run of chaos: producers and workers before a server, and their audit at the end.

The short form of a fault takes seconds and is in every `make check`; the long one takes `JOBQ_LONG_MINUTES`
(3) and is run by `make chaos`. Both are the same code.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

import jobq
from tests.chaos.auditor import DOUBLED_KEYS, NOTHING, Allowed, Audit, Case, audit, read_state
from tests.chaos.notes import (
    ACKNOWLEDGED,
    EPOCH_VARIABLE,
    INTENT,
    MADE,
    ROLLED_BACK,
    Evidence,
    Journal,
    read,
)
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.chaos.auditor import State
    from tests.conftest import SpawnPython
    from tests.support.faketime import Clock
    from tests.support.processes import PythonProcess

ROOT: Final = Path(__file__).parents[2]
PATH: Final = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
LONG: Final = os.environ.get("JOBQ_LONG") == "1"
MINUTES: Final = float(os.environ.get("JOBQ_LONG_MINUTES", "3"))
SEED: Final = int(os.environ.get("JOBQ_CHAOS_SEED", str(random.randrange(1 << 30))))
FIGURES: Final = os.environ.get("JOBQ_CHAOS_FIGURES")  # a file that gets a line for each run

WORKERS: Final = 3
PRODUCERS: Final = 3
_SAMPLE_S: Final = 0.1
DRAIN_S: Final = 120.0 if LONG else 30.0
_END_S: Final = 15.0  # a worker's grace, and what a busy machine may add


def how_long_s(short_s: float) -> float:
    """Return for how long a fault is made: so many seconds, or the long form's minutes."""
    return MINUTES * 60 if LONG else short_s


class Load(NamedTuple):
    """What the producers make.

    Attributes:
        pause_s: between two calls of one producer, in the mean.
        run_s: how long jobs run, one of these each.
        open_s: how long transactions stay open, one of these each.
        many: jobs of one call at the most.
    """

    pause_s: float = 0.02
    run_s: tuple[float, ...] = (0.0, 0.005, 0.02, 0.2)
    open_s: tuple[float, ...] = (0.0, 0.0, 0.05, 0.3)
    many: int = 12


USUAL: Final = Load()


class Stage:
    """Producers and workers of one run.

    Args:
        spawn: starts processes.
        dsn: the database, by the way that the auditor takes; the others take it too unless told otherwise.
        folder: for the notes.
        worker_dsn, producer_dsn: other ways for them: a proxy, a pooler, several hosts.
        client: more arguments of the workers' clients.
        sabotage: a fault of jobq's own, see `sabotage`.
        supervised: whether the workers are the processes of one ``jobqctl worker``.
        clocks: by which the processes go, in turn.
        ticks: whether the workers have a schedule too, of a job a second.
        true_times: puts the true times in the place of those that the database says.
        load: what the producers make.
        config: fields of WorkerConfig; times in seconds.
    """

    def __init__(
        self,
        spawn: SpawnPython,
        dsn: str,
        folder: Path,
        *,
        worker_dsn: str | None = None,
        producer_dsn: str | None = None,
        client: dict[str, Any] | None = None,
        sabotage: str | None = None,
        supervised: bool = False,
        clocks: Sequence[Clock] = (),
        ticks: bool = False,
        true_times: Callable[[State], State] | None = None,
        load: Load = USUAL,
        **config: Any,
    ) -> None:
        self._spawn = spawn
        self.dsn = dsn
        self.folder = folder
        self.worker_dsn = worker_dsn or dsn
        self.producer_dsn = producer_dsn or dsn
        self._client = client or {}
        self._sabotage = sabotage
        self._supervised = supervised
        wrong: list[Clock | None] = [*clocks]
        self._clocks = itertools.cycle(wrong or [None])
        self._epoch = time.time() - time.monotonic()
        self._ticks = ticks
        self._true_times = true_times
        self._load = load
        self._config = config
        self._numbers = itertools.count(1)
        self.code: Path | None = None  # where the processes to be started have jobq from, if not from here
        self._journal = Journal(folder / "stage.notes")
        self.rng = random.Random(SEED)
        self.workers: list[PythonProcess] = []
        self.producers: list[PythonProcess] = []
        self.ended: list[PythonProcess] = []
        self.keys_doubled: set[str] = set()
        self.until = 0.0
        self.counts: dict[str, float] = {}

    # -- processes ----------------------------------------------------------------------------------

    def start_worker(self, *, wait: bool = True) -> PythonProcess:
        """Start one more worker, or one more supervisor with all of them."""
        if self._supervised:
            return self._start_supervisor()
        settings = {
            "dsn": self.worker_dsn,
            "client": self._client,
            "notes": self._notes("worker"),
            "sabotage": self._sabotage,
            "ticks": self._ticks,
            "config": self._config,
        }
        process = self._spawn("-m", "tests.chaos.worker", json.dumps(settings), cwd=ROOT, env=self._env())
        self.workers.append(process)
        if wait:
            process.wait_for_output("works on")
        return process

    def _start_supervisor(self) -> PythonProcess:
        options = ["--processes", str(WORKERS), "--queue", "default=10"]
        options += ["--lease", "2.5", "--heartbeat", "0.5", "--grace", "1"]
        options += ["--crash-limit", "1000000"]  # what is killed at random is no job's fault
        env = {"JOBQ_CHAOS_NOTES": str(self.folder / "worker"), "PYTHONPATH": PATH}
        command = ["-m", "jobq.cli", "worker", "tests.chaos.app:jobs", "--dsn", self.worker_dsn, *options]
        process = self._spawn(*command, cwd=ROOT, env=env)
        self.workers.append(process)
        return process

    def make(self, kind: str, **args: Any) -> int:
        """Make one job as the producers do, noted as theirs are."""
        token = f"stage:{next(self._numbers)}"
        self._journal.note(INTENT, jobs=[[token, None]])
        with jobq.Client(self.dsn, pool_min_size=0, pool_max_size=1) as client:
            made = client.enqueue(kind, {"token": token, "s": 0.0, **args})
        self._journal.note(ACKNOWLEDGED, jobs=[[token, made.id, MADE]])
        return made.id

    def make_in(self, connection: psycopg.Connection, count: int) -> dict[str, int]:
        """Write jobs in somebody's transaction; return their tokens and ids for `note_decided`."""
        tokens = [f"stage:{next(self._numbers)}" for _ in range(count)]
        self._journal.note(INTENT, jobs=[[token, None] for token in tokens])
        jobs = [jobq.NewJob("work", {"token": token, "s": 0.0, "do": "work"}) for token in tokens]
        # a transaction that has notified cannot be prepared
        made = jobq.Client(self.dsn, notify=False).enqueue_many(jobs, tx=connection)
        return {token: one.id for token, one in zip(tokens, made, strict=True)}

    def note_decided(self, jobs: dict[str, int], *, made: bool) -> None:
        """Note what became of the transaction that wrote these jobs."""
        if made:
            self._journal.note(ACKNOWLEDGED, jobs=[[token, job_id, MADE] for token, job_id in jobs.items()])
        else:
            self._journal.note(ROLLED_BACK, jobs=list(jobs))

    def start_producer(self) -> PythonProcess:
        """Start one more producer."""
        settings = {
            "dsn": self.producer_dsn,
            "notes": self._notes("producer"),
            "sabotage": self._sabotage,
            "seed": self.rng.random(),
            **self._load._asdict(),
        }
        process = self._spawn("-m", "tests.chaos.producer", json.dumps(settings), cwd=ROOT, env=self._env())
        self.producers.append(process)
        return process

    def _env(self) -> dict[str, str]:
        env = {} if self.code is None else {"PYTHONPATH": str(self.code)}
        clock = next(self._clocks)
        return env if clock is None else {**env, **clock.env, EPOCH_VARIABLE: str(self._epoch)}

    def _notes(self, who: str) -> str:
        return str(self.folder / f"{who} {next(self._numbers)}.notes")

    def retire(self, worker: PythonProcess) -> None:
        """Count a worker as ended, and let another take its place."""
        self.workers.remove(worker)
        self.ended.append(worker)
        self.start_worker(wait=False)

    def replace_ended(self) -> None:
        """Let another worker take the place of each that has ended by itself, as its host would."""
        for worker in [one for one in self.workers if not one.running]:
            self.count("workers that ended")
            self.retire(worker)

    def count(self, what: str, by: float = 1) -> None:
        """Count something for the figures."""
        self.counts[what] = self.counts.get(what, 0) + by

    def note_longest(self, what: str, value: float) -> None:
        """Keep the largest of some figures."""
        self.counts[what] = round(max(self.counts.get(what, 0.0), value), 2)

    # -- the run ------------------------------------------------------------------------------------

    def run(self, fault: Callable[[Stage], None], short_s: float, *, allowed: Allowed = NOTHING) -> Audit:
        """Put everything under load, make the fault for its time, work off what is left, and audit.

        Args:
            fault: makes the fault until ``self.until``, and takes it back before it returns.
            short_s: how long the short form makes it.
            allowed: what the fault may cost.
        """
        for _ in range(1 if self._supervised else WORKERS):
            self.start_worker(wait=False)
        for _ in range(PRODUCERS):
            self.start_producer()
        for process in (*self.workers, *self.producers):
            process.wait_for_output("works on" if process in self.workers else "PRODUCES", 60.0)
        self.until = time.monotonic() + how_long_s(short_s)
        with self._watching_keys():
            fault(self)
            self.stop_producers()
            self.drain(strict=False)
        self.stop_workers()
        return self.audit(allowed)

    @property
    def is_long(self) -> bool:
        """Whether this is the long form."""
        return LONG

    def is_over(self) -> bool:
        """Whether the fault has been made for its time."""
        return time.monotonic() >= self.until

    def pause(self, low_s: float, high_s: float) -> None:
        """Let the load go on for a while: so long is the pause between two faults."""
        time.sleep(max(0.0, min(self.rng.uniform(low_s, high_s), self.until - time.monotonic())))

    def stop_producers(self) -> None:
        """Tell the producers to stop; one that waits for a dead server is killed, its last call in doubt."""
        for producer in self.producers:
            producer.terminate()
        for producer in self.producers:
            try:
                code = producer.wait(_END_S)
            except AssertionError:
                producer.kill()
                self.count("producers that hung")
                continue
            assert code == 0, f"a producer failed:\n{producer.output}"

    def drain(self, *, strict: bool = True) -> None:
        """Wait until no job is left to do; give up after a time: the audit says what is left."""
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline and self._left() != 0:
            self.replace_ended()
            time.sleep(_SAMPLE_S)
        assert not strict or self._left() == 0

    def _left(self) -> int | None:
        sql = "select (select count(*) from jobq.ready) + (select count(*) from jobq.scheduled)"
        with contextlib.suppress(psycopg.Error), psycopg.connect(self.dsn, autocommit=True) as connection:
            row = connection.execute(f"{sql} + (select count(*) from jobq.running)".encode()).fetchone()
            return None if row is None else int(row[0])
        return None

    def stop_workers(self) -> None:
        """Stop all workers in order, those that have just been started when they are up."""
        for worker in self.workers:
            worker.wait_for_output("works on", 60.0)
        for worker in self.workers:
            worker.signal(signal.SIGCONT)
            worker.terminate()
        for worker in self.workers:
            code = worker.wait(_END_S)
            assert code == 0, f"a worker ended with {code}:\n{worker.output}"

    def evidence(self) -> Evidence:
        """Return what was noted so far."""
        return read(self.folder)

    def audit(self, allowed: Allowed = NOTHING) -> Audit:
        """Reconcile, and print the figures."""
        state = read_state(self.dsn, self.keys_doubled)
        if self._true_times is not None:
            state = self._true_times(state)
        verdict = audit(Case(self.evidence(), state, allowed))
        verdict.figures.update(self.counts)
        report(verdict)
        return verdict

    @contextlib.contextmanager
    def _watching_keys(self) -> Iterator[None]:
        """Look again and again, in one snapshot each time, whether a key is held twice."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(_SAMPLE_S):
                # the server may be away, which is others' business
                with contextlib.suppress(psycopg.Error), psycopg.connect(self.dsn, autocommit=True) as one:
                    self.keys_doubled.update(row[0] for row in one.execute(DOUBLED_KEYS))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(60)

    def sql(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; return its rows, if it has any."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(text.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def await_work(self, timeout_s: float = 30.0, *, after: str = "the fault") -> None:
        """Wait until jobs end that were claimed after now, and keep the longest time that it took."""
        began = time.monotonic()
        since: list[tuple[Any, ...]] = []

        def goes_on() -> bool:
            with contextlib.suppress(psycopg.OperationalError):  # a server that steps down ends what it began
                if not since:
                    since.extend(self.sql("select clock_timestamp()"))
                ended = "select exists (select from jobq.finished where claimed_at > %s)"
                return self.sql(ended, *since[0]) == [(True,)]
            return False

        eventually(goes_on, timeout_s, what=f"work goes on after {after}")
        self.note_longest("s longest until work went on", time.monotonic() - began)

    def await_answers(self, timeout_s: float = 30.0) -> None:
        """Wait until the database answers."""

        def answers() -> bool:
            try:
                return self.sql("select 1") == [(1,)]
            except psycopg.Error:
                return False

        eventually(answers, timeout_s, what="the database answers")


def report(verdict: Audit, more: str = "") -> None:
    """Print what a run showed, and keep its figures where they are to be kept."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "chaos").split("::")[-1].split(" ")[0]
    print(f"\n{name} (seed {SEED}): {verdict}\n{more}")  # noqa: T201 - what it is run for
    if FIGURES:
        with Path(FIGURES).open("a") as file:
            line = {"test": name, "long": LONG, **verdict.figures, "broken": sorted(verdict.broken)}
            file.write(json.dumps(line) + "\n")


def assert_kept(verdict: Audit, *, at_least: int = 50) -> None:
    """Fail unless every promise was kept, under a load that is worth the name."""
    assert not verdict.problems, str(verdict)
    assert verdict.figures["completed"] >= at_least, f"too little happened to prove anything: {verdict}"
