-- compatible_from: 1
--
-- What the fleet's duties and its operators need: a leader's lease, schedules, pauses, requests to
-- cancel what runs, retention, and a log of who did what. All of it is small and off the hot path; code
-- of version 1 goes on beside it without knowing of it.

-- A leader's lease. One row, made once and updated a few times a minute by one process: no hot row, and
-- no session lock, so that it works through a transaction pooler and a frozen process cannot keep it.
-- The term grows with each election; every write of a leader asks for its own, and locks the row with
-- `for key share`. The term is unique so that an election changes a key, which waits for such writes,
-- while a renewal does not.
create table {schema}.leader (
    only_one    boolean primary key default true check (only_one),
    term        bigint not null unique,
    worker_id   bigint,
    worker      text,
    elected_at  timestamptz,
    lease_until timestamptz not null
) with (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200
);
insert into {schema}.leader (term, lease_until) values (0, '-infinity');
comment on table {schema}.leader is 'which worker does the duties of the fleet, and until when';

-- Schedules. next_at is the next tick that has not been dealt with; the tick's row and its job are made
-- in one transaction, so that no restart, clock or second leader doubles one.
create table {schema}.periodic (
    name          text primary key check (octet_length(name) between 1 and 128),
    kind          {schema}.short_name not null,
    args          jsonb not null,
    options       jsonb not null default '{}',
    cron          text,
    tz            text,
    every_s       double precision check (every_s > 0),
    catch_up      text not null check (catch_up in ('skip', 'one', 'all')),
    catch_up_max  integer not null check (catch_up_max >= 1),
    overlap       text not null check (overlap in ('allow', 'skip')),
    jitter_s      double precision not null default 0 check (jitter_s >= 0),
    run_at_start  boolean not null default false,
    is_dynamic    boolean not null,
    declared_at   timestamptz not null default clock_timestamp(),
    next_at       timestamptz,
    last_at       timestamptz,
    last_job_id   bigint,
    problem       text,
    paused_at     timestamptz,
    paused_by     text,
    pause_reason  text,
    check ((cron is null) <> (every_s is null))
);
comment on table {schema}.periodic is 'schedules: declared by live workers, or made by a client (is_dynamic)';

create table {schema}.periodic_tick (
    name    text not null,
    tick    timestamptz not null,
    job_id  bigint,
    skipped text,
    made_at timestamptz not null default clock_timestamp(),
    primary key (name, tick)
);
comment on table {schema}.periodic_tick is 'ticks that were dealt with: the job of each, or why there is none';

alter table {schema}.worker add column periodics text[] not null default '{}';
comment on column {schema}.worker.periodics is 'names of the schedules that this process declares';

-- What must not run now. A queue or a kind; until is null for "until resumed".
create table {schema}.pause (
    scope     text not null check (scope in ('queue', 'kind')),
    name      text not null check (octet_length(name) between 1 and 128),
    reason    text,
    paused_by text,
    paused_at timestamptz not null default clock_timestamp(),
    until     timestamptz,
    primary key (scope, name)
);
comment on table {schema}.pause is 'queues and kinds of which workers start no job';

-- Requests to cancel a job that runs. A worker sees those of its own jobs; what is left when the job
-- has gone elsewhere, a duty applies.
create table {schema}.cancel_request (
    job_id       bigint primary key,
    reason       text,
    requested_by text,
    requested_at timestamptz not null default clock_timestamp()
);
comment on table {schema}.cancel_request is 'running jobs that are to be cancelled';

-- How long finished jobs are kept, in seconds; infinity keeps them. The row '' is for all queues that
-- have none of their own; what it leaves null has the default of the code.
create table {schema}.retention (
    queue       text primary key check (octet_length(queue) <= 128),
    completed_s double precision check (completed_s >= 0),
    discarded_s double precision check (discarded_s >= 0),
    cancelled_s double precision check (cancelled_s >= 0)
);
comment on table {schema}.retention is 'how long finished jobs are kept';

create table {schema}.operator_log (
    id      bigint generated always as identity primary key,
    at      timestamptz not null default clock_timestamp(),
    actor   text not null,
    action  text not null,
    target  jsonb not null,
    jobs    bigint,
    reason  text
);
comment on table {schema}.operator_log is 'who did what, when and why';

-- Uniqueness beyond the life of a job: a key of a period is held until held_until, and by nothing else;
-- one until the start is held while its job waits for its first start.
alter table {schema}.unique_key
    add column held_until timestamptz,
    add column until_started boolean not null default false;

-- Retention and statistics find by age what has ended; people list what was discarded or cancelled.
create index finished_at on {schema}.finished (finished_at);
create index finished_not_completed on {schema}.finished (state, finished_at) where state <> 'completed';

revoke all on {schema}.leader, {schema}.periodic, {schema}.periodic_tick, {schema}.pause,
    {schema}.cancel_request, {schema}.retention, {schema}.operator_log from public;
