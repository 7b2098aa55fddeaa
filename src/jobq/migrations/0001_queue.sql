-- compatible_from: 1
--
-- The queue's storage. A job's state is the table that it stands in:
--
--     scheduled ──promote──▶ ready ──claim──▶ running ──outcome──▶ finished
--         ▲                    ▲                 │
--         └── retry, snooze ───┴── hand back ────┘
--
-- Every transition is one statement that deletes from one table and inserts into another, so a
-- job is in exactly one of the four at any moment that anybody can see. `job` holds the payload
-- and is written once: what changes often is small, and what is large never changes.
--
-- The hot tables live with a vacuum horizon that some other transaction pins for an hour. Then
-- dead rows stay, in the heap and in every index, and what matters is that no statement walks
-- over them twice: hence (job_id, attempt) as key (a job that comes back has a new key, not a
-- pile of dead entries under the old one), and `job_id + 0` in the lane's index (an index that
-- holds plain job_id is one that the planner, told by ANALYZE that the table is empty, scans
-- from end to end to find one job).
--
-- Lock order, everywhere: rows of one hot table in ctid order; tables in the order ready,
-- scheduled, running, finished; unique keys in key order, before any of these.

create sequence {schema}.job_id_seq as bigint;

create table {schema}.job (
    id           bigint primary key,
    kind         text not null check (octet_length(kind) between 1 and 128),
    args         jsonb not null,
    max_attempts integer not null check (max_attempts between 1 and 32767),
    timeout_s    double precision check (timeout_s > 0),
    created_at   timestamptz not null default statement_timestamp(),
    expires_at   timestamptz,
    unique_key   bytea check (octet_length(unique_key) = 16),
    unique_name  text,
    meta         jsonb,
    tags         text[]
) with (
    -- Insert and delete only: the batches of retention, not single rows, should call for vacuum.
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_insert_scale_factor = 0.2
);
comment on table {schema}.job is 'payload of every job, written once';

create table {schema}.ready (
    job_id    bigint not null,
    -- The lane's order: one snapshot tells which of these are decided, so a worker can know
    -- exactly how far nothing more can appear (see the low-water mark in DESIGN.md).
    xid       xid8 not null default pg_current_xact_id(),
    queue     text not null check (octet_length(queue) between 1 and 128),
    priority  smallint not null check (priority between -9 and 9),
    attempt   integer not null default 0 check (attempt >= 0),
    failures  integer not null default 0 check (failures >= 0),
    crashes   integer not null default 0 check (crashes >= 0),
    ready_at  timestamptz not null default statement_timestamp(),
    primary key (job_id, attempt)
) with (
    -- Empties and refills all day: a fixed number of dead rows, not a share of a table that is
    -- empty when it is measured, should start vacuum; no cost delay, for the table is small.
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 100000
);
create unique index ready_lane on {schema}.ready (queue, priority, xid, (job_id + 0));
comment on table {schema}.ready is 'jobs that can run now, in lanes of (queue, priority)';

create table {schema}.scheduled (
    job_id    bigint not null,
    run_at    timestamptz not null,
    reason    text not null check (reason in ('scheduled', 'retry', 'snooze', 'unknown kind', 'crash', 'suspect')),
    queue     text not null check (octet_length(queue) between 1 and 128),
    priority  smallint not null check (priority between -9 and 9),
    attempt   integer not null default 0 check (attempt >= 0),
    failures  integer not null default 0 check (failures >= 0),
    crashes   integer not null default 0 check (crashes >= 0),
    primary key (job_id, attempt)
) with (
    autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0
);
create index scheduled_due on {schema}.scheduled (run_at);
comment on table {schema}.scheduled is 'jobs that can run later, and why they wait';

create table {schema}.running (
    job_id     bigint not null,
    worker_id  bigint not null,
    claimed_at timestamptz not null default statement_timestamp(),
    queue      text not null,
    priority   smallint not null,
    attempt    integer not null check (attempt >= 1),
    failures   integer not null check (failures >= 0),
    crashes    integer not null check (crashes >= 0),
    -- No index on worker_id, on purpose: it would cost each claim and serve only the rare sweep.
    primary key (job_id, attempt)
) with (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 100000
);
comment on table {schema}.running is 'claimed jobs; (job_id, attempt, worker_id) is the fence of every outcome';

create table {schema}.finished (
    job_id      bigint primary key,
    state       text not null check (state in ('completed', 'discarded', 'cancelled')),
    finished_at timestamptz not null default statement_timestamp(),
    claimed_at  timestamptz,
    queue       text not null,
    priority    smallint not null,
    worker_id   bigint,
    attempt     integer not null,
    failures    integer not null,
    crashes     integer not null,
    reason      text,
    result      jsonb
) with (
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_insert_scale_factor = 0.2
);
comment on table {schema}.finished is 'jobs that have ended, until retention removes them';

create table {schema}.attempt_error (
    job_id     bigint not null,
    attempt    integer not null,
    outcome    text not null check (outcome in ('failed', 'permanent', 'timeout', 'crashed', 'undecodable')),
    type       text not null,
    message    text not null,
    traceback  text not null,
    worker_id  bigint,
    worker     text not null,
    started_at timestamptz,
    ended_at   timestamptz not null default statement_timestamp(),
    omitted    integer not null default 0 check (omitted >= 0),
    primary key (job_id, attempt)
);
comment on column {schema}.attempt_error.omitted is 'how many older errors of this job were dropped by the time of this one';

create table {schema}.unique_key (
    key        bytea not null check (octet_length(key) = 16),
    generation integer not null check (generation >= 1),
    job_id     bigint not null,
    primary key (key, generation)
);
comment on table {schema}.unique_key is 'a key is held while the job of its newest generation is ready, scheduled or running';

create table {schema}.worker (
    -- Random, chosen by the process at each start: a sequence repeats itself after a failover
    -- that lost its last values, and two live workers with one id would share a fence.
    id           bigint primary key,
    name         text not null,
    host         text not null,
    pid          integer not null,
    version      text not null,
    queues       text[] not null,
    kinds        text[] not null,
    started_at   timestamptz not null default clock_timestamp(),
    heartbeat_at timestamptz not null default clock_timestamp(),
    lease_until  timestamptz not null,
    ended_at     timestamptz,
    end_reason   text check (end_reason in ('stopped', 'lease ended', 'died')),
    check ((ended_at is null) = (end_reason is null))
) with (
    -- One small update a heartbeat, all of them HOT.
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200
);
comment on table {schema}.worker is 'worker processes and their leases; one that has ended can never renew';

create view {schema}.jobs as
select j.id, w.state, w.reason, j.kind, w.queue, w.priority, j.args, j.meta, j.tags,
       w.attempt, w.failures, w.crashes, j.max_attempts,
       j.timeout_s * interval '1 second' as timeout, j.unique_name as unique_key,
       j.created_at, w.run_at, j.expires_at, w.claimed_at, w.finished_at, w.worker_id, w.result
from (
    select job_id, 'ready'::text as state, null::text as reason, queue, priority, attempt, failures, crashes,
           ready_at as run_at, null::timestamptz as claimed_at, null::timestamptz as finished_at,
           null::bigint as worker_id, null::jsonb as result
    from {schema}.ready
    union all
    select job_id, 'scheduled', reason, queue, priority, attempt, failures, crashes, run_at, null, null, null, null
    from {schema}.scheduled
    union all
    select job_id, 'running', null, queue, priority, attempt, failures, crashes, null, claimed_at, null, worker_id, null
    from {schema}.running
    union all
    select job_id, state, reason, queue, priority, attempt, failures, crashes, null, claimed_at, finished_at, worker_id, result
    from {schema}.finished
) w
join {schema}.job j on j.id = w.job_id;
comment on view {schema}.jobs is 'every job with its state: public, stable, read-only';
