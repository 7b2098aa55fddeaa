"""Single: one `Client.enqueue` at a time, each its own transaction, beside a bare INSERT.

Each client is a process with its own connection. All of them do the same for a while, then all do
the other, in turns: both see the same machine. Nobody listens on the queue, so no enqueue sends a
notification; asking whether somebody does is part of it.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final

import psycopg

import jobq
from bench import payload, workload
from bench.hands import call_all
from bench.lab import Window
from bench.rates import rate_result
from bench.result import Floor, Result
from jobq._postgres import sync_cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.hands import Hand
    from bench.lab import Lab
    from jobq._postgres import SyncCursor

FLOORS: Final = {1: Floor("ratio", 0.8), 16: Floor("ratio", 0.6)}
_BATCH: Final = 20  # operations between two looks at the clock


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    for clients, floor in FLOORS.items():
        yield _measure(lab, clients, floor)


def _measure(lab: Lab, clients: int, floor: Floor) -> Result:
    rounds = lab.pick(full=40, quick=12, tiny=1)
    slice_s = lab.pick(full=0.5, quick=0.25, tiny=0.1)
    ours: list[tuple[int, Window]] = []
    bare: list[tuple[int, Window]] = []
    with lab.database() as database, lab.hands(clients) as hands:
        with database.connect() as connection:
            payload.create(connection)
        for work in (insert_payloads, enqueue):
            call_all(hands, work, database.dsn, 0.0)  # connects, prepares
        for number in range(rounds):
            # whoever comes second may profit or suffer: they take turns in that too
            turns = [(insert_payloads, bare), (enqueue, ours)]
            for work, windows in turns if number % 2 else reversed(turns):
                windows.append(_slice(lab, hands, work, database.dsn, slice_s))
    return rate_result(
        "single",
        f"{clients} client{'s' if clients > 1 else ''}",
        ours,
        bare,
        yardstick_name="bare INSERT of the payload row",
        floor=floor,
        settings=lab.settings(slots=None, clients=clients, listeners=0),
    )


def _slice(
    lab: Lab, hands: Sequence[Hand], work: Callable[[str, float], int], dsn: str, seconds: float
) -> tuple[int, Window]:
    before = lab.meter.read()
    replies = call_all(hands, work, dsn, seconds)
    window = Window.between(before, lab.meter.read(), sum(reply.cpu_s for reply in replies))
    return sum(reply.value for reply in replies), window


@functools.cache
def _client(dsn: str) -> jobq.Client:
    client = jobq.Client(dsn)
    client.open()
    return client


@functools.cache
def _cursor(dsn: str) -> SyncCursor:
    return sync_cursor(psycopg.connect(dsn, autocommit=True))


def enqueue(dsn: str, seconds: float) -> int:
    """Enqueue for so long; return how many jobs. For a hand, which keeps its client."""
    client = _client(dsn)
    return _repeat(lambda: client.enqueue(workload.EMAIL, workload.EMAIL_ARGS), seconds)


def insert_payloads(dsn: str, seconds: float) -> int:
    """Insert payload rows for so long; return how many. For a hand, which keeps its connection."""
    cursor = _cursor(dsn)
    return _repeat(lambda: payload.insert_one(cursor), seconds)


def _repeat(operation: Callable[[], object], seconds: float) -> int:
    done = 0
    end_s = time.monotonic() + seconds
    while not done or time.monotonic() < end_s:
        for _ in range(_BATCH):
            operation()
        done += _BATCH
    return done
