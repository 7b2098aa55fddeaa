"""Bulk: `Client.enqueue_many` in calls of 1,000.

The yardstick is what must be stored at the least: the payload rows alone, by an INSERT of 1,000
rows, prepared, each call in its own transaction, over as bare a connection as psycopg has. Our
call validates and encodes each job's arguments, inserts the payload and the lane's row, and
answers with every id.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import psycopg

import jobq
from jobq._bench import payload, workload
from jobq._bench.lab import Window
from jobq._bench.rates import rate_result
from jobq._bench.result import Floor, Result
from jobq._postgres import sync_cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Lab
    from jobq._postgres import SyncCursor

FLOOR: Final = Floor("value", 80_000)


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=200_000, quick=100_000, tiny=2_000)
    rounds = lab.pick(full=7, quick=3, tiny=1)
    ours: list[tuple[int, Window]] = []
    bare: list[tuple[int, Window]] = []
    for _ in range(rounds):
        # both in one database: created afresh, for a table of millions is another measurement
        with lab.database() as database, lab.hands(1) as [hand]:
            with database.connect() as connection:
                payload.create(connection)
            bare.append((jobs, _window(lab, hand, insert_payloads, database.dsn, jobs)))
            ours.append((jobs, _window(lab, hand, enqueue, database.dsn, jobs)))
    yield rate_result(
        "bulk",
        f"calls of {workload.BULK_CALL:,}",
        ours,
        bare,
        yardstick_name=f"INSERT of {workload.BULK_CALL:,} payload rows",
        floor=FLOOR,
        settings=lab.settings(slots=None, clients=1),
    )


def _window(lab: Lab, hand: Hand, work: Callable[[str, int], None], dsn: str, jobs: int) -> Window:
    hand.call(work, dsn, workload.BULK_CALL)  # connects, prepares, warms up
    before = lab.meter.read()
    reply = hand.call(work, dsn, jobs)
    return Window.between(before, lab.meter.read(), reply.cpu_s)


@functools.cache
def _client(dsn: str) -> jobq.Client:
    client = jobq.Client(dsn)
    client.open()
    return client


@functools.cache
def _cursor(dsn: str) -> SyncCursor:
    return sync_cursor(psycopg.connect(dsn, autocommit=True))


def enqueue(dsn: str, jobs: int) -> None:
    """Enqueue so many jobs. For a hand, which keeps its client."""
    workload.fill(_client(dsn), jobs)


def insert_payloads(dsn: str, jobs: int) -> None:
    """Insert so many payload rows. For a hand, which keeps its connection."""
    cursor = _cursor(dsn)
    for _ in range(0, jobs, workload.BULK_CALL):
        payload.insert_many(cursor, [payload.ARGS_JSON] * workload.BULK_CALL)
