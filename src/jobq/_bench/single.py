"""Single: one `Client.enqueue` at a time, each its own transaction, beside INSERTs of the payload row.

There are two yardsticks. The bare INSERT is the least that psycopg offers: a prepared statement through a
cursor, its parameters ready as text, in a tight loop on a connection of its own. (Sent by libpq alone, as
`Client.enqueue` sends its statement, it makes 1.15 of that with one client, and 1.5 with 16.) The
application's INSERT is what one would write instead of an enqueue: it takes a connection from a pool, and
makes JSON of the same arguments. `Client.enqueue` does as much as that one.

Each client is a process. All of them do the same for a while, then all do the next, in turns: all
see the same machine. Nobody listens on the queue, so no enqueue sends a notification; asking
whether somebody does is part of it.
"""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import psycopg
import psycopg_pool
from psycopg.types.json import Jsonb

import jobq
from jobq._bench import payload, workload
from jobq._bench.hands import call_all
from jobq._bench.lab import Window
from jobq._bench.rates import rate_result
from jobq._bench.result import Floor, Result
from jobq._postgres import sync_cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jobq._bench.hands import Hand
    from jobq._bench.lab import Lab
    from jobq._postgres import SyncCursor

FLOORS: Final = {1: Floor("ratio", 0.8), 16: Floor("ratio", 0.6)}
_BATCH: Final = 20  # operations between two looks at the clock


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    for clients, floor in FLOORS.items():
        yield from _measure(lab, clients, floor)


def _measure(lab: Lab, clients: int, floor: Floor) -> Iterator[Result]:
    rounds = lab.pick(full=40, quick=9, tiny=1)
    slice_s = lab.pick(full=0.5, quick=0.25, tiny=0.1)
    ours: list[tuple[int, Window]] = []
    bare: list[tuple[int, Window]] = []
    application: list[tuple[int, Window]] = []
    turns = [(insert_payloads, bare), (enqueue, ours), (insert_as_applications_do, application)]
    with lab.database() as database, lab.hands(clients) as hands:
        with database.connect() as connection:
            payload.create(connection)
        for work, _ in turns:
            call_all(hands, work, database.dsn, 0.0)  # connects, prepares
        for number in range(rounds):
            # whoever comes later may profit or suffer: they take turns in that too
            for work, windows in turns if number % 2 else reversed(turns):
                windows.append(slice_of(lab, hands, work, database.dsn, slice_s))
    case = f"{clients} client{'s' if clients > 1 else ''}"
    settings = lab.settings(slots=None, clients=clients, listeners=0)
    for which, name, yardstick in (
        (case, "bare INSERT of the payload row, in a tight loop", bare),
        (f"{case}, application", "an application's INSERT of the payload row, through a pool", application),
    ):
        yield rate_result(
            "single",
            which,
            ours,
            yardstick,
            yardstick_name=name,
            floor=floor if yardstick is bare else None,
            settings=settings,
        )


def slice_of(
    lab: Lab, hands: Sequence[Hand], work: Callable[[str, float], int], dsn: str, seconds: float
) -> tuple[int, Window]:
    """Have all hands do the same for a while; return how often they did, and the window."""
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
    return repeat(lambda: client.enqueue(workload.EMAIL, workload.EMAIL_ARGS), seconds)


def insert_payloads(dsn: str, seconds: float) -> int:
    """Insert payload rows for so long; return how many. For a hand, which keeps its connection."""
    cursor = _cursor(dsn)
    return repeat(lambda: payload.insert_one(cursor), seconds)


@functools.cache
def _pool(dsn: str) -> psycopg_pool.ConnectionPool[Any]:
    pool = psycopg_pool.ConnectionPool(dsn, kwargs={"autocommit": True}, min_size=1, max_size=10, open=False)
    pool.open(wait=True)
    return pool


def insert_as_applications_do(dsn: str, seconds: float) -> int:
    """Insert payload rows for so long, each through a pool and with its JSON made. For a hand."""
    pool = _pool(dsn)

    def insert() -> None:
        with pool.connection() as connection:
            args = Jsonb(asdict(workload.EMAIL_ARGS))
            connection.execute(payload.INSERT_PLAIN, [payload.KIND, args, 25, 3600.0]).fetchone()

    return repeat(insert, seconds)


def repeat(operation: Callable[[], object], seconds: float) -> int:
    """Do something for so long; return how often."""
    done = 0
    end_s = time.monotonic() + seconds
    while not done or time.monotonic() < end_s:
        for _ in range(_BATCH):
            operation()
        done += _BATCH
    return done
