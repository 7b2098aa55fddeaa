-- compatible_from: 1
--
-- What the fleet's duties and its operators need: a leader's lease, schedules, pauses, requests to
-- cancel what runs, retention, and a log of who did what. All of it is small and off the hot path; code
-- of version 1 goes on beside it without knowing of it.

-- Every table that is altered below, in the order in which enqueues and claims take them: with another one first,
-- each of them holds what the migration waits for and waits for what it has.
lock table {schema}.job, {schema}.scheduled, {schema}.unique_key, {schema}.worker in access exclusive mode;

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
    missed_until timestamptz,
    made_at timestamptz not null default clock_timestamp(),
    primary key (name, tick)
);
create index periodic_tick_made on {schema}.periodic_tick (made_at);
comment on column {schema}.periodic_tick.missed_until is 'this tick and all before that one were missed';
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

-- Jobs of a paused kind wait as scheduled. Not valid: what stands there passed the narrower check, and
-- reading it all again would hold the table's lock.
alter table {schema}.scheduled drop constraint scheduled_reason_check, add constraint scheduled_reason_check
    check (reason in ('scheduled', 'retry', 'snooze', 'unknown kind', 'crash', 'suspect', 'paused')) not valid;

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

-- Which fields of jobs are hidden when jobs are shown: of one kind, or, where that is '', of all.
create table {schema}.redaction (
    kind  text not null check (octet_length(kind) <= 128),
    field text not null check (octet_length(field) between 1 and 128),
    primary key (kind, field)
);
comment on table {schema}.redaction is 'fields of jobs that are hidden in output';

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
comment on table {schema}.unique_key is
    'a key is held as its newest generation says: until a time, or while that job waits, or while it is live';

-- Which of its key's rows is the job's, so that nobody walks over a hot key's generations to find it; null
-- where code of version 1 made the job. Whoever adds a generation locks the row that he counts from (for
-- key share), so rows can be removed (for update skip locked) without a second count from the beginning.
alter table {schema}.job add column unique_generation integer;

-- The last CHECK on the way of an enqueue: compiled anew for each statement, it took 2.2 of 20 µs. All who
-- write a job's max_attempts look at it first, the SQL function below too.
alter table {schema}.job drop constraint job_max_attempts_check;

-- Retention and statistics find by age what has ended; people list what was discarded or cancelled.
create index finished_at on {schema}.finished (finished_at);
create index finished_not_completed on {schema}.finished (state, finished_at) where state <> 'completed';

revoke all on {schema}.leader, {schema}.periodic, {schema}.periodic_tick, {schema}.pause,
    {schema}.cancel_request, {schema}.retention, {schema}.redaction, {schema}.operator_log from public;

-- As in the migration before, and: documents are nested no deeper than those that the clients make, for
-- what a reader's stack can hold differs; a time to expire lies ahead; a time limit is judged by its seconds,
-- for '-1 year 361 days' is more than nothing and less than no time at all. A slot of a job that was made
-- later than now holds no key: the clock was set back since. Names are looked at under a plain collation: a
-- caller's column may have one that knows no patterns and hashes to something else. No plain string here
-- has a backslash, for some sessions take them for escapes.
create or replace function {schema}.enqueue(
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
    -- A container within a hundred others. The walk ends there, and short documents are spared it.
    too_deep constant jsonpath := 'strict $.**{100} ? (@.type() == "array" || @.type() == "object")';
    control_character constant text := E'[\\u0001-\\u001f\\u007f-\\u009f]';
    problem constant text := case
        when kind is null or octet_length(kind) not between 1 and 128 then 'kind: 1 to 128 bytes'
        when kind collate pg_catalog."C" ~ control_character then 'kind: without control characters'
        when args is null then 'args: a JSON document, not null'
        when octet_length(args::text) > 1048576 then 'args: at most 1 MiB'
        when octet_length(args::text) > 201 and pg_catalog.jsonb_path_exists(args, too_deep)
            then 'args: nested deeper than 100 levels'
        when queue is null or octet_length(queue) not between 1 and 128 then 'queue: 1 to 128 bytes'
        when queue collate pg_catalog."C" ~ control_character then 'queue: without control characters'
        when priority is null or priority not between -9 and 9 then 'priority: -9 to 9'
        when run_at > '9999-12-30 00:00:00+00' then 'run_at: before the year 10000'
        when run_at < '0001-01-02 00:00:00+00' then 'run_at: after the year 0'
        when max_attempts is null or max_attempts not between 1 and 32767 then 'max_attempts: 1 to 32767'
        when pg_catalog.date_part('epoch', timeout) <= 0::float8 then 'timeout: more than 0, or null for no limit'
        when pg_catalog.date_part('epoch', timeout) > 3155760000::float8
            then 'timeout: at most 100 years, or null for no limit'
        when octet_length(unique_key) = 0 then 'unique_key: not empty, or null for none'
        when jsonb_typeof(meta) <> 'object' then 'meta: a JSON object, or null'
        when octet_length(meta::text) > 16384 then 'meta: at most 16 KiB'
        when octet_length(meta::text) > 201 and pg_catalog.jsonb_path_exists(meta, too_deep)
            then 'meta: nested deeper than 100 levels'
        when pg_catalog.cardinality(tags) > 20 or pg_catalog.array_ndims(tags) > 1 then 'tags: a list of at most 20'
        when tags is not null and exists (
            select from pg_catalog.unnest(tags) tag where tag is null or octet_length(tag) not between 1 and 100
        ) then 'tags: each of 1 to 100 bytes'
        when expires_at > '9999-12-30 00:00:00+00' then 'expires_at: before the year 10000'
        when expires_at <= pg_catalog.statement_timestamp() then 'expires_at: in the future'
        when expires_at <= run_at then 'expires_at: after run_at'
    end;
    held_key constant bytea := pg_catalog.substring(
        pg_catalog.sha256(pg_catalog.convert_to(pg_catalog.normalize(unique_key, 'NFC'), 'UTF8')), 1, 16);
    last {schema}.unique_key%rowtype;
    last_tid tid;
begin
    if problem is not null then
        raise exception 'jobq: %', problem using errcode = 'invalid_parameter_value';
    end if;
    enqueue.id := pg_catalog.nextval('{schema}.job_id_seq');
    enqueue.inserted := held_key is null;

    -- A key is held as its newest generation says. The insert waits for a concurrent holder's
    -- transaction; when that commits, the next round sees it.
    for round in 1 .. 10 loop
        exit when enqueue.inserted;
        select u.ctid, u.generation, u.job_id, u.held_until, u.until_started
        into last_tid, last.generation, last.job_id, last.held_until, last.until_started
        from {schema}.unique_key u where u.key = held_key order by u.generation desc limit 1;
        if (case when last.held_until is not null then last.held_until > pg_catalog.clock_timestamp()
                and not coalesce((select j.created_at > pg_catalog.clock_timestamp()
                                  from {schema}.job j where j.id = last.job_id), false)
            else coalesce(
                (select 1 from {schema}.ready w where w.job_id = last.job_id
                 and (w.attempt = 0 or not last.until_started) limit 1),
                (select 1 from {schema}.scheduled w where w.job_id = last.job_id
                 and (w.attempt = 0 or not last.until_started) limit 1),
                (select 1 from {schema}.running w where w.job_id = last.job_id
                 and not last.until_started limit 1)) is not null end)
        then
            enqueue.id := last.job_id;
            return next;
            return;
        end if;
        perform from {schema}.unique_key u where u.ctid = last_tid for key share;
        continue when last.generation is not null and not found;  -- it was removed just now
        insert into {schema}.unique_key (key, generation, job_id)
        values (held_key, coalesce(last.generation, 0) + 1, enqueue.id) on conflict do nothing;
        enqueue.inserted := found;
    end loop;
    if not enqueue.inserted then
        raise exception 'jobq: a unique key was lost to other transactions 10 times; try the enqueue again'
            using errcode = 'serialization_failure';
    end if;

    insert into {schema}.job (id, kind, args, max_attempts, timeout_s, expires_at,
                              unique_key, unique_name, unique_generation, meta, tags)
    values (enqueue.id, enqueue.kind, enqueue.args, enqueue.max_attempts,
            pg_catalog.date_part('epoch', enqueue.timeout), enqueue.expires_at,
            held_key, pg_catalog.left(pg_catalog.normalize(enqueue.unique_key, 'NFC'), 200),
            case when held_key is not null then coalesce(last.generation, 0) + 1 end,
            nullif(enqueue.meta, '{}'),
            case when pg_catalog.cardinality(enqueue.tags) > 0 then enqueue.tags end);
    if enqueue.run_at > pg_catalog.statement_timestamp() then
        insert into {schema}.scheduled (job_id, run_at, reason, queue, priority)
        values (enqueue.id, enqueue.run_at, 'scheduled', enqueue.queue, enqueue.priority);
    else
        insert into {schema}.ready (job_id, queue, priority)
        values (enqueue.id, enqueue.queue, enqueue.priority);
        -- Notify only when a listener waits: it holds this lock shared (see the clients' enqueue).
        if pg_catalog.pg_try_advisory_lock(pg_catalog.hashtext({schema_name}), pg_catalog.hashtext(enqueue.queue collate pg_catalog."C")) then
            perform pg_catalog.pg_advisory_unlock(
                pg_catalog.hashtext({schema_name}),
                pg_catalog.hashtext(enqueue.queue collate pg_catalog."C"));
        else
            perform pg_catalog.pg_notify({channel}, enqueue.queue);
        end if;
    end if;
    return next;
end $jobq$;
