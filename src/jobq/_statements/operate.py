"""What an operator asks of single jobs: look, and retry.

Times and JSON come back as text: a pool of the user's own may load such types in ways of its own.
The statements are rare, and planned anew at each call: a plan that a connection kept from when the
tables were empty would read them whole.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, cast

from jobq._documents import read_document
from jobq._errors import ArgumentsDecodeError, ConfigError, JobConflict, JobNotFound, UniqueConflict
from jobq._messages import shown
from jobq._operation import Call, Operation, in_schema
from jobq._statements.enqueue import NOTIFY, enqueue_sql
from jobq._statements.operator_log import Entry, logged_as
from jobq._statements.retake import RETAKE
from jobq._types import AttemptError, JobInfo, JobState

if TYPE_CHECKING:
    from collections.abc import Sequence


# PostgreSQL's years go from 4713 BC to 294276, and to infinity; Python's from 1 to 9999.
_FIRST: Final = "'0001-01-01 00:00:00+00'::timestamptz"
_LAST: Final = "'9999-12-31 23:59:59.999999+00'::timestamptz"


def instant(column: str) -> str:
    """Return SQL of a moment as text in ISO's form, within what Python can hold; null stays null."""
    known = f"case when {column} is not null then greatest(least({column}, {_LAST}), {_FIRST}) end"
    return f"""to_char({known} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')"""


# The view joins four tables; each part is found by its own key. The time limit is read past it, for an
# interval holds less than the number does.
GET: Final = f"""
select v.id, v.state, v.reason, v.kind, v.queue, v.priority, v.args::text, v.meta::text,
       pg_catalog.to_jsonb(v.tags)::text, v.attempt, v.failures, v.crashes, v.max_attempts, j.timeout_s::text,
       v.unique_key, {instant("v.created_at")}, {instant("v.run_at")}, {instant("v.expires_at")},
       {instant("v.claimed_at")}, {instant("v.finished_at")}, v.worker_id, v.result::text
from {{schema}}.jobs v join {{schema}}.job j on j.id = v.id where v.id = $1::int8
"""

# A job without errors is one row of nulls; no job is no row.
ERRORS: Final = f"""
select e.attempt, e.outcome, e.type, e.message, e.traceback, e.worker,
       {instant("e.started_at")}, {instant("e.ended_at")}, e.omitted
from {{schema}}.job j left join {{schema}}.attempt_error e on e.job_id = j.id
where j.id = $1::int8 order by e.attempt
"""

RETRY: Final = f"""
with l as materialized (
    select ctid as tid, job_id, attempt from {{schema}}.finished where job_id = $1::int8 for update
), {RETAKE}, x as (
    delete from {{schema}}.finished where ctid = any (array(
        select tid from l where job_id not in (select job_id from lost)))
    returning job_id, queue, priority, attempt
), r as (
    insert into {{schema}}.ready (job_id, queue, priority, attempt)
    select job_id, queue, priority, attempt from x
    returning queue
), c as (
    delete from {{schema}}.cancel_request where job_id in (select job_id from x)
), n as materialized (
    select pg_catalog.count({NOTIFY}) as sent from r q where $2::bool
), {logged_as(3, jobs="1", where="exists (select from x)")}
select (select count(*) from r), (select holder from lost), (select count(*) from l), (select sent from n)
"""

LOOKS: Final = 5  # a job may be on its way between two tables; this often it is looked for again


def get_job(schema: str, job_id: int) -> Operation[JobInfo]:
    """Return a job as it stands now.

    Raises:
        JobNotFound: there is none with that id.
    """
    rows = yield Call(in_schema(GET, schema), (checked_id(job_id),), replan=True)
    if not rows:
        raise JobNotFound(f"there is no job {job_id}")
    return job_info(rows[0])


def job_errors(schema: str, job_id: int) -> Operation[list[AttemptError]]:
    """Return how a job's attempts failed, the oldest first.

    Raises:
        JobNotFound: there is none with that id.
    """
    rows = yield Call(in_schema(ERRORS, schema), (checked_id(job_id),), replan=True)
    if not rows:
        raise JobNotFound(f"there is no job {job_id}")
    return [_error(row) for row in rows if row[0] is not None]


def _error(row: Sequence[Any]) -> AttemptError:
    attempt, outcome, type_, message, traceback, worker, started_at, ended_at, omitted = row
    ended = datetime.fromisoformat(ended_at)
    return AttemptError(
        attempt, outcome, type_, message, traceback, worker, _time(started_at), ended, omitted
    )


def retry_job(
    schema: str, job_id: int, reason: str = "", by: str | None = None, *, notify: bool
) -> Operation[None]:
    """Make a finished job ready again, with its history and a fresh budget.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it has not ended.
        UniqueConflict: another job holds its unique key.
        ConfigError: the reason or the name cannot be kept.
    """
    job_id = checked_id(job_id)
    entry = Entry("retry", {"job": job_id}, by, reason).params
    for _ in range(LOOKS):
        rows = yield Call(enqueue_sql(RETRY, schema), (job_id, notify, *entry), replan=True)
        moved, holder, finished, _ = rows[0]
        if moved:
            return
        if holder is not None:
            raise UniqueConflict(f"job {job_id} cannot be retried: job {holder} holds its unique key", holder)
        if not finished:
            break
        # Another job took the key at this very moment: the next look sees which.
    info = yield from get_job(schema, job_id)
    if info.state.is_terminal:
        raise JobConflict(f"job {job_id} is being moved by others just now; try again")
    raise JobConflict(f"job {job_id} is {info.state.value}, and only a job that has ended can be retried")


def checked_id(job_id: int) -> int:
    """Return a job's id; one that no job can have is none that there is."""
    if not isinstance(cast("object", job_id), int) or isinstance(job_id, bool):
        raise ConfigError(f"job_id={shown(job_id)}: an integer, as enqueue returned it")
    if not -(2**63) <= job_id < 2**63:
        raise JobNotFound(f"there is no job {shown(job_id)}")
    return int(job_id)


def _meta(job_id: int, text: str | None) -> dict[str, object]:
    if not text:
        return {}
    meta = read_document(text)
    if not isinstance(meta, dict):
        raise ArgumentsDecodeError(f"job {job_id}: its meta is no object that can be read here")
    return cast("dict[str, object]", meta)


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def job_info(row: Sequence[Any]) -> JobInfo:
    """Return what a row with the columns of :data:`GET` says."""
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
        args=read_document(args),
        meta=_meta(job_id, meta),
        tags=tuple(cast("list[str]", read_document(tags))) if tags else (),
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
        result=read_document(result) if result else None,
    )
