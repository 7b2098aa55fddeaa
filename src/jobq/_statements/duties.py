"""Duties that any worker does for all: register and renew leases, promote due jobs, rescue.

None needs a leader. Promotion and rescue choose their rows with SKIP LOCKED and delete them by
ctid, so that two workers that do the same duty at once share the work; a decision that was
overtaken changes no row, since the row that it was about is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobq._operation import Call, Operation, Row, in_schema
from jobq._statements.enqueue import NOTIFY, enqueue_sql
from jobq._types import AttemptError, Job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

ANY_TIME_US: Final = 2**63 - 1

# Which server this is, until it is started anew. In whole microseconds: a role's settings round a float.
SERVER: Final = "(extract(epoch from pg_postmaster_start_time()) * 1000000.0)::int8"

REGISTER: Final = f"""
insert into {{schema}}.worker (id, name, host, pid, version, queues, kinds, periodics, lease_until)
values ($1::int8, $2::text, $3::text, $4::int4, $5::text, $6::text[], $7::text[], $8::text[],
        clock_timestamp() + $9::float8 * interval '1 second')
returning {SERVER}
"""

# Renews only what has not been declared over: whoever ended the lease may have given the jobs away.
RENEW: Final = """
update {schema}.worker
set heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + $2::float8 * interval '1 second'
where id = $1::int8 and ended_at is null
returning id
"""

END: Final = """
update {schema}.worker set ended_at = clock_timestamp(), end_reason = $2::text
where id = $1::int8 and ended_at is null
returning id
"""

# While the server was away nobody could renew: its start counts as a renewal of all leases. What the caller
# knows of the same sort counts, too ($2; $3 is the latest that the clock can show unless it was stepped
# forward): from then on the living, who renew three times a lease, have half of it. A moment that is still to
# come says nothing: the clock was set back since.
#
# A renewal that is still to come was stamped before the clock was set back. It counts as one of now, or
# the jobs of a worker that died with it would wait until then. By the clock when the row is locked, for a
# renewal that comes meanwhile must not be shortened.
EXPIRE: Final = """
with c as materialized (
    select now, (extract(epoch from now) * 1000000.0)::int8 as now_us,
           timestamptz 'epoch' + $2::float8 * interval '1 microsecond' as since
    from (select clock_timestamp() as now) o
), stamped as (
    update {schema}.worker
    set heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + (lease_until - heartbeat_at)
    where ctid = any (array(
        select ctid from {schema}.worker where ended_at is null and heartbeat_at > clock_timestamp()
        for update skip locked))
      and ended_at is null and heartbeat_at > clock_timestamp()
), dead as (
    update {schema}.worker set ended_at = clock_timestamp(), end_reason = 'lease ended'
    where ctid = any (array(
        select w.ctid from c, {schema}.worker w where ended_at is null and lease_until < now
           and id <> $1::int8 and now_us <= $3::int8
           and pg_postmaster_start_time() not between now - (lease_until - heartbeat_at) and now
           and since not between now - (lease_until - heartbeat_at) / 2::float8 and now
        for update of w skip locked))
      and ended_at is null and lease_until < (select now from c)
    returning id, name
)
select c.now_us, dead.id, dead.name from c left join dead on true
"""

# $3: where live rows can begin. Plain (not the exact mark of the lanes): a transaction that stayed
# open past its job's time leaves a row behind the mark, and the full rescan finds it.
PROMOTE: Final = f"""
with s as materialized (
    select ctid as tid from {{schema}}.scheduled
    where run_at >= coalesce($1::timestamptz, '-infinity')
      and run_at <= coalesce($2::timestamptz, statement_timestamp())
    order by run_at limit $3::int4 for update skip locked
), x as (
    delete from {{schema}}.scheduled where ctid = any (array(select tid from s)) returning *
), i as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt, failures, crashes)
    select job_id, queue, priority, attempt, failures, crashes from x
), q as materialized (
    select queue, count(*) as jobs from x group by queue
), n as materialized (
    select pg_catalog.count({NOTIFY}) as sent from q where $4::bool
)
select (select pg_catalog.array_agg(queue::text) from q), (select coalesce(sum(jobs), 0)::int8 from q),
       (select sent from n),
       (select nullif(least(min(run_at), statement_timestamp() - interval '1 second'), '-infinity') from (
            select run_at from {{schema}}.scheduled
            where run_at >= coalesce($1::timestamptz, '-infinity') order by run_at limit 1) f),
       (select date_part('epoch', run_at - statement_timestamp()) from {{schema}}.scheduled
        where run_at > coalesce($2::timestamptz, statement_timestamp()) and run_at < 'infinity'
        order by run_at limit 1)
"""

# A job whose worker died goes back at once the first time, and with growing pauses after that; at
# the limit it is discarded, for it may be what kills them. The living workers are few and are listed
# once: as `not exists`, one is looked up for each running row. One that was to be cancelled is.
RESCUE: Final = f"""
with s as materialized (
    select ctid as tid from {{schema}}.running
    where worker_id <> all (array(select id from {{schema}}.worker where ended_at is null))
      and job_id <> all ($1::int8[])
    order by ctid limit $2::int4 for update skip locked
), dead as (
    delete from {{schema}}.running where ctid = any (array(select tid from s)) returning *
), u as materialized (
    select dead.*, c.job_id is not null as asked, c.reason as asked_reason from dead left join lateral (
        select job_id, reason from {{schema}}.cancel_request where job_id = dead.job_id limit 1) c on true
), ready as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt, failures, crashes)
    select job_id, queue, priority, attempt, failures, crashes + 1
    from u where crashes = 0 and $3::int4 > 1 and not asked
    on conflict do nothing
), scheduled as (
    insert into {{schema}}.scheduled (job_id, run_at, reason, queue, priority, attempt, failures, crashes)
    select job_id, statement_timestamp() + crashes::float8 * (0.5::float8 + random()) * interval '1 second',
           'crash', queue, priority, attempt, failures, crashes + 1
    from u where crashes > 0 and crashes + 1 < $3::int4 and not asked
    on conflict do nothing
), finished as (
    insert into {{schema}}.finished
        (job_id, state, claimed_at, queue, priority, worker_id, attempt, failures, crashes, reason)
    select job_id, case when asked then 'cancelled' else 'discarded' end, claimed_at, queue, priority,
           worker_id, attempt, failures, crashes + 1,
           case when asked then asked_reason
                else 'its worker died with it ' || (crashes + 1)::text || ' times' end
    from u where asked or crashes + 1 >= $3::int4
    on conflict do nothing
), e as (
    insert into {{schema}}.attempt_error
        (job_id, attempt, outcome, type, message, traceback, worker_id, worker, started_at, omitted)
    select u.job_id, u.attempt, 'crashed', 'jobq.WorkerDied',
           'the worker died, or its lease ended, while it held this job', '', u.worker_id,
           coalesce((select name from {{schema}}.worker where id = u.worker_id),
                    'worker ' || u.worker_id::text),
           u.claimed_at,
           coalesce((select omitted from {{schema}}.attempt_error a where a.job_id = u.job_id
                     order by attempt desc limit 1), 0)
    from u
    on conflict do nothing
), n as materialized (
    select pg_catalog.count({NOTIFY}) as sent from (
        select distinct queue from u where crashes = 0 and $3::int4 > 1 and not asked) q
)
select u.job_id, u.attempt, u.queue, u.worker_id, u.crashes + 1 >= $3::int4 and not u.asked,
       (select sent from n), j.kind
from u left join lateral (select kind from {{schema}}.job where id = u.job_id limit 1) j on true
"""

NEXT_ORPHAN: Final = """
select job_id from {schema}.running
where worker_id <> all (array(select id from {schema}.worker where ended_at is null))
  and job_id <> all ($1::int8[])
order by ctid limit 1
"""

# What a rescue would discard. A supervisor knows no handlers, so it leaves these to a worker.
AT_CRASH_LIMIT: Final = """
select job_id from {schema}.running
where worker_id <> all (array(select id from {schema}.worker where ended_at is null))
  and crashes + 1 >= $1::int4
order by ctid
"""

# What an `on_discard` callback is told: the job as it was enqueued, and its last error.
DISCARDED: Final = """
select j.id, j.kind, f.queue, f.priority, f.attempt, f.failures, f.crashes, j.max_attempts, j.timeout_s,
       coalesce(f.worker_id, 0), date_part('epoch', j.created_at), j.meta::text, j.tags,
       f.reason, f.finished_at,
       e.attempt, e.outcome, e.type, e.message, e.traceback, e.worker, e.started_at, e.ended_at, e.omitted
from pg_catalog.unnest($1::int8[]) o(id)
cross join lateral (select * from {schema}.job where id = o.id limit 1) j
cross join lateral (select * from {schema}.finished where job_id = o.id and state = 'discarded' limit 1) f
left join lateral (
    select * from {schema}.attempt_error a where a.job_id = o.id order by a.attempt desc limit 1
) e on true
"""


class Expired(NamedTuple):
    """What one look at the leases found.

    Attributes:
        now_us: the database's clock then, in microseconds since the epoch.
        workers: ids and names of those whose lease it declared over.
    """

    now_us: int
    workers: list[tuple[int, str]]


class Promoted(NamedTuple):
    """What one promotion did.

    Attributes:
        queues: those that got jobs.
        jobs: how many.
        mark: where the next promotion may begin.
        next_due_s: seconds until the next scheduled job that this one saw, ``None`` for none.
    """

    queues: list[str]
    jobs: int
    mark: datetime | None
    next_due_s: float | None


class Rescued(NamedTuple):
    """One job that was taken back from a dead worker; ``discarded`` at its crash limit."""

    job_id: int
    attempt: int
    queue: str
    worker_id: int
    discarded: bool
    kind: str | None


class Registration(NamedTuple):
    """What a worker process says of itself when it starts."""

    id: int
    name: str
    host: str
    pid: int
    version: str
    queues: list[str]
    kinds: list[str]
    periodics: Sequence[str] = ()


def register(schema: str, registration: Registration, lease_s: float) -> Operation[int]:
    """Make the worker's row, with a first lease. Returns which server has it, for `claim`."""
    rows = yield Call(
        in_schema(REGISTER, schema), (*registration[:-1], list(registration.periodics), lease_s)
    )
    return int(rows[0][0])


def renew(schema: str, worker_id: int, lease_s: float) -> Operation[bool]:
    """Renew a lease from now on. ``False``: it had been declared over, and never comes back."""
    return bool((yield Call(in_schema(RENEW, schema), (worker_id, lease_s))))


def end(schema: str, worker_id: int, reason: str) -> Operation[bool]:
    """Declare a worker ended (``stopped`` or ``died``). ``False``: somebody already had."""
    return bool((yield Call(in_schema(END, schema), (worker_id, reason))))


def expire(schema: str, but: int = 0, since_us: int = 0, latest_us: int = ANY_TIME_US) -> Operation[Expired]:
    """Declare over every lease that has run out.

    Args:
        schema: where the queue lives.
        but: an identity to leave alone: the caller's own, which is about to renew. A process that was
            frozen for longer than its lease would else be the first to call itself dead.
        since_us: from when on the living could renew, as far as the caller knows. Microseconds since the
            epoch by the database's clock, here and below.
        latest_us: if the clock shows more, nothing is declared.
    """
    rows = yield Call(in_schema(EXPIRE, schema), (but, since_us, latest_us))
    return Expired(rows[0][0], [(row[1], row[2]) for row in rows if row[1] is not None])


def promote(
    schema: str, mark: datetime | None, limit: int, *, notify: bool, now: datetime | None = None
) -> Operation[Promoted]:
    """Move up to ``limit`` due jobs to ``ready``. ``now`` replaces the database's clock in tests."""
    rows = yield Call(enqueue_sql(PROMOTE, schema), (mark, now, limit, notify))
    queues, jobs, _, next_mark, next_due_s = rows[0]
    return Promoted(queues or [], jobs, next_mark, next_due_s)


def rescue(schema: str, crash_limit: int, limit: int, leave: Sequence[int] = ()) -> Operation[list[Rescued]]:
    """Take back up to ``limit`` jobs whose worker has no lease, but those in ``leave``."""
    rows = yield Call(enqueue_sql(RESCUE, schema), (list(leave), limit, crash_limit))
    return [Rescued._make((*row[:5], row[6])) for row in rows]


def at_crash_limit(schema: str, crash_limit: int) -> Operation[list[int]]:
    """Return the jobs of dead workers that a rescue with this limit would discard."""
    rows = yield Call(in_schema(AT_CRASH_LIMIT, schema), (crash_limit,))
    return [row[0] for row in rows]


def next_orphan(schema: str, leave: Sequence[int]) -> Operation[int | None]:
    """Return the job that a rescue of one would take next, if any."""
    rows = yield Call(in_schema(NEXT_ORPHAN, schema), (list(leave),))
    return rows[0][0] if rows else None


def discarded(schema: str, ids: Sequence[int]) -> Operation[list[tuple[Job, AttemptError]]]:
    """Return discarded jobs with what ended them, those that are still there."""
    rows = yield Call(in_schema(DISCARDED, schema), (list(ids),))
    return [(Job(*row[:13]), _last_error(row)) for row in rows]


def _last_error(row: Row) -> AttemptError:
    if row[15] is not None:
        return AttemptError(*row[15:])
    # It was never started, so no attempt failed; the reason says what happened.
    attempt, reason, finished_at = row[4], row[13], row[14]
    return AttemptError(attempt, "permanent", "jobq.NotStarted", reason or "", "", "", None, finished_at, 0)
