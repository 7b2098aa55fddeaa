"""Pickup: how long after its commit a job's handler starts, on a worker that idles.

One job at a time, at random intervals, enqueued in a transaction of its own; the clock starts just
before COMMIT is sent, so writing the WAL is part of it. Clocks are the system's monotonic one,
which is the same in every process. The yardstick is what LISTEN and NOTIFY take by themselves,
from the same kind of COMMIT to a process that waits for nothing else; the two take turns.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg

import jobq
from jobq._bench import payload, workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.latency import latency_result
from jobq._bench.meter import cpu_between
from jobq._bench.result import Floor, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.lab import Database, Lab
    from jobq._bench.result import Cost

FLOORS: Final = {50: Floor("value", 3.0, at_least=False), 99: Floor("value", 15.0, at_least=False)}
CHANNEL: Final = "bench"  # written out where SQL takes no parameter
_INTERVAL_S: Final = (0.005, 0.105)
_READY_TIMEOUT_S: Final = 30.0
_LISTEN_TIMEOUT_S: Final = 240.0


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    samples = lab.pick(full=1_000, quick=160, tiny=10)
    warm_up = lab.pick(full=20, quick=10, tiny=2)
    with lab.database() as database:
        job_ms, bare_ms, cost = _sample(lab, database, warm_up, samples)
    for percent, floor in FLOORS.items():
        yield latency_result(
            "pickup",
            percent,
            job_ms,
            bare_ms,
            yardstick_name="LISTEN/NOTIFY alone",
            floor=floor,
            # with all that an idle worker does meanwhile, and the yardstick's part
            cost=cost,
            settings=lab.settings(slots=workload.DEFAULT_SLOTS, interval_ms=[s * 1e3 for s in _INTERVAL_S]),
        )


def _sample(
    lab: Lab, database: Database, warm_up: int, samples: int
) -> tuple[list[float], list[float], Cost]:
    """Return the latencies of jobs and of bare notifications, in milliseconds, and the cost a job."""
    with lab.hands(3) as [worker, listener, enqueuer], database.connect() as connection:
        payload.create(connection)
        worker.start(workload.time_starts, database.dsn, warm_up + samples)
        listener.start(listen, database.dsn, warm_up + samples)
        workload.await_one_row(connection, workload.WORKER_IS_THERE, _READY_TIMEOUT_S)
        workload.await_one_row(connection, LISTENER_IS_THERE, _READY_TIMEOUT_S)
        enqueuer.call(commit_alternately, database.dsn, warm_up, 0)
        before, worker_cpu_s = lab.meter.read(), worker.cpu_s()
        commits = enqueuer.call(commit_alternately, database.dsn, samples, warm_up).value
        starts = {start.number: start.monotonic_s for start in worker.result().value}
        heard: dict[int, float] = listener.result().value
        window = Window.between(before, lab.meter.read(), cpu_between(worker_cpu_s, worker.cpu_s()))
    job_ms = [(starts[number] - job_s) * 1e3 for number, job_s, _ in commits]
    bare_ms = [(heard[number] - bare_s) * 1e3 for number, _, bare_s in commits]
    return job_ms, bare_ms, window.cost(samples)


LISTENER_IS_THERE: Final = """
select from pg_stat_activity
where datname = current_database() and query = 'listen bench' and state = 'idle'
"""


def listen(dsn: str, notifications: int) -> dict[int, float]:
    """Receive so many notifications; return when each came, by its number. For a hand."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("listen bench")
        heard: dict[int, float] = {}
        for notification in connection.notifies(timeout=_LISTEN_TIMEOUT_S):
            heard[int(notification.payload)] = time.monotonic()
            if len(heard) == notifications:
                return heard
    raise BenchError(f"heard {len(heard)} of {notifications} notifications")


def commit_alternately(dsn: str, pairs: int, first: int) -> list[tuple[int, float, float]]:
    """Commit a job and a bare notification in turns, at random intervals. For a hand.

    Returns:
        For each pair: its number from ``first``, and when the job's and the notification's COMMIT
        were sent.
    """
    rng = random.Random(first)  # the same intervals in every run
    with psycopg.connect(dsn) as connection, jobq.Client(dsn) as client:
        return [
            (number, _commit_job(client, connection, number, rng), _commit_bare(connection, number, rng))
            for number in range(first, first + pairs)
        ]


def _commit_job(
    client: jobq.Client, connection: psycopg.Connection[Any], number: int, rng: random.Random
) -> float:
    time.sleep(rng.uniform(*_INTERVAL_S))
    client.enqueue(workload.PROBE, workload.ProbeArgs(number), tx=connection)
    return _commit(connection)


def _commit_bare(connection: psycopg.Connection[Any], number: int, rng: random.Random) -> float:
    time.sleep(rng.uniform(*_INTERVAL_S))
    cursor = psycopg.RawCursor(connection)
    payload.insert_one(cursor)
    cursor.execute("select pg_notify($1::text, $2::text)", [CHANNEL, str(number)], prepare=True)
    return _commit(connection)


def _commit(connection: psycopg.Connection[Any]) -> float:
    sent_s = time.monotonic()
    connection.commit()
    return sent_s
