"""What each action writes for the rows ``m`` of a window: CTEs that end in how many were changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobq._statements.control import ALERT
from jobq._statements.enqueue import NOTIFY
from jobq._statements.retake import RETAKE
from jobq._types import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from jobq._statements.filter import Query

_MINE: Final = "ctid = any (array(select tid from m))"


class Written(NamedTuple):
    """The composed part of a statement.

    Attributes:
        ctes: what it does, with ``m`` before it.
        done: SQL of how many jobs were changed.
        conflicting, holders: SQL of two arrays: jobs that could not be, and who stands in their way.
        sent: SQL that makes PostgreSQL send what is to be sent.
    """

    ctes: str
    done: str = "(select count(*) from x)"
    conflicting: str = "null::int8[]"
    holders: str = "null::int8[]"
    sent: str = "null"


class When(NamedTuple):
    """A moment: one that was given, or so many seconds from the database's now."""

    run_at: datetime | None
    delay_s: float = 0.0

    def described(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {"delay_s": self.delay_s} if self.run_at is None else {"run_at": self.run_at.isoformat()}


class Settings(NamedTuple):
    """What actions need to know beside the jobs.

    Attributes:
        when: for a reschedule.
        queue, priority: for a move; ``None`` leaves it.
        notify: whether workers are told.
    """

    when: When = When(None)
    queue: str | None = None
    priority: int | None = None
    notify: bool = True


def _table(state: JobState) -> str:
    return "finished" if state.is_terminal else state.value


def _told(query: Query, settings: Settings, rows: str) -> str:
    """Return the CTE that tells listeners of queues, ``rows`` being where their names stand."""
    return f"""n as materialized (
    select pg_catalog.count({NOTIFY}) as sent from (select distinct queue from {rows}) q
    where {query.bind(settings.notify, "bool")}
)"""


def cancel(query: Query, state: JobState, settings: Settings, entry: Sequence[str]) -> Written:
    """End those that wait; ask the workers of those that run."""
    reason = f"nullif({query.bind(entry[3], 'text')}, '')"
    if state is JobState.RUNNING:
        ctes = f"""x as (
    insert into {{schema}}.cancel_request (job_id, reason, requested_by)
    select job_id, {reason}, {query.bind(entry[0], "text")} from m order by job_id
    on conflict (job_id) do nothing returning job_id
), n as materialized (
    select {ALERT} as sent from (select from x limit 1) q where {query.bind(settings.notify, "bool")}
)"""
        return Written(ctes, sent="(select sent from n)")
    return Written(f"""x as (
    delete from {{schema}}.{_table(state)} where {_MINE}
    returning job_id, queue, priority, attempt, failures, crashes
), f as (
    insert into {{schema}}.finished (job_id, state, queue, priority, attempt, failures, crashes, reason)
    select job_id, 'cancelled', queue, priority, attempt, failures, crashes, {reason} from x
)""")


def retry(query: Query, state: JobState, settings: Settings, entry: Sequence[str]) -> Written:
    """Make finished ones ready again, but those whose key another job holds."""
    del state, entry
    ctes = f"""l as materialized (
    select ctid as tid, job_id, attempt from {{schema}}.finished
    where {_MINE} order by ctid for update
), {RETAKE}, x as (
    delete from {{schema}}.finished where ctid = any (array(
        select tid from l where job_id not in (select job_id from lost)))
    returning job_id, queue, priority, attempt
), r as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt)
    select job_id, queue, priority, attempt from x
), c as (
    delete from {{schema}}.cancel_request where job_id in (select job_id from x)
), {_told(query, settings, "x")}"""
    return Written(
        ctes,
        conflicting="(select pg_catalog.array_agg(job_id order by job_id) from lost)",
        holders="(select pg_catalog.array_agg(holder order by job_id) from lost)",
        sent="(select sent from n)",
    )


def delete(query: Query, state: JobState, settings: Settings, entry: Sequence[str]) -> Written:
    """Remove them with all that belongs to them. The leader forgets their keys, which nothing holds now."""
    del query, settings, entry
    return Written(f"""x as (
    delete from {{schema}}.{_table(state)} where {_MINE} returning job_id
), p as (
    delete from {{schema}}.job where id = any (array(select job_id from x))
    returning id, unique_key, unique_generation
), e as (
    delete from {{schema}}.attempt_error where job_id = any (array(select job_id from x))
), k as (
    update {{schema}}.unique_key set held_until = '-infinity' where ctid = any (array(
        select k.tid from p cross join lateral (
            select ctid as tid from {{schema}}.unique_key
            where key = p.unique_key and generation = p.unique_generation and job_id = p.id
              and held_until > statement_timestamp() limit 1) k))
)""")


def reschedule(query: Query, state: JobState, settings: Settings, entry: Sequence[str]) -> Written:
    """Give them another time; a ready one whose time has come already stays as it is."""
    del entry
    when = settings.when
    moment = (
        f"(statement_timestamp() + {query.bind(when.delay_s, 'float8')} * interval '1 second')"
        if when.run_at is None
        else query.bind(when.run_at, "timestamptz")
    )
    if state is JobState.SCHEDULED:
        # Never before now, where the promoters' marks have passed.
        return Written(f"""x as (
    update {{schema}}.scheduled set run_at = greatest({moment}, statement_timestamp())
    where {_MINE} returning job_id
)""")
    ctes = f"""y as (
    delete from {{schema}}.ready where ctid = any (array(
        select tid from m where {moment} > statement_timestamp()))
    returning job_id, queue, priority, attempt, failures, crashes
), s as (
    insert into {{schema}}.scheduled (job_id, run_at, reason, queue, priority, attempt, failures, crashes)
    select job_id, {moment}, 'scheduled', queue, priority, attempt, failures, crashes from y
), x as materialized (
    select job_id from y union all select job_id from m where {moment} <= statement_timestamp()
)"""
    return Written(ctes)


def move(query: Query, state: JobState, settings: Settings, entry: Sequence[str]) -> Written:
    """Put them at the end of another lane: where they were, the marks of that lane may have passed."""
    del entry
    queue, priority = query.bind(settings.queue, "text"), query.bind(settings.priority, "int2")
    where = f"queue = coalesce({queue}, queue), priority = coalesce({priority}, priority)"
    if state is JobState.SCHEDULED:
        return Written(f"""x as (
    update {{schema}}.scheduled set {where} where {_MINE} returning job_id
)""")
    ctes = f"""x as (
    update {{schema}}.ready set {where}, xid = pg_current_xact_id() where {_MINE} returning job_id, queue
), {_told(query, settings, "x")}"""
    return Written(ctes, sent="(select sent from n)")


WRITERS: Final[Mapping[str, Callable[[Query, JobState, Settings, Sequence[str]], Written]]] = {
    "cancel": cancel,
    "retry": retry,
    "delete": delete,
    "reschedule": reschedule,
    "move": move,
}
