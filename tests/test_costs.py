"""What a job costs, counted and not timed: round trips, statements, and buffer hits beside a long history."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

import jobq
from jobq._bench.stock import FINISHED, SCHEDULED
from jobq._bench.wire import Counts, Wire
from jobq._marks import LaneMarks
from jobq._statements.cancel import cancel_job
from jobq._statements.claim import claim, refresh
from jobq._statements.duties import promote, renew
from jobq._statements.enqueue import enqueue_one
from jobq._statements.outcomes import complete, settle
from tests.support.storage import BOOM, SCHEMA, Storage, enqueue_rows, hold, job_row, settlement
from tests.test_plans import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._operation import Call

BATCH: Final = 100
WORKER: Final = 1

pytestmark = pytest.mark.matrix


# -- round trips ---------------------------------------------------------------------------------------


@pytest.fixture
def wire(dsn: str) -> Iterator[Wire]:
    with Wire(dsn) as wire:
        yield wire


def counted(wire: Wire, work: Callable[[], object]) -> Counts:
    before = wire.read()
    work()
    return wire.read().since(before)


def test_an_enqueue_is_one_statement_and_one_round_trip(wire: Wire) -> None:
    with jobq.Client(wire.address) as client:
        client.enqueue("email", {"to": "ada"})  # connects, and prepares

        assert counted(wire, lambda: client.enqueue("email", {"to": "ada"})) == Counts(1, 1, 0)


@pytest.mark.parametrize("jobs", [10, 1_000])
def test_however_many_jobs_a_call_enqueues_it_is_one_round_trip(wire: Wire, jobs: int) -> None:
    many = [jobq.NewJob("email", {"to": "ada"})] * jobs
    with jobq.Client(wire.address) as client:
        client.enqueue_many(many)

        assert counted(wire, lambda: client.enqueue_many(many)) == Counts(1, 1, 0)


def test_in_a_caller_s_transaction_an_enqueue_adds_one_round_trip_and_nothing_else(wire: Wire) -> None:
    with jobq.Client(wire.address) as client, psycopg.connect(wire.address) as connection:
        for _ in range(2):
            connection.execute("select 1")
            client.enqueue("email", {"to": "ada"}, tx=connection)
            connection.commit()
        connection.execute("select 1")  # begins

        spent = counted(wire, lambda: client.enqueue("email", {"to": "ada"}, tx=connection))

    assert (spent.statements, spent.round_trips) == (1, 1)  # preparing it is the connection's own business


@pytest.mark.parametrize("slots", [20, 200])
async def test_a_worker_on_a_full_queue_makes_a_fraction_of_a_round_trip_a_job(
    wire: Wire, dsn: str, slots: int
) -> None:
    jobs, total, done = jobq.Jobs(), 4_000, 0
    all_ran = asyncio.Event()

    @jobs.handler("email")
    async def send(job: jobq.Job, args: dict[str, str]) -> None:
        nonlocal done
        done += 1
        if done == total:
            all_ran.set()

    async with jobq.AsyncClient(dsn) as client:
        await client.enqueue_many([jobq.NewJob("email", {"to": "ada"})] * total)
    async with jobq.AsyncClient(wire.address) as client:
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(queues={"default": slots}))
        running = asyncio.create_task(worker.run(handle_signals=False))
        await all_ran.wait()
        await worker.stop()
        await running
    spent = wire.read()

    # One claim and one record for at least twenty jobs, and everything that it took to start and to stop.
    # A worker that asked for each job by itself would make two a job.
    assert spent.round_trips <= total / 20 * 2 + 200, spent
    assert spent.statements <= total / 20 * 2 + 200, spent


# -- buffer hits beside a long history -------------------------------------------------------------------

# Both lengths give the indexes of ids the same depth: a level more costs each look-up a hit, and should.
SHORT: Final = 20_000
LONG: Final = 80_000


def add_history(store: Storage, rows: int) -> None:
    store.session.connection.execute(FINISHED, {"rows": rows})
    store.session.connection.execute(SCHEDULED, {"rows": rows // 4})


def hits(store: Storage, call: Call) -> int:
    plan = explain(store, call, "analyze, buffers, timing off,")
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def hits_of_hot_statements(store: Storage) -> dict[str, int]:
    """Return what each hot statement reads, for the same work on the same few live jobs."""
    row, marks = job_row(), LaneMarks()
    found = {
        "enqueue": hits(store, hold(enqueue_one(SCHEMA, row, notify=True))),
        "enqueue many": hits(store, hold(enqueue_rows([row] * (3 * BATCH - 1), notify=True))),
        "refresh": hits(store, hold(refresh(SCHEMA, "default", marks.ranges(), 0.0))),
        "claim": hits(store, hold(claim(SCHEMA, "default", marks.ranges(), BATCH, WORKER))),
    }
    fences = [(int(i), int(a)) for i, a in store.sql("select job_id, attempt from jobq.running order by 1")]
    failing = store.claim(WORKER, BATCH)
    failures = [settlement(job, "scheduled", "retry", failure=BOOM) for job in failing]
    found["complete"] = hits(store, hold(complete(SCHEMA, WORKER, fences, {})))
    found["fail"] = hits(store, hold(settle(SCHEMA, WORKER, "w", failures, notify=True)))
    found["promote"] = hits(store, hold(promote(SCHEMA, None, BATCH, notify=True)))
    found["renew"] = hits(store, hold(renew(SCHEMA, WORKER, 60.0)))
    [job_id] = store.enqueue(1)
    found["cancel"] = hits(store, hold(cancel_job(SCHEMA, job_id)))
    store.sql("delete from jobq.ready")
    return found


@pytest.mark.parametrize("statistics", ["of an empty moment", "fresh"])
def test_no_hot_statement_reads_more_beside_a_longer_history(dsn: str, statistics: str) -> None:
    with Storage(dsn) as store:
        store.worker(WORKER)
        store.sql("analyze")
        for table in ("job", "ready", "scheduled", "running", "finished"):
            store.sql(f"alter table jobq.{table} set (autovacuum_enabled = off)")
        courses: list[dict[str, int]] = []
        for rows in (SHORT, LONG):
            add_history(store, rows)
            if statistics == "fresh":
                store.sql("analyze")
            hits_of_hot_statements(store)  # extends tables, warms catalogues
            courses.append(hits_of_hot_statements(store))
    short, long = courses
    for name, read in short.items():
        assert long[name] <= 1.15 * read + 5, f"{name}: {read} → {long[name]}"
