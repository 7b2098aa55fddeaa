"""A producer's process: ``python -m tests.chaos.producer SETTINGS``.

It makes jobs in every way that there is, one after the other until SIGTERM, and keeps book: before each of
what it is about to make, afterwards of what it was told. What fails it writes down and goes on from.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg

import jobq
from tests.chaos.books import ProducerLedger, ProducerNotes
from tests.chaos.ledger import Pace
from tests.chaos.notes import EPOCH_VARIABLE
from tests.support.polling import pause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.chaos.books import ProducerBook

KEYS: Final = 8  # few, so that they are held most of the time
REPLACED_KEYS: Final = 2
_REPLACED_WAIT_S: Final = (0.0, 0.05, 0.3, 1.0)  # most jobs that are to be replaced wait for it
PRIORITIES: Final = (5, 0, 0, 0, -5)
_PAUSE_AFTER_FAILURE_S: Final = 0.05
_ANSWER_S: Final = 10.0  # a connection of the application's own gives up so, by its own settings
_LONGEST_SLEEP_S: Final = 0.05  # so that it hears of SIGTERM, and of another pace
_MADE_UP_S: Final = 1.0  # a producer that was held up makes up for so much of it


class Pauses:
    """Pauses of random length between two calls, whatever was made."""

    def __init__(self, rng: random.Random, pause_s: float) -> None:
        self._rng = rng
        self._pause_s = pause_s
        self._next_at = 0.0

    def wait_s(self) -> float:
        """Return the seconds until the next call."""
        return self._next_at - time.monotonic()

    def note_made(self, _jobs: int) -> None:
        """Hear of a call."""
        self._next_at = time.monotonic() + self._rng.uniform(0, 2 * self._pause_s)


class Paced:
    """So many jobs a second as a `Pace` says."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._next_at = 0.0

    def wait_s(self) -> float:
        """Return the seconds until the next call."""
        return self._next_at - time.monotonic() if self._pace.get() else _LONGEST_SLEEP_S

    def note_made(self, jobs: int) -> None:
        """Hear of a call."""
        begin = max(self._next_at, time.monotonic() - _MADE_UP_S)
        self._next_at = begin + jobs / (self._pace.get() or math.inf)


class Producer:
    """Makes jobs until it is told to stop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._dsn: str = settings["dsn"]
        self._rng = random.Random(settings["seed"])
        self._book: ProducerBook
        self._rhythm: Pauses | Paced
        if "ledger" in settings:
            self._book, self._rhythm = ProducerLedger(settings["ledger"]), Paced(Pace(settings["pace"]))
        else:
            self._book = ProducerNotes(settings["notes"])
            self._rhythm = Pauses(self._rng, settings["pause_s"])
        self._run_s: Sequence[float] = settings["run_s"]
        self._open_s: Sequence[float] = settings["open_s"]
        self._most: int = settings["many"]
        self._knows_the_time = EPOCH_VARIABLE not in os.environ  # else its wall clock is wrong
        self._client = jobq.Client(self._dsn, pool_min_size=1, pool_max_size=2)
        self._own: psycopg.Connection | None = None
        self._stopped = False
        self._intended = 0
        self._acknowledged = 0

    def run(self) -> None:
        """Work until SIGTERM."""
        signal.signal(signal.SIGTERM, self._stop)
        actions: list[Callable[[], None]] = [
            self._one,
            self._one,
            self._many,
            self._in_transaction,
            self._rolled_back,
            self._with_key,
            self._later,
        ]
        if hasattr(jobq, "Unique"):  # code of the first version, which a test of upgrades runs, has none
            actions += [self._replacing, self._replacing, self._replacing_in_transaction]
        with self._client:
            print("PRODUCES", flush=True)  # noqa: T201 - the stage waits for it
            while not self._stopped:
                wait_s = self._rhythm.wait_s()
                if wait_s > 0:
                    pause(min(wait_s, _LONGEST_SLEEP_S))
                    continue
                before = self._acknowledged
                try:
                    self._rng.choice(actions)()
                except (jobq.Error, psycopg.Error) as error:
                    self._book.failed(error)
                    pause(_PAUSE_AFTER_FAILURE_S)
                self._rhythm.note_made(self._acknowledged - before)

    def _stop(self, *_: object) -> None:
        self._stopped = True

    # -- the ways -----------------------------------------------------------------------------------

    def _one(self) -> None:
        [job] = self._intend(1)
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _many(self) -> None:
        jobs = self._intend(self._rng.randint(2, self._most))
        self._note_made(jobs, self._client.enqueue_many(jobs))

    def _later(self) -> None:
        wait = timedelta(seconds=self._rng.uniform(0.1, 1.0))
        when = {"run_at": datetime.now(UTC) + wait} if self._knows_the_time else {"delay": wait}
        [job] = self._intend(1, at_once=False, **when)
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _with_key(self) -> None:
        [job] = self._intend(1, unique=f"key {self._rng.randrange(KEYS)}")
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _replacing(self) -> None:
        job = self._intend_replacement()
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _replacing_in_transaction(self) -> None:
        self._write_in_transaction([self._intend_replacement()], commit=self._rng.random() < 0.7)

    def _in_transaction(self) -> None:
        self._write_in_transaction(self._intend_some(), commit=True)

    def _rolled_back(self) -> None:
        self._write_in_transaction(self._intend_some(), commit=False)

    def _write_in_transaction(self, jobs: Sequence[jobq.NewJob], *, commit: bool) -> None:
        """Write jobs and keep the transaction open for a while, so that they commit out of order."""
        connection = self._connection()
        by_sql = all("unique" not in job.options for job in jobs) and self._rng.random() < 0.5
        try:
            if by_sql:
                made = [self._by_sql(connection, job) for job in jobs]
            else:
                made = self._client.enqueue_many(jobs, tx=connection)
            pause(self._rng.choice(self._open_s))
            if not commit:
                connection.rollback()
        except (jobq.Error, psycopg.Error):
            connection.close()  # before any commit was sent: none of it can come to exist
            self._book.rolled_back(jobs)
            raise
        if not commit:
            self._book.rolled_back(jobs)
            return
        try:
            connection.commit()
        except psycopg.Error:
            connection.close()  # in doubt
            raise
        self._note_made(jobs, made)

    # -- their parts --------------------------------------------------------------------------------

    def _connection(self) -> psycopg.Connection:
        if self._own is None or self._own.closed:
            self._own = psycopg.connect(
                self._dsn, prepare_threshold=None, connect_timeout=int(_ANSWER_S), autocommit=False
            )
        return self._own

    def _by_sql(self, connection: psycopg.Connection, job: jobq.NewJob) -> jobq.Enqueued:
        row = connection.execute(
            "select id, inserted from jobq.enqueue(%s, %s::jsonb, priority => %s)",
            [job.kind, json.dumps(job.args), job.options.get("priority", 0)],
        ).fetchone()
        assert row is not None
        return jobq.Enqueued(row[0], inserted=row[1])

    def _intend_some(self) -> list[jobq.NewJob]:
        return self._intend(self._rng.randint(1, 4), at_once=False)

    def _intend_replacement(self) -> jobq.NewJob:
        """Return a job that takes the place of the one that holds its key, if that has never been claimed."""
        unique = jobq.Unique(f"replaced {self._rng.randrange(REPLACED_KEYS)}", on_conflict="replace")
        wait = timedelta(seconds=self._rng.choice(_REPLACED_WAIT_S))
        [job] = self._intend(1, at_once=False, unique=unique, delay=wait)
        return job

    def _intend(self, count: int, *, at_once: bool = True, **options: Any) -> list[jobq.NewJob]:
        jobs = [self._job(options, time.time() if at_once else None) for _ in range(count)]
        self._book.intend(jobs)
        return jobs

    def _job(self, options: dict[str, Any], at: float | None) -> jobq.NewJob:
        """Return a new job.

        Args:
            options: its options.
            at: when it can start, which is now; ``None`` where that is later, so that nobody takes the
                time until then for slowness.
        """
        self._intended += 1
        args = {
            "token": f"{os.getpid()}:{self._intended}",
            "do": self._rng.choices(["work", "fail", "snooze"], [16, 2, 1])[0],
            "s": round(self._rng.choice(self._run_s), 4),
            "at": at,
        }
        kind = self._rng.choice(["work", "work", "thread"])
        return jobq.NewJob(kind, args, priority=self._rng.choice(PRIORITIES), **options)

    def _note_made(self, jobs: Sequence[jobq.NewJob], told: Sequence[jobq.Enqueued]) -> None:
        self._acknowledged += sum(one.inserted for one in told)
        self._book.made(jobs, told)


def main() -> None:
    """Run the producer that the command line describes."""
    settings = json.loads(sys.argv[1])
    if settings.get("sabotage") is not None:  # it knows jobq's insides, which older code does not have
        from tests.chaos import sabotage

        sabotage.apply_to_producer(settings["sabotage"])
    Producer(settings).run()


if __name__ == "__main__":
    main()
