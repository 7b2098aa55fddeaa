"""Unique keys of finished jobs that an operator makes ready again: for one job, or for a batch.

A job that holds its key while it is live takes it again, under a new generation. One that holds it until its
first start takes it again only if it was never started; once started it runs without, but is not retried
beside another job that waits with its key. A key of a period says how many jobs are *made* in a time
slot; to retry one makes none, so those are retried whatever holds the key now.
"""

from __future__ import annotations

from typing import Final

from jobq._statements.enqueue_unique import HELD

# To stand after `l` (tid, job_id, attempt): finished rows, locked against two retries at once; nobody who
# holds a key waits for such a row. `lost` has the jobs that must stay, and who stands in their way,
# which is null where another call got the key at this very moment. Of two that have one key the
# newer is retried. A job's former row is stale from then on, and goes with the leader's next walk.
RETAKE: Final = f"""known as materialized (
    select l.tid, l.job_id, j.tid as job_tid, j.key, u.tid as newest_tid,
           coalesce(u.generation, 0) + 1 as new_generation, u.job_id as holder, {HELD} as is_held,
           coalesce(o.until_started, false) as until_started,
           j.key is not null and o.held_until is null as is_barred_by_key,
           j.key is not null and o.held_until is null
               and not (coalesce(o.until_started, false) and l.attempt > 0) as needs_key
    from l
    left join lateral (
        select ctid as tid, unique_key as key, unique_generation as generation from {{schema}}.job
        where id = l.job_id limit 1) j on true
    left join lateral (
        select held_until, until_started from {{schema}}.unique_key
        where key = j.key and generation = j.generation and job_id = l.job_id limit 1) o on true
    left join lateral (
        select ctid as tid, * from {{schema}}.unique_key where key = j.key
        order by generation desc limit 1) u on true
), first_of_key as materialized (
    select known.*, pg_catalog.first_value(job_id) over (partition by key order by job_id desc) as newest
    from known where needs_key
), fit as materialized (
    select f.* from (select * from first_of_key where not is_held and job_id = newest order by key) f
    left join lateral (
        select 1 as locked from {{schema}}.unique_key u where u.ctid = f.newest_tid for key share) l on true
    where f.newest_tid is null or l.locked = 1
), won as (
    insert into {{schema}}.unique_key (key, generation, job_id, until_started)
    select key, new_generation, job_id, until_started from fit order by key
    on conflict do nothing
    returning job_id
), renewed as (
    update {{schema}}.job p set unique_generation = f.new_generation
    from fit f where p.ctid = f.job_tid and f.job_id in (select job_id from won)
), lost as materialized (
    select job_id, holder from known where is_barred_by_key and is_held
    union all
    select job_id, case when job_id <> newest then newest end from first_of_key
    where not is_held and job_id not in (select job_id from won)
)"""
