"""The auditor of a load that is held for long: it reconciles counts where `auditor` reconciles notes.

Producers counted what they were told to exist, workers what they started, how it ended, and what they were
told to be recorded (see `ledger`), and PostgreSQL itself counts the rows that came to stand in a table and
left it. Nothing was hurt meanwhile, so all of them must say the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.chaos.auditor import Problem
from tests.chaos.ledger import COMPLETED, MADE, RAISED, REFUSED, STARTED, Totals, tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

SCHEDULE: Final = "every second"  # the name of the only one


@dataclass(slots=True)
class Books:
    """What the tables say when all has ended.

    Attributes:
        waiting: jobs that are ready, scheduled or running.
        given_up: jobs that ended otherwise than completed.
        finished: jobs that have ended and are still there.
        torn: payloads without a place, and places without a payload.
        came, left: rows that were inserted into `finished`, and deleted there, as PostgreSQL counts them.
        ticks: when the schedule ticked, in seconds, and the job that it made.
        workers_ended: workers whose lease ended before they were told to stop.
        keys_doubled: keys that were seen held by two live jobs at once.
    """

    waiting: int = 0
    given_up: int = 0
    finished: int = 0
    torn: int = 0
    came: int = 0
    left: int = 0
    ticks: list[tuple[int, int | None]] = field(default_factory=list[tuple[int, "int | None"]])
    workers_ended: int = 0
    keys_doubled: set[str] = field(default_factory=set[str])


@dataclass(frozen=True, slots=True)
class Account:
    """All that there is to reconcile."""

    producers: Totals
    workers: Totals
    books: Books


def what_was_acknowledged_completes_once(account: Account) -> Iterator[object]:
    """What was told to exist is completed, once, and so is each tick's job; and nothing else is."""
    ticks = tally(job_id for _, job_id in account.books.ticks if job_id is not None)
    asked, completed = account.producers[MADE] + ticks, account.workers[COMPLETED]
    if asked != completed:
        yield f"acknowledged or ticked {asked}, completed {completed}"


def each_start_ends_once(account: Account) -> Iterator[object]:
    """A handler's start ends in the recorded completion of its job, or it raised; none is in vain."""
    started, ended = account.workers[STARTED], account.workers[COMPLETED] + account.workers[RAISED]
    if started != ended:
        yield f"started {started}, completed or raised {ended}"


def the_tables_tell_the_same(account: Account) -> Iterator[object]:
    """As many jobs came to be finished as completed, and those that retention did not remove are there."""
    books = account.books
    if books.came != account.workers[COMPLETED].count:
        yield f"{books.came} came to be finished, {account.workers[COMPLETED].count} were completed"
    if books.came - books.left != books.finished:
        yield f"of {books.came} finished ones {books.left} left, and {books.finished} are there"
    if books.torn:
        yield f"{books.torn} payloads without a place, or places without a payload"


def no_call_is_refused(account: Account) -> Iterator[object]:
    """Nothing is wrong, so no enqueue fails."""
    if refused := account.producers[REFUSED].count:
        yield f"{refused} calls"


def nothing_is_stranded(account: Account) -> Iterator[object]:
    """With time to work it all off, nothing waits or runs."""
    if account.books.waiting:
        yield f"{account.books.waiting} jobs"


def nothing_is_given_up(account: Account) -> Iterator[object]:
    """Every job completes."""
    if account.books.given_up:
        yield f"{account.books.given_up} jobs"


def each_second_has_its_tick(account: Account) -> Iterator[object]:
    """A schedule of every second makes a job each second, whatever else there is to do."""
    seconds = [second for second, _ in account.books.ticks]
    wanted = set(range(min(seconds), max(seconds) + 1)) if seconds else {0}
    yield from (f"second {missed} was missed" for missed in sorted(wanted - set(seconds)))
    yield from (f"second {second} has no job" for second, job_id in account.books.ticks if job_id is None)


def workers_keep_their_leases(account: Account) -> Iterator[object]:
    """Nobody who lives is called dead."""
    if account.books.workers_ended:
        yield f"{account.books.workers_ended} workers"


def keys_are_held_once(account: Account) -> Iterator[object]:
    """No two jobs of one unique key live at once."""
    yield from (f"{key} held twice" for key in account.books.keys_doubled)


PROMISES: Final = (
    what_was_acknowledged_completes_once,
    each_start_ends_once,
    the_tables_tell_the_same,
    no_call_is_refused,
    nothing_is_stranded,
    nothing_is_given_up,
    each_second_has_its_tick,
    workers_keep_their_leases,
    keys_are_held_once,
)


def reckon(account: Account) -> list[Problem]:
    """Hold an account against every promise."""
    found = ((promise.__name__, list(promise(account))) for promise in PROMISES)
    return [Problem(name, what) for name, what in found if what]


# -- what the database says ---------------------------------------------------------------------------

_WAITING: Final = """
select (select count(*) from jobq.ready) + (select count(*) from jobq.scheduled)
     + (select count(*) from jobq.running)
"""
_WORKERS: Final = "select count(*) from jobq.worker where ended_at is null"
_COUNTS: Final = """
select (select count(*) from jobq.finished where state <> 'completed'), (select count(*) from jobq.finished),
       (select count(*) from jobq.job j full join jobq.finished f on f.job_id = j.id
        where j.id is null or f.job_id is null)
"""
_CAME_AND_LEFT: Final = (
    "select n_tup_ins, n_tup_del from pg_stat_user_tables where relid = 'jobq.finished'::regclass"
)
_TICKS: Final = """
select extract(epoch from tick)::int8, job_id from jobq.periodic_tick where skipped is null order by tick
"""


def waiting(connection: psycopg.Connection) -> int:
    """Return how many jobs have not ended."""
    return _one(connection, _WAITING)[0]


def workers(connection: psycopg.Connection) -> int:
    """Return how many workers have not ended."""
    return _one(connection, _WORKERS)[0]


def read_books(connection: psycopg.Connection, workers_ended: int, keys_doubled: set[str]) -> Books:
    """Read what the tables say, once all who wrote there have ended: by then they have told of all of it."""
    given_up, finished, torn = _one(connection, _COUNTS)
    came, left = _one(connection, _CAME_AND_LEFT)
    ticks = connection.execute(_TICKS).fetchall()
    return Books(
        waiting(connection), given_up, finished, torn, came, left, ticks, workers_ended, keys_doubled
    )


def _one(connection: psycopg.Connection, sql: str) -> tuple[int, ...]:
    row: tuple[int, ...] | None = connection.execute(sql.encode()).fetchone()
    assert row is not None
    return row
