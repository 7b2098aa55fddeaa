"""Enqueue: the statements that make jobs, and what they answer.

A column that is the same for every job of a call travels once, as a scalar; a column that
differs travels as an array; one that nobody uses costs nothing. So a bulk call of one kind sends
little more than its arguments (`unnest` pads the empty arrays with NULL, `coalesce` fills in).

A notification takes a global lock when its transaction commits (32 writers: 13,100 → 4,300
transactions/s), so one is sent only when it can help. A listener that waits holds a shared
advisory lock on its queue; an enqueue that can take the exclusive lock, and lets it go at once,
knows that nobody waits. It costs 2 µs and leaves no row behind.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobq._errors import JobConflict
from jobq._operation import Call, Operation, Rows, in_schema
from jobq._types import Enqueued

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime


class JobRow(NamedTuple):
    """One job as the enqueue statements take it, every option resolved.

    Attributes:
        args: the encoded JSON document; ``meta`` likewise, ``None`` when empty.
        run_at: when it is due, ``None`` for now; or ``delay_s``, seconds from the database's now.
        timeout_s: seconds, ``None`` for no limit.
        tags: PostgreSQL's text form of a text array, ``None`` when there are none.
        unique_key: 16 bytes, or ``None``; ``unique_name`` is what people read.
    """

    kind: str
    args: str
    queue: str
    priority: int
    max_attempts: int
    timeout_s: float | None
    run_at: datetime | None = None
    delay_s: float | None = None
    expires_at: datetime | None = None
    meta: str | None = None
    tags: str | None = None
    unique_key: bytes | None = None
    unique_name: str | None = None


# A notification's payload is the queue's name and nothing else; its bound (128 bytes) is far
# below the 7,999 that PostgreSQL takes.
NOTIFY: Final = """case
    when pg_try_advisory_lock(hashtext({schema_name}), hashtext(q.queue))
    then pg_advisory_unlock(hashtext({schema_name}), hashtext(q.queue))::text
    else pg_notify({channel}, q.queue)::text end"""

# One job, ready now: the common case has the shortest statement (0.87 of a bare INSERT of the
# payload row where the general one makes 0.74).
ENQUEUE_ONE: Final = f"""
with j as (
    insert into {{schema}}.job (id, kind, args, max_attempts, timeout_s, expires_at, meta, tags)
    values (nextval('{{schema}}.job_id_seq'), $1::text, $2::text::jsonb, $3::int4, $4::float8,
            $5::timestamptz, $6::text::jsonb, $7::text::text[])
    returning id
), r as (
    insert into {{schema}}.ready (job_id, queue, priority) select id, $8::text, $9::int2 from j
    returning job_id, queue
)
select q.job_id, case when $10::bool then {NOTIFY} end from r q
"""

_COLUMNS: Final = """
    coalesce(t.kind, $2::text) as kind, t.args,
    coalesce(t.queue, $4::text) as queue, coalesce(t.priority, $6::int2) as priority,
    coalesce(t.max_attempts, $8::int4) as max_attempts, coalesce(t.timeout_s, $10::float8) as timeout_s,
    coalesce(t.run_at, $12::timestamptz,
             statement_timestamp() + coalesce(t.delay_s, $14::float8) * interval '1 second') as run_at,
    coalesce(t.expires_at, $16::timestamptz) as expires_at,
    coalesce(t.meta, $18::text) as meta, coalesce(t.tags, $20::text) as tags"""

_ROWS: Final = """unnest($1::text[], $3::text[], $5::text[], $7::int2[], $9::int4[], $11::float8[],
    $13::timestamptz[], $15::float8[], $17::timestamptz[], $19::text[], $21::text[]"""
_NAMES: Final = (
    "kind, args, queue, priority, max_attempts, timeout_s, run_at, delay_s, expires_at, meta, tags"
)

_INSERT: Final = f"""
j as (
    insert into {{schema}}.job
        (id, kind, args, max_attempts, timeout_s, expires_at, meta, tags{{unique_columns}})
    select id, kind, args::jsonb, max_attempts, timeout_s, expires_at, meta::jsonb,
           tags::text[]{{unique_values}}
    from {{source}}
), r as (
    insert into {{schema}}.ready (job_id, queue, priority)
    select id, queue, priority from {{source}} where run_at is null or run_at <= statement_timestamp()
), s as (
    insert into {{schema}}.scheduled (job_id, run_at, reason, queue, priority)
    select id, run_at, 'scheduled', queue, priority from {{source}} where run_at > statement_timestamp()
), n as materialized (
    select count({NOTIFY}) as sent from (
        select distinct queue from {{source}} where run_at is null or run_at <= statement_timestamp()
    ) q where $22::bool
)"""


def _insert(source: str, *, unique: bool) -> str:
    columns = (", unique_key, unique_name", ", key, name") if unique else ("", "")
    return (
        _INSERT.replace("{source}", source)
        .replace("{unique_columns}", columns[0])
        .replace("{unique_values}", columns[1])
    )


ENQUEUE_MANY: Final = f"""
with x as materialized (
    select nextval('{{schema}}.job_id_seq') as id, t.ord, {_COLUMNS}
    from {_ROWS}) with ordinality t({_NAMES}, ord)
), {_insert("x", unique=False)}
select x.id, (select sent from n) from x order by x.ord
"""

# A key is held while its newest generation's job is live; nothing is deleted when a job ends
# (deleting there grows with reuse under a pinned horizon: 53 → 211 µs for 100 hot keys). Liveness
# is a coalesce of scalar subqueries, for `exists or exists` becomes hashed subplans over whole
# tables. Keys are inserted in order, so that two calls with the same keys cannot deadlock. The
# insert waits for a concurrent holder's transaction to end, and for nothing else.
ENQUEUE_UNIQUE: Final = f"""
with x as materialized (
    select nextval('{{schema}}.job_id_seq') as id, t.ord, {_COLUMNS}, t.key, t.name
    from {_ROWS}, $23::bytea[], $24::text[]) with ordinality t({_NAMES}, key, name, ord)
), newest as materialized (
    select k.id, k.key, g.generation, g.job_id as holder
    from (select id, key from x where key is not null order by key) k
    left join lateral (
        select generation, job_id from {{schema}}.unique_key u where u.key = k.key
        order by generation desc limit 1
    ) g on true
), known as materialized (
    select newest.*, coalesce(
        (select 1 from {{schema}}.ready where job_id = holder limit 1),
        (select 1 from {{schema}}.scheduled where job_id = holder limit 1),
        (select 1 from {{schema}}.running where job_id = holder limit 1)) is not null as held
    from newest
), won as (
    insert into {{schema}}.unique_key (key, generation, job_id)
    select key, coalesce(generation, 0) + 1, id from known where not held order by key
    on conflict do nothing
    returning job_id
), y as materialized (
    select x.* from x left join won on won.job_id = x.id where x.key is null or won.job_id is not null
), {_insert("y", unique=True)}
select x.id, y.id is not null, case when known.held then known.holder end, (select sent from n)
from x left join y on y.id = x.id left join known on known.id = x.id order by x.ord
"""

# Who won a key that this transaction's snapshot did not show: a new statement sees it.
FIND_HOLDERS: Final = """
select k.ord, u.job_id
from unnest($1::bytea[]) with ordinality k(key, ord)
cross join lateral (
    select job_id from {schema}.unique_key u where u.key = k.key order by generation desc limit 1
) u
"""

# A key can be lost and then given up (the winner rolled back) again and again only while others
# keep fighting for it; this many rounds are far beyond what was ever seen.
MAX_UNIQUE_ROUNDS: Final = 10


def notify_channel(schema: str) -> str:
    """Return the channel that tells listeners of this schema which queue has work.

    A channel's name is an identifier: 63 bytes at the most. Schema names reach that by
    themselves, so a long one is represented by its tail-safe prefix; two schemas that share it
    would only wake each other's workers.
    """
    return f"jobq:{schema}".encode()[:63].decode(errors="ignore")


@functools.lru_cache(maxsize=256)
def enqueue_sql(text: str, schema: str) -> str:
    """Return an enqueue statement for one schema."""
    channel = notify_channel(schema).replace("'", "''")
    return in_schema(text.replace("{channel}", f"'{channel}'"), schema)


def enqueue_one(schema: str, row: JobRow, *, notify: bool) -> Operation[Enqueued]:
    """Make one job."""
    if row.run_at is not None or row.delay_s is not None or row.unique_key is not None:
        return (yield from enqueue_many(schema, [row], notify=notify))[0]
    rows = yield Call(
        enqueue_sql(ENQUEUE_ONE, schema),
        (
            row.kind,
            row.args,
            row.max_attempts,
            row.timeout_s,
            row.expires_at,
            row.meta,
            row.tags,
            row.queue,
            row.priority,
            notify,
        ),
    )
    return Enqueued(rows[0][0], inserted=True)


def enqueue_many(schema: str, rows: Sequence[JobRow], *, notify: bool) -> Operation[list[Enqueued]]:
    """Make many jobs in one statement: all of them or none. Answers in input order."""
    if not rows:
        return []
    if any(row.unique_key is not None for row in rows):
        return (yield from _enqueue_unique(schema, rows, notify=notify))
    answer = yield Call(enqueue_sql(ENQUEUE_MANY, schema), _parameters(rows, notify=notify))
    return [Enqueued(line[0], inserted=True) for line in answer]


def _parameters(rows: Sequence[JobRow], *, notify: bool) -> list[Any]:
    kinds, args, *others = zip(*(row[:11] for row in rows), strict=True)
    kind, kind_array = _column(kinds)
    parameters: list[Any] = [kind_array, kind, list(args)]
    for values in others:
        parameters += _column(values)
    parameters.append(notify)
    return parameters


def _column(values: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Return a column as its scalar and its array, one of which says it all."""
    first = values[0]
    if values.count(first) == len(values):
        return first, []
    return None, list(values)


def _enqueue_unique(schema: str, rows: Sequence[JobRow], *, notify: bool) -> Operation[list[Enqueued]]:
    results: list[Enqueued | None] = [None] * len(rows)
    pending, twins = _first_of_each_key(rows)
    for _ in range(MAX_UNIQUE_ROUNDS):
        chosen = [rows[i] for i in pending]
        parameters = _parameters(chosen, notify=notify)
        parameters += [[row.unique_key for row in chosen], [row.unique_name for row in chosen]]
        answer = yield Call(enqueue_sql(ENQUEUE_UNIQUE, schema), parameters)
        lost: list[int] = []
        for i, (job_id, inserted, holder, _) in zip(pending, answer, strict=True):
            if inserted:
                results[i] = Enqueued(job_id, inserted=True)
            elif holder is not None:
                results[i] = Enqueued(holder, inserted=False)
            else:
                lost.append(i)
        pending = yield from _resolve_lost(schema, rows, lost, results)
        if not pending:
            break
    for i, original in twins.items():
        kept = results[original]
        results[i] = Enqueued(kept.id, inserted=False) if kept else None
    return _all_known(results)


def _first_of_each_key(rows: Sequence[JobRow]) -> tuple[list[int], dict[int, int]]:
    """Split a call's rows into those to insert, and repetitions of a key with the row they repeat."""
    first: dict[bytes, int] = {}
    twins: dict[int, int] = {}
    for i, row in enumerate(rows):
        if row.unique_key is not None and first.setdefault(row.unique_key, i) != i:
            twins[i] = first[row.unique_key]
    return [i for i in range(len(rows)) if i not in twins], twins


def _resolve_lost(
    schema: str, rows: Sequence[JobRow], lost: Sequence[int], results: list[Enqueued | None]
) -> Operation[list[int]]:
    """Name the holder for each key lost to a concurrent call; return those that lost to nobody."""
    if not lost:
        return []
    found: Rows = yield Call(in_schema(FIND_HOLDERS, schema), ([rows[i].unique_key for i in lost],))
    for ordinal, job_id in found:
        results[lost[ordinal - 1]] = Enqueued(job_id, inserted=False)
    return [i for i in lost if results[i] is None]


def _all_known(results: Sequence[Enqueued | None]) -> list[Enqueued]:
    known = [result for result in results if result is not None]
    if len(known) != len(results):
        raise JobConflict(
            f"a unique key was lost to other transactions {MAX_UNIQUE_ROUNDS} times; try the enqueue again"
        )
    return known
