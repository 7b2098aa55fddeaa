"""Enqueue with unique keys: who holds a key, who gets it, and what becomes of the others.

Every making of a job with a key adds a row to `unique_key`, the key's next generation, and only the newest
row counts. It says how the key is held: until a time slot has passed; while its job waits for its first
start; or while its job is live. Nothing is deleted when a job ends (deleting there grows with reuse
under a pinned horizon: 53 → 211 µs for 100 hot keys).

Three rules make it free of races at any isolation level:

* two who saw the same newest row want the same next generation, and the primary key lets one have it. The
  other waits for that transaction, and for nothing else, and is told who was faster; in a transaction
  of repeatable reads or more the server says so with a serialization failure;
* whoever adds a generation locks the row that he counts from (``for key share``): what `keys` says of how
  rows are removed rests on that. Who counts from one that is gone finds no row to lock, and looks again;
* locks are taken in one order: keys in their own order, then waiting jobs in `ready`, then those in
  `scheduled`, each in ctid order.

Whoever is to replace waits for others who do, by an advisory lock for each key, taken before the statement
begins: so its snapshot shows what they left. Without, of twenty who replace one job nineteen would find
that it has moved, and again of those nineteen; and calls with many keys, which would come back for some
while they hold others, would deadlock. From `MAX_LOCKED_KEYS` on a call does without.

A job that waits is replaced only before its first start, and its row there becomes another: a claim whose
snapshot is older finds the row that it saw gone or newer, and cannot start the job with the arguments of
before. Within a lane a replaced job keeps its place, or one that is replaced often would never come up.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from jobq._errors import JobConflict, UniqueConflict
from jobq._kinds.jobtype import JobColumns
from jobq._kinds.unique import PLAIN, RAISE, REPLACE, RETURN
from jobq._operation import Call, Operation, Rows, in_schema
from jobq._statements.insert import DUE_AT, IS_DUE, ROWS, column, insert_call, insert_jobs, notify_queues
from jobq._types import Enqueued

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jobq._kinds.jobtype import JobRow

# Of `u`, the newest row of a key. Liveness is a coalesce of scalar subqueries, for `exists or exists`
# becomes hashed subplans over whole tables; and each goes backwards, for a job that has come and gone
# often leaves a trail of dead entries, the newest last. A slot of a job that was made later than now does not
# count: the clock was set back since, and the key would be held until that slot has come and passed.
HELD: Final = """case
        when u.job_id is null then false
        when u.held_until is not null then u.held_until > statement_timestamp() and not coalesce(
            (select created_at > clock_timestamp() from {schema}.job where id = u.job_id limit 1), false)
        when u.until_started then coalesce(
            (select attempt = 0 from {schema}.ready where job_id = u.job_id order by attempt desc limit 1),
            (select attempt = 0 from {schema}.scheduled where job_id = u.job_id
             order by attempt desc limit 1),
            false)
        else coalesce(
            (select true from {schema}.ready where job_id = u.job_id order by attempt desc limit 1),
            (select true from {schema}.scheduled where job_id = u.job_id order by attempt desc limit 1),
            (select true from {schema}.running where job_id = u.job_id order by attempt desc limit 1),
            false) end"""

# In whole microseconds: no float may put the end of a slot before its last moment.
_SLOT_END: Final = """case when period_us is not null then timestamptz 'epoch' + interval '1 microsecond'
        * (((extract(epoch from statement_timestamp()) * 1000000.0)::int8 / period_us + 1)
           * period_us)::float8 end"""

# `k`: the jobs to be made, with the newest row of each one's key. `won`: the keys that this call got, each
# under `new_generation`. The CTEs are never joined to one another, but asked by `in`, which is a hash
# whatever the planner thinks of their size: joined, 20,000 keys took 14 s with a generic plan.
_KEYS: Final = f"""
with k as materialized (
    select x.*, u.tid, u.job_id as holder, {HELD} as is_held, coalesce(u.generation, 0) + 1 as new_generation
    from (select nextval({{job_ids}}) as id, t.* from {ROWS}) x
    left join lateral (
        select ctid as tid, * from {{schema}}.unique_key
        where key = x.unique_key order by generation desc limit 1
    ) u on true
), fit as materialized (
    select f.id, f.unique_key, f.new_generation,
           {{period_us}} as period_us, {{until_started}} as until_started
    from (select * from k where unique_key is not null and not is_held order by unique_key) f
    left join lateral (
        select 1 as locked from {{schema}}.unique_key u where u.ctid = f.tid for key share) l on true
    where f.tid is null or l.locked = 1
), won as (
    insert into {{schema}}.unique_key (key, generation, job_id, held_until, until_started)
    select unique_key, new_generation, id, {_SLOT_END}, until_started from fit order by unique_key
    on conflict do nothing
    returning job_id
)"""

# The common way: a holder is returned. Also for a single job that raises: there is nothing else to keep.
ENQUEUE_UNIQUE: Final = f"""{_KEYS}, y as materialized (
    select * from k where unique_key is null or id in (select job_id from won)
), {insert_jobs("y", unique=True)},
{notify_queues(f"select distinct {{queue}} as queue from y where {IS_DUE}")}
select id, unique_key is null or id in (select job_id from won), case when is_held then holder end,
       new_generation, false, (select sent from n)
from k order by ord
"""

# The full way. `gate`: nothing is made or replaced when a job that is to raise cannot be made. `waiting`:
# the holders that are to be replaced, where their rows are. `m`: those rows, locked, and what becomes of
# them. `moved`: what was done.
ENQUEUE_REPLACE: Final = f"""{_KEYS}, gate as materialized (
    select (select count(*) from won) >= 0 and not exists (
        select from k
        where {{conflict}} = {RAISE} and unique_key is not null and id not in (select job_id from won)
    ) as is_open
), y as materialized (
    select * from k
    where (unique_key is null or id in (select job_id from won)) and (select is_open from gate)
), waiting as materialized (
    select id, holder, args, {{priority}} as priority, {DUE_AT} as run_at,
           {{conflict}} as conflict, {{max_wait_s}} as max_wait_s,
           (select case when attempt = 0 then ctid end from {{schema}}.ready
            where job_id = holder order by attempt desc limit 1) as ready_tid,
           (select case when attempt = 0 then ctid end from {{schema}}.scheduled
            where job_id = holder order by attempt desc limit 1) as scheduled_tid
    from k where is_held and {{conflict}} between 1 and 7 and (select is_open from gate)
), locked_ready as materialized (
    select w.*, t.* from (select * from waiting where ready_tid is not null order by ready_tid) w
    cross join lateral (
        select ctid as tid, queue as old_queue, priority as old_priority, null::timestamptz as old_run_at
        from {{schema}}.ready where ctid = w.ready_tid for update) t
), locked_scheduled as materialized (
    select w.*, t.* from (
        select * from waiting where scheduled_tid is not null and (select count(*) from locked_ready) >= 0
        order by scheduled_tid) w
    cross join lateral (
        select ctid as tid, queue as old_queue, priority as old_priority, run_at as old_run_at
        from {{schema}}.scheduled where ctid = w.scheduled_tid for update) t
), m as materialized (
    select l.id, l.holder, l.tid, l.ready_tid is not null as was_ready, l.old_queue, l.args, l.conflict,
           case when l.conflict & {
    REPLACE["priority"]
}::int2 <> 0 then l.priority else l.old_priority end as priority,
           case when l.conflict & {REPLACE["run_at"]}::int2 = 0 then l.old_run_at else least(
               coalesce(l.run_at, statement_timestamp()),
               c.created_at + l.max_wait_s * interval '1 second') end as run_at, c.tid as job_tid
    from (select * from locked_ready union all select * from locked_scheduled) l
    left join lateral (
        select ctid as tid, created_at from {{schema}}.job
        where id >= l.holder and id <= l.holder order by id desc limit 1) c on true
), kept as (
    update {{schema}}.ready r
    set priority = m.priority,
        xid = case when r.priority::int2 = m.priority then r.xid else pg_current_xact_id() end
    from m where r.ctid = m.tid and m.was_ready and (m.run_at is null or m.run_at <= statement_timestamp())
    returning m.*
), from_ready as (
    delete from {{schema}}.ready r using m
    where r.ctid = m.tid and m.was_ready and m.run_at > statement_timestamp()
    returning m.*
), postponed as (
    update {{schema}}.scheduled s set priority = m.priority, run_at = m.run_at
    from m where s.ctid = m.tid and not m.was_ready and m.run_at > statement_timestamp()
    returning m.*
), from_scheduled as (
    delete from {{schema}}.scheduled s using m
    where s.ctid = m.tid and not m.was_ready and m.run_at <= statement_timestamp()
    returning m.*
), to_ready as (
    insert into {{schema}}.ready (job_id, queue, priority)
    select holder, old_queue, priority from from_scheduled
), to_scheduled as (
    insert into {{schema}}.scheduled (job_id, run_at, reason, queue, priority)
    select holder, run_at, 'scheduled', old_queue, priority from from_ready
), moved as materialized (
    select * from kept union all select * from postponed
    union all select * from from_ready union all select * from from_scheduled
), rewritten as (
    update {{schema}}.job j set args = moved.args::jsonb
    from moved where j.ctid = moved.job_tid and moved.conflict & {REPLACE["args"]}::int2 <> 0
), {insert_jobs("y", unique=True)},
{
    notify_queues(f'''select {{queue}} as queue from y where {IS_DUE}
    union select old_queue from moved where run_at is null or run_at <= statement_timestamp()''')
}
select id, (unique_key is null or id in (select job_id from won)) and (select is_open from gate),
       case when is_held and (id in (select id from moved) or id not in (
           select id from waiting where coalesce(ready_tid, scheduled_tid) is not null)) then holder end,
       new_generation, id in (select id from moved), (select sent from n)
from k order by ord
"""

# In the order of the array.
LOCK_KEYS: Final = """
select pg_catalog.count(pg_advisory_xact_lock(k.id)::text) from pg_catalog.unnest($1::int8[]) k(id)
"""

# Who was faster than this call, which a new statement sees; unless he held the key for a slot that has
# passed, or his job is gone.
FIND_FASTER: Final = """
select k.ord, u.job_id
from unnest($1::bytea[], $2::int4[]) with ordinality k(key, generation, ord)
cross join lateral (
    select job_id from {schema}.unique_key u
    where u.key = k.key and u.generation = k.generation
      and coalesce(u.held_until > statement_timestamp(),
                   (select true from {schema}.job where id = u.job_id limit 1)) limit 1
) u
"""

# Keys that this call got and has no use for: of a row without a job only a slot holds anything. The row stays
# (see `keys`), for where each statement is a transaction others may have counted on from it.
GIVE_UP: Final = """
update {schema}.unique_key set held_until = '-infinity' where ctid = any (array(
    select u.tid from unnest($1::bytea[], $2::int4[], $3::int8[]) k(key, generation, job_id)
    cross join lateral (
        select ctid as tid from {schema}.unique_key u
        where u.key = k.key and u.generation = k.generation and u.job_id = k.job_id
          and u.held_until is not null limit 1) u))
"""

# A key can be lost and then given up (the winner rolled back) again and again only while others
# keep fighting for it; this many rounds are far beyond what was ever seen.
MAX_UNIQUE_ROUNDS: Final = 10

# All locks of a server share a table of some thousands.
MAX_LOCKED_KEYS: Final = 100

# From so many jobs on a call is planned anew (1 ms): a plan from when the tables were empty would read
# them whole for each key.
_BULK: Final = 100


class _Answer(NamedTuple):
    """What the statement says of one job.

    Attributes:
        id: the id that the job has, or would have had.
        inserted: whether it was made.
        holder: the job that holds its key, where that is certain.
        generation: under which its key was asked for.
        replaced: whether the holder was replaced.
    """

    id: int
    inserted: bool
    holder: int | None
    generation: int
    replaced: bool


def enqueue_unique(schema: str, rows: Sequence[JobRow], *, notify: bool) -> Operation[list[Enqueued]]:
    """Make jobs of which some have unique keys: all of them or none. Answers in input order.

    Raises:
        UniqueConflict: a key is held, and was to raise then.
        JobConflict: other transactions fought for a key for too long.
    """
    first, again = _split(rows)
    locks = sorted({_lock_id(schema, row) for row in rows if _conflict(row) in _REPLACING})
    if 0 < len(locks) <= MAX_LOCKED_KEYS:
        yield Call(LOCK_KEYS, (locks,))
    made = yield from _make(schema, {i: rows[i] for i in first}, notify=notify)
    later: dict[int, Enqueued] = {}
    overlays = _overlays(rows, again)
    if overlays:
        later = yield from _make(schema, overlays, notify=notify)
    for i, original in again.items():
        made[i] = Enqueued(made[original].id, inserted=False)
        if _conflict(rows[i]) in _REPLACING and original in later:
            made[i] = later[original]
            later[original] = Enqueued(
                made[i].id, inserted=False, replaced=made[i].replaced or made[i].inserted
            )
    return [made[i] for i in range(len(rows))]


_REPLACING: Final = range(1, RAISE)


def _conflict(row: JobRow) -> int:
    unique = row.options.unique
    return RETURN if unique is None else unique.rule.conflict


def _lock_id(schema: str, row: JobRow) -> int:
    key = row.options.unique_key
    assert key is not None
    digest = hashlib.sha256(f"jobq.unique:{schema}:".encode() + key).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _split(rows: Sequence[JobRow]) -> tuple[list[int], dict[int, int]]:
    """Split a call's rows into the first of each key, and repetitions with the row that they repeat."""
    first: dict[bytes, int] = {}
    again: dict[int, int] = {}
    for i, row in enumerate(rows):
        key = row.options.unique_key
        if key is None or first.setdefault(key, i) == i:
            continue
        original = again[i] = first[key]
        if _conflict(row) == RAISE:
            raise UniqueConflict(
                f"items {original} and {i} have the same unique key {row.options.unique_name!r}", None
            )
    return [i for i in range(len(rows)) if i not in again], again


def _overlays(rows: Sequence[JobRow], again: dict[int, int]) -> dict[int, JobRow]:
    """Return, for each row that later ones are to replace, one row that does what they would in turn."""
    overlays: dict[int, JobRow] = {}
    for i, original in again.items():
        if _conflict(rows[i]) in _REPLACING:
            base = overlays.get(original)
            overlays[original] = rows[i] if base is None else _overlaid(base, rows[i])
    return overlays


def _overlaid(base: JobRow, row: JobRow) -> JobRow:
    before, after = base.options, row.options
    assert before.unique is not None
    assert after.unique is not None
    fields = after.unique.replace
    timed = after if "run_at" in fields else before
    assert timed.unique is not None
    options = before._replace(
        priority=after.priority if "priority" in fields else before.priority,
        run_at=timed.run_at,
        delay_s=timed.delay_s,
        unique=dataclasses.replace(
            before.unique, replace=tuple({*before.unique.replace, *fields}), max_wait=timed.unique.max_wait
        ),
    )
    return base._replace(args=row.args if "args" in fields else base.args, options=options)


def _make(schema: str, jobs: dict[int, JobRow], *, notify: bool) -> Operation[dict[int, Enqueued]]:
    """Make jobs no two of which have the same key."""
    made: dict[int, Enqueued] = {}
    pending = list(jobs)
    for _ in range(MAX_UNIQUE_ROUNDS):
        rows = [jobs[i] for i in pending]
        lines = yield _call(schema, rows, notify=notify)
        answers = yield from _name_faster(schema, rows, [_Answer._make(line[:5]) for line in lines])
        refused = [n for n, row in enumerate(rows) if _conflict(row) == RAISE and not answers[n].inserted]
        if refused:  # then nothing was made, but keys may have been taken
            yield from _give_up(schema, rows, answers)
            _raise_conflict(pending, rows, answers, refused)
            continue
        for i, answer in zip(pending, answers, strict=True):
            if answer.inserted:
                made[i] = Enqueued(answer.id, inserted=True)
            elif answer.holder is not None:
                made[i] = Enqueued(answer.holder, inserted=False, replaced=answer.replaced)
        pending = [i for i in pending if i not in made]
        if not pending:
            return made
    raise JobConflict(
        f"a unique key was lost to other transactions {MAX_UNIQUE_ROUNDS} times; try the enqueue again"
    )


def _call(schema: str, rows: Sequence[JobRow], *, notify: bool) -> Call:
    options = [row.options for row in rows]
    rules = [PLAIN if one.unique is None else one.unique.rule for one in options]
    conflicts = {rule.conflict for rule in rules}
    is_full = not conflicts <= {RETURN, RAISE} or (RAISE in conflicts and len(rows) > 1)
    keys, names = [one.unique_key for one in options], [one.unique_name for one in options]
    ways = list(map(column, zip(*rules, strict=True)))
    return insert_call(
        ENQUEUE_REPLACE if is_full else ENQUEUE_UNIQUE,
        schema,
        JobColumns.of(rows),
        *(keys, names, *(ways if is_full else ways[:2])),
        notify=notify,
        replan=len(rows) >= _BULK,
    )


def _name_faster(schema: str, rows: Sequence[JobRow], answers: list[_Answer]) -> Operation[list[_Answer]]:
    """Name the holder for each key that was lost to a concurrent call, but of jobs that are to replace it."""
    lost = [
        n
        for n, (row, answer) in enumerate(zip(rows, answers, strict=True))
        if not answer.inserted and answer.holder is None and _conflict(row) in {RETURN, RAISE}
    ]
    if lost:
        keys = [rows[n].options.unique_key for n in lost]
        generations = [answers[n].generation for n in lost]
        found: Rows = yield Call(in_schema(FIND_FASTER, schema), (keys, generations))
        for ordinal, job_id in found:
            place: int = ordinal - 1
            n = lost[place]
            if job_id != answers[n].id:  # a key that this call got, and gives up
                answers[n] = answers[n]._replace(holder=job_id)
    return answers


def _give_up(schema: str, rows: Sequence[JobRow], answers: Sequence[_Answer]) -> Operation[None]:
    if len(rows) > 1:  # a single one has no key to give up
        keys = [row.options.unique_key for row in rows]
        generations, ids = [answer.generation for answer in answers], [answer.id for answer in answers]
        yield Call(in_schema(GIVE_UP, schema), (keys, generations, ids))


def _raise_conflict(
    places: Sequence[int], rows: Sequence[JobRow], answers: Sequence[_Answer], refused: Iterable[int]
) -> None:
    """Raise for the first job that was to raise and whose key somebody else certainly holds."""
    for n in refused:
        holder = answers[n].holder
        if holder is not None:
            item = f"item {places[n]}: " if len(rows) > 1 else ""
            name = rows[n].options.unique_name
            raise UniqueConflict(f"{item}job {holder} holds the unique key {name!r}", holder)
