"""Schedules that are written: those that workers have in their code, and those that clients add."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from jobq._errors import PeriodicConflict
from jobq._kinds.cron import Every, Timetable
from jobq._limits import MAX_ARGUMENTS_BYTES
from jobq._operation import Call, Operation, atomic, in_schema
from jobq._statements.operator_log import Entry, log_action
from jobq._statements.periodic import DECLARED, instant, write_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.options import ResolvedOptions
    from jobq._kinds.schedule import Schedule

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

# A worker that started before this one and lives. Whoever started at the same moment comes later; one that
# started later than now came before the clock was set back.
_DECLARED_BEFORE: Final = f"""
select {instant("coalesce($3::timestamptz, clock_timestamp())")}, {instant("me.started_at")},
       pg_catalog.array_to_json(array(
    select distinct n from {{schema}}.worker w, pg_catalog.unnest(w.periodics) n
    where w.ended_at is null and w.lease_until > clock_timestamp()
      and w.id <> me.id and n = any ($2::text[])
      and ((w.started_at, w.id) < (me.started_at, me.id) or w.started_at > clock_timestamp())))::text
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
        name: _Known(
            is_new, cron, tz, every_s, _moment(next_at), datetime.fromisoformat(declared_at), dynamic
        )
        for name, is_new, cron, tz, every_s, next_at, declared_at, dynamic in rows
    }


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


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


def add_periodic(
    schema: str, added: Prepared, reason: str = "", by: str | None = None, *, now: datetime | None = None
) -> Operation[None]:
    """Add a schedule that no code declares, or replace one.

    Raises:
        PeriodicConflict: live workers declare one of that name.
    """
    return atomic(_add(schema, added, entry_of("add periodic", added.name, by, reason), now))


def _add(schema: str, added: Prepared, entry: Entry, given: datetime | None) -> Operation[None]:
    known = (yield from _lock_or_make(schema, [added.columns], is_dynamic=True))[added.name]
    [(now_text, is_declared)] = yield Call(in_schema(_NOW_AND_DECLARED, schema), (added.name, given))
    if is_declared and not known.is_dynamic:
        raise conflict_of(added.name)
    now = datetime.fromisoformat(now_text)
    is_new = known.is_new or not known.is_dynamic
    next_at = _next_at(added.schedule, known, now, comes_into_force=is_new)
    yield from _write(schema, [added.columns], now, [next_at], is_dynamic=True)
    yield from log_action(schema, entry)


def entry_of(action: str, name: str, by: str | None, reason: str) -> Entry:
    """Return the entry of the operator log for what is done to a schedule."""
    entry = Entry(action, {"periodic": name}, by, reason)
    _ = entry.params  # what cannot be kept shows before anything is sent
    return entry


def conflict_of(name: str) -> PeriodicConflict:
    """Return the error for what is not done to a schedule that live workers declare."""
    return PeriodicConflict(
        f"schedule {name!r} is declared in the code of workers that run: change it there, or pause it"
    )
