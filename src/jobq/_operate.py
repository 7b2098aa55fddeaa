"""What an operator asks of single jobs: look, cancel, retry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from jobq._enqueue import NOTIFY, enqueue_sql
from jobq._errors import JobConflict, JobNotFound
from jobq._operation import Call, Operation, in_schema
from jobq._types import AttemptError, JobInfo, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence

# The view joins four tables; each part is found by its own key.
GET: Final = """
select id, state, reason, kind, queue, priority, args::text, meta::text, tags, attempt, failures, crashes,
       max_attempts, extract(epoch from timeout)::float8, unique_key, created_at, run_at, expires_at,
       claimed_at, finished_at, worker_id, result::text
from {schema}.jobs where id = $1::int8
"""

ERRORS: Final = """
select attempt, outcome, type, message, traceback, worker, started_at, ended_at, omitted
from {schema}.attempt_error where job_id = $1::int8 order by attempt
"""

# A job that waits is in one of two tables; each is locked by ctid, ready first. One that moves
# between them at this moment is missed by both, and the caller looks again.
CANCEL: Final = """
with r as (
    delete from {schema}.ready where ctid = any (array(
        select ctid from {schema}.ready where job_id = $1::int8 for update))
    returning queue, priority, attempt, failures, crashes
), s as (
    delete from {schema}.scheduled where ctid = any (array(
        select ctid from {schema}.scheduled where job_id = $1::int8 for update))
    returning queue, priority, attempt, failures, crashes
)
insert into {schema}.finished (job_id, state, queue, priority, attempt, failures, crashes, reason)
select $1::int8, 'cancelled', queue, priority, attempt, failures, crashes, nullif($2::text, '')
from (select * from r union all select * from s) w
returning job_id
"""

# The key is taken again under a new generation, unless another live job holds it.
RETRY: Final = f"""
with f as materialized (
    select f.ctid as tid, j.unique_key as key, g.generation, g.job_id as holder
    from {{schema}}.finished f
    join {{schema}}.job j on j.id = f.job_id
    left join lateral (
        select generation, job_id from {{schema}}.unique_key u where u.key = j.unique_key
        order by generation desc limit 1
    ) g on true
    where f.job_id = $1::int8
    for update of f
), known as materialized (
    select f.*, coalesce(
        (select 1 from {{schema}}.ready where job_id = f.holder limit 1),
        (select 1 from {{schema}}.scheduled where job_id = f.holder limit 1),
        (select 1 from {{schema}}.running where job_id = f.holder limit 1)) is not null as held
    from f
), won as (
    insert into {{schema}}.unique_key (key, generation, job_id)
    select key, coalesce(generation, 0) + 1, $1::int8 from known where key is not null and not held
    on conflict do nothing
    returning job_id
), x as (
    delete from {{schema}}.finished where ctid = any (array(
        select tid from known where key is null or exists (select from won)))
    returning job_id, queue, priority, attempt
), r as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt)
    select job_id, queue, priority, attempt from x
    returning queue
), n as materialized (
    select count({NOTIFY}) as sent from r q where $2::bool
)
select (select count(*) from r), (select sent from n), (select holder from known where held), (select count(*) from f)
"""

_LOOKS: Final = 5  # a job may be on its way between two tables; this often it is looked for again


def get_job(schema: str, job_id: int) -> Operation[JobInfo]:
    """Return a job as it stands now.

    Raises:
        JobNotFound: there is none with that id.
    """
    rows = yield Call(in_schema(GET, schema), (job_id,))
    if not rows:
        raise JobNotFound(f"there is no job {job_id}")
    return _info(rows[0])


def job_errors(schema: str, job_id: int) -> Operation[list[AttemptError]]:
    """Return how a job's attempts failed, the oldest first."""
    rows = yield Call(in_schema(ERRORS, schema), (job_id,))
    return [AttemptError(*row) for row in rows]


def cancel_job(schema: str, job_id: int, reason: str) -> Operation[None]:
    """End a job that waits.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it runs, or has ended.
    """
    for _ in range(_LOOKS):
        if (yield Call(in_schema(CANCEL, schema), (job_id, reason))):
            return
        info = yield from get_job(schema, job_id)
        if info.state not in (JobState.READY, JobState.SCHEDULED):
            raise JobConflict(f"job {job_id} is {info.state.value}; only a job that waits can be cancelled")
    raise JobConflict(f"job {job_id} is being moved by others just now; try again")


def retry_job(schema: str, job_id: int, *, notify: bool) -> Operation[None]:
    """Make a finished job ready again, with its history and a fresh budget.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it has not ended, or another live job holds its unique key.
    """
    rows = yield Call(enqueue_sql(RETRY, schema), (job_id, notify))
    moved, _, holder, finished = rows[0]
    if moved:
        return
    if holder is not None:
        raise JobConflict(f"job {job_id} cannot be retried: job {holder} holds its unique key now")
    info = yield from get_job(schema, job_id)
    if finished:
        raise JobConflict(f"job {job_id} cannot be retried: another job took its unique key just now")
    raise JobConflict(f"job {job_id} is {info.state.value}; only a finished job can be retried")


def _info(row: Sequence[Any]) -> JobInfo:
    (
        job_id, state, reason, kind, queue, priority, args, meta, tags, attempt, failures, crashes,
        max_attempts, timeout_s, unique_key, created_at, run_at, expires_at,
        claimed_at, finished_at, worker_id, result,
    ) = row  # fmt: skip
    return JobInfo(
        id=job_id,
        state=JobState(state),
        reason=reason,
        kind=kind,
        queue=queue,
        priority=priority,
        args=msgspec.json.decode(args),
        meta=msgspec.json.decode(meta) if meta else {},
        tags=tuple(tags or ()),
        attempt=attempt,
        failures=failures,
        crashes=crashes,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
        unique_key=unique_key,
        created_at=created_at,
        run_at=run_at,
        expires_at=expires_at,
        claimed_at=claimed_at,
        finished_at=finished_at,
        worker_id=worker_id,
        result=msgspec.json.decode(result) if result else None,
    )
