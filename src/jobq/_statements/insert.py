"""What all statements that make jobs share: their rows, their columns, and whom they wake.

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

from jobq._operation import in_schema, quote_literal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from jobq._kinds.unique import Unique


class JobRow(NamedTuple):
    """One job as the enqueue statements take it, every option resolved.

    Attributes:
        args: the encoded JSON document; ``meta`` likewise, ``None`` when empty.
        run_at: when it is due, ``None`` for now; or ``delay_s``, seconds from the database's now.
        timeout_s: seconds, ``None`` for no limit.
        tags: PostgreSQL's text form of a text array, ``None`` when there are none.
        unique_key: 16 bytes, or ``None``; ``unique_name`` is what people read.
        unique: how the key is held, ``None`` for the plain way.
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
    unique: Unique | None = None


# A notification's payload is the queue's name and nothing else; its bound (128 bytes) is far
# below the 7,999 that PostgreSQL takes.
NOTIFY: Final = """case
    when pg_try_advisory_lock(hashtext({schema_name}), hashtext(q.queue::text))
    then pg_advisory_unlock(hashtext({schema_name}), hashtext(q.queue::text))::text
    else pg_notify({channel}, q.queue::text)::text end"""

COLUMNS: Final = """
    coalesce(t.kind, $2::text) as kind, t.args,
    coalesce(t.queue, $4::text) as queue, coalesce(t.priority, $6::int2) as priority,
    coalesce(t.max_attempts, $8::int4) as max_attempts, coalesce(t.timeout_s, $10::float8) as timeout_s,
    coalesce(t.run_at, $12::timestamptz,
             statement_timestamp() + coalesce(t.delay_s, $14::float8) * interval '1 second') as run_at,
    coalesce(t.expires_at, $16::timestamptz) as expires_at,
    coalesce(t.meta, $18::text) as meta, coalesce(t.tags, $20::text) as tags"""

ROWS: Final = """unnest($1::text[], $3::text[], $5::text[], $7::int2[], $9::int4[], $11::float8[],
    $13::timestamptz[], $15::float8[], $17::timestamptz[], $19::text[], $21::text[]"""
NAMES: Final = "kind, args, queue, priority, max_attempts, timeout_s, run_at, delay_s, expires_at, meta, tags"

_JOBS: Final = """
j as (
    insert into {schema}.job
        (id, kind, args, max_attempts, timeout_s, expires_at, meta, tags{unique_columns})
    select id, kind, args::jsonb, max_attempts, timeout_s, expires_at, meta::jsonb,
           tags::text[]{unique_values}
    from {source}
), r as (
    insert into {schema}.ready (job_id, queue, priority)
    select id, queue, priority from {source} where run_at is null or run_at <= statement_timestamp()
), s as (
    insert into {schema}.scheduled (job_id, run_at, reason, queue, priority)
    select id, run_at, 'scheduled', queue, priority from {source} where run_at > statement_timestamp()
)"""


def insert_jobs(source: str, *, unique: bool = False) -> str:
    """Return the part of a statement that makes the jobs of a CTE, in `job` and where they wait."""
    columns, values = (", unique_key, unique_name, unique_generation", ", key, name, new_generation")
    return (
        _JOBS.replace("{source}", source)
        .replace("{unique_columns}", columns if unique else "")
        .replace("{unique_values}", values if unique else "")
    )


def notify_queues(queues: str) -> str:
    """Return the part that wakes whoever waits for a queue that a query names; once each."""
    return f"n as materialized (select pg_catalog.count({NOTIFY}) as sent from ({queues}) q where $22::bool)"


def notify_channel(schema: str) -> str:
    """Return the channel that tells listeners of this schema which queue has work.

    A channel's name is an identifier: 63 bytes at the most. Schema names reach that by
    themselves, so a long one is represented by its tail-safe prefix; two schemas that share it
    would only wake each other's workers.
    """
    return f"jobq:{schema}".encode()[:63].decode(errors="ignore")


@functools.lru_cache(maxsize=256)
def enqueue_sql(text: str, schema: str) -> str:
    """Return a statement that may notify, for one schema."""
    return in_schema(text.replace("{channel}", quote_literal(notify_channel(schema))), schema)


def parameters(rows: Sequence[JobRow], *, notify: bool) -> list[Any]:
    """Return the parameters $1 to $22 of a statement over `ROWS`."""
    kinds, args, *others = zip(*(row[:11] for row in rows), strict=True)
    kind, kind_array = column(kinds)
    values: list[Any] = [kind_array, kind, list(args)]
    for one in others:
        values += column(one)
    values.append(notify)
    return values


def column(values: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """Return a column as its scalar and its array, one of which says it all."""
    first = values[0]
    if values.count(first) == len(values):
        return first, []
    return None, list(values)
