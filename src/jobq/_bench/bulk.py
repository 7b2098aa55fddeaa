"""Bulk: `Client.enqueue_many` in calls of 1,000, and of 100,000.

The yardstick is what must be stored at the least: the payload rows alone, by an INSERT of as many
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
LARGE_CALL: Final = 100_000


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=200_000, quick=100_000, tiny=2_000)
    yield _measure(lab, jobs, workload.BULK_CALL, lab.pick(full=7, quick=3, tiny=1))
    large = lab.pick(full=LARGE_CALL, quick=LARGE_CALL, tiny=2_000)
    yield _measure(lab, max(jobs, large), large, lab.pick(full=5, quick=2, tiny=1))


def _measure(lab: Lab, jobs: int, call: int, rounds: int) -> Result:
    ours: list[tuple[int, Window]] = []
    bare: list[tuple[int, Window]] = []
    for _ in range(rounds):
        # both in one database: created afresh, for a table of millions is another measurement
        with lab.database() as database, lab.hands(1) as [hand]:
            with database.connect() as connection:
                payload.create(connection)
            bare.append((jobs, _window(lab, hand, insert_payloads, database.dsn, jobs, call)))
            ours.append((jobs, _window(lab, hand, enqueue, database.dsn, jobs, call)))
    return rate_result(
        "bulk",
        "calls of 1,000" if call == workload.BULK_CALL else "large calls",
        ours,
        bare,
        yardstick_name=f"INSERT of {call:,} payload rows",
        floor=FLOOR if call == workload.BULK_CALL else None,
        settings=lab.settings(slots=None, clients=1, call=call),
    )


def _window(
    lab: Lab, hand: Hand, work: Callable[[str, int, int], None], dsn: str, jobs: int, call: int
) -> Window:
    hand.call(work, dsn, workload.BULK_CALL, workload.BULK_CALL)  # connects, prepares, warms up
    before = lab.meter.read()
    reply = hand.call(work, dsn, jobs, call)
    return Window.between(before, lab.meter.read(), reply.cpu_s)


@functools.cache
def _client(dsn: str) -> jobq.Client:
    client = jobq.Client(dsn)
    client.open()
    return client


@functools.cache
def _cursor(dsn: str) -> SyncCursor:
    return sync_cursor(psycopg.connect(dsn, autocommit=True))


def enqueue(dsn: str, jobs: int, call: int) -> None:
    """Enqueue so many jobs. For a hand, which keeps its client."""
    workload.fill(_client(dsn), jobs, call=call)


def insert_payloads(dsn: str, jobs: int, call: int) -> None:
    """Insert so many payload rows. For a hand, which keeps its connection."""
    cursor = _cursor(dsn)
    for _ in range(0, jobs, call):
        payload.insert_many(cursor, [payload.ARGS_JSON] * call)
