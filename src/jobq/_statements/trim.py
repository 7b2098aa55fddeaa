"""What else grows and has an end: ticks of schedules, the operators' log, workers.

Small tables, trimmed in small bites; all of them by the leader, with its term.
"""

from __future__ import annotations

from typing import Final

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
