"""The leader: one worker that does the fleet's duties, by a lease in one row of the database.

A term is one reign: it grows with each election and is never used twice. Every write of a leader
carries its own, and begins by locking the leader's row with `for key share` (`LED`). The term is a
key of that table, so that

- an election waits for no writer (it skips a row that is locked, and is tried again), and no writer
  is overtaken in the middle: while its statement runs, nobody else can be elected;
- a write that was decided before an election and comes to the server after it finds another term,
  and changes nothing;
- a renewal, which changes no key, waits for no write and makes none wait.

There is no session lock, so it works through a transaction pooler, and a process that is frozen
keeps nothing: its lease runs out by the database's clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

from jobq._errors import Error
from jobq._operation import Call, Operation, atomic, in_schema

T = TypeVar("T")

LED: Final = """led as materialized (
    select term from {schema}.leader
    where worker_id = $1::int8 and term = $2::int8 and lease_until > clock_timestamp()
    for key share
)"""
"""The first CTE of every write of a leader; its parameters are a :class:`Term`.

The write itself asks ``where exists (select from led)``, so that it locks nothing else before.
"""

# A leader that has been declared dead, or has ended, is no leader even if its lease still runs: a
# supervisor that saw its child die makes the next election possible at once. Nor is one whose lease ends
# later than a lease from now, as long as its own as a worker: the clock was set back since, and who
# knows whether it still leads; if it does, it costs a change of the leader.
_ELECT: Final = """
with free as materialized (
    select l.ctid as tid from {schema}.leader l
    where (l.lease_until <= clock_timestamp() or exists (
            select from {schema}.worker w where w.id = l.worker_id and (w.ended_at is not null
                or l.lease_until > clock_timestamp() + (w.lease_until - w.heartbeat_at))))
      and exists (select from {schema}.worker w where w.id = $1::int8 and w.ended_at is null)
    for update of l skip locked
)
update {schema}.leader
set term = term + 1, worker_id = $1::int8, worker = $2::text, elected_at = clock_timestamp(),
    lease_until = clock_timestamp() + $3::float8 * interval '1 second'
where ctid = any (array(select tid from free))
returning term
"""

_RENEW: Final = """
update {schema}.leader set lease_until = clock_timestamp() + $3::float8 * interval '1 second'
where worker_id = $1::int8 and term = $2::int8 and lease_until > clock_timestamp()
returning term
"""

_RESIGN: Final = """
update {schema}.leader set lease_until = '-infinity'
where worker_id = $1::int8 and term = $2::int8
returning term
"""

_LOCK: Final = f"with {LED} select term from led"

# Whoever freezes in the middle of a transaction must not keep the row locked for ever.
_LIMIT_IDLE: Final = "select set_config('idle_in_transaction_session_timeout', $1::text, true)"
_LONGEST_IDLE_S: Final = 5.0


class Term(NamedTuple):
    """One reign of one worker: the first two parameters of every statement with :data:`LED`.

    Attributes:
        worker_id: the identity under which it was elected.
        number: grows with each election.
    """

    worker_id: int
    number: int


class Deposed(Error):
    """The term is over: somebody else leads, or nobody does. Nothing was written. Never seen by users."""


def elect(schema: str, worker_id: int, worker: str, lease_s: float) -> Operation[Term | None]:
    """Try to become the leader. ``None``: somebody else is, or this identity has ended."""
    rows = yield Call(in_schema(_ELECT, schema), (worker_id, worker, lease_s))
    return Term(worker_id, rows[0][0]) if rows else None


def renew_term(schema: str, term: Term, lease_s: float) -> Operation[bool]:
    """Lead on, from now for ``lease_s`` seconds. ``False``: the term is over, for good."""
    return bool((yield Call(in_schema(_RENEW, schema), (*term, lease_s))))


def resign(schema: str, term: Term) -> Operation[bool]:
    """End a term, so that a successor is elected at once. ``False``: it was over already."""
    return bool((yield Call(in_schema(_RESIGN, schema), term)))


def led(schema: str, term: Term, operation: Operation[T]) -> Operation[T]:
    """Run an operation of several statements as the leader, in one transaction.

    The leader's row stays locked to the end of it, so no statement within needs :data:`LED`.

    Raises:
        Deposed: the term is over; nothing was written.
    """
    return atomic(_led(schema, term, operation))


def _led(schema: str, term: Term, operation: Operation[T]) -> Operation[T]:
    yield Call(_LIMIT_IDLE, (f"{_LONGEST_IDLE_S * 1000:.0f}ms",))
    if not (yield Call(in_schema(_LOCK, schema), term)):
        raise Deposed(f"term {term.number} is over")
    return (yield from operation)
