"""A database with many jobs in every table, and statistics that are right, or wrong in several ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from tests.support.storage import SCHEMA, TABLES

if TYPE_CHECKING:
    from tests.support.storage import Storage

PER_TABLE: Final = 50_000
WORKER: Final = 1
_FILL: Final = f"""
insert into jobq.worker (id, name, host, pid, version, queues, kinds, lease_until)
values ({WORKER}, 'w', 'h', 1, '0', '{{default}}', '{{}}', now() + interval '1 hour');

insert into jobq.job (id, kind, args, max_attempts, unique_key, unique_name)
select g, 'noop', '{{}}', 25, case when g % 4 = 0 then decode(md5(g::text), 'hex') end, g::text
from generate_series(1, 4 * {PER_TABLE}) g;
insert into jobq.unique_key (key, generation, job_id)
select unique_key, 1, id from jobq.job where unique_key is not null;

insert into jobq.ready (job_id, xid, queue, priority)
select g, (3 + g / 10)::text::xid8, 'default', (g % 5) - 2 from generate_series(1, {PER_TABLE}) g;
insert into jobq.scheduled (job_id, run_at, reason, queue, priority)
select g, now() + ({PER_TABLE} + 5000 - g) * interval '1 second', 'scheduled', 'default', 0
from generate_series({PER_TABLE} + 1, 2 * {PER_TABLE}) g;
insert into jobq.running (job_id, worker_id, queue, priority, attempt, failures, crashes)
select g, {WORKER}, 'default', 0, 1, 0, 0 from generate_series(2 * {PER_TABLE} + 1, 3 * {PER_TABLE}) g;
insert into jobq.finished (job_id, state, queue, priority, worker_id, attempt, failures, crashes)
select g, 'discarded', 'default', 0, {WORKER}, 1, 0, 0
from generate_series(3 * {PER_TABLE} + 1, 4 * {PER_TABLE}) g;
insert into jobq.attempt_error (job_id, attempt, outcome, type, message, traceback, worker)
select g, 0, 'failed', 'E', '', '', 'w' from generate_series(2 * {PER_TABLE} + 1, 4 * {PER_TABLE}) g;
select setval('jobq.job_id_seq', 4 * {PER_TABLE});
"""


class Ids(NamedTuple):
    """Some jobs of each table, spread over it."""

    ready: list[int]
    scheduled: list[int]
    running: list[int]
    finished: list[int]


def some(count: int) -> Ids:
    step = PER_TABLE // count // 4 * 4
    starts = [4 + table * PER_TABLE for table in range(4)]  # multiples of 4 have a unique key
    return Ids(*(list(range(start, start + step * count, step)) for start in starts))


def fill(store: Storage) -> None:
    store.sql(_FILL)


def empty(store: Storage) -> None:
    """Delete everything; what was there stays as dead rows, in the tables and in every index."""
    for table in TABLES:
        store.sql(f"delete from {SCHEMA}.{table}")


def leave_statistics_alone(store: Storage) -> None:
    for table in TABLES:
        store.sql(f"alter table {SCHEMA}.{table} set (autovacuum_enabled = off)")
