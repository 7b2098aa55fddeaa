"""What all statements that make jobs share: their columns, their parameters, and whom they wake.

A column that is the same for every job of a call is a scalar, and stands in the statement where its value
is used; one that differs is an array, and a column of the rows. So the rows of a call are as narrow as can
be, and there is a statement for each set of columns that differ, of which a program has a few. (Rows of all
columns, filled in by `coalesce`, cost the server a seventh more.)

The arguments travel as one text, a document a line: no document has a bare line break, so nobody escapes
anything, and the parameter is made by one `join`.

A notification takes a global lock when its transaction commits (32 writers: 13,100 → 4,300
transactions/s), so one is sent only when it can help. A listener that waits holds a shared
advisory lock on its queue; an enqueue that can take the exclusive lock, and lets it go at once,
knows that nobody waits. It costs 2 µs and leaves no row behind.
"""

from __future__ import annotations

import functools
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from jobq._operation import Call, in_schema, quote_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.jobtype import JobColumns

# A notification's payload is the queue's name and nothing else; its bound (128 bytes) is far
# below the 7,999 that PostgreSQL takes.
NOTIFY: Final = """case
    when pg_try_advisory_lock(hashtext({schema_name}), hashtext(q.queue::text))
    then pg_advisory_unlock(hashtext({schema_name}), hashtext(q.queue::text))::text
    else pg_notify({channel}, q.queue::text)::text end"""

# The parameters from $2 on. Those after `notify` are of unique keys.
_TYPES: Final = {
    "kind": "text",
    "queue": "text",
    "priority": "int2",
    "max_attempts": "int4",
    "timeout_s": "float8",
    "run_at": "timestamptz",
    "delay_s": "float8",
    "expires_at": "timestamptz",
    "meta": "text",
    "tags": "text",
    "notify": "bool",
    "unique_key": "bytea",
    "unique_name": "text",
    "period_us": "int8",
    "until_started": "bool",
    "conflict": "int2",
    "max_wait_s": "float8",
}
_OPTIONS: Final = list(_TYPES).index("notify") - 1  # that a row has, and all statements store

# A call's jobs with their arguments, their place in the call (`ord`), and what differs between them.
ROWS: Final = """rows from (pg_catalog.unnest(pg_catalog.string_to_array($1::text, E'\\n')){arrays})
         with ordinality t(args{names}, ord)"""

DUE_AT: Final = "coalesce({run_at}, statement_timestamp() + {delay_s} * interval '1 second')"
IS_DUE: Final = f"coalesce({DUE_AT} <= statement_timestamp(), true)"

_JOBS: Final = f"""
j as (
    insert into {{schema}}.job
        (id, kind, args, max_attempts, timeout_s, expires_at, meta, tags{{unique_columns}})
    select id, {{kind}}, args::jsonb, {{max_attempts}}, {{timeout_s}}, {{expires_at}}, {{meta}}::jsonb,
           {{tags}}::text[]{{unique_values}}
    from {{source}}
), r as (
    insert into {{schema}}.ready (job_id, queue, priority)
    select id, {{queue}}, {{priority}} from {{source}} where {IS_DUE}
), s as (
    insert into {{schema}}.scheduled (job_id, run_at, reason, queue, priority)
    select id, {DUE_AT}, 'scheduled', {{queue}}, {{priority}}
    from {{source}} where {DUE_AT} > statement_timestamp()
)"""


def insert_jobs(source: str, *, unique: bool = False) -> str:
    """Return the part of a statement that makes the jobs of a CTE, in `job` and where they wait."""
    columns = ", unique_key, unique_name, unique_generation"
    values = ", unique_key, unique_name, new_generation"
    return (
        _JOBS.replace("{source}", source)
        .replace("{unique_columns}", columns if unique else "")
        .replace("{unique_values}", values if unique else "")
    )


def notify_queues(queues: str) -> str:
    """Return the part that wakes whoever waits for a queue that a query names; once each."""
    return f"n as materialized (select pg_catalog.count({NOTIFY}) as sent from ({queues}) q where {{notify}})"


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


def insert_call(
    template: str, schema: str, jobs: JobColumns, *more: Any, notify: bool, replan: bool = False
) -> Call:
    """Return the call of a statement over `ROWS`.

    Args:
        template: the statement, with `{queue}` for what is each job's queue, and so on.
        schema: where the queue lives.
        jobs: what is to be made.
        more: the parameters after `notify`: scalars, or a list with a value for each job.
        notify: whether to wake who waits.
        replan: see `Call`.
    """
    options = [column(values) for values in zip(*jobs.various_options, strict=True)]
    values = [column(jobs.kinds), *options[:_OPTIONS], notify, *more]
    varies = tuple(type(value) is list for value in values)
    return Call(insert_sql(template, schema, varies), ["\n".join(jobs.args), *values], replan)


def column(values: Sequence[Any]) -> Any:
    """Return a parameter: the value that all jobs have, else a list of theirs."""
    return values[0] if values.count(values[0]) == len(values) else list(values)


@functools.lru_cache(maxsize=256)
def insert_sql(template: str, schema: str, varies: tuple[bool, ...]) -> str:
    """Return a statement over `ROWS` for one schema; ``varies``: which of its parameters are lists."""
    text, arrays, names = template, "", ""
    for number, (name, of_type), is_array in zip(count(2), _TYPES.items(), varies, strict=False):
        if is_array:
            arrays += f", pg_catalog.unnest(${number}::{of_type}[])"
            names += f", {name}"
        text = text.replace(f"{{{name}}}", name if is_array else f"${number}::{of_type}")
    return enqueue_sql(text.replace("{arrays}", arrays).replace("{names}", names), schema)
