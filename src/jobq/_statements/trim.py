"""What else grows and has an end: ticks of schedules, the operators' log, workers, keys of periods.

Small tables, trimmed in small bites; all of them by the leader, with its term.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from jobq._operation import Call, Operation, in_schema
from jobq._statements.leader import LED, Deposed, Term

BITE: Final = 1_000  # rows that one statement removes, or looks at, at the most

# A tick's row keeps it from being made twice; one so old has been dealt with for good, since the
# schedule's next tick lies far behind it.
_TICKS: Final = f"""
with {LED}, x as (
    delete from {{schema}}.periodic_tick where ctid = any (array(
        select ctid from {{schema}}.periodic_tick
        where made_at < clock_timestamp() - $3::float8 * interval '1 second' and exists (select from led)
        order by made_at limit $4::int4))
    returning 1
)
select (select count(*) from led), (select count(*) from x)
"""

# By id, which is the order of time here, so that the log needs no index for this.
_LOG: Final = f"""
with {LED}, oldest as materialized (
    select ctid as tid, at from {{schema}}.operator_log where exists (select from led)
    order by id limit $4::int4
), x as (
    delete from {{schema}}.operator_log where ctid = any (array(
        select tid from oldest where at < clock_timestamp() - $3::float8 * interval '1 second'))
    returning 1
)
select (select count(*) from led), (select count(*) from x)
"""

_WORKERS: Final = f"""
with {LED}, x as (
    delete from {{schema}}.worker where ctid = any (array(
        select ctid from {{schema}}.worker
        where ended_at < clock_timestamp() - $3::float8 * interval '1 second' and exists (select from led)
          and id <> all (array(select distinct worker_id from {{schema}}.running))
        limit $4::int4))
    returning 1
)
select (select count(*) from led), (select count(*) from x)
"""

# Rows of keys whose jobs are gone: those that a period held when their job was removed, or that an enqueue
# had locked, or that an operator's retry left under an earlier generation. All keys are walked in their
# order, from a place ($3, $4) that the caller keeps. What somebody has locked is left for the next walk.
_KEYS: Final = f"""
with {LED}, seen as materialized (
    select ctid as tid, key, generation, job_id, held_until from {{schema}}.unique_key
    where exists (select from led) and (key, generation) > ($3::bytea, $4::int4)
    order by key, generation limit $5::int4
), free as materialized (
    select u.tid
    from (select tid from seen s
          where coalesce(held_until, '-infinity') <= statement_timestamp()
            and (select 1 from {{schema}}.job where id = s.job_id limit 1) is null) s
    cross join lateral (
        select ctid as tid from {{schema}}.unique_key where ctid = s.tid for update skip locked) u
), x as (
    delete from {{schema}}.unique_key where ctid = any (array(select tid from free)) returning 1
), last as materialized (
    select key, generation from seen order by key desc, generation desc limit 1
)
select (select count(*) from led), (select count(*) from x), (select count(*) from seen),
       (select key from last), (select generation from last)
"""


class KeyPlace(NamedTuple):
    """How far the keys have been walked."""

    key: bytes
    generation: int


FIRST_KEY: Final = KeyPlace(b"", 0)


def forget_ticks(schema: str, term: Term, older_s: float) -> Operation[int]:
    """Remove up to :data:`BITE` ticks that were dealt with longer than ``older_s`` seconds ago.

    Raises:
        Deposed: the term is over.
    """
    return (yield from _trim(_TICKS, schema, term, older_s))


def forget_log(schema: str, term: Term, older_s: float) -> Operation[int]:
    """Remove up to :data:`BITE` entries of the operators' log that are older than that."""
    return (yield from _trim(_LOG, schema, term, older_s))


def forget_workers(schema: str, term: Term, older_s: float) -> Operation[int]:
    """Remove up to :data:`BITE` workers that ended longer ago than that and hold nothing."""
    return (yield from _trim(_WORKERS, schema, term, older_s))


def _trim(sql: str, schema: str, term: Term, older_s: float) -> Operation[int]:
    rows = yield Call(in_schema(sql, schema), (*term, older_s, BITE))
    if not rows[0][0]:
        raise Deposed(f"term {term.number} is over")
    count: int = rows[0][1]
    return count


def forget_keys(schema: str, term: Term, place: KeyPlace) -> Operation[tuple[int, KeyPlace]]:
    """Look at the next :data:`BITE` rows of unique keys, and remove those that nothing needs.

    Args:
        schema: where.
        term: the leader's.
        place: what the last call returned, or `FIRST_KEY`.

    Returns:
        How many were removed, and where to go on: `FIRST_KEY` when all have been looked at.

    Raises:
        Deposed: the term is over.
    """
    rows = yield Call(in_schema(_KEYS, schema), (*term, *place, BITE))
    led, removed, seen, key, generation = rows[0]
    if not led:
        raise Deposed(f"term {term.number} is over")
    return removed, KeyPlace(bytes(key), generation) if seen >= BITE else FIRST_KEY
