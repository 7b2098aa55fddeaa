"""Horizon: what a job costs while some other transaction pins the vacuum horizon.

One connection holds ``BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT …`` open, so that no dead row
goes away. Jobs are enqueued in bulk and drained in flow, a few thousand waiting at any time. The
figure is the cost of a job in the last tenth of all jobs beside that in the first: server CPU of
all its processes, and shared-buffer hits, both for enqueue, claim and completion together.
Autovacuum comes as it comes, and rescans are as often as they are.

Before the first job counts, some flow through, and ANALYZE runs when all of them are done: it sees
tables with pages and no live row, which is the worst that it can tell the planner.

There are three cases: the statements alone, in the bare loop; a worker; and a worker while the
pinning transaction has also written, a job of its own among it. Sessions report their
buffer hits late, so at the edges of both tenths the flow rests until a further statement has made
all of them report. CPU is read along the way too: ``course_us`` has it for each tenth between.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString, Self

import jobq
from jobq._bench import bareloop, workload
from jobq._bench.lab import BenchError, Window
from jobq._bench.meter import cpu_between
from jobq._bench.result import Cost, Floor, Result, Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import psycopg

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Lab
    from jobq._bench.meter import Reading

FLOOR: Final = Floor("ratio", 1.2, at_least=False)
WRITER_FLOOR: Final = Floor("ratio", 1.3, at_least=False)
SLOTS: Final = 200
READER: Final = ("begin isolation level repeatable read", "select count(*) from jobq.ready")
# a writer's own jobs may still appear, so no mark may pass it
WRITER: Final = (*READER, "select id from jobq.enqueue('never')")
TENTHS: Final = 10
WAITING: Final = 5_000  # jobs on their way at the most
WARM_UP: Final = 5_000
REST_S: Final = 1.2  # longer than a session keeps its statistics to itself, when it has something to do
REPORT_JOBS: Final = 200  # so that each session ends one more statement
_RESTS: Final = 5  # after the warm-up, and at the edges of the first tenth and of the last
_SETTLE_S: Final = 0.2  # until the outcomes of those are recorded
_POLL_S: Final = 0.002
_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Edge:
    """The counters at a moment when the flow rests."""

    reading: Reading
    hand_cpu_s: float | None
    hits: int


@dataclass(frozen=True, slots=True)
class Run:
    """What a job cost in the first tenth and in the last.

    Attributes:
        first, last: CPU and WAL. ``first_hits`` and ``last_hits``: shared-buffer hits.
        course_us: server CPU in each of the tenths between.
    """

    first: Cost
    last: Cost
    first_hits: float
    last_hits: float
    course_us: Sequence[float]


class Flow:
    """Jobs on their way through a queue, from a client of its own to a hand that follows."""

    def __init__(self, lab: Lab, dsn: str, database: str, hand: Hand) -> None:
        self._lab = lab
        self._database = database
        self._hand = hand
        self._client = jobq.Client(dsn)
        self.sent = 0

    def __enter__(self) -> Self:
        self._client.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def push(self, jobs: int) -> None:
        """Enqueue so many, as fast as they are worked off."""
        end = self.sent + jobs
        while self.sent < end:
            count = min(workload.BULK_CALL, end - self.sent)
            self._await(self.sent + count - WAITING)
            workload.fill(self._client, count)
            self.sent += count

    def rest(self) -> Edge:
        """Wait until all is done and every session has reported; return the counters."""
        self._await(self.sent)
        time.sleep(REST_S)
        self.push(REPORT_JOBS)
        self._await(self.sent)
        time.sleep(_SETTLE_S)
        hits = self._lab.meter.buffer_hits(self._database)
        return Edge(self._lab.meter.read(), self._hand.cpu_s(), hits)

    def _await(self, done: int) -> None:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self._hand.progress < done:
            if not self._hand.busy:
                self._hand.result()  # raises what it has to say
                raise BenchError(f"{self._hand.progress} jobs were done, and {done} expected")
            if time.monotonic() > deadline_s:
                raise BenchError(f"{self._hand.progress} of {done} jobs done within {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    tenth = lab.pick(full=50_000, quick=6_000, tiny=500)
    rounds = lab.pick(full=3, quick=1, tiny=1)
    runs: dict[str, list[Run]] = {"bare loop": [], "worker": [], "worker, writer open": []}
    for _ in range(rounds):
        runs["bare loop"].append(_run_once(lab, tenth, READER, bareloop.follow))
        runs["worker"].append(_run_once(lab, tenth, READER, workload.follow, SLOTS))
        runs["worker, writer open"].append(_run_once(lab, tenth, WRITER, workload.follow, SLOTS))
    for case, measured in runs.items():
        yield from _results(lab, tenth, case, measured)


def _run_once(
    lab: Lab, tenth: int, pin: Sequence[LiteralString], follow: Callable[..., None], *more: int
) -> Run:
    total = WARM_UP + TENTHS * tenth + _RESTS * REPORT_JOBS
    with lab.database() as database, lab.hands(1) as [hand], database.connect() as connection:
        hand.start(follow, database.dsn, total + 1, *more)  # one more than is measured: it says good-bye
        with Flow(lab, database.dsn, database.name, hand) as flow, database.connect() as pinning:
            for statement in pin:
                pinning.execute(statement)
            measured = _measure(lab, flow, tenth, connection)
            flow.push(1)
            hand.result()
            pinning.execute("rollback")
        _check(connection, total + 1)
    return measured


def _measure(lab: Lab, flow: Flow, tenth: int, connection: psycopg.Connection[Any]) -> Run:
    flow.push(WARM_UP)
    flow.rest()
    connection.execute("analyze")
    edges = [flow.rest()]
    flow.push(tenth)
    edges.append(flow.rest())
    course_s: list[float | None] = [lab.meter.read().server_cpu_s]
    for _ in range(TENTHS - 2):
        flow.push(tenth)
        course_s.append(lab.meter.read().server_cpu_s)
    edges.append(flow.rest())
    flow.push(tenth)
    edges.append(flow.rest())
    jobs = tenth + REPORT_JOBS
    return Run(
        _cost(edges[0], edges[1], jobs),
        _cost(edges[2], edges[3], jobs),
        (edges[1].hits - edges[0].hits) / jobs,
        (edges[3].hits - edges[2].hits) / jobs,
        [(b - a) / tenth * 1e6 for a, b in itertools.pairwise(course_s) if a and b],
    )


def _cost(before: Edge, after: Edge, jobs: int) -> Cost:
    client_s = cpu_between(before.hand_cpu_s, after.hand_cpu_s)
    return Window.between(before.reading, after.reading, client_s).cost(jobs)


def _check(connection: psycopg.Connection[Any], jobs: int) -> None:
    rows = dict(connection.execute("select state, count(*) from jobq.jobs group by state").fetchall())
    if rows != {"completed": jobs}:
        raise BenchError(f"{jobs} jobs should be completed, and there are {rows}")


def _results(lab: Lab, tenth: int, case: str, runs: Sequence[Run]) -> Iterator[Result]:
    last = Cost.median([run.last for run in runs])
    first = Cost.median([run.first for run in runs])
    course_us = [Spread.of(tenths).median for tenths in zip(*(run.course_us for run in runs), strict=True)]
    settings = lab.settings(
        slots=None if case == "bare loop" else SLOTS, jobs=tenth * TENTHS, waiting=WAITING
    )
    figures = {
        "buffer hits": ("hits/job", [(run.last_hits, run.first_hits) for run in runs]),
        "server CPU": (
            "µs/job",
            [(run.last.server_cpu_us or 0.0, run.first.server_cpu_us or 0.0) for run in runs],
        ),
    }
    if last.server_cpu_us is None:  # nobody can tell on this system
        del figures["server CPU"]
    for name, (unit, pairs) in figures.items():
        yield Result(
            bench="horizon",
            case=f"{case}, {name}",
            value=Spread.of([value for value, _ in pairs]),
            unit=unit,
            yardstick=Spread.of([yardstick for _, yardstick in pairs]),
            yardstick_name=f"the first {tenth:,} of {TENTHS * tenth:,} jobs",
            ratio=ratios([value for value, _ in pairs], [yardstick for _, yardstick in pairs]),
            runs=len(runs),
            cost=last,
            yardstick_cost=first,
            floor=WRITER_FLOOR if "writer" in case else FLOOR,
            settings=settings,
            details={"course_us": course_us},
        )
