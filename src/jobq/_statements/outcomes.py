"""Outcomes: how a claimed job leaves `running`.

Every statement here begins with the fence: it deletes from `running` by (job_id, attempt,
worker_id) and acts only on what that returned. A row that is gone is a lost lease; its outcome
changes nothing, and the caller counts it.

The row is found by LATERAL with LIMIT 1 for each job, and deleted by ctid: joined to an array
directly, the planner, told by ANALYZE that `running` is empty, reads the whole table (3 s for one
batch). By ctid and in order is also the lock order that keeps all writers free of deadlocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from jobq._operation import Call, Operation, in_schema
from jobq._statements.enqueue import NOTIFY, enqueue_sql

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_ERRORS_KEPT: Final = 20  # attempts whose error a job keeps; older ones are dropped and counted

Fence: TypeAlias = tuple[int, int]  # (job_id, attempt); the worker's id is the third part

Target: TypeAlias = Literal["scheduled", "ready", "discarded", "cancelled"]


class Failure(NamedTuple):
    """How an attempt failed, as it is kept in the job's history."""

    outcome: str
    type: str
    message: str
    traceback: str


class Settlement(NamedTuple):
    """What becomes of one claimed job that did not complete.

    Attributes:
        to: the table, or the terminal state, that it goes to.
        reason: why it waits, or why it ended.
        delay_s: seconds until it is due, where it goes to ``scheduled``.
        failed: whether this run counts against ``max_attempts``.
        failure: what to add to the history.
    """

    job_id: int
    attempt: int
    to: Target
    reason: str | None = None
    delay_s: float = 0.0
    failed: bool = False
    failure: Failure | None = None


_FENCE: Final = """
    select {columns} ctid as tid from {schema}.running
    where job_id = o.job_id and attempt = o.attempt and worker_id = $3::int8 limit 1"""

# One row: those that it had, or NULL where it had all; none where it had none. A row for each job costs a
# twentieth of the whole.
# Results are rare, and one JSON document of them costs the common batch nothing. The sub-select has
# it parsed once: beside the column it is parsed for each job (500 results of 1 kB: 290 ms).
COMPLETE: Final = f"""
with u as (
    delete from {{schema}}.running where ctid = any (array(
        select r.tid from unnest($1::int8[], $2::int4[]) o(job_id, attempt)
        cross join lateral ({_FENCE.format(columns="", schema="{schema}")}) r))
    returning *
), f as (
    insert into {{schema}}.finished
        (job_id, state, claimed_at, queue, priority, worker_id, attempt, failures, crashes, result)
    select job_id, 'completed', claimed_at, queue, priority, worker_id, attempt, failures, crashes,
           (select $4::text::jsonb) -> job_id::text
    from u
)
select case when count(*) < pg_catalog.cardinality($1::int8[])::int8 then pg_catalog.array_agg(job_id) end
from u having count(*) > 0::int8
"""

# `on conflict`: where somebody wrote the tables by hand, the job may stand in the target already. It is
# not lost then, and must leave `running` all the same, or its outcome would be refused for ever.
# A job that an operator wants cancelled is, whatever else was decided before its worker knew.
# Where there is no failure its texts are empty: a NULL in an array is a text where `array_nulls` is off,
# and through a pooler a worker sets nothing.
SETTLE: Final = f"""
with x as materialized (
    select r.tid, o.job_id, o.attempt, o.delay_s, o.failed, nullif(o.outcome, '') as outcome, o.type,
           o.message, o.traceback,
           coalesce(c.target, o.target) as target,
           case when c.target is null then o.reason else c.reason end as reason
    from unnest($1::int8[], $2::int4[], $4::text[], $5::text[], $6::float8[], $7::int4[],
                $8::text[], $9::text[], $10::text[], $11::text[])
         o(job_id, attempt, target, reason, delay_s, failed, outcome, type, message, traceback)
    cross join lateral ({_FENCE.format(columns="", schema="{schema}")}) r
    left join lateral (
        select 'cancelled' as target, reason from {{schema}}.cancel_request
        where job_id = o.job_id and o.target <> 'cancelled' limit 1) c on true
    order by r.tid
), u as (
    delete from {{schema}}.running r using x where r.ctid = x.tid
    returning r.job_id, r.worker_id, r.claimed_at, r.queue, r.priority, r.attempt,
              least(r.failures, 2147483646) + x.failed as failures,
              r.crashes, x.target, x.reason, x.delay_s, x.outcome, x.type, x.message, x.traceback
), ready as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt, failures, crashes)
    select job_id, queue, priority, attempt, failures, crashes from u where target = 'ready'
    on conflict do nothing
), scheduled as (
    insert into {{schema}}.scheduled (job_id, run_at, reason, queue, priority, attempt, failures, crashes)
    select job_id, statement_timestamp() + delay_s * interval '1 second', reason,
           queue, priority, attempt, failures, crashes
    from u where target = 'scheduled'
    on conflict do nothing
), finished as (
    insert into {{schema}}.finished
        (job_id, state, claimed_at, queue, priority, worker_id, attempt, failures, crashes, reason)
    select job_id, target, claimed_at, queue, priority, worker_id, attempt, failures, crashes, reason
    from u where target in ('discarded', 'cancelled')
    on conflict do nothing
), e as (
    insert into {{schema}}.attempt_error
        (job_id, attempt, outcome, type, message, traceback, worker_id, worker, started_at, omitted)
    select job_id, attempt, outcome, type, message, traceback, worker_id, $12::text, claimed_at,
           coalesce((select omitted from {{schema}}.attempt_error a where a.job_id = u.job_id
                     order by attempt desc limit 1), 0)
           + greatest((select count(*) from {{schema}}.attempt_error a
                       where a.job_id = u.job_id) - $13::int4 + 1, 0)
    from u where outcome is not null
    on conflict do nothing
), dropped as (
    delete from {{schema}}.attempt_error where ctid in (
        select d.tid from u cross join lateral (
            select ctid as tid from {{schema}}.attempt_error a where a.job_id = u.job_id
            order by attempt desc offset $13::int4 - 1
        ) d where u.outcome is not null)
), n as materialized (
    select pg_catalog.count({NOTIFY}) as sent from (select distinct queue from u where target = 'ready') q
    where $14::bool
)
select job_id, (select sent from n) from u
"""

# A worker that ends in order gives everything back that it still holds, whatever that is. Only for
# a process that is gone, or that can prove that nothing of these rows still runs.
RELEASE: Final = f"""
with s as materialized (
    select ctid as tid from {{schema}}.running
    where worker_id = $1::int8 and job_id <> all ($2::int8[]) order by ctid
), d as (
    delete from {{schema}}.running where ctid = any (array(select tid from s)) returning *
), u as materialized (
    select d.*, c.job_id is not null as asked, c.reason from d left join lateral (
        select job_id, reason from {{schema}}.cancel_request where job_id = d.job_id limit 1) c on true
), i as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt, failures, crashes)
    select job_id, queue, priority, attempt, failures, crashes from u where not asked
    on conflict do nothing
), f as (
    insert into {{schema}}.finished
        (job_id, state, claimed_at, queue, priority, worker_id, attempt, failures, crashes, reason)
    select job_id, 'cancelled', claimed_at, queue, priority, worker_id, attempt, failures, crashes, reason
    from u where asked
    on conflict do nothing
), e as (
    update {{schema}}.worker set ended_at = clock_timestamp(), end_reason = 'stopped'
    where $3::bool and id = $1::int8 and ended_at is null
), n as materialized (
    select pg_catalog.count({NOTIFY}) as sent from (select distinct queue from u) q
)
select job_id, (select sent from n) from u
"""

FIND_FINISHED: Final = """
select f.job_id from unnest($1::int8[], $2::int4[]) o(job_id, attempt)
cross join lateral (
    select job_id from {schema}.finished f
    where f.job_id = o.job_id and f.attempt = o.attempt and f.worker_id = $3::int8 limit 1
) f
"""


def complete(
    schema: str, worker_id: int, fences: Sequence[Fence], results: Mapping[int, str]
) -> Operation[set[int]]:
    """Record jobs as completed; ``results`` are JSON texts by job id. Returns the ids that it had."""
    document = "{" + ",".join(f'"{job_id}":{text}' for job_id, text in results.items()) + "}"
    ids, attempts = [f[0] for f in fences], [f[1] for f in fences]
    rows = yield Call(in_schema(COMPLETE, schema), (ids, attempts, worker_id, document))
    if not rows:
        return set()
    [(some,)] = rows
    return set(ids) if some is None else set(some)


def settle(
    schema: str, worker_id: int, worker_name: str, settlements: Sequence[Settlement], *, notify: bool
) -> Operation[set[int]]:
    """Record what became of jobs that did not complete. Returns the ids that it had."""
    failures = [s.failure for s in settlements]
    parameters = (
        [s.job_id for s in settlements],
        [s.attempt for s in settlements],
        worker_id,
        [s.to for s in settlements],
        [s.reason for s in settlements],
        [s.delay_s for s in settlements],
        [int(s.failed) for s in settlements],
        *([f[column] if f else "" for f in failures] for column in range(4)),
        worker_name,
        MAX_ERRORS_KEPT,
        notify,
    )
    rows = yield Call(enqueue_sql(SETTLE, schema), parameters)
    return {row[0] for row in rows}


def release(
    schema: str, worker_id: int, keep: Sequence[int] = (), *, ends: bool = False
) -> Operation[list[int]]:
    """Hand back every job that a worker still holds, but those in ``keep``. Returns their ids.

    Args:
        schema: where the queue lives.
        worker_id: who held them.
        keep: jobs that it goes on with.
        ends: declare the worker ended by the same statement, so that nobody can start one of these jobs
            while its former worker seems to be alive.
    """
    rows = yield Call(enqueue_sql(RELEASE, schema), (worker_id, list(keep), ends))
    return [row[0] for row in rows]


def find_finished(schema: str, worker_id: int, fences: Sequence[Fence]) -> Operation[set[int]]:
    """Return which of these attempts stand in ``finished``: for a batch whose reply was lost."""
    ids, attempts = [f[0] for f in fences], [f[1] for f in fences]
    rows = yield Call(in_schema(FIND_FINISHED, schema), (ids, attempts, worker_id))
    return {row[0] for row in rows}
