"""Notify: what it costs an enqueue to wake somebody, beside a bare INSERT of the payload row.

There are three cases, each with 1 and 16 clients: a client that never notifies; the usual one while
nobody waits, which asks a lock and sends nothing; and the usual one while somebody waits all the
time, so that each enqueue sends a notification, and its commit takes the server's one lock for them.
A busy worker does not wait, so of a stream of jobs only the first is notified of.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Final

import psycopg

import jobq
from jobq._bench import payload, workload
from jobq._bench.hands import call_all
from jobq._bench.rates import rate_result
from jobq._bench.single import insert_payloads, repeat, slice_of
from jobq._operation import in_schema
from jobq._statements.enqueue import notify_channel

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from jobq._bench.lab import Database, Lab, Window
    from jobq._bench.result import Result

SCHEMA: Final = "jobq"
ARM: Final = "select pg_advisory_lock_shared(hashtext({schema_name}), hashtext('default'))"
STOP: Final = "bench_stop"
_LISTEN_TIMEOUT_S: Final = 240.0
_READY_TIMEOUT_S: Final = 30.0
WAITS: Final = """
select from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and granted
"""


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    for clients in (1, 16):
        yield from _measure(lab, clients)


def _measure(lab: Lab, clients: int) -> Iterator[Result]:
    rounds = lab.pick(full=20, quick=5, tiny=1)
    slice_s = lab.pick(full=0.5, quick=0.25, tiny=0.1)
    bare: list[tuple[int, Window]] = []
    cases: dict[str, list[tuple[int, Window]]] = {"off": [], "nobody waits": [], "each notifies": []}
    with lab.database() as database, lab.hands(clients) as hands:
        with database.connect() as connection:
            payload.create(connection)
        for work in (insert_payloads, enqueue, enqueue_silently):
            call_all(hands, work, database.dsn, 0.0)  # connects, prepares
        for _ in range(rounds):
            bare.append(slice_of(lab, hands, insert_payloads, database.dsn, slice_s))
            cases["off"].append(slice_of(lab, hands, enqueue_silently, database.dsn, slice_s))
            cases["nobody waits"].append(slice_of(lab, hands, enqueue, database.dsn, slice_s))
            with _somebody_waits(lab, database):
                cases["each notifies"].append(slice_of(lab, hands, enqueue, database.dsn, slice_s))
    for name, windows in cases.items():
        yield rate_result(
            "notify",
            f"{name}, {clients} client{'s' if clients > 1 else ''}",
            windows,
            bare,
            yardstick_name="bare INSERT of the payload row",
            floor=None,
            settings=lab.settings(slots=None, clients=clients),
        )


@contextlib.contextmanager
def _somebody_waits(lab: Lab, database: Database) -> Generator[None]:
    with lab.hands(1) as [listener], database.connect() as connection:
        listener.start(wait, database.dsn)
        workload.await_one_row(connection, WAITS, _READY_TIMEOUT_S)
        yield
        connection.execute("select pg_notify(%s, '')", [STOP])
        listener.result()


def wait(dsn: str) -> int:
    """Wait as an idle worker does, but never claim; return how many notifications came. For a hand."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f'listen "{notify_channel(SCHEMA)}"'.encode())
        connection.execute(f"listen {STOP}".encode())
        connection.execute(in_schema(ARM, SCHEMA).encode())
        heard = 0
        for notification in connection.notifies(timeout=_LISTEN_TIMEOUT_S):
            if notification.channel == STOP:
                break
            heard += 1
        return heard


@functools.cache
def _client(dsn: str, *, notify: bool) -> jobq.Client:
    client = jobq.Client(dsn, notify=notify)
    client.open()
    return client


def enqueue(dsn: str, seconds: float) -> int:
    """Enqueue for so long; return how many jobs. For a hand, which keeps its client."""
    return _enqueue(_client(dsn, notify=True), seconds)


def enqueue_silently(dsn: str, seconds: float) -> int:
    """Do the same and wake nobody."""
    return _enqueue(_client(dsn, notify=False), seconds)


def _enqueue(client: jobq.Client, seconds: float) -> int:
    return repeat(lambda: client.enqueue(workload.EMAIL, workload.EMAIL_ARGS), seconds)


# -- in a caller's transaction ---------------------------------------------------------------------------

ORDER: Final = "insert into customer_order (customer, total) values (%s, %s)"
CREATE_ORDERS: Final = """
create table if not exists customer_order (
    id bigint generated always as identity primary key, customer text not null, total numeric not null
)
"""


def run_in_transactions(lab: Lab) -> Iterator[Result]:
    """Measure an application's transaction with an enqueue in it, beside the same with an INSERT."""
    rounds = lab.pick(full=20, quick=7, tiny=1)
    slice_s = lab.pick(full=0.5, quick=0.25, tiny=0.1)
    bare: list[tuple[int, Window]] = []
    ours: list[tuple[int, Window]] = []
    turns = [(order_and_insert, bare), (order_and_enqueue, ours)]
    with lab.database() as database, lab.hands(1) as hands:
        with database.connect() as connection:
            payload.create(connection)
            connection.execute(CREATE_ORDERS)
        for work, _ in turns:
            call_all(hands, work, database.dsn, 0.0)
        for number in range(rounds):
            for work, windows in turns if number % 2 else reversed(turns):
                windows.append(slice_of(lab, hands, work, database.dsn, slice_s))
    yield rate_result(
        "transaction",
        "1 client",
        ours,
        bare,
        yardstick_name="the same transaction with an INSERT of the payload row instead",
        floor=None,
        settings=lab.settings(slots=None, clients=1, library="psycopg"),
    )


@functools.cache
def _connection(dsn: str) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn)


def order_and_enqueue(dsn: str, seconds: float) -> int:
    """Write an order and enqueue a job in one transaction, for so long. For a hand."""
    client, connection = _client(dsn, notify=True), _connection(dsn)

    def once() -> None:
        connection.execute(ORDER, ["Ada", 12])
        client.enqueue(workload.EMAIL, workload.EMAIL_ARGS, tx=connection)
        connection.commit()

    return repeat(once, seconds)


def order_and_insert(dsn: str, seconds: float) -> int:
    """Write an order and a payload row in one transaction, for so long. For a hand."""
    connection = _connection(dsn)
    cursor = psycopg.RawCursor(connection)

    def once() -> None:
        connection.execute(ORDER, ["Ada", 12])
        payload.insert_one(cursor)
        connection.commit()

    return repeat(once, seconds)
