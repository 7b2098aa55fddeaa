"""Enqueue: the statements that make jobs, and what they answer. Those for unique keys: `enqueue_unique`."""

from __future__ import annotations

from typing import Final

from jobq._kinds.jobtype import JobColumns, JobRow
from jobq._operation import Call, Constants, Operation, again_after_deadlock, atomic
from jobq._statements.insert import (
    IS_DUE,
    NOTIFY,
    ROWS,
    enqueue_sql,
    insert_call,
    insert_jobs,
    notify_channel,
    notify_queues,
)
from jobq._types import Enqueued

__all__ = [
    "ENQUEUE_MANY",
    "ENQUEUE_ONE",
    "NOTIFY",
    "Template",
    "enqueue_atomically",
    "enqueue_many",
    "enqueue_one",
    "enqueue_sql",
    "notify_channel",
]

# One job, ready now: the common case has the shortest statement (0.95 to 1 of what a bare INSERT of the
# payload row makes through a cursor; the general one makes 0.74).
ENQUEUE_ONE: Final = f"""
with j as (
    insert into {{schema}}.job (id, args, expires_at, meta, tags, kind, max_attempts, timeout_s)
    values (nextval({{job_ids}}), $1::text::jsonb, $2::timestamptz, $3::text::jsonb,
            $4::text::text[], $5::text, $8::int4, $9::float8)
    returning id
)
insert into {{schema}}.ready as q (job_id, queue, priority) select id, $6::text, $7::int2 from j
returning job_id, case when $10::bool then {NOTIFY} end
"""

ENQUEUE_MANY: Final = f"""
with x as materialized (
    select nextval({{job_ids}}) as id, t.* from {ROWS}
), {insert_jobs("x")},
{notify_queues(f"select distinct {{queue}} as queue from x where {IS_DUE}")}
select id from x where (select sent from n) >= 0 order by ord
"""


def enqueue_one(schema: str, row: JobRow, *, notify: bool) -> Operation[Enqueued]:
    """Make one job."""
    options = row.options
    if options.run_at is not None or options.delay_s is not None or options.unique_key is not None:
        return (yield from enqueue_many(schema, JobColumns.of([row]), notify=notify))[0]
    return (yield from Template(schema, row, notify=notify).enqueue(row.args))


class Template:
    """Makes jobs that are ready at once and differ in nothing but their arguments.

    Args:
        row: one of them.
    """

    def __init__(self, schema: str, row: JobRow, *, notify: bool) -> None:
        self._sql: Final = enqueue_sql(ENQUEUE_ONE, schema)
        one = row.options
        scalars = (one.queue, one.priority, one.max_attempts, one.timeout_s)
        self._rest: Final = Constants(one.expires_at, one.meta, one.tags, row.kind, *scalars, notify)

    def enqueue(self, args: str) -> Operation[Enqueued]:
        """Make one job."""
        rest = self._rest
        rows = yield Call(self._sql, (args, *rest.values), constants=rest)
        return Enqueued(rows[0][0], inserted=True)


def enqueue_many(schema: str, jobs: JobColumns, *, notify: bool) -> Operation[list[Enqueued]]:
    """Make many jobs in one statement: all of them or none. Answers in input order.

    Raises:
        UniqueConflict: a key is held, and was to raise then.
    """
    if not jobs.kinds:
        return []
    if any(one.unique_key is not None for one in jobs.various_options):
        rows = [JobRow(*row) for row in zip(*jobs, strict=True)]
        from jobq._statements.enqueue_unique import enqueue_unique  # noqa: PLC0415 - many programs have none

        return (yield from enqueue_unique(schema, rows, notify=notify))
    answer = yield insert_call(ENQUEUE_MANY, schema, jobs, notify=notify)
    return [Enqueued(line[0], inserted=True) for line in answer]


def enqueue_atomically(schema: str, jobs: JobColumns, *, notify: bool) -> Operation[list[Enqueued]]:
    """Make many jobs as `enqueue_many` does, in a transaction of their own on a connection in autocommit.

    With unique keys several statements may follow: together, and each with its own snapshot.
    """
    # Possible where a call has to look again for a key while it holds others.
    return (yield from again_after_deadlock(lambda: atomic(enqueue_many(schema, jobs, notify=notify))))
