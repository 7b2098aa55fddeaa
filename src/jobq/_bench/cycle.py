"""Cycle: jobs are enqueued in bulk and drained at the same time, all on the same cores.

The yardstick is the same enqueueing process beside the bare loop. And pickup at half load: the same
traffic at half the pace, in calls of 100, while single jobs come on top whose handlers' starts are
timed, beside bare notifications that are sent in turns with them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import bareloop, hands, payload, workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.latency import latency_result
from jobq._bench.pickup import LISTENER_IS_THERE, commit_alternately, listen
from jobq._bench.rates import rate_result
from jobq._bench.result import Cost, Floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._bench.lab import Lab
    from jobq._bench.result import Result

FLOOR: Final = Floor("value", 18_000)
SLOTS: Final = 200
WARM_UP: Final = 2_000
PACED_CALL: Final = 100
_POLL_S: Final = 0.002
_READY_TIMEOUT_S: Final = 30.0
_TIMEOUT_S: Final = 240.0


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=100_000, quick=40_000, tiny=1_000)
    ours: list[tuple[int, Window]] = []
    bare: list[tuple[int, Window]] = []
    for _ in range(lab.pick(full=5, quick=2, tiny=1)):
        bare.append((jobs, _once(lab, jobs, bareloop.follow)))
        ours.append((jobs, _once(lab, jobs, workload.follow, SLOTS)))
    yield rate_result(
        "cycle",
        "enqueue and drain",
        ours,
        bare,
        yardstick_name="the same with the bare loop instead of a worker",
        floor=FLOOR,
        settings=lab.settings(slots=SLOTS, worker_processes=1, call=workload.BULK_CALL),
    )


def _once(lab: Lab, jobs: int, follow: Callable[..., None], *more: int) -> Window:
    """Return the window from the first of so many enqueues to the last handler's end."""
    with lab.database() as database, lab.hands(2) as [worker, enqueuer]:
        worker.start(follow, database.dsn, WARM_UP + jobs + 1, *more)  # one more: it says good-bye
        enqueuer.call(enqueue, database.dsn, WARM_UP)
        _await(worker, WARM_UP)
        before, cpu_s = lab.meter.read(), _cpu_s(worker, enqueuer)
        enqueuer.start(enqueue, database.dsn, jobs)
        _await(worker, WARM_UP + jobs)
        window = Window.between(before, lab.meter.read(), _cpu_s(worker, enqueuer) - cpu_s)
        enqueuer.result()
        enqueuer.call(enqueue, database.dsn, 1)
        worker.result()
        return window


def _cpu_s(*measured: hands.Hand) -> float:
    return sum(hand.cpu_s() or 0.0 for hand in measured)


def _await(worker: hands.Hand, done: int) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while worker.progress < done:
        if not worker.busy:
            worker.result()  # raises what it has to say
        if time.monotonic() > deadline_s:
            raise BenchError(f"{worker.progress} of {done} jobs done within {_TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def enqueue(dsn: str, jobs: int) -> None:
    """Enqueue so many jobs in bulk. For a hand."""
    with jobq.Client(dsn) as client:
        workload.fill(client, jobs)


def enqueue_paced(dsn: str, jobs_a_second: float, seconds: float) -> int:
    """Enqueue at a pace for so long; return how many jobs. For a hand."""
    done, began_s = 0, time.monotonic()
    with jobq.Client(dsn) as client:
        while (passed_s := time.monotonic() - began_s) < seconds:
            if done <= passed_s * jobs_a_second:
                workload.fill(client, PACED_CALL)
                done += PACED_CALL
            else:
                time.sleep(_POLL_S)
    return done


# -- pickup at half load -----------------------------------------------------------------------------------


def run_at_half_load(lab: Lab) -> Iterator[Result]:
    """Measure."""
    samples = lab.pick(full=500, quick=100, tiny=10)
    jobs = lab.pick(full=60_000, quick=30_000, tiny=2_000)
    pace = jobs / _once(lab, jobs, workload.follow, SLOTS).seconds / 2
    with lab.database() as database, lab.hands(4) as [worker, listener, enqueuer, load]:
        with database.connect() as connection:
            payload.create(connection)
            worker.start(workload.time_starts, database.dsn, samples)
            listener.start(listen, database.dsn, samples)
            workload.await_one_row(connection, workload.WORKER_IS_THERE, _READY_TIMEOUT_S)
            workload.await_one_row(connection, LISTENER_IS_THERE, _READY_TIMEOUT_S)
        load.start(enqueue_paced, database.dsn, pace, samples * 0.12 + 2)
        enqueuer.call(time.sleep, 0.5)
        commits = enqueuer.call(commit_alternately, database.dsn, samples, 0).value
        starts = {start.number: start.monotonic_s for start in worker.result().value}
        heard: dict[int, float] = listener.result().value
    job_ms = [(starts[number] - job_s) * 1e3 for number, job_s, _ in commits]
    bare_ms = [(heard[number] - bare_s) * 1e3 for number, _, bare_s in commits]
    for percent in (50, 99):
        result = latency_result(
            "halfload",
            percent,
            job_ms,
            bare_ms,
            yardstick_name="LISTEN/NOTIFY alone, beside the same load",
            floor=None,
            cost=Cost(),
            settings=lab.settings(slots=workload.DEFAULT_SLOTS, jobs_a_second=round(pace), call=PACED_CALL),
        )
        yield result
