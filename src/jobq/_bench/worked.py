"""Benches of a worker beside the same worker with plainer work: one variation of a queue each.

* lanes: jobs spread over up to 100 queues, or over up to all 19 priorities, beside one of each;
* retries: jobs that each fail once beside jobs that do not; an attempt is twice recorded then;
* duration: handlers that sleep, beside what so many slots could do at the most;
* processes: one to eight worker processes on one core, and two on two cores, beside one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import jobq
from jobq._bench import workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.rates import rate_result
from jobq._bench.result import Floor, Result, Spread
from jobq._bench.workers import FAILING, Work, serve, stretch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from jobq._bench.lab import Lab

QUEUES: Final = (10, 100)
PRIORITIES: Final = (5, 19)
SLOTS: Final = 200
PLAIN: Final = Work()
TWO_CORES: Final = Floor("ratio", 1.5)
DURATIONS_MS: Final = (1, 10, 100)
PROCESSES: Final = (2, 4, 8)

Runs = list[tuple[int, Window]]
Case = tuple[Work, "Callable[[int], jobq.NewJob]"]  # a worker, and the n-th job for it


def lanes(lab: Lab) -> Iterator[Result]:
    """Measure jobs in several queues, and of several priorities."""
    cases = {f"{count} queues": _in_queues(count) for count in QUEUES}
    cases |= {f"{count} priorities": _of_priorities(count) for count in PRIORITIES}
    jobs = lab.pick(full=100_000, quick=40_000, tiny=1_000)
    yield from _beside_plain(lab, "lanes", cases, jobs, "the same worker, one queue and one priority")


def _in_queues(count: int) -> Case:
    names = [f"queue{n}" for n in range(count)]
    work = Work(queues=dict.fromkeys(names, SLOTS // count))
    return work, lambda n: _job(queue=names[n % count])


def _of_priorities(count: int) -> Case:
    return PLAIN, lambda n: _job(priority=n % count - count // 2)


def retries(lab: Lab) -> Iterator[Result]:
    """Measure jobs that each fail once."""
    cases: dict[str, Case] = {
        "each fails once": (PLAIN, lambda _: jobq.NewJob(FAILING, workload.EMAIL_ARGS)),
    }
    jobs = lab.pick(full=50_000, quick=20_000, tiny=1_000)
    yield from _beside_plain(
        lab, "retries", cases, jobs, "the same worker, jobs that do not fail", runs_a_job=2
    )


def _job(**options: Any) -> jobq.NewJob:
    return jobq.NewJob(workload.EMAIL, workload.EMAIL_ARGS, **options)


def _beside_plain(
    lab: Lab,
    bench: str,
    cases: Mapping[str, Case],
    jobs: int,
    yardstick_name: str,
    *,
    runs_a_job: int = 1,
) -> Iterator[Result]:
    plain: Runs = []
    runs: dict[str, Runs] = {name: [] for name in cases}
    for _ in range(lab.pick(full=5, quick=2, tiny=1)):
        plain.append(drained(lab, PLAIN, jobs))
        for name, (work, make) in cases.items():
            runs[name].append(drained(lab, work, jobs, make, runs_a_job=runs_a_job))
    for name, windows in runs.items():
        yield rate_result(
            bench,
            name,
            windows,
            plain,
            yardstick_name=yardstick_name,
            floor=None,
            settings=lab.settings(slots=cases[name][0].slots, worker_processes=1),
        )


def drained(
    lab: Lab,
    work: Work,
    jobs: int,
    make: Callable[[int], jobq.NewJob] = workload.new_email,
    count: int = 1,
    *,
    runs_a_job: int = 1,
) -> tuple[int, Window]:
    """Have workers drain a fresh database, and measure their middle.

    Where jobs run more than once, all first runs may come before the second ones: the middle has both.
    """
    with lab.database() as database, lab.hands(count) as working:
        with jobq.Client(database.dsn) as client:
            workload.fill(client, jobs, make)
        for hand in working:
            hand.start(serve, database.dsn, work)
        runs, window = stretch(lab, database, working, jobs * runs_a_job)
    return runs // runs_a_job, window


def duration(lab: Lab) -> Iterator[Result]:
    """Measure handlers that take their time: with enough slots a worker should keep them all busy."""
    rounds = lab.pick(full=3, quick=2, tiny=1)
    for sleep_ms in DURATIONS_MS:
        most = SLOTS / sleep_ms * 1e3  # what so short handlers cost in CPU time may be less than that
        seconds = lab.pick(full=10.0, quick=4.0, tiny=0.4)
        jobs = int(min(most, 20_000) * seconds)
        runs = [drained(lab, Work(sleep_s=sleep_ms / 1e3), jobs) for _ in range(rounds)]
        result = rate_result(
            "duration",
            f"{sleep_ms} ms",
            runs,
            runs,
            yardstick_name=f"{SLOTS} slots that are never empty",
            floor=None,
            settings=lab.settings(slots=SLOTS, handler=f"async, sleeps {sleep_ms} ms"),
        )
        value = result.value
        ratio = Spread(value.median / most, value.least / most, value.most / most)
        yield replace(result, yardstick=Spread.of([most]), ratio=ratio, cpu_ratio=None)


def processes(lab: Lab) -> Iterator[Result]:
    """Measure several worker processes on one core, and two on two."""
    jobs = lab.pick(full=100_000, quick=40_000, tiny=2_000)
    one: Runs = []
    several: dict[int, Runs] = {count: [] for count in PROCESSES}
    spread: Runs = []
    rounds = lab.pick(full=5, quick=2, tiny=1)
    for _ in range(rounds):
        one.append(drained(lab, PLAIN, jobs))
        for count, runs in several.items():
            runs.append(drained(lab, PLAIN, jobs, count=count))
        try:
            with lab.on_two_cores():
                spread.append(drained(lab, PLAIN, jobs, count=2))
        except BenchError:
            continue  # there is no second core: nothing to say about two
    cases = [(f"{count} processes", runs, count, None) for count, runs in several.items()]
    if spread:
        cases.append(("two cores, 2 processes", spread, 2, TWO_CORES))  # type: ignore[arg-type]
    for name, runs, count, floor in cases:
        yield rate_result(
            "processes",
            name,
            runs,
            one,
            yardstick_name="one process on one core",
            floor=floor,
            settings=lab.settings(slots=SLOTS, worker_processes=count, jobs=jobs),
        )
