"""Locks on the queue's tables: who holds one that keeps others out, and how long to wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from jobq._messages import shown_query
from jobq._operation import Call, in_schema

if TYPE_CHECKING:
    from jobq._operation import Operation

# What an ALTER TABLE, a VACUUM FULL or somebody's LOCK TABLE holds; what statements hold is weaker.
HOLDERS: Final = """
select c.relname::text, a.pid, date_part('epoch', clock_timestamp() - a.xact_start), a.query
from pg_locks l
join pg_class c on c.oid = l.relation
left join pg_stat_activity a on a.pid = l.pid
where c.relnamespace = (select oid from pg_namespace where nspname = {schema_name})
  and c.relkind = 'r' and l.granted and l.pid is distinct from pg_backend_pid()
  and l.database = (select oid from pg_database where datname = current_database())
  and l.mode in ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
order by a.xact_start, 1
limit 5
"""

_LONGEST_QUERY: Final = 80


class Holder(NamedTuple):
    """Who keeps others from a table.

    Attributes:
        table: its name without the schema.
        pid: the server's process, ``None`` for a prepared transaction.
        for_s: how long its transaction has been open, ``None`` when the server does not say.
        query: what it ran last, ``None`` likewise.
    """

    table: str
    pid: int | None
    for_s: float | None
    query: str | None

    def __str__(self) -> str:
        holder = "a prepared transaction" if self.pid is None else f"server process {self.pid}"
        age = "" if self.for_s is None else f" for {max(0.0, self.for_s):.0f} s"
        query = "" if self.query is None else f" ({shown_query(self.query, _LONGEST_QUERY)})"
        return f"table {self.table} is locked by {holder}{age}{query}"


def lock_holders(schema: str) -> Operation[list[Holder]]:
    """Return who holds locks on the schema's tables that keep a worker waiting, the oldest first."""
    return [Holder._make(row) for row in (yield Call(in_schema(HOLDERS, schema)))]


def limit_lock_waits(seconds: float) -> Operation[None]:
    """Let no later statement of this session wait for a lock for longer than this; 0 is without limit."""
    yield Call("select set_config('lock_timeout', $1::text, false)", (f"{int(seconds * 1000)}ms",))
