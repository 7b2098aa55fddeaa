"""What an operator asks of single jobs: look, cancel, retry.

Times and JSON come back as text: a pool of the user's own may load such types in ways of its own.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from jobq._enqueue import NOTIFY, enqueue_sql
from jobq._errors import ConfigError, JobConflict, JobNotFound
from jobq._operation import Call, Operation, in_schema
from jobq._types import AttemptError, JobInfo, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence


def _instant(column: str) -> str:
    return f"""to_char({column} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')"""


# The view joins four tables; each part is found by its own key.
GET: Final = f"""
select id, state, reason, kind, queue, priority, args::text, meta::text, to_jsonb(tags)::text,
       attempt, failures, crashes, max_attempts, date_part('epoch', timeout)::float8::text, unique_key,
       {_instant("created_at")}, {_instant("run_at")}, {_instant("expires_at")},
       {_instant("claimed_at")}, {_instant("finished_at")}, worker_id, result::text
from {{schema}}.jobs where id = $1::int8
"""

# A job without errors is one row of nulls; no job is no row.
ERRORS: Final = f"""
select e.attempt, e.outcome, e.type, e.message, e.traceback, e.worker,
       {_instant("e.started_at")}, {_instant("e.ended_at")}, e.omitted
from {{schema}}.job j left join {{schema}}.attempt_error e on e.job_id = j.id
where j.id = $1::int8 order by e.attempt
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

# The key is taken again under a new generation, unless another live job holds it. The finished row
# is locked first, against two retries at once; nobody who holds a key waits for such a row.
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
select (select count(*) from r), (select holder from known where held), (select count(*) from f),
       (select sent from n)
"""

MAX_REASON: Final = 1_000  # characters
_LOOKS: Final = 5  # a job may be on its way between two tables; this often it is looked for again


def get_job(schema: str, job_id: int) -> Operation[JobInfo]:
    """Return a job as it stands now.

    Raises:
        JobNotFound: there is none with that id.
    """
    rows = yield Call(in_schema(GET, schema), (_id(job_id),))
    if not rows:
        raise JobNotFound(f"there is no job {job_id}")
    return _info(rows[0])


def job_errors(schema: str, job_id: int) -> Operation[list[AttemptError]]:
    """Return how a job's attempts failed, the oldest first.

    Raises:
        JobNotFound: there is none with that id.
    """
    rows = yield Call(in_schema(ERRORS, schema), (_id(job_id),))
    if not rows:
        raise JobNotFound(f"there is no job {job_id}")
    return [_error(row) for row in rows if row[0] is not None]


def _error(row: Sequence[Any]) -> AttemptError:
    attempt, outcome, type_, message, traceback, worker, started_at, ended_at, omitted = row
    ended = datetime.fromisoformat(ended_at)
    return AttemptError(
        attempt, outcome, type_, message, traceback, worker, _time(started_at), ended, omitted
    )


def cancel_job(schema: str, job_id: int, reason: str) -> Operation[None]:
    """End a job that waits.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it runs, or has ended.
        ConfigError: the reason is no text, or longer than 1,000 characters.
    """
    _check_reason(reason)
    for _ in range(_LOOKS):
        if (yield Call(in_schema(CANCEL, schema), (_id(job_id), reason))):
            return
        info = yield from get_job(schema, job_id)
        if info.state is JobState.RUNNING:
            raise JobConflict(f"job {job_id} is running, and only a job that waits can be cancelled")
        if info.state.is_terminal:
            raise JobConflict(f"job {job_id} has ended: it is {info.state.value}")
    raise JobConflict(f"job {job_id} is being moved by others just now; try again")


def retry_job(schema: str, job_id: int, *, notify: bool) -> Operation[None]:
    """Make a finished job ready again, with its history and a fresh budget.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it has not ended, or another live job holds its unique key.
    """
    for _ in range(_LOOKS):
        rows = yield Call(enqueue_sql(RETRY, schema), (_id(job_id), notify))
        moved, holder, finished, _ = rows[0]
        if moved:
            return
        if holder is not None:
            raise JobConflict(f"job {job_id} cannot be retried: job {holder} holds its unique key")
        if not finished:
            break
        # Another job took the key at this very moment: the next look sees which.
    info = yield from get_job(schema, job_id)
    if info.state.is_terminal:
        raise JobConflict(f"job {job_id} is being moved by others just now; try again")
    raise JobConflict(f"job {job_id} is {info.state.value}, and only a job that has ended can be retried")


def _id(job_id: int) -> int:
    """Return a job's id; one that no job can have is none that there is."""
    if not isinstance(cast("object", job_id), int) or isinstance(job_id, bool):
        raise ConfigError(f"job_id={job_id!r}: an integer, as enqueue returned it")
    if not -(2**63) <= job_id < 2**63:
        raise JobNotFound(f"there is no job {job_id}")
    return job_id


def _check_reason(reason: object) -> None:
    if not isinstance(reason, str) or len(reason) > MAX_REASON or "\0" in reason:
        raise ConfigError(f"reason: a text of at most {MAX_REASON:,} characters without NUL")
    try:
        reason.encode()
    except UnicodeEncodeError:
        raise ConfigError("reason: a lone surrogate is no text") from None


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _info(row: Sequence[Any]) -> JobInfo:
    (
        job_id, state, reason, kind, queue, priority, args, meta, tags,
        attempt, failures, crashes, max_attempts, timeout_s, unique_key,
        created_at, run_at, expires_at, claimed_at, finished_at, worker_id, result,
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
        tags=tuple(msgspec.json.decode(tags)) if tags else (),
        attempt=attempt,
        failures=failures,
        crashes=crashes,
        max_attempts=max_attempts,
        timeout_s=None if timeout_s is None else float(timeout_s),
        unique_key=unique_key,
        created_at=datetime.fromisoformat(created_at),
        run_at=_time(run_at),
        expires_at=_time(expires_at),
        claimed_at=_time(claimed_at),
        finished_at=_time(finished_at),
        worker_id=worker_id,
        result=msgspec.json.decode(result) if result else None,
    )
