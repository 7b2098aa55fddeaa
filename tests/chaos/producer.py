"""A producer's process: ``python -m tests.chaos.producer SETTINGS``.

It makes jobs in every way that there is, one after the other until SIGTERM, and notes before each what it
is about to make and afterwards what it was told. What fails it notes and goes on from.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg

import jobq
from tests.chaos.notes import ACKNOWLEDGED, FAILED, INTENT, ROLLED_BACK, Journal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KEYS: Final = 8  # few, so that they are held most of the time
PRIORITIES: Final = (5, 0, 0, 0, -5)
_PAUSE_AFTER_FAILURE_S: Final = 0.05
_ANSWER_S: Final = 10.0  # a connection of the application's own gives up so, by its own settings


class Producer:
    """Makes jobs until it is told to stop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._dsn: str = settings["dsn"]
        self._journal = Journal(settings["notes"])
        self._rng = random.Random(settings["seed"])
        self._pause_s: float = settings["pause_s"]
        self._run_s: Sequence[float] = settings["run_s"]
        self._client = jobq.Client(self._dsn, pool_min_size=1, pool_max_size=2)
        self._own: psycopg.Connection | None = None
        self._stopped = False
        self._made = 0

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
        with self._client:
            print("PRODUCES", flush=True)  # noqa: T201 - the stage waits for it
            while not self._stopped:
                try:
                    self._rng.choice(actions)()
                except (jobq.Error, psycopg.Error) as error:
                    self._journal.note(FAILED, error=type(error).__name__, text=str(error)[:200])
                    time.sleep(_PAUSE_AFTER_FAILURE_S)
                time.sleep(self._rng.uniform(0, 2 * self._pause_s))

    def _stop(self, *_: object) -> None:
        self._stopped = True

    # -- the ways -----------------------------------------------------------------------------------

    def _one(self) -> None:
        [job] = self._intend(1)
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _many(self) -> None:
        jobs = self._intend(self._rng.randint(2, 12))
        self._note_made(jobs, self._client.enqueue_many(jobs))

    def _later(self) -> None:
        [job] = self._intend(1, run_at=datetime.now(UTC) + timedelta(seconds=self._rng.uniform(0.1, 1.0)))
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _with_key(self) -> None:
        [job] = self._intend(1, unique=f"key {self._rng.randrange(KEYS)}")
        self._note_made([job], [self._client.enqueue(job.kind, job.args, **job.options)])

    def _in_transaction(self) -> None:
        self._write_in_transaction(commit=True)

    def _rolled_back(self) -> None:
        self._write_in_transaction(commit=False)

    def _write_in_transaction(self, *, commit: bool) -> None:
        """Write some jobs and keep the transaction open for a while, so that they commit out of order."""
        connection = self._connection()
        jobs = self._intend(self._rng.randint(1, 4))
        try:
            if self._rng.random() < 0.5:
                made = self._client.enqueue_many(jobs, tx=connection)
            else:
                made = [self._by_sql(connection, job) for job in jobs]
            time.sleep(self._rng.choice([0.0, 0.0, 0.05, 0.3]))
            if not commit:
                connection.rollback()
        except (jobq.Error, psycopg.Error):
            connection.close()  # before any commit was sent: none of it can come to exist
            self._journal.note(ROLLED_BACK, jobs=[token_of(job) for job in jobs])
            raise
        if not commit:
            self._journal.note(ROLLED_BACK, jobs=[token_of(job) for job in jobs])
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

    def _intend(self, count: int, **options: Any) -> list[jobq.NewJob]:
        jobs = [self._job(options) for _ in range(count)]
        self._journal.note(INTENT, jobs=[[token_of(job), options.get("unique")] for job in jobs])
        return jobs

    def _job(self, options: dict[str, Any]) -> jobq.NewJob:
        self._made += 1
        do = self._rng.choices(["work", "fail", "snooze"], [16, 2, 1])[0]
        args = {
            "token": f"{os.getpid()}:{self._made}",
            "do": do,
            "s": round(self._rng.choice(self._run_s), 4),
        }
        kind = self._rng.choice(["work", "work", "thread"])
        return jobq.NewJob(kind, args, priority=self._rng.choice(PRIORITIES), **options)

    def _note_made(self, jobs: Sequence[jobq.NewJob], made: Sequence[jobq.Enqueued]) -> None:
        pairs = zip(jobs, made, strict=True)
        self._journal.note(ACKNOWLEDGED, jobs=[[token_of(job), one.id, one.inserted] for job, one in pairs])


def token_of(job: jobq.NewJob) -> str:
    """Return the name that a job bears in its arguments, by which it is known whatever its id."""
    token: str = job.args["token"]  # type: ignore[index]  # made above
    return token


if __name__ == "__main__":
    Producer(json.loads(sys.argv[1])).run()
