"""Stock: rows that the server makes by itself, millions of them in a minute, that stand there beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import psycopg

CHUNK: Final = 250_000  # rows a transaction

READY: Final = """
with made as materialized (select nextval('jobq.job_id_seq') as id from generate_series(1, %(rows)s)),
j as (
    insert into jobq.job (id, kind, args, max_attempts, timeout_s)
    select id, 'send_email', '{"to":"user12345@example.com","subject":"hello hello hello 12"}', 25, 3600
    from made
)
insert into jobq.ready (job_id, queue, priority) select id, 'default', 0 from made
"""
FINISHED: Final = """
with made as materialized (select nextval('jobq.job_id_seq') as id from generate_series(1, %(rows)s)),
j as (
    insert into jobq.job (id, kind, args, max_attempts, timeout_s)
    select id, 'send_email', '{"to":"user12345@example.com","subject":"hello hello hello 12"}', 25, 3600
    from made
)
insert into jobq.finished
    (job_id, state, finished_at, claimed_at, queue, priority, worker_id, attempt, failures, crashes)
select id, 'completed', now(), now(), 'default', 0, 1, 1, 0, 0 from made
"""
SCHEDULED: Final = """
with made as materialized (select nextval('jobq.job_id_seq') as id, n from generate_series(1, %(rows)s) n),
j as (
    insert into jobq.job (id, kind, args, max_attempts, timeout_s)
    select id, 'send_email', '{"to":"user12345@example.com","subject":"hello hello hello 12"}', 25, 3600
    from made
)
insert into jobq.scheduled (job_id, run_at, reason, queue, priority)
select id, now() + interval '1 day' + n * interval '1 second', 'scheduled', 'default', 0 from made
"""


def fill(connection: psycopg.Connection[Any], sql: str, rows: int) -> None:
    """Make so many rows by one of the statements above."""
    for begin in range(0, rows, CHUNK):
        connection.execute(sql.encode(), {"rows": min(CHUNK, rows - begin)})
