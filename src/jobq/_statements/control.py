"""Control: what workers are told while they run, and how they learn of it.

Requests to cancel and pauses are rows. Each worker reads what concerns it once a second, so that
nothing depends on a notification; one without a payload, on a channel of its own, only makes
workers look at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobq._operation import Call, Operation, in_schema, quote_literal
from jobq._statements.enqueue import enqueue_sql

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_APPLIED: Final = 500  # requests that one pass looks at

ALERT: Final = "pg_notify({control}, '')::text"
"""SQL that makes workers look at once; :func:`control_sql` puts the channel's name in."""

# The requests are looked up by the worker's own jobs, which are few, and not at all while there are none.
_POLL: Final = """
select scope, name, null::int8, null::text from {schema}.pause
where until is null or until > clock_timestamp()
union all
select 'job', null, o.job_id, c.reason
from pg_catalog.unnest($1::int8[]) o(job_id)
cross join lateral (select reason from {schema}.cancel_request where job_id = o.job_id limit 1) c
where exists (select from {schema}.cancel_request)
union all
select 'open', null, null, null where exists (select from {schema}.cancel_request)
"""

# What the job's worker did not come to: it failed or was handed back before it heard of the request,
# or its worker died. A job is in exactly one table of any snapshot, so that one which is in none of
# the live ones has ended. Requests are locked first: an operator's retry, which removes them, waits.
_APPLY: Final = """
with c as materialized (
    select ctid as tid, job_id, reason from {schema}.cancel_request
    order by ctid limit $1::int4 for update skip locked
), r as (
    delete from {schema}.ready where ctid = any (array(
        select l.tid from c cross join lateral (
            select ctid as tid from {schema}.ready where job_id = c.job_id limit 1) l))
    returning job_id, queue, priority, attempt, failures, crashes
), s as (
    delete from {schema}.scheduled where ctid = any (array(
        select l.tid from c cross join lateral (
            select ctid as tid from {schema}.scheduled where job_id = c.job_id limit 1) l))
    returning job_id, queue, priority, attempt, failures, crashes
), w as materialized (
    select * from r union all select * from s
), f as (
    insert into {schema}.finished (job_id, state, queue, priority, attempt, failures, crashes, reason)
    select w.job_id, 'cancelled', w.queue, w.priority, w.attempt, w.failures, w.crashes, c.reason
    from w join c on c.job_id = w.job_id
    on conflict do nothing
), d as (
    delete from {schema}.cancel_request where ctid = any (array(
        select c.tid from c where exists (select from w where w.job_id = c.job_id) or coalesce(
            (select 1 from {schema}.ready where job_id = c.job_id limit 1),
            (select 1 from {schema}.scheduled where job_id = c.job_id limit 1),
            (select 1 from {schema}.running where job_id = c.job_id limit 1)) is null))
)
select job_id from w
"""


class Orders(NamedTuple):
    """What one poll told a worker.

    Attributes:
        queues, kinds: that are paused now.
        cancels: of the worker's own jobs, those that are to be cancelled, with the reason.
        has_requests: whether anybody's request to cancel stands open.
    """

    queues: frozenset[str]
    kinds: frozenset[str]
    cancels: dict[int, str | None]
    has_requests: bool


def control_channel(schema: str) -> str:
    """Return the channel on which workers are told to look; bounded like the queues' own."""
    return f"jobq-control:{schema}".encode()[:63].decode(errors="ignore")


def control_sql(text: str, schema: str) -> str:
    """Return a statement that may hold :data:`ALERT` and enqueue notifications, for one schema."""
    return enqueue_sql(text.replace("{control}", quote_literal(control_channel(schema))), schema)


def poll(schema: str, job_ids: Sequence[int]) -> Operation[Orders]:
    """Read what a worker that holds these jobs must know."""
    rows = yield Call(in_schema(_POLL, schema), (list(job_ids),))
    return Orders(
        frozenset(name for scope, name, _, _ in rows if scope == "queue"),
        frozenset(name for scope, name, _, _ in rows if scope == "kind"),
        {job_id: reason for scope, _, job_id, reason in rows if scope == "job"},
        any(row[0] == "open" for row in rows),
    )


def apply_requests(schema: str) -> Operation[list[int]]:
    """Cancel jobs that were asked to be and wait, forget requests whose job has ended; return the former."""
    return [row[0] for row in (yield Call(in_schema(_APPLY, schema), (MAX_APPLIED,)))]
