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

-- Domains, where a table is written on the hot path: PostgreSQL compiles a table's CHECKs anew for each
-- statement (1.8 µs each, 17 of a single enqueue's 100), and a domain's once a session. Counters and
-- what only our own statements write are left to those.
create domain {schema}.short_name as text check (octet_length(value) between 1 and 128);
create domain {schema}.priority as smallint check (value between -9 and 9);

create sequence {schema}.job_id_seq as bigint;

create table {schema}.job (
    id           bigint primary key,
    kind         {schema}.short_name not null,
    args         jsonb not null,
    max_attempts integer not null check (max_attempts between 1 and 32767),
    timeout_s    double precision,
    created_at   timestamptz not null default statement_timestamp(),
    expires_at   timestamptz,
    unique_key   bytea,
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
    queue     {schema}.short_name not null,
    priority  {schema}.priority not null,
    attempt   integer not null default 0,
    failures  integer not null default 0,
    crashes   integer not null default 0,
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
    queue     {schema}.short_name not null,
    priority  {schema}.priority not null,
    attempt   integer not null default 0,
    failures  integer not null default 0,
    crashes   integer not null default 0,
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
    attempt    integer not null,
    failures   integer not null,
    crashes    integer not null,
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

-- For psql, triggers and other languages: what the clients' enqueue does, with the same options by
-- the same names, the same checks and the same uniqueness. It runs with its caller's rights, so a SET
-- search_path would guard nobody but the caller against himself, and it costs 0.4 ms a call: what
-- could be shadowed by accident is qualified instead.
create function {schema}.enqueue(
    kind         text,
    args         jsonb       default '{}',
    queue        text        default 'default',
    priority     integer     default 0,
    run_at       timestamptz default null,
    max_attempts integer     default 25,
    timeout      interval    default '1 hour',
    unique_key   text        default null,
    meta         jsonb       default null,
    tags         text[]      default null,
    expires_at   timestamptz default null
) returns table (id bigint, inserted boolean) language plpgsql as $jobq$
#variable_conflict use_column
declare
    problem constant text := case
        when kind is null or octet_length(kind) not between 1 and 128 then 'kind: 1 to 128 bytes'
        when kind ~ '[\u0001-\u001f\u007f-\u009f]' then 'kind: without control characters'
        when args is null then 'args: a JSON document, not null'
        when octet_length(args::text) > 1048576 then 'args: at most 1 MiB'
        when queue is null or octet_length(queue) not between 1 and 128 then 'queue: 1 to 128 bytes'
        when queue ~ '[\u0001-\u001f\u007f-\u009f]' then 'queue: without control characters'
        when priority is null or priority not between -9 and 9 then 'priority: -9 to 9'
        when run_at > '9999-12-30 00:00:00+00' then 'run_at: before the year 10000'
        when run_at < '0001-01-02 00:00:00+00' then 'run_at: after the year 0'
        when max_attempts is null or max_attempts not between 1 and 32767 then 'max_attempts: 1 to 32767'
        when timeout <= interval '0' then 'timeout: more than 0, or null for no limit'
        when timeout > interval '36525 days' then 'timeout: at most 100 years, or null for no limit'
        when unique_key = '' then 'unique_key: not empty, or null for none'
        when jsonb_typeof(meta) <> 'object' then 'meta: a JSON object, or null'
        when octet_length(meta::text) > 16384 then 'meta: at most 16 KiB'
        when cardinality(tags) > 20 or array_ndims(tags) > 1 then 'tags: a list of at most 20'
        when tags is not null and exists (
            select from unnest(tags) tag where tag is null or octet_length(tag) not between 1 and 100
        ) then 'tags: each of 1 to 100 bytes'
        when expires_at > '9999-12-30 00:00:00+00' then 'expires_at: before the year 10000'
        when expires_at < '0001-01-02 00:00:00+00' then 'expires_at: after the year 0'
        when expires_at <= run_at then 'expires_at: after run_at'
    end;
    held_key constant bytea := pg_catalog.substring(
        pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.normalize(unique_key, 'NFC'), 'UTF8')), 1, 16);
    last_generation integer;
    holder bigint;
begin
    if problem is not null then
        raise exception 'jobq: %', problem using errcode = 'invalid_parameter_value';
    end if;
    enqueue.id := pg_catalog.nextval('{schema}.job_id_seq');
    enqueue.inserted := held_key is null;

    -- A key is held while the job of its newest generation is live. The insert waits for a
    -- concurrent holder's transaction; when that commits, the next round sees it.
    for round in 1 .. 10 loop
        exit when enqueue.inserted;
        select u.generation, u.job_id into last_generation, holder
        from {schema}.unique_key u where u.key = held_key order by u.generation desc limit 1;
        if coalesce(
            (select 1 from {schema}.ready w where w.job_id = holder limit 1),
            (select 1 from {schema}.scheduled w where w.job_id = holder limit 1),
            (select 1 from {schema}.running w where w.job_id = holder limit 1)) is not null
        then
            enqueue.id := holder;
            return next;
            return;
        end if;
        insert into {schema}.unique_key (key, generation, job_id)
        values (held_key, coalesce(last_generation, 0) + 1, enqueue.id) on conflict do nothing;
        enqueue.inserted := found;
    end loop;
    if not enqueue.inserted then
        raise exception 'jobq: a unique key was lost to other transactions 10 times; try the enqueue again'
            using errcode = 'serialization_failure';
    end if;

    insert into {schema}.job (id, kind, args, max_attempts, timeout_s, expires_at, unique_key, unique_name, meta, tags)
    values (enqueue.id, enqueue.kind, enqueue.args, enqueue.max_attempts,
            pg_catalog.date_part('epoch', enqueue.timeout), enqueue.expires_at,
            held_key, pg_catalog.left(pg_catalog.normalize(enqueue.unique_key, 'NFC'), 200),
            nullif(enqueue.meta, '{}'), nullif(enqueue.tags, '{}'));
    if enqueue.run_at > pg_catalog.statement_timestamp() then
        insert into {schema}.scheduled (job_id, run_at, reason, queue, priority)
        values (enqueue.id, enqueue.run_at, 'scheduled', enqueue.queue, enqueue.priority);
    else
        insert into {schema}.ready (job_id, queue, priority)
        values (enqueue.id, enqueue.queue, enqueue.priority);
        -- Notify only when a listener waits: it holds this lock shared (see the clients' enqueue).
        if pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext({schema_name}), pg_catalog.hashtext(enqueue.queue)) then
            perform pg_catalog.pg_advisory_unlock(
                pg_catalog.hashtext({schema_name}), pg_catalog.hashtext(enqueue.queue));
        else
            perform pg_catalog.pg_notify({channel}, enqueue.queue);
        end if;
    end if;
    return next;
end $jobq$;
comment on function {schema}.enqueue is 'make a job: public, stable; inserted is false when the unique key is held';

-- Nobody has rights here but those whom the owner gives them.
revoke all on {schema}.job_id_seq, {schema}.job, {schema}.ready, {schema}.scheduled, {schema}.running,
    {schema}.finished, {schema}.attempt_error, {schema}.unique_key, {schema}.worker, {schema}.jobs from public;
revoke all on function {schema}.enqueue from public;
