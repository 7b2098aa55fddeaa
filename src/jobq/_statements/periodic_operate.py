"""What people do with schedules: list, remove, pause, resume, trigger. To add one: `periodic_declare`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from jobq._errors import ConfigError, PeriodicNotFound
from jobq._kinds.options import check_name
from jobq._operation import Call, Operation, atomic, in_schema
from jobq._statements.enqueue import enqueue_one
from jobq._statements.operator_log import log_action, logged_as
from jobq._statements.periodic import DECLARED, Row, instant, read_row
from jobq._statements.periodic_declare import conflict_of, entry_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.schedule import CatchUp, Overlap
    from jobq._statements.operator_log import Entry
    from jobq._types import Enqueued

_LIST: Final = f"""
select p.name, p.kind, p.args::text, p.cron, p.tz, p.every_s, p.catch_up, p.overlap,
       {instant("p.next_at")}, {instant("p.last_at")}, p.last_job_id, {instant("s.tick")}, s.skipped,
       {instant("p.paused_at")}, p.paused_by, p.pause_reason, p.problem, p.is_dynamic,
       p.is_dynamic or p.name = any ({DECLARED})
from {{schema}}.periodic p
left join lateral (
    select tick, skipped from {{schema}}.periodic_tick t
    where t.name = p.name order by tick desc limit 1
) s on true
order by p.name
"""

# A pause says only that nobody looks; what was missed by its end is passed over.
_PAUSE: Final = f"""
with p as (
    update {{schema}}.periodic
    set paused_at = coalesce(paused_at, clock_timestamp()), paused_by = $2::text,
        pause_reason = nullif($5::text, '')
    where name = $1::text
    returning name
), {logged_as(2, where="exists (select from p)")}
select id from logged
"""

_LOCK: Final = f"""
select p.name, p.kind, p.args::text, p.options::text, p.cron, p.tz, p.every_s, p.catch_up, p.catch_up_max,
       p.overlap, p.jitter_s, {instant("p.next_at")}, p.paused_at is not null,
       {instant("coalesce($2::timestamptz, clock_timestamp())")}
from {{schema}}.periodic p where p.name = $1::text for update
"""

_RESUME: Final = """
update {schema}.periodic
set paused_at = null, paused_by = null, pause_reason = null, problem = null, next_at = $2::timestamptz
where name = $1::text
returning name
"""

_REMOVE: Final = f"""
with p as (
    delete from {{schema}}.periodic
    where name = $1::text and (is_dynamic or name <> all ({DECLARED}))
    returning name
), t as (
    delete from {{schema}}.periodic_tick where name in (select name from p)
), {logged_as(2, where="exists (select from p)")}
select exists (select from p), exists (select from {{schema}}.periodic where name = $1::text),
       (select id from logged)
"""

_NOTE_TRIGGER: Final = """
update {schema}.periodic set last_job_id = $2::int8 where name = $1::text returning name
"""


@dataclass(frozen=True, slots=True)
class PeriodicInfo:
    """A schedule as the database shows it at one moment.

    Attributes:
        name, kind, args: as they were declared (``args`` as plain JSON).
        every: its interval; or
        cron: its expression, with the time zone ``tz``.
        catch_up, overlap: as they were declared.
        next_at: its next tick; ``None`` while it is paused or not active.
        last_at: its last tick that made a job, ``None`` before the first.
        last_job_id: the last job that it made, at a tick or by :meth:`trigger`.
        skipped_at: its last tick, where that made no job; ``skip_reason`` says why.
        paused_at, paused_by, pause_reason: since when and why it is paused; ``None`` when it is not.
        active: whether it ticks when it is not paused: a live worker declares it, or it is dynamic.
        dynamic: whether a client added it, and no code declares it.
        problem: why it cannot tick just now, though it should; ``None`` when all is well.
    """

    name: str
    kind: str
    args: object
    every: timedelta | None
    cron: str | None
    tz: str | None
    catch_up: CatchUp
    overlap: Overlap
    next_at: datetime | None
    last_at: datetime | None
    last_job_id: int | None
    skipped_at: datetime | None
    skip_reason: str | None
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    active: bool
    dynamic: bool
    problem: str | None

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self.paused_at is not None


def list_periodic(schema: str) -> Operation[list[PeriodicInfo]]:
    """Return all schedules, by name."""
    return [_info(row) for row in (yield Call(in_schema(_LIST, schema)))]


def remove_periodic(schema: str, name: str, reason: str = "", by: str | None = None) -> Operation[None]:
    """Remove a schedule, and what is remembered of its ticks. Its jobs stay.

    Raises:
        PeriodicNotFound: there is none of that name.
        PeriodicConflict: live workers declare it.
    """
    name = check_name("name", name)
    rows = yield Call(
        in_schema(_REMOVE, schema), (name, *entry_of("remove periodic", name, by, reason).params)
    )
    removed, existed, _ = rows[0]
    if not removed:
        raise conflict_of(name) if existed else _not_found(name)


def pause_periodic(schema: str, name: str, reason: str = "", by: str | None = None) -> Operation[None]:
    """Let a schedule make no jobs until it is resumed.

    Raises:
        PeriodicNotFound: there is none of that name.
    """
    name = check_name("name", name)
    entry = entry_of("pause periodic", name, by, reason)
    if not (yield Call(in_schema(_PAUSE, schema), (name, *entry.params))):
        raise _not_found(name)


def resume_periodic(
    schema: str, name: str, reason: str = "", by: str | None = None, *, now: datetime | None = None
) -> Operation[None]:
    """Let a schedule tick again, from now on. Does nothing when it is not paused.

    Raises:
        PeriodicNotFound: there is none of that name.
    """
    name = check_name("name", name)
    return atomic(_resume(schema, name, entry_of("resume periodic", name, by, reason), now))


def _resume(schema: str, name: str, entry: Entry, given: datetime | None) -> Operation[None]:
    row, is_paused, now = yield from _lock(schema, name, given)
    if not is_paused:
        return
    try:
        next_at = row.timetable.next_after(now)
    except ConfigError:
        next_at = None  # this host cannot tell, and the leader will
    yield Call(in_schema(_RESUME, schema), (name, next_at))
    yield from log_action(schema, entry)


def trigger_periodic(
    schema: str, name: str, reason: str = "", by: str | None = None, *, notify: bool
) -> Operation[Enqueued]:
    """Make a schedule's job now, beside its ticks.

    Raises:
        PeriodicNotFound: there is none of that name.
        ConfigError: another version of jobq wrote it, with options that this one does not know.
    """
    name = check_name("name", name)
    return atomic(_trigger(schema, name, entry_of("trigger periodic", name, by, reason), notify=notify))


def _trigger(schema: str, name: str, entry: Entry, *, notify: bool) -> Operation[Enqueued]:
    row, _, _ = yield from _lock(schema, name)
    made = yield from enqueue_one(schema, row.job(), notify=notify)
    if made.inserted:
        yield Call(in_schema(_NOTE_TRIGGER, schema), (name, made.id))
    yield from log_action(schema, entry, int(made.inserted))
    return made


def _lock(schema: str, name: str, given: datetime | None = None) -> Operation[tuple[Row, bool, datetime]]:
    rows = yield Call(in_schema(_LOCK, schema), (name, given))
    if not rows:
        raise _not_found(name)
    *row, is_paused, now = rows[0]
    return read_row(row), is_paused, datetime.fromisoformat(now)


def _not_found(name: str) -> PeriodicNotFound:
    return PeriodicNotFound(f"there is no schedule {name!r}")


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _info(row: Sequence[Any]) -> PeriodicInfo:
    (
        name, kind, args, cron, tz, every_s, catch_up, overlap, next_at, last_at, last_job_id,
        newest_tick, skip_reason, paused_at, paused_by, pause_reason, problem, dynamic, active,
    ) = row  # fmt: skip
    return PeriodicInfo(
        name=name,
        kind=kind,
        args=msgspec.json.decode(args),
        every=None if every_s is None else timedelta(microseconds=round(every_s * 1_000_000)),
        cron=cron,
        tz=tz,
        catch_up=catch_up,
        overlap=overlap,
        next_at=_time(next_at) if active and paused_at is None else None,
        last_at=_time(last_at),
        last_job_id=last_job_id,
        skipped_at=None if skip_reason is None else _time(newest_tick),
        skip_reason=skip_reason,
        paused_at=_time(paused_at),
        paused_by=paused_by,
        pause_reason=pause_reason,
        active=active,
        dynamic=dynamic,
        problem=problem,
    )
