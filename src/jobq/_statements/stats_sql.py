"""What the queues hold and how far behind they are, at a price that does not grow with them.

A count of a million rows reads them all. Here each table's blocks are read as if it had a few hundred:
all of them where it has no more, else one of every n, drawn by lot (a fixed step would meet what comes in
fixed steps), and the newest ones whole (under a pinned vacuum horizon that is where the live rows are).
Blocks are addressed by ctid, so neither dead rows nor statistics, however stale, make it read more. What
was sampled is marked as estimated.

Only what an index finds without walking over the dead is asked of an index: the end of the last hour,
the few that did not complete, what is due within seconds. The heads of the lanes are not so: everything
that was claimed since the horizon was pinned is dead and stands before them. They are asked last and
only where `ready` is too large to be read, within a time limit, and the sample answers otherwise.

All of it is one transaction with one snapshot, so that a job is counted once, and the planner is left
the same freedom as a worker leaves it: none.
"""

from __future__ import annotations

from typing import Final

SAMPLED_BLOCKS: Final = 120  # of each table, spread over it…
NEWEST_BLOCKS: Final = 30  # …and these at its end
HOUR_ROWS: Final = 1_000  # of the last hour that are counted one by one
_PROBES: Final = 12  # points of the last hour at which the rate is measured, if there are more…
_PROBE_ROWS: Final = 1_000  # …each by so many rows: a batch of outcomes has one and the same time
OTHER_ROWS: Final = 150  # discarded, and cancelled, that are counted one by one
DUE_ROWS: Final = 300  # of what is due within seconds
_PARKED_FOR_S: Final = 11  # a job of an unknown kind is parked for 10 s
MOST_LANES: Final = 60
LANES_TIME_LIMIT_MS: Final = 250

BEGIN: Final = "begin isolation level repeatable read, read only"
_PLAN: Final = (
    ("enable_seqscan", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("plan_cache_mode", "force_generic_plan"),
    ("jit", "off"),
)
SETTINGS: Final = "select " + ", ".join(f"set_config('{name}', '{value}', true)" for name, value in _PLAN)
LIMIT: Final = "select set_config('statement_timeout', $1::text, true)"

_CHOSEN: Final = f"""
size as materialized (
    select place, greatest(pages - {NEWEST_BLOCKS}, 0) as body, pages,
           greatest(1, ceil(greatest(pages - {NEWEST_BLOCKS}, 0)::numeric / {SAMPLED_BLOCKS}.0))::int8 as step
    from (
        select place, pg_relation_size(pg_catalog.format('%I.%I', {{schema_name}}, place)::regclass)
                      / current_setting('block_size')::int8 as pages
        from pg_catalog.unnest($1::text[]) place
    ) s
), block as materialized (
    select place, number, weight from (
        select place, body, n * step + floor(random() * step::float8)::int8 as number, step as weight
        from size cross join lateral generate_series(0::int8, (body - 1) / step) n
        where body > 0
    ) stratum where number < body
    union all
    select place, generate_series(body, pages - 1), 1 from size
)
"""


def _of_blocks(place: str, columns: str) -> str:
    """Return the FROM clause that gives the rows of the chosen blocks; `offset 0` keeps it a loop."""
    return f"""
    from block b cross join lateral (
        select {columns} from {{schema}}.{place}
        where ctid >= ('(' || b.number::text || ',0)')::tid
          and ctid < ('(' || (b.number + 1)::text || ',0)')::tid
        offset 0
    ) r where b.place = '{place}'"""


_IN_LAST_HOUR: Final = (
    "finished_at > statement_timestamp() - interval '1 hour' and finished_at <= statement_timestamp()"
)

# $1: the four tables. A row for each state and queue, and one without a queue that says one of how many of
# the table's blocks was read. `part`: of scheduled jobs those of unknown kinds, of finished ones those of the
# last hour.
COUNTS: Final = f"""
with {_CHOSEN}
select place, null::text, 0::float8, 0::float8, null::float8, step from size
union all
select 'ready', r.queue, sum(b.weight)::float8, 0,
       max(date_part('epoch', statement_timestamp() - r.ready_at)), null
{_of_blocks("ready", "queue::text, ready_at")} group by r.queue
union all
select 'scheduled', r.queue, sum(b.weight)::float8,
       coalesce(sum(b.weight) filter (where r.reason = 'unknown kind'), 0)::float8, null, null
{_of_blocks("scheduled", "queue::text, reason")} group by r.queue
union all
select 'running', r.queue, sum(b.weight)::float8, 0, null, null
{_of_blocks("running", "queue")} group by r.queue
union all
select r.state, r.queue, sum(b.weight)::float8,
       coalesce(sum(b.weight) filter (where {_IN_LAST_HOUR}), 0)::float8, null, null
{_of_blocks("finished", "queue, state, finished_at")} group by r.state, r.queue
"""

LAST_HOUR: Final = f"""
select queue, state, count(*)::float8 from (
    select queue, state from {{schema}}.finished
    where {_IN_LAST_HOUR}
    order by finished_at limit {HOUR_ROWS + 1}
) f group by queue, state
"""

# Where the sample saw too few of them: the rate at points spread over the hour, each by the time that the
# next rows took. What stands at the last time of a full probe may be a part of a batch, and is left out.
LAST_HOUR_RATE: Final = f"""
with probe as materialized (
    select slot, statement_timestamp() - interval '1 hour'
                 + (slot::float8 + random() / 2::float8) * interval '1 hour' / {_PROBES}::float8 as from_at
    from generate_series(0, {_PROBES - 1}) slot
), f as materialized (
    select p.slot, p.from_at, x.*, count(*) over w as n, min(finished_at) over w as first_at,
           max(finished_at) over w as last_at
    from probe p cross join lateral (
        select queue, state, finished_at from {{schema}}.finished
        where finished_at > p.from_at and finished_at <= statement_timestamp()
        order by finished_at limit {_PROBE_ROWS}
    ) x
    window w as (partition by p.slot)
)
select queue, state, sum({3600 / _PROBES}::float8 / greatest(0.000001, date_part('epoch',
    case when n < {_PROBE_ROWS} then statement_timestamp() else last_at end - from_at)))::float8
from f where n < {_PROBE_ROWS} or finished_at < last_at or first_at = last_at
group by queue, state
"""

# All of them, and those of the last hour.
OTHERS: Final = f"""
select s.state, x.queue, count(*)::float8, count(*) filter (where {_IN_LAST_HOUR})::float8
from pg_catalog.unnest(array['discarded', 'cancelled']) s(state)
cross join lateral (
    select queue, finished_at from {{schema}}.finished where state = s.state and state <> 'completed'
    order by finished_at desc limit {OTHER_ROWS + 1}
) x group by s.state, x.queue
"""

# From now on: what was due before is dead rows, mostly. A parked job comes here every few seconds.
UNKNOWN: Final = f"""
select queue, count(*) filter (where reason = 'unknown kind')::float8, count(*) from (
    select queue::text, reason from {{schema}}.scheduled
    where run_at > statement_timestamp()
      and run_at <= statement_timestamp() + interval '{_PARKED_FOR_S} seconds'
    order by run_at limit {DUE_ROWS + 1}
) s group by queue
"""

# From lane to lane by the index. A transaction that began early may have written late: hence 5 rows.
LANES: Final = f"""
with recursive lane(queue, priority, n) as (
    (select queue::text, priority::int2, 1 from {{schema}}.ready order by queue, priority limit 1)
    union all
    select x.queue, x.priority, l.n + 1 from lane l cross join lateral (
        select queue::text, priority::int2 from {{schema}}.ready
        where (queue::text, priority::int2) > (l.queue, l.priority) order by queue, priority limit 1
    ) x where l.n < {MOST_LANES}
)
select l.queue, max(date_part('epoch', statement_timestamp() - h.ready_at)), max(l.n)
from lane l cross join lateral (
    select ready_at from {{schema}}.ready where queue::text = l.queue and priority::int2 = l.priority
    order by xid, (job_id + 0) limit 5
) h group by l.queue
"""

# Queues that somebody works on, and those that are paused. Times travel as text (see `operate`).
KNOWN: Final = """
select queue, sum(workers)::int8, bool_or(paused), max(until), max(reason) from (
    select q as queue, 1 as workers, false as paused, null as until, null as reason
    from {schema}.worker, pg_catalog.unnest(queues) q
    where ended_at is null and lease_until > statement_timestamp()
    union all
    select name, 0, true, extract(epoch from until)::text, reason from {schema}.pause
    where scope = 'queue' and (until is null or until > statement_timestamp())
) k group by queue
"""

WORKERS: Final = """
select id, name, host, pid, version, pg_catalog.to_jsonb(queues)::text, pg_catalog.to_jsonb(kinds)::text,
       extract(epoch from started_at)::text, extract(epoch from heartbeat_at)::text,
       extract(epoch from lease_until)::text, extract(epoch from ended_at)::text, end_reason,
       date_part('epoch', statement_timestamp() - heartbeat_at)::float8,
       ended_at is null and lease_until > statement_timestamp()
from {schema}.worker
where ended_at is null or ended_at > statement_timestamp() - $1::float8 * interval '1 second'
order by ended_at is not null, started_at desc, id limit 10000
"""

RUNNING: Final = f"""
with {_CHOSEN}
select null::int8, 0::float8, step = 1 from size
union all
select r.worker_id, sum(b.weight)::float8, null
{_of_blocks("running", "worker_id")} group by r.worker_id
"""
