"""What PostgreSQL does without a queue: the payload row alone, in a table of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from jobq._operation import array_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    import psycopg

    from jobq._postgres import SyncCursor

KIND: Final = "send_email"
# About 60 bytes, as an e-mail's arguments are.
ARGS_JSON: Final = '{"to":"user12345@example.com","subject":"hello hello hello 12"}'

# The columns that every job has, the types and the key of jobq's own payload table.
CREATE: Final = """
create table if not exists payload (
    id           bigint generated always as identity primary key,
    kind         text not null,
    args         jsonb not null,
    max_attempts integer not null,
    timeout_s    double precision,
    created_at   timestamptz not null default statement_timestamp()
)
"""

INSERT_ONE: Final = """
insert into payload (kind, args, max_attempts, timeout_s)
values ($1::text, $2::text::jsonb, $3::int4, $4::float8) returning id
"""

INSERT_PLAIN: Final = """
insert into payload (kind, args, max_attempts, timeout_s) values (%s, %s, %s, %s) returning id
"""

INSERT_MANY: Final = """
insert into payload (kind, args, max_attempts, timeout_s)
select $1::text, args::jsonb, $3::int4, $4::float8 from unnest($2::text[]) a(args) returning id
"""


def create(connection: psycopg.Connection[Any]) -> None:
    """Make the table in the database of a connection."""
    connection.execute(CREATE)


def insert_one(cursor: SyncCursor) -> None:
    """Insert one row, in a transaction of its own."""
    cursor.execute(INSERT_ONE, [KIND, ARGS_JSON, "25", "3600"], prepare=True)
    cursor.fetchone()


def insert_many(cursor: SyncCursor, args: Sequence[str]) -> None:
    """Insert a row for each argument document, in one statement."""
    cursor.execute(INSERT_MANY, [KIND, array_literal(args), "25", "3600"], prepare=True)
    cursor.fetchall()
