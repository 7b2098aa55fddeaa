"""Schedules in the database: declared, looked at, ticked, and steered by people.

`periodic.next_at` is the next tick that nothing was done about. A tick is dealt with in one
transaction, which holds the leader's term: its row in `periodic_tick`, whose key (name, tick) lets
nobody deal with it twice, its job, and the next `next_at`. So neither a restart nor a change of the
leader nor two leaders can lose or double one.

All of it goes by the database's clock. Where that is set back, `next_at` may stand further ahead than
the next tick; `resync` moves it back, and the ticks that were dealt with already have their row.

Lock order: the leader's row, a schedule's row, its ticks, and then what an enqueue locks.
"""

from __future__ import annotations

import functools
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_type_hints

import msgspec

from jobq._errors import ConfigError, JobConflict
from jobq._kinds.cron import Timetable, make_timetable
from jobq._kinds.jobtype import JobRow
from jobq._kinds.options import DEFAULTS, ResolvedOptions
from jobq._operation import Call, Operation, in_schema
from jobq._statements.enqueue import enqueue_one
from jobq._statements.leader import LED, Term, led

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.schedule import CatchUp, Overlap

# A unique key that an open transaction has just taken, or a row that an operator holds, must not keep
# the leader: the schedule is tried again.
_LOCK_TIMEOUT: Final = "2s"


def instant(column: str) -> str:
    """Return SQL for a time as text: a pool of the user's own may load times in ways of its own."""
    return f"""to_char({column} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')"""


SCHEDULE_IN_META: Final = "schedule"  # an application's own member of that name goes before

DECLARED: Final = """array(
    select pg_catalog.unnest(w.periodics) from {schema}.worker w
    where w.ended_at is null and w.lease_until > clock_timestamp())"""
"""The names that live workers declare."""

# Due ones first, and the first that is not: when to look again.
_LOOK: Final = f"""
select p.name, p.kind, p.args::text, p.options::text, p.cron, p.tz, p.every_s, p.catch_up, p.catch_up_max,
       p.overlap, p.jitter_s, {instant("p.next_at")}, {instant("c.now")}
from (select coalesce($1::timestamptz, clock_timestamp()) as now) c
left join lateral (
    select * from {{schema}}.periodic p
    where p.paused_at is null and p.name <> all ($2::text[])
      and (p.is_dynamic or p.name = any ({DECLARED}))
    order by p.next_at nulls first, p.name limit $3::int4
) p on true
order by p.next_at nulls first, p.name
"""

_LOCK_TIMEOUT_SQL: Final = "select set_config('lock_timeout', $1::text, true)"

# The tick's row comes first: who cannot make it makes no job. The schedule's row is locked, and must
# still be waiting for what the leader saw. A tick that was missed is dealt with when it comes again:
# then the clock was ahead, and is right now.
_TAKE_TICK: Final = """
with p as materialized (
    select name, last_job_id from {schema}.periodic
    where name = $1::text and next_at = $2::timestamptz and paused_at is null for update
), t as (
    insert into {schema}.periodic_tick as t (name, tick) select name, $3::timestamptz from p
    on conflict (name, tick) do update set skipped = null, missed_until = null, made_at = excluded.made_at
    where t.missed_until is not null
    returning tick
)
select p.last_job_id, exists (select from t), coalesce(
        (select 1 from {schema}.ready where job_id = p.last_job_id limit 1),
        (select 1 from {schema}.scheduled where job_id = p.last_job_id limit 1),
        (select 1 from {schema}.running where job_id = p.last_job_id limit 1)) is not null
from p
"""

_SET_TICK: Final = """
with t as (
    update {schema}.periodic_tick set job_id = $3::int8, skipped = $4::text
    where name = $1::text and tick = $2::timestamptz
)
update {schema}.periodic
set next_at = $5::timestamptz, problem = null, last_job_id = coalesce($3::int8, last_job_id),
    last_at = case when $3::int8 is null then last_at else $2::timestamptz end
where name = $1::text
"""

_ADVANCE: Final = "update {schema}.periodic set next_at = $2::timestamptz where name = $1::text"

# Ticks that are passed over have one row together: a schedule of seconds misses millions in a month.
_PASS_OVER: Final = f"""
with {LED}, p as (
    update {{schema}}.periodic set next_at = $5::timestamptz, problem = null
    where name = $3::text and next_at = $4::timestamptz and paused_at is null and exists (select from led)
    returning name
), t as (
    insert into {{schema}}.periodic_tick (name, tick, skipped, missed_until)
    select name, $4::timestamptz, $6::text, $5::timestamptz from p
    on conflict do nothing
)
select exists (select from p)
"""

_MOVE: Final = f"""
with {LED}
update {{schema}}.periodic p set next_at = m.next_at, problem = null
from unnest($3::text[], $4::timestamptz[], $5::timestamptz[]) m(name, seen, next_at)
where p.name = m.name and p.next_at is not distinct from m.seen and exists (select from led)
returning p.name
"""

_SET_PROBLEM: Final = f"""
with {LED}
update {{schema}}.periodic set problem = $4::text
where name = $3::text and problem is distinct from $4::text and exists (select from led)
returning name
"""

_AHEAD: Final = f"""
select p.name, p.cron, p.tz, p.every_s, {instant("p.next_at")}, {instant("c.now")}
from (select coalesce($1::timestamptz, clock_timestamp()) as now) c, {{schema}}.periodic p
where p.paused_at is null and p.next_at > c.now and p.name > $2::text and p.name <> all ($3::text[])
order by p.name limit $4::int4
"""

_PRUNE: Final = f"""
with {LED}
delete from {{schema}}.periodic_tick
where ctid = any (array(
    select ctid from {{schema}}.periodic_tick
    where made_at < clock_timestamp() - $3::float8 * interval '1 second'
    order by made_at limit $4::int4))
  and exists (select from led)
returning 1
"""


class Row(NamedTuple):
    """A schedule as it stands in the table, not yet understood: one that cannot be is one's own problem.

    Attributes:
        every_s: seconds; ``None`` with ``cron``.
        next_at: the next tick that nothing was done about, ``None`` when it is to be computed.
    """

    name: str
    kind: str
    args: str
    options: str
    cron: str | None
    tz: str | None
    every_s: float | None
    catch_up: CatchUp
    catch_up_max: int
    overlap: Overlap
    jitter_s: float
    next_at: datetime | None

    @property
    def timetable(self) -> Timetable:
        """When it ticks.

        Raises:
            ConfigError: this host cannot tell (it lacks the time zone).
        """
        return read_timetable(self.cron, self.tz, self.every_s)

    def job(self, tick: datetime | None = None, jitter_s: float = 0.0) -> JobRow:
        """Return the job of a tick; without one, as it is made outside of the ticks.

        Its meta says which schedule and which tick it is of, for handlers that catch up.

        Raises:
            ConfigError: the options are those of another version.
        """
        options = read_options(self.options)
        options = options._replace(meta=_meta(options.meta, self.name, tick))
        wait_s = (options.delay_s or 0.0) + jitter_s
        if tick is not None and wait_s:
            options = options._replace(run_at=tick + timedelta(seconds=wait_s), delay_s=None)
        return JobRow(self.kind, self.args, options)


class Ahead(NamedTuple):
    """A schedule that waits for a tick, and the moment at which that was seen."""

    name: str
    cron: str | None
    tz: str | None
    every_s: float | None
    next_at: datetime
    now: datetime

    def next_tick(self) -> datetime:
        """Return its first tick after now: before ``next_at`` where the clock was set back since.

        Raises:
            ConfigError: this host cannot tell.
        """
        return read_timetable(self.cron, self.tz, self.every_s).next_after(self.now)


class Look(NamedTuple):
    """What the table shows at one moment.

    Attributes:
        now: that moment, by the database's clock.
        due: schedules whose tick has come, and those whose next one is to be computed.
        next_at: the first tick that has not come, of those that were looked at.
        is_full: whether more may be due.
    """

    now: datetime
    due: list[Row]
    next_at: datetime | None
    is_full: bool


class Fired(NamedTuple):
    """What became of a tick.

    Attributes:
        job_id: the job that was made, ``None`` for none.
        skipped: why not.
        overtaken: the schedule was changed meanwhile, or the tick was dealt with before.
    """

    job_id: int | None = None
    skipped: str | None = None
    overtaken: bool = False


def look(schema: str, leave: Sequence[str], limit: int, *, now: datetime | None = None) -> Operation[Look]:
    """Look at up to ``limit`` schedules in force, those in ``leave`` apart. ``now``: for tests."""
    rows = yield Call(in_schema(_LOOK, schema), (now, list(leave), limit))
    moment = datetime.fromisoformat(rows[0][-1])
    found = [read_row(row[:-1]) for row in rows if row[0] is not None]
    due = [row for row in found if row.next_at is None or row.next_at <= moment]
    ahead = [row.next_at for row in found if row.next_at is not None and row.next_at > moment]
    return Look(moment, due, ahead[0] if ahead else None, len(due) == limit)


def fire(
    schema: str, term: Term, row: Row, tick: datetime, next_at: datetime, job: JobRow, *, notify: bool
) -> Operation[Fired]:
    """Deal with one tick of a schedule: make its job, or say why not; what comes next is ``next_at``.

    Raises:
        Deposed: the term is over; nothing was done.
        DatabaseError: the server refused the job; nothing was done.
    """
    return led(schema, term, _fire(schema, row, tick, next_at, job, notify=notify))


def _fire(
    schema: str, row: Row, tick: datetime, next_at: datetime, job: JobRow, *, notify: bool
) -> Operation[Fired]:
    yield Call(_LOCK_TIMEOUT_SQL, (_LOCK_TIMEOUT,))
    taken = yield Call(in_schema(_TAKE_TICK, schema), (row.name, row.next_at, tick))
    if not taken:
        return Fired(overtaken=True)
    previous, is_new, is_unfinished = taken[0]
    if not is_new:
        yield Call(in_schema(_ADVANCE, schema), (row.name, next_at))
        return Fired(overtaken=True)
    if row.overlap == "skip" and is_unfinished:
        fired = Fired(skipped=f"the previous job {previous} is unfinished")
    else:
        fired = yield from _make_job(schema, job, notify=notify)
    yield Call(in_schema(_SET_TICK, schema), (row.name, tick, fired.job_id, fired.skipped, next_at))
    return fired


def _make_job(schema: str, job: JobRow, *, notify: bool) -> Operation[Fired]:
    try:
        made = yield from enqueue_one(schema, job, notify=notify)
    except JobConflict as conflict:
        return Fired(skipped=str(conflict))
    if made.inserted:
        return Fired(made.id)
    if made.replaced:
        return Fired(skipped=f"job {made.id}, which holds its unique key and waits, was updated instead")
    return Fired(skipped=f"job {made.id} holds its unique key")


def pass_over(schema: str, term: Term, row: Row, until: datetime, reason: str) -> Operation[bool]:
    """Leave out a schedule's ticks before ``until``, its next one. ``False``: it was changed meanwhile."""
    rows = yield Call(in_schema(_PASS_OVER, schema), (*term, row.name, row.next_at, until, reason))
    return rows[0][0]  # type: ignore[no-any-return]  # a boolean of ours


def move(
    schema: str, term: Term, moves: Sequence[tuple[str, datetime | None, datetime]]
) -> Operation[list[str]]:
    """Set the next tick of schedules: (name, what it was seen as, what it is to be)."""
    columns = [list(column) for column in zip(*moves, strict=True)]
    return [name for (name,) in (yield Call(in_schema(_MOVE, schema), (*term, *columns)))]


def set_problem(schema: str, term: Term, name: str, problem: str) -> Operation[bool]:
    """Show what is wrong with a schedule. ``False``: it is shown already."""
    return bool((yield Call(in_schema(_SET_PROBLEM, schema), (*term, name, problem))))


def ahead(
    schema: str, after: str, leave: Sequence[str], limit: int, *, now: datetime | None = None
) -> Operation[list[Ahead]]:
    """Return schedules that wait for a tick and come after a name, by name."""
    rows = yield Call(in_schema(_AHEAD, schema), (now, after, list(leave), limit))
    return [Ahead._make((*row[:4], *map(datetime.fromisoformat, row[4:]))) for row in rows]


def prune(schema: str, term: Term, older_s: float, limit: int) -> Operation[int]:
    """Forget up to ``limit`` ticks that were dealt with longer than ``older_s`` seconds ago."""
    return len((yield Call(in_schema(_PRUNE, schema), (*term, older_s, limit))))


def read_timetable(cron: str | None, tz: str | None, every_s: float | None) -> Timetable:
    """Return the timetable of a row.

    Raises:
        ConfigError: this host cannot tell: it lacks the time zone, or a newer version wrote it.
    """
    if every_s is None:
        return make_timetable(cron=cron, tz=tz)
    return make_timetable(every=timedelta(microseconds=round(every_s * 1_000_000)))


def _meta(document: str | None, name: str, tick: datetime | None) -> str:
    meta = msgspec.json.decode(document, type=dict[str, object]) if document else {}
    of = {"name": name} if tick is None else {"name": name, "tick": tick.isoformat()}
    return msgspec.json.encode({SCHEDULE_IN_META: of, **meta}).decode()


def write_options(options: ResolvedOptions) -> str:
    """Return the options of a schedule's jobs as a JSON document: those that are not the defaults.

    So an older version can read it, unless something is used that it does not know.
    """
    given = {name: value for name, value in options._asdict().items() if value != getattr(DEFAULTS, name)}
    return msgspec.json.encode(given).decode()


def read_options(document: str) -> ResolvedOptions:
    """Return what `write_options` wrote.

    Raises:
        ConfigError: another version wrote it.
    """
    types = _option_types()
    try:
        stored = msgspec.json.decode(document, type=dict[str, object])
        return DEFAULTS._replace(
            **{name: msgspec.convert(value, types[name]) for name, value in stored.items()}
        )
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"options: written by another version of jobq: {error}") from error


@functools.cache
def _option_types() -> dict[str, Any]:
    return get_type_hints(ResolvedOptions)


def read_row(row: Sequence[Any]) -> Row:
    """Return a row of the table, its columns in the order of `Row`."""
    *others, next_at = row
    return Row._make((*others, None if next_at is None else datetime.fromisoformat(next_at)))
