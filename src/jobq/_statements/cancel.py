"""Cancel one job: at once where it waits, by a request to its worker where it runs."""

from __future__ import annotations

import enum
from typing import Final

from jobq._errors import JobConflict
from jobq._operation import Call, Operation, in_schema
from jobq._statements.control import ALERT, control_sql
from jobq._statements.operate import LOOKS, checked_id, get_job
from jobq._statements.operator_log import Entry, logged_as

# A job that waits is in one of two tables; each is locked by ctid, ready first. One that moves
# between them at this moment is missed by both, and the caller looks again.
_CANCEL: Final = f"""
with r as (
    delete from {{schema}}.ready where ctid = any (array(
        select ctid from {{schema}}.ready where job_id = $1::int8 for update))
    returning queue, priority, attempt, failures, crashes
), s as (
    delete from {{schema}}.scheduled where ctid = any (array(
        select ctid from {{schema}}.scheduled where job_id = $1::int8 for update))
    returning queue, priority, attempt, failures, crashes
), f as (
    insert into {{schema}}.finished (job_id, state, queue, priority, attempt, failures, crashes, reason)
    select $1::int8, 'cancelled', queue, priority, attempt, failures, crashes, nullif($5::text, '')
    from (select * from r union all select * from s) w
    returning job_id
), {logged_as(2, jobs="1", where="exists (select from f)")}
select job_id from f
"""

# Its worker sees the request; when the job has left it by then, whoever polls next applies it.
_REQUEST: Final = f"""
with r as materialized (
    select job_id from {{schema}}.running where job_id = $1::int8 limit 1
), c as (
    insert into {{schema}}.cancel_request (job_id, reason, requested_by)
    select job_id, nullif($5::text, ''), $2::text from r
    on conflict (job_id) do nothing
), n as materialized (
    select {ALERT} as sent from r where $6::bool
), {logged_as(2, jobs="1", where="exists (select from r)")}
select job_id, (select sent from n) from r
"""


class Cancellation(enum.StrEnum):
    """What a cancel did."""

    CANCELLED = "cancelled"
    """The job waited, and is cancelled."""
    REQUESTED = "requested"
    """The job runs, and its handler is told to stop. A handler that completes all the same is completed."""


def cancel_job(
    schema: str, job_id: int, reason: str = "", by: str | None = None, *, notify: bool = True
) -> Operation[Cancellation]:
    """End a job that waits, or ask the worker of one that runs to stop it.

    Raises:
        JobNotFound: there is none with that id.
        JobConflict: it has ended.
        ConfigError: the reason or the name cannot be kept.
    """
    job_id = checked_id(job_id)
    entry = Entry("cancel", {"job": job_id}, by, reason).params
    for _ in range(LOOKS):
        if (yield Call(in_schema(_CANCEL, schema), (job_id, *entry), replan=True)):
            return Cancellation.CANCELLED
        if (yield Call(control_sql(_REQUEST, schema), (job_id, *entry, notify), replan=True)):
            return Cancellation.REQUESTED
        info = yield from get_job(schema, job_id)
        if info.state.is_terminal:
            raise JobConflict(f"job {job_id} has ended: it is {info.state.value}")
    raise JobConflict(f"job {job_id} is being moved by others just now; try again")
