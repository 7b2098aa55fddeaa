"""Retention: what it costs to remove a finished job, and whether that keeps up with full speed.

There are three cases:

* removal: the leader's own statement in a tight loop, on jobs that have all reached their age. Beside it
  payload rows alone are deleted, in batches of the same size. The figure is server CPU a job;
* a pinned horizon: the same while some other transaction keeps every dead row. The figure is the last tenth
  of the jobs beside the first, in shared-buffer hits;
* a full cycle: jobs are enqueued in bulk and drained by a worker that leads, and that removes them two
  seconds after their end, the soonest that there is. Beside it the same worker keeps them. ``overdue_s``
  says how long after its time the oldest job that is still there should have been removed, at the end.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jobq
from jobq._bench import payload, workload
from jobq._bench.horizon import Flow
from jobq._bench.lab import BenchError, Window
from jobq._bench.meter import cpu_between, server_cpu_s
from jobq._bench.rates import rate_result
from jobq._bench.result import Cost, Floor, Result, Spread, ratios
from jobq._bench.workload import DrainReply
from jobq._operation import run as run_operation
from jobq._postgres import execute, sync_cursor
from jobq._sessions import SyncSession
from jobq._statements.duties import Registration, register
from jobq._statements.leader import elect
from jobq._statements.retention import BATCH, Walk, read_retention, remove_finished, rules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Database, Lab
    from jobq._operation import Call, Operation, Rows

T = TypeVar("T")

SCHEMA: Final = "jobq"
FLOOR: Final = Floor("value", 4.0, at_least=False)
FLAT: Final = Floor("ratio", 1.2, at_least=False)
TENTHS: Final = 10
SLOTS: Final = 200
_LEASE_S: Final = 3600.0
_REST_S: Final = 1.2  # longer than a session keeps its statistics to itself
_SETTLE_S: Final = 0.1  # until they have arrived
_TIMEOUT_S: Final = 20.0
WARM_UP: Final = 2_000
SOONEST_S: Final = 2.0  # after its end no job is removed sooner
LED: Final = "select from jobq.leader where lease_until > clock_timestamp()"
OLDEST: Final = """
select coalesce(extract(epoch from clock_timestamp() - min(finished_at)), 0)::float8 from jobq.finished
"""

# Batches of 250 outcomes have one moment each, as a worker's have.
FILL: Final = """
with made as materialized (
    select nextval('jobq.job_id_seq') as id, n from generate_series(1, %(jobs)s) n
), j as (
    insert into jobq.job (id, kind, args, max_attempts, timeout_s)
    select id, %(kind)s, %(args)s, 25, 3600 from made
)
insert into jobq.finished
    (job_id, state, finished_at, claimed_at, queue, priority, worker_id, attempt, failures, crashes)
select id, 'completed', at, at, 'default', 0, 1, 1, 0, 0
from made, lateral (select now() - interval '2 days' + (n / 250) * interval '10 ms' as at) t
order by id
"""

DELETE_PAYLOADS: Final = """
with x as (
    delete from payload where ctid = any (array(
        select ctid from payload where id > $1::int8 order by id limit $2::int4))
    returning id
)
select count(*), max(id) from x
"""


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=200_000, quick=40_000, tiny=4_000)
    rounds = lab.pick(full=5, quick=2, tiny=1)
    yield _removal(lab, jobs, rounds)
    yield _pinned(lab, lab.pick(full=500_000, quick=100_000, tiny=60_000), lab.pick(full=3, quick=1, tiny=1))
    yield _cycle(lab, lab.pick(full=300_000, quick=100_000, tiny=1_000), lab.pick(full=3, quick=1, tiny=1))


# -- removal -------------------------------------------------------------------------------------------


def _removal(lab: Lab, jobs: int, rounds: int) -> Result:
    ours: list[tuple[Window, int]] = []
    bare: list[Window] = []
    for _ in range(rounds):
        with lab.database() as database, lab.hands(1) as [hand], database.connect() as connection:
            _fill(connection, jobs)
            payload.create(connection)
            connection.execute(
                "insert into payload (kind, args, max_attempts, timeout_s)"
                " select %s, %s, 25, 3600 from generate_series(1, %s)",
                [payload.KIND, payload.ARGS_JSON, jobs],
            )
            connection.execute("vacuum analyze")
            connection.execute("checkpoint")
            bare.append(_window(lab, hand, delete_payloads, database, jobs))
            hits = _hits(lab, database)
            ours.append((_window(lab, hand, remove, database, jobs), hits))
            ours[-1] = (ours[-1][0], _hits(lab, database) - hits)
            _expect(connection, 0)
    values, yardsticks = [[_server_us(w, jobs) for w in ws] for ws in ([w for w, _ in ours], bare)]
    return Result(
        bench="retention",
        case="removal",
        value=Spread.of(values),
        unit="µs/job",
        yardstick=Spread.of(yardsticks),
        yardstick_name=f"DELETE of {BATCH:,} payload rows",
        ratio=ratios(values, yardsticks),
        runs=rounds,
        cost=Cost.median([window.cost(jobs) for window, _ in ours]),
        yardstick_cost=Cost.median([window.cost(jobs) for window in bare]),
        floor=FLOOR,
        settings=lab.settings(slots=None, batch=BATCH),
        details={
            "jobs": jobs,
            "jobs_per_s": Spread.of([jobs / window.seconds for window, _ in ours]).median,
            "hits_per_job": Spread.of([hits / jobs for _, hits in ours]).median,
        },
    )


def _window(lab: Lab, hand: Hand, work: Callable[..., DrainReply], database: Database, jobs: int) -> Window:
    before = lab.meter.read()
    reply = hand.call(work, database.dsn, jobs, lab.meter.postmaster_pid).value
    wal_bytes = lab.meter.read().wal_bytes - before.wal_bytes
    return Window(reply.seconds, reply.server_cpu_s, reply.client_cpu_s, wal_bytes)


def _server_us(window: Window, jobs: int) -> float:
    return (window.server_cpu_s or 0.0) / jobs * 1e6


def _hits(lab: Lab, database: Database) -> int:
    """Return the buffer hits of sessions that have ended, which have all reported."""
    time.sleep(_REST_S)
    return lab.meter.buffer_hits(database.name)


def _fill(connection: psycopg.Connection[Any], jobs: int) -> None:
    connection.execute(FILL, {"jobs": jobs, "kind": payload.KIND, "args": payload.ARGS_JSON})


def _expect(connection: psycopg.Connection[Any], jobs: int) -> None:
    [row] = connection.execute(
        "select (select count(*) from jobq.finished), (select count(*) from jobq.job)"
    ).fetchall()
    if row != (jobs, jobs):
        raise BenchError(f"{jobs} finished jobs should be left, and there are {row}")


class Remover:
    """A leader's connection, its term and its walk."""

    def __init__(self, dsn: str) -> None:
        self._session = SyncSession.open(dsn, schema=SCHEMA, name="remover", plan_settings=True)
        cursor = sync_cursor(self._session.connection)
        self._execute: Callable[[Call], Rows] = lambda call: execute(cursor, call, prepare=True)
        self._run(register(SCHEMA, Registration(1, "remover", "here", 1, "0", [], []), _LEASE_S))
        term = self._run(elect(SCHEMA, 1, "remover", _LEASE_S))
        assert term is not None
        self._term = term
        self._walk = Walk(rules(self._run(read_retention(SCHEMA)))[0])

    def turn(self) -> int:
        """Remove a batch; return how many jobs that were."""
        removed = self._run(remove_finished(SCHEMA, self._term, self._walk))
        self._walk = removed.walk
        return removed.jobs

    def close(self) -> None:
        """Close the connection."""
        self._session.close()

    def _run(self, operation: Operation[T]) -> T:
        return run_operation(operation, self._execute)


def remove(dsn: str, jobs: int, postmaster_pid: int) -> DrainReply:
    """Remove so many jobs. For a hand."""
    remover = Remover(dsn)
    try:
        return _timed(remover.turn, jobs, postmaster_pid)
    finally:
        remover.close()


def delete_payloads(dsn: str, jobs: int, postmaster_pid: int) -> DrainReply:
    """Delete so many payload rows. For a hand."""
    session = SyncSession.open(dsn, schema=SCHEMA, name="deleter", plan_settings=True)
    cursor = sync_cursor(session.connection)
    last = 0

    def turn() -> int:
        nonlocal last
        cursor.execute(DELETE_PAYLOADS, [str(last), str(BATCH)], prepare=True)
        row = cursor.fetchone()
        assert row is not None
        count, last = row
        return int(count)

    try:
        return _timed(turn, jobs, postmaster_pid)
    finally:
        session.close()


def _timed(turn: Callable[[], int], jobs: int, postmaster_pid: int) -> DrainReply:
    """Take turns until so many rows are gone; return what that took, while the session lives."""
    server_s, client_s, began_s = server_cpu_s(postmaster_pid), time.process_time(), time.perf_counter()
    done = 0
    while done < jobs:
        turned = turn()
        assert turned, f"nothing more to remove after {done} of {jobs} jobs"
        done += turned
    return DrainReply.since(server_s, client_s, time.perf_counter() - began_s, postmaster_pid)


# -- a pinned horizon ------------------------------------------------------------------------------------


class PinnedRun(NamedTuple):
    """Buffer hits a job in the first tenth and in the last, and what a job cost there."""

    first: float
    last: float
    cost: Cost


def _pinned(lab: Lab, jobs: int, rounds: int) -> Result:
    runs = [_pinned_once(lab, jobs) for _ in range(rounds)]
    first, last = [run.first for run in runs], [run.last for run in runs]
    return Result(
        bench="retention",
        case="pinned horizon",
        value=Spread.of(last),
        unit="hits/job",
        yardstick=Spread.of(first),
        yardstick_name=f"the first {jobs // TENTHS:,} of {jobs:,} jobs",
        ratio=ratios(last, first),
        runs=rounds,
        cost=Cost.median([run.cost for run in runs]),
        floor=FLAT,
        settings=lab.settings(slots=None, batch=BATCH),
    )


def _pinned_once(lab: Lab, jobs: int) -> PinnedRun:
    with lab.database() as database, database.connect() as connection, database.connect() as pinning:
        _fill(connection, jobs)
        connection.execute("vacuum analyze")
        pinning.execute("begin isolation level repeatable read")
        pinning.execute("select count(*) from jobq.finished")
        remover = Remover(database.dsn)
        edges, cost = [_edge(lab, database, remover, 0)], Cost()
        for tenth in (1, TENTHS - 1, TENTHS):
            before, cpu_s, done = lab.meter.read(), time.process_time(), edges[-1][1]
            while done < tenth * jobs // TENTHS - BATCH:
                done += remover.turn()
            window = Window.between(before, lab.meter.read(), time.process_time() - cpu_s)
            cost = window.cost(done - edges[-1][1])
            edges.append(_edge(lab, database, remover, done))
        remover.close()
        _expect(connection, jobs - edges[-1][1])
    first, _, last = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(edges)]
    return PinnedRun(first, last, cost)


def _edge(lab: Lab, database: Database, remover: Remover, done: int) -> tuple[int, int]:
    """Remove one batch after a rest, so that the session reports; return its hits, and the jobs so far."""
    time.sleep(_REST_S)
    done += remover.turn()
    time.sleep(_SETTLE_S)
    return lab.meter.buffer_hits(database.name), done


# -- a full cycle ------------------------------------------------------------------------------------------


def _cycle(lab: Lab, jobs: int, rounds: int) -> Result:
    ours: list[tuple[int, Window]] = []
    keeping: list[tuple[int, Window]] = []
    overdue: list[float] = []
    for _ in range(rounds):
        keeping.append((jobs, _cycle_once(lab, jobs, removes=False)[0]))
        window, overdue_s = _cycle_once(lab, jobs, removes=True)
        ours.append((jobs, window))
        overdue.append(overdue_s)
    result = rate_result(
        "retention",
        "full cycle",
        ours,
        keeping,
        yardstick_name="the same, and all finished jobs are kept",
        floor=None,
        settings=lab.settings(slots=SLOTS),
    )
    return replace(result, details={**result.details, "overdue_s": max(overdue)})


def _cycle_once(lab: Lab, jobs: int, *, removes: bool) -> tuple[Window, float]:
    """Return the window, and for how long the oldest job that should be gone has been there."""
    with lab.database() as database, lab.hands(1) as [hand], database.connect() as connection:
        with jobq.Client(database.dsn) as client:
            client.queues.set_retention(completed=timedelta(0) if removes else "keep")
        hand.start(workload.follow, database.dsn, jobs + WARM_UP + 1, SLOTS)  # one more: it says good-bye
        with Flow(lab, database.dsn, database.name, hand) as flow:
            workload.await_one_row(connection, LED, _TIMEOUT_S)
            flow.push(WARM_UP)
            flow.rest()
            before, cpu_s = lab.meter.read(), hand.cpu_s()
            flow.push(jobs)
            window = Window.between(before, lab.meter.read(), cpu_between(cpu_s, hand.cpu_s()))
            [(age_s,)] = connection.execute(OLDEST).fetchall()
            flow.push(1)
            hand.result()
    return window, max(0.0, age_s - SOONEST_S) if removes else 0.0
