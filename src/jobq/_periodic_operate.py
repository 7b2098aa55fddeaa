"""What workers and people do with schedules: declare, list, add, remove, pause, resume, trigger."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from jobq._cron import Every, Timetable
from jobq._enqueue import enqueue_one
from jobq._errors import ConfigError, PeriodicConflict, PeriodicNotFound
from jobq._limits import MAX_ARGUMENTS_BYTES
from jobq._operation import Call, Operation, atomic, in_schema
from jobq._operator_log import Entry, log_action, logged_as
from jobq._options import check_name
from jobq._periodic import DECLARED, Row, instant, read_row, write_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._options import ResolvedOptions
    from jobq._schedule import CatchUp, Overlap, Schedule
    from jobq._types import Enqueued

_NEW: Final = """unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::float8[],
    $8::text[], $9::int4[], $10::text[], $11::float8[], $12::bool[])
    d(name, kind, args, options, cron, tz, every_s, catch_up, catch_up_max, overlap, jitter_s,
      run_at_start)"""

# Makes the rows that are missing, and locks and returns those that are there, in the order of their
# names; whoever else declares some of them waits, and the next statement sees what he did.
_LOCK_OR_MAKE: Final = f"""
insert into {{schema}}.periodic as p (name, kind, args, options, cron, tz, every_s, catch_up, catch_up_max,
                                      overlap, jitter_s, run_at_start, is_dynamic)
select name, kind, args::jsonb, options::jsonb, cron, tz, every_s, catch_up, catch_up_max,
       overlap, jitter_s, run_at_start, $13::bool
from {_NEW} order by name
on conflict (name) do update set name = excluded.name
returning name, xmax = 0, cron, tz, every_s, {instant("next_at")}, {instant("declared_at")}, is_dynamic
"""

# A worker that started before this one and lives. Whoever started at the same moment comes later.
_DECLARED_BEFORE: Final = f"""
select {instant("coalesce($3::timestamptz, clock_timestamp())")}, {instant("me.started_at")},
       array_to_json(array(
    select distinct n from {{schema}}.worker w, unnest(w.periodics) n
    where w.ended_at is null and w.lease_until > clock_timestamp()
      and (w.started_at, w.id) < (me.started_at, me.id) and n = any ($2::text[])))::text
from {{schema}}.worker me where me.id = $1::int8
"""

_WRITE: Final = f"""
update {{schema}}.periodic p
set kind = d.kind, args = d.args::jsonb, options = d.options::jsonb, cron = d.cron, tz = d.tz,
    every_s = d.every_s, catch_up = d.catch_up, catch_up_max = d.catch_up_max, overlap = d.overlap,
    jitter_s = d.jitter_s, run_at_start = d.run_at_start, is_dynamic = $13::bool, problem = null,
    declared_at = t.declared_at, next_at = t.next_at
from {_NEW} join unnest($14::text[], $15::timestamptz[], $16::timestamptz[]) t(name, declared_at, next_at)
     using (name)
where p.name = d.name
returning p.name
"""

_NOW_AND_DECLARED: Final = f"""
select {instant("coalesce($2::timestamptz, clock_timestamp())")}, $1::text = any ({DECLARED})
"""

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


class _Known(NamedTuple):
    """What the table holds of a schedule that is being declared."""

    is_new: bool
    cron: str | None
    tz: str | None
    every_s: float | None
    next_at: datetime | None
    declared_at: datetime
    is_dynamic: bool

    def is_newer(self, started_at: datetime, now: datetime) -> bool:
        """Whether a worker wrote it that started after ``started_at``; not if that is in the future."""
        return not self.is_new and not self.is_dynamic and started_at < self.declared_at <= now


class _Columns(NamedTuple):
    """A schedule's columns as it was declared, in the order of `_NEW`."""

    name: str
    kind: str
    args: str
    options: str
    cron: str | None
    tz: str | None
    every_s: float | None
    catch_up: str
    catch_up_max: int
    overlap: str
    jitter_s: float
    run_at_start: bool


class Prepared(NamedTuple):
    """A schedule ready to be stored."""

    schedule: Schedule
    columns: _Columns

    @property
    def name(self) -> str:
        """What it is known by."""
        return self.schedule.name


def prepare_schedule(
    schedule: Schedule, defaults: ResolvedOptions, max_bytes: int = MAX_ARGUMENTS_BYTES
) -> Prepared:
    """Return a schedule ready to be stored.

    Args:
        schedule: what was declared.
        defaults: options that a client has for all its jobs.
        max_bytes: the most that the arguments of a job may have.

    Raises:
        ConfigError: its jobs cannot be stored; names the schedule.
    """
    kind, args, options = schedule.prepare(defaults, max_bytes)
    return Prepared(
        schedule,
        _Columns(
            schedule.name,
            kind,
            args,
            write_options(options),
            *_times(schedule.timetable),
            schedule.catch_up,
            schedule.catch_up_max,
            schedule.overlap,
            schedule.jitter_s,
            schedule.run_at_start,
        ),
    )


def declare(
    schema: str, worker_id: int, schedules: Sequence[Prepared], *, now: datetime | None = None
) -> Operation[list[str]]:
    """Write the schedules that a worker has in its code, which has just registered.

    One whose times are unchanged keeps its next tick, so that what was missed is caught up with; one
    whose times are new ticks from now on. What a worker wrote that started later is left alone: in a
    rolling deploy the newest code counts, whoever comes last to write. ``now`` replaces the database's
    clock in tests, here and below.

    Returns:
        Names of those that clients had added, and which are declared now.
    """
    return atomic(_declare(schema, worker_id, schedules, now)) if schedules else _nothing()


def _nothing() -> Operation[list[str]]:
    yield from ()
    return []


def _declare(
    schema: str, worker_id: int, schedules: Sequence[Prepared], given: datetime | None
) -> Operation[list[str]]:
    known = yield from _lock_or_make(schema, [one.columns for one in schedules], is_dynamic=False)
    rows = yield Call(in_schema(_DECLARED_BEFORE, schema), (worker_id, list(known), given))
    if not rows:
        return []  # this worker was declared over already
    now, started_at = datetime.fromisoformat(rows[0][0]), datetime.fromisoformat(rows[0][1])
    in_force: list[str] = msgspec.json.decode(rows[0][2], type=list[str])
    mine = [one for one in schedules if not known[one.name].is_newer(started_at, now)]
    ticks = [
        _next_at(one.schedule, known[one.name], now, comes_into_force=one.name not in in_force)
        for one in mine
    ]
    yield from _write(schema, [one.columns for one in mine], started_at, ticks, is_dynamic=False)
    return [one.name for one in mine if known[one.name].is_dynamic]


def _lock_or_make(
    schema: str, columns: Sequence[_Columns], *, is_dynamic: bool
) -> Operation[dict[str, _Known]]:
    arrays = [list(column) for column in zip(*columns, strict=True)]
    rows = yield Call(in_schema(_LOCK_OR_MAKE, schema), (*arrays, is_dynamic))
    return {
        name: _Known(is_new, cron, tz, every_s, _time(next_at), datetime.fromisoformat(declared_at), dynamic)
        for name, is_new, cron, tz, every_s, next_at, declared_at, dynamic in rows
    }


def _write(
    schema: str,
    columns: Sequence[_Columns],
    declared_at: datetime,
    ticks: Sequence[datetime],
    *,
    is_dynamic: bool,
) -> Operation[None]:
    if columns:
        arrays = [list(column) for column in zip(*columns, strict=True)]
        times = ([row.name for row in columns], [declared_at] * len(columns), list(ticks))
        yield Call(in_schema(_WRITE, schema), (*arrays, is_dynamic, *times))


def _next_at(schedule: Schedule, known: _Known, now: datetime, *, comes_into_force: bool) -> datetime:
    """Return the next tick of a schedule that is being declared."""
    next_at = known.next_at
    if next_at is None or _times(schedule.timetable) != (known.cron, known.tz, known.every_s):
        next_at = schedule.timetable.next_after(now)
    if schedule.run_at_start and comes_into_force and next_at > now:
        return now  # a tick beside the timetable; what was missed would make a job anyway
    return next_at


def _times(timetable: Timetable) -> tuple[str | None, str | None, float | None]:
    """Return its columns cron, tz and every_s."""
    if isinstance(timetable, Every):
        return None, None, timetable.every.total_seconds()
    return timetable.expression, timetable.tz, None


def list_periodic(schema: str) -> Operation[list[PeriodicInfo]]:
    """Return all schedules, by name."""
    return [_info(row) for row in (yield Call(in_schema(_LIST, schema)))]


def add_periodic(
    schema: str, added: Prepared, reason: str = "", by: str | None = None, *, now: datetime | None = None
) -> Operation[None]:
    """Add a schedule that no code declares, or replace one.

    Raises:
        PeriodicConflict: live workers declare one of that name.
    """
    return atomic(_add(schema, added, _entry("add periodic", added.name, by, reason), now))


def _add(schema: str, added: Prepared, entry: Entry, given: datetime | None) -> Operation[None]:
    known = (yield from _lock_or_make(schema, [added.columns], is_dynamic=True))[added.name]
    [(now_text, is_declared)] = yield Call(in_schema(_NOW_AND_DECLARED, schema), (added.name, given))
    if is_declared and not known.is_dynamic:
        raise _conflict(added.name)
    now = datetime.fromisoformat(now_text)
    is_new = known.is_new or not known.is_dynamic
    next_at = _next_at(added.schedule, known, now, comes_into_force=is_new)
    yield from _write(schema, [added.columns], now, [next_at], is_dynamic=True)
    yield from log_action(schema, entry)


def remove_periodic(schema: str, name: str, reason: str = "", by: str | None = None) -> Operation[None]:
    """Remove a schedule, and what is remembered of its ticks. Its jobs stay.

    Raises:
        PeriodicNotFound: there is none of that name.
        PeriodicConflict: live workers declare it.
    """
    name = check_name("name", name)
    rows = yield Call(in_schema(_REMOVE, schema), (name, *_entry("remove periodic", name, by, reason).params))
    removed, existed, _ = rows[0]
    if not removed:
        raise _conflict(name) if existed else _not_found(name)


def pause_periodic(schema: str, name: str, reason: str = "", by: str | None = None) -> Operation[None]:
    """Let a schedule make no jobs until it is resumed.

    Raises:
        PeriodicNotFound: there is none of that name.
    """
    name = check_name("name", name)
    entry = _entry("pause periodic", name, by, reason)
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
    return atomic(_resume(schema, name, _entry("resume periodic", name, by, reason), now))


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
    return atomic(_trigger(schema, name, _entry("trigger periodic", name, by, reason), notify=notify))


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


def _entry(action: str, name: str, by: str | None, reason: str) -> Entry:
    entry = Entry(action, {"periodic": name}, by, reason)
    _ = entry.params  # what cannot be kept shows before anything is sent
    return entry


def _not_found(name: str) -> PeriodicNotFound:
    return PeriodicNotFound(f"there is no schedule {name!r}")


def _conflict(name: str) -> PeriodicConflict:
    return PeriodicConflict(
        f"schedule {name!r} is declared in the code of workers that run: change it there, or pause it"
    )


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
