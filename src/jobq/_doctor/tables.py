"""Checks of the tables: their invariants, their indexes, their dead rows, the role's rights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobq._doctor.findings import Context, Finding, Level
from jobq._operation import Call, in_schema
from jobq._units import counted, octets

if TYPE_CHECKING:
    from jobq._operation import Operation, Rows

_SHOWN: Final = 5  # ids named in a message
_DEAD_ROWS: Final = 500_000
_BLOATED_OCTETS: Final = 200_000_000
_HOT: Final = ("ready", "scheduled", "running", "worker", "leader")

# Each pair from its smaller side by the other's key. `finished` is never read whole.
_IN_TWO: Final = """
select w.job_id, w.a, w.b from (
    select r.job_id, 'ready' as a, 'scheduled' as b from {schema}.ready r
        join {schema}.scheduled s on s.job_id = r.job_id
    union all
    select r.job_id, 'running', 'ready' from {schema}.running r
        join {schema}.ready s on s.job_id = r.job_id
    union all
    select r.job_id, 'running', 'scheduled' from {schema}.running r
        join {schema}.scheduled s on s.job_id = r.job_id
    union all
    select r.job_id, 'running', 'finished' from {schema}.running r
        join {schema}.finished s on s.job_id = r.job_id
    union all
    select r.job_id, 'ready', 'finished' from {schema}.ready r
        join {schema}.finished s on s.job_id = r.job_id
    union all
    select r.job_id, 'scheduled', 'finished' from {schema}.scheduled r
        join {schema}.finished s on s.job_id = r.job_id
) w limit 100
"""

_WITHOUT_PAYLOAD: Final = """
select w.job_id, w.state from (
    select job_id, 'ready' as state from {schema}.ready
    union all select job_id, 'scheduled' from {schema}.scheduled
    union all select job_id, 'running' from {schema}.running
) w
where not exists (select from {schema}.job j where j.id = w.job_id) limit 100
"""

_WITHOUT_STATE: Final = """
select j.id from {schema}.job j
where not exists (select from {schema}.finished w where w.job_id = j.id)
  and not exists (select from {schema}.ready w where w.job_id = j.id)
  and not exists (select from {schema}.scheduled w where w.job_id = j.id)
  and not exists (select from {schema}.running w where w.job_id = j.id)
limit 100
"""


_MAKE_READY: Final = "insert into {schema}.ready (job_id, queue, priority) values (<id>, 'default', 0);"


def in_one_table(context: Context) -> Operation[list[Finding]]:
    """Check that no job is in two tables."""
    rows = yield Call(in_schema(_IN_TWO, context.schema))
    if not rows:
        return [Finding("one table a job", Level.OK, "no job is in two")]
    shown = ", ".join(f"{job_id} ({one} and {other})" for job_id, one, other in rows[:_SHOWN])
    return [
        Finding(
            "one table a job",
            Level.PROBLEM,
            f"{_count(rows)} in two tables: {shown}",
            "Somebody wrote to the tables by hand, or a backup was restored over them. Delete the row that is"
            " wrong: for a finished job the one that waits, unless it is to run again.",
        )
    ]


def with_payload(context: Context) -> Operation[list[Finding]]:
    """Check that what waits or runs has its payload."""
    rows = yield Call(in_schema(_WITHOUT_PAYLOAD, context.schema))
    if not rows:
        return [Finding("payloads", Level.OK, "every job that waits or runs has its own")]
    shown = ", ".join(f"{job_id} ({state})" for job_id, state in rows[:_SHOWN])
    return [
        Finding(
            "payloads",
            Level.PROBLEM,
            f"{_count(rows)} without a payload: {shown}",
            "Rows of the table job were deleted by hand. Workers discard such jobs with that reason;"
            " restore the rows from a backup if the work is to be done.",
        )
    ]


def with_state(context: Context) -> Operation[list[Finding]]:
    """Check that every payload has a state."""
    rows = yield Call(in_schema(_WITHOUT_STATE, context.schema))
    if not rows:
        return [Finding("states", Level.OK, "every job has one")]
    shown = ", ".join(str(job_id) for (job_id,) in rows[:_SHOWN])
    return [
        Finding(
            "states",
            Level.PROBLEM,
            f"{_count(rows)} in no table of a state: {shown}",
            "Rows were deleted by hand, or a restore was partial. To run such a job again: "
            + in_schema(_MAKE_READY, context.schema),
        )
    ]


_FUTURE: Final = """
select count(*)::int8 from {schema}.ready where xid >= pg_snapshot_xmax(pg_current_snapshot())
"""


def future_xids(context: Context) -> Operation[list[Finding]]:
    """Look for rows that carry transaction ids of another cluster, after a dump and restore."""
    rows = yield Call(in_schema(_FUTURE, context.schema))
    count = rows[0][0]
    if not count:
        return [Finding("restored rows", Level.OK, "no ready job carries another cluster's transaction id")]
    return [
        Finding(
            "restored rows",
            Level.WARNING,
            f"{counted(count, 'ready job')} with transaction ids from the future: run after all newer ones",
            "They came by a dump and restore, or by logical replication. Restart one worker of their queue:"
            " it stamps them anew.",
        )
    ]


_EXPECTED: Final = """
select e.name, i.indisvalid from pg_catalog.unnest($2::text[]) e(name)
left join pg_class c on c.relname = e.name and c.relnamespace = $1::text::regnamespace
left join pg_index i on i.indexrelid = c.oid
where i.indisvalid is distinct from true
"""
INDEXES: Final = (
    "job_pkey", "ready_pkey", "ready_lane", "scheduled_pkey", "scheduled_due", "running_pkey",
    "finished_pkey", "finished_at", "finished_not_completed", "attempt_error_pkey", "unique_key_pkey",
    "worker_pkey", "periodic_pkey", "periodic_tick_pkey", "periodic_tick_made",
)  # fmt: skip


def indexes(context: Context) -> Operation[list[Finding]]:
    """Check that every index is there and valid."""
    name = in_schema("{schema}", context.schema)
    rows = yield Call(_EXPECTED, (name, list(INDEXES)))
    if not rows:
        return [Finding("indexes", Level.OK, f"all {len(INDEXES)} are there and valid")]
    return [
        Finding(
            "indexes",
            Level.PROBLEM,
            f"{index} is {'missing' if is_valid is None else 'not valid'}",
            f"reindex index {name}.{index};" if is_valid is not None else
            "Make it again as `jobqctl migrate --sql` shows it, with create index concurrently.",
        )
        for index, is_valid in rows
    ]  # fmt: skip


_BLOAT: Final = """
select relname::text, n_dead_tup, n_live_tup, pg_total_relation_size(relid::regclass),
       date_part('epoch', clock_timestamp() - greatest(last_autovacuum, last_vacuum))::float8
from pg_stat_user_tables where schemaname = $1::text order by pg_total_relation_size(relid::regclass) desc
"""


def dead_rows(context: Context) -> Operation[list[Finding]]:
    """Look at dead rows and sizes of the tables."""
    rows = yield Call(_BLOAT, (context.schema,))
    findings: list[Finding] = []
    for table, dead, live, bytes_, _ in rows:
        is_hot = table in _HOT
        too_many = dead > _DEAD_ROWS and dead > live
        too_large = is_hot and bytes_ > _BLOATED_OCTETS and live < dead + 1_000_000
        if too_many or (too_large and dead > _DEAD_ROWS // 10):
            findings.append(
                Finding(
                    "dead rows",
                    Level.WARNING,
                    f"{table} holds {dead:,} dead rows beside {live:,} live ones, {octets(bytes_)} in all",
                    "VACUUM cannot keep up, or something pins its horizon (see there). When that is gone:"
                    f" vacuum {in_schema('{schema}', context.schema)}.{table};",
                )
            )
    total = sum(row[3] for row in rows)
    dead = sum(row[1] for row in rows)
    return findings or [Finding("dead rows", Level.OK, f"{dead:,} in {octets(total)} of tables and indexes")]


_RIGHTS: Final = """
select c.relname::text from pg_class c
where c.relnamespace = $1::text::regnamespace and c.relkind in ('r', 'v')
  and not has_table_privilege(c.oid, 'select')
"""


def rights(context: Context) -> Operation[list[Finding]]:
    """Name the tables that this role may not read: the other checks see nothing of them."""
    rows = yield Call(_RIGHTS, (in_schema("{schema}", context.schema),))
    if not rows:
        return [Finding("rights", Level.OK, "this role may read every table")]
    names = ", ".join(name for (name,) in rows)
    return [
        Finding(
            "rights",
            Level.NOTE,
            f"this role may not read {names}",
            "Run the doctor as the schema's owner, or grant select.",
        )
    ]


def _count(rows: Rows) -> str:
    count = len(rows)
    return "100 jobs or more are" if count >= 100 else f"{count} job{'s are' if count != 1 else ' is'}"
