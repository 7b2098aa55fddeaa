"""Pauses: queues and kinds of which workers start no job, with who said so, why, and until when.

A paused queue's jobs stay ready: nobody claims them. A kind is not in the claim's order, so jobs of a
paused one are claimed and put back for a while, as scheduled with the reason ``paused``; that uses no
retry. Either begins and ends within a second, for each worker reads the pauses that often (`control`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, TypeAlias

from jobq._errors import ConfigError
from jobq._kinds.options import changes, check_kind, check_moment
from jobq._operation import Call, Operation, in_schema
from jobq._statements.control import ALERT, control_sql
from jobq._statements.operate import instant
from jobq._statements.operator_log import Entry, logged_as

Scope: TypeAlias = Literal["queue", "kind"]

PUT_BACK_S: Final = (30.0, 60.0)  # for how long a job of a paused kind is put back, at random
_WAKE_BATCH: Final = 1_000
_MOST_BATCHES: Final = 1_000

_READ: Final = f"""
select scope, name, reason, paused_by, {instant("paused_at")}, {instant("until")} from {{schema}}.pause
where until is null or until > clock_timestamp() order by scope desc, name
"""

# What has ended by itself is removed by the way.
_PAUSE: Final = f"""
with gone as (
    delete from {{schema}}.pause where until <= clock_timestamp() and (scope, name) <> ($1::text, $2::text)
), p as (
    insert into {{schema}}.pause (scope, name, reason, paused_by, paused_at, until)
    values ($1::text, $2::text, nullif($7::text, ''), $4::text, clock_timestamp(), $3::timestamptz)
    on conflict (scope, name) do update set reason = excluded.reason, paused_by = excluded.paused_by,
        paused_at = excluded.paused_at, until = excluded.until
), {logged_as(4)}
select {ALERT} from logged where $8::bool
"""

_RESUME: Final = f"""
with p as (
    delete from {{schema}}.pause where scope = $1::text and name = $2::text
    returning until is null or until > clock_timestamp() as held
), {logged_as(3)}
select coalesce((select held from p), false), case when $7::bool then {ALERT} end from logged
"""

# Jobs that were put back because their kind was paused are due within the longest such wait. Never
# before now, where the promoters' marks have passed.
WAKE: Final = """
with s as materialized (
    select s.ctid as tid from {schema}.scheduled s
    cross join lateral (
        select from {schema}.job where id = s.job_id and kind::text = $1::text limit 1) j
    where s.run_at > statement_timestamp()
      and s.run_at <= statement_timestamp() + $2::float8 * interval '1 second' and s.reason = 'paused'
    limit $3::int4
), u as (
    update {schema}.scheduled set run_at = statement_timestamp(), reason = 'scheduled'
    where ctid = any (array(select tid from s)) returning job_id
)
select count(*) from u
"""


@dataclass(frozen=True, slots=True)
class Pause:
    """A queue or a kind of which workers start no job.

    Attributes:
        scope: ``queue`` or ``kind``; ``name`` says which.
        reason: why, where it was said.
        paused_by: who said so.
        paused_at: since when.
        until: when it ends by itself; ``None`` for not before it is resumed.
    """

    scope: Scope
    name: str
    reason: str | None
    paused_by: str | None
    paused_at: datetime
    until: datetime | None


def read_pauses(schema: str) -> Operation[list[Pause]]:
    """Return what is paused now: queues, then kinds, by name."""
    return [_pause(*row) for row in (yield Call(in_schema(_READ, schema)))]


def _pause(scope: Scope, name: str, reason: str | None, by: str | None, at: str, until: str | None) -> Pause:
    ends = None if until is None else datetime.fromisoformat(until)
    return Pause(scope, name, reason, by, datetime.fromisoformat(at), ends)


def pause(
    schema: str,
    queue: str | None,
    kind: str | None,
    reason: str = "",
    by: str | None = None,
    until: datetime | None = None,
    *,
    notify: bool = True,
) -> Operation[None]:
    """Pause a queue or a kind, in place of what was said of it before.

    Raises:
        ConfigError: not exactly one of ``queue`` and ``kind``, or something that cannot be kept.
    """
    scope, name = _target(queue, kind)
    ends = None if until is None else check_moment("until", until)
    target = {scope: name, **({"until": ends.isoformat()} if ends is not None else {})}
    params = (scope, name, ends, *Entry("pause", target, by, reason).params, notify)
    yield Call(control_sql(_PAUSE, schema), params)


def resume(
    schema: str,
    queue: str | None,
    kind: str | None,
    reason: str = "",
    by: str | None = None,
    *,
    notify: bool = True,
) -> Operation[bool]:
    """End a pause; return whether there was one. Jobs of a kind that were put back come at once.

    Raises:
        ConfigError: not exactly one of ``queue`` and ``kind``, or something that cannot be kept.
    """
    scope, name = _target(queue, kind)
    params = (scope, name, *Entry("resume", {scope: name}, by, reason).params, notify)
    rows = yield Call(control_sql(_RESUME, schema), params)
    if scope == "kind":
        for _ in range(_MOST_BATCHES):
            woken = yield Call(in_schema(WAKE, schema), (name, PUT_BACK_S[1], _WAKE_BATCH), replan=True)
            if woken[0][0] < _WAKE_BATCH:
                break
    return bool(rows[0][0])


def _target(queue: str | None, kind: str | None) -> tuple[Scope, str]:
    if (queue is None) == (kind is None):
        raise ConfigError("pause, resume: give queue or kind, one of them")
    if kind is not None:
        return "kind", check_kind(kind)
    return "queue", str(changes({"queue": queue})["queue"])
