"""Punctual: how late a scheduled job starts, on a worker that idles.

Jobs are due at random moments of some seconds ahead; a job's lateness is its handler's start minus
its time, both by the system's clock, which is the server's too. The yardstick is how late a process
wakes that does nothing but sleep until random moments of the same seconds, on the same cores: what
the machine itself can do.
"""

from __future__ import annotations

import random
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import workload
from jobq._bench.lab import Window
from jobq._bench.latency import latency_result
from jobq._bench.meter import cpu_between
from jobq._bench.result import Floor, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.lab import Database, Lab
    from jobq._bench.result import Cost

FLOORS: Final = {50: None, 99: Floor("value", 250.0, at_least=False)}
_AHEAD_S: Final = 0.5  # nothing is due before all is enqueued
_READY_TIMEOUT_S: Final = 30.0


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    samples = lab.pick(full=1_000, quick=200, tiny=10)
    span_s = lab.pick(full=50.0, quick=10.0, tiny=0.5)
    with lab.database() as database:
        late_ms, woken_late_ms, cost = _sample(lab, database, samples, span_s)
    for percent, floor in FLOORS.items():
        yield latency_result(
            "punctual",
            percent,
            late_ms,
            woken_late_ms,
            yardstick_name="a process that only sleeps until its time",
            floor=floor,
            cost=cost,  # with all that an idle worker does meanwhile
            settings=lab.settings(slots=workload.DEFAULT_SLOTS, due_per_s=samples / span_s),
        )


def _sample(
    lab: Lab, database: Database, samples: int, span_s: float
) -> tuple[list[float], list[float], Cost]:
    """Return how late jobs and the sleeper were, in milliseconds, and the cost a job."""
    rng = random.Random(samples)  # the same moments in every run
    with (
        lab.hands(2) as [worker, sleeper],
        database.connect() as connection,
        jobq.Client(database.dsn) as client,
    ):
        worker.start(workload.time_starts, database.dsn, samples)
        workload.await_one_row(connection, workload.WORKER_IS_THERE, _READY_TIMEOUT_S)
        begin_s = time.time() + _AHEAD_S
        due_s = [begin_s + rng.uniform(0, span_s) for _ in range(samples)]
        client.enqueue_many(
            [
                jobq.NewJob(
                    workload.PROBE, workload.ProbeArgs(number), run_at=datetime.fromtimestamp(at_s, UTC)
                )
                for number, at_s in enumerate(due_s)
            ]
        )
        before, worker_cpu_s = lab.meter.read(), worker.cpu_s()
        sleeper.start(sleep_until, [begin_s + rng.uniform(0, span_s) for _ in range(samples)])
        starts: list[workload.Start] = worker.result().value
        window = Window.between(before, lab.meter.read(), cpu_between(worker_cpu_s, worker.cpu_s()))
        woken_late_s: list[float] = sleeper.result().value
    late_ms = [(start.system_s - due_s[start.number]) * 1e3 for start in starts]
    return late_ms, [late_s * 1e3 for late_s in woken_late_s], window.cost(samples)


def sleep_until(moments_s: list[float]) -> list[float]:
    """Sleep until each of these moments; return how many seconds late each was. For a hand."""
    late_s: list[float] = []
    for moment_s in sorted(moments_s):
        time.sleep(max(0.0, moment_s - time.time()))
        late_s.append(time.time() - moment_s)
    return late_s
