"""Checks of the server: its settings, its clock, its connections, and who pins the vacuum horizon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobq._doctor.findings import Context, Finding, Level
from jobq._messages import shown_query
from jobq._operation import Call, in_schema
from jobq._units import counted, duration

if TYPE_CHECKING:
    from jobq._operation import Operation

_HORIZON_WARNING_S: Final = 300.0
_HORIZON_PROBLEM_S: Final = 3600.0
_HORIZON_XIDS: Final = 1_000_000  # of a session whose age in seconds this role may not see
_CLOCK_WARNING_S: Final = 1.0
_CLOCK_PROBLEM_S: Final = 30.0
_CONNECTIONS_A_WORKER: Final = 5
_FULL_SHARE: Final = 0.9
_LONGEST_QUERY: Final = 120  # characters

# A hidden session (another role's, without pg_read_all_stats) still shows its xids, but no time or query.
_HORIZON: Final = """
select kind, who, age(xmin), seconds, what from (
    select 'session' as kind, pg_catalog.format('pid %s (%s, %s)', pid, coalesce(usename, '?'),
                                     coalesce(nullif(application_name, ''), 'no application name')) as who,
           coalesce(backend_xmin, backend_xid) as xmin,
           date_part('epoch', clock_timestamp() - xact_start)::float8 as seconds,
           coalesce(query, '') as what, datname
    from pg_stat_activity
    where coalesce(backend_xmin, backend_xid) is not null and pid <> pg_backend_pid()
      and backend_type in ('client backend', 'walsender')
    union all
    select 'prepared', pg_catalog.format('transaction %L of %s', gid, owner), transaction,
           date_part('epoch', clock_timestamp() - prepared)::float8, '', database
    from pg_prepared_xacts
    union all
    select 'slot', pg_catalog.format('replication slot %L (%s)', slot_name,
                          case when active then 'active' else 'inactive' end), xmin, null, '', database
    from pg_replication_slots where xmin is not null
) h
where datname is null or datname = current_database()
order by age(xmin) desc limit 3
"""

_REMEDIES: Final = {
    "session": "Have its owner commit, or end it: select pg_terminate_backend(<pid>). While it is open,"
    " VACUUM can remove nothing that was deleted since, and every table grows.",
    "prepared": "Finish it: commit prepared '<gid>' or rollback prepared '<gid>'.",
    "slot": "Let its standby catch up, or drop the slot: select pg_drop_replication_slot('<name>').",
}


def horizon(context: Context) -> Operation[list[Finding]]:
    """Find what keeps VACUUM from removing dead rows."""
    del context
    findings: list[Finding] = []
    for kind, who, xids, seconds, what in (yield Call(_HORIZON)):
        is_old = xids > _HORIZON_XIDS if seconds is None else seconds > _HORIZON_WARNING_S
        if not is_old:
            continue
        level = Level.PROBLEM if (seconds or 0.0) > _HORIZON_PROBLEM_S else Level.WARNING
        since = f"for {duration(seconds)}" if seconds is not None else f"for {xids:,} transactions"
        query = f": {shown_query(what, _LONGEST_QUERY)}" if what else ""
        findings.append(Finding("vacuum horizon", level, f"{who} pins it {since}{query}", _REMEDIES[kind]))
    return findings or [Finding("vacuum horizon", Level.OK, "no old transaction pins it")]


# What ended or started later than now did so before the clock was set back.
_CLOCK: Final = """
select date_part('epoch', now)::float8::text, date_part('epoch', greatest(
    (select max(finished_at) from {schema}.finished), (select max(started_at) from {schema}.worker)) - now)
from (select clock_timestamp() as now) c
"""


def clock(context: Context) -> Operation[list[Finding]]:
    """Compare the database's clock with this machine's, and with what it has shown before."""
    before = context.clock_s()
    [(now, ahead_s)] = yield Call(in_schema(_CLOCK, context.schema))
    after = context.clock_s()
    return [_compared(before, float(now), after), *_set_back(ahead_s)]


def _set_back(ahead_s: float | None) -> list[Finding]:
    if ahead_s is None or ahead_s < _CLOCK_WARNING_S:
        return []
    return [
        Finding(
            "clock",
            Level.WARNING,
            f"the database's clock was set back, by {duration(ahead_s)} at least",
            "Retries, snoozes and delays that were reckoned before may wait so much longer than they should:"
            " docs/operation.md says how to have them come now.",
        )
    ]


def _compared(before: float, theirs: float, after: float) -> Finding:
    """Compare two clocks, from what this machine's showed before and after it asked for the other."""
    # The answer was true at some moment between the two.
    off = max(before - theirs, theirs - after, 0.0)
    if off < _CLOCK_WARNING_S:
        said = f"this machine and the database agree within {after - before + off:.1f} s"
        return Finding("clock", Level.OK, said)
    direction = "behind" if theirs > after else "ahead of"
    return Finding(
        "clock",
        Level.PROBLEM if off > _CLOCK_PROBLEM_S else Level.WARNING,
        f"this machine is {duration(off)} {direction} the database",
        "Have both follow NTP. Due times and leases go by the database's clock; run_at comes from here.",
    )


_CONNECTIONS: Final = """
select current_setting('max_connections')::int4, current_setting('superuser_reserved_connections')::int4,
       (select count(*) from pg_stat_activity where backend_type = 'client backend')::int4,
       (select count(*) from {schema}.worker where ended_at is null)::int4
"""


def connections(context: Context) -> Operation[list[Finding]]:
    """Compare the connections that there are and that workers need with those that there can be."""
    rows = yield Call(in_schema(_CONNECTIONS, context.schema))
    most, reserved, used, workers = rows[0]
    free = most - reserved
    needed = workers * _CONNECTIONS_A_WORKER
    need = "needs" if workers == 1 else "need"
    said = f"{used} of {free} in use; {counted(workers, 'live worker')} {need} {needed:,} beside their pools"
    if used > free * _FULL_SHARE or needed > free:
        return [
            Finding(
                "connections",
                Level.WARNING,
                said,
                "Raise max_connections, run fewer processes, make pools smaller, or put a pooler before it.",
            )
        ]
    return [Finding("connections", Level.OK, said)]


def pooler(context: Context) -> Operation[list[Finding]]:
    """Say whether a transaction pooler stands between, and what that costs."""
    if not context.pooled:
        return [Finding("pooler", Level.OK, "a direct connection")]
    yield Call("select 1")
    return [
        Finding(
            "pooler",
            Level.NOTE,
            "this connection goes through a pooler in transaction mode: nothing is prepared, and"
            " notifications do not arrive",
            "Give workers a direct address for their listener (listen_dsn), or live with polling.",
        )
    ]


# Name, the value that is wrong, how bad, what it means, what to do.
_SETTINGS: Final = (
    ("fsync", "off", Level.PROBLEM, "a power cut can destroy the database", "Set fsync = on."),
    ("full_page_writes", "off", Level.PROBLEM, "a power cut can damage pages", "Set full_page_writes = on."),
    ("autovacuum", "off", Level.PROBLEM, "dead rows pile up until claims crawl", "Set autovacuum = on."),
    ("track_counts", "off", Level.PROBLEM, "autovacuum does not know what to do", "Set track_counts = on."),
    (
        "synchronous_commit",
        "off",
        Level.WARNING,
        "the last commits before a crash of the server are lost: acknowledged jobs too",
        "Set synchronous_commit = on for this role.",
    ),
    (
        "default_transaction_read_only",
        "on",
        Level.PROBLEM,
        "no job can be made or claimed by this role here",
        "Set it off for this role, or connect to the primary (target_session_attrs=read-write).",
    ),
    (
        "array_nulls",
        "off",
        Level.PROBLEM,
        "calls that make several jobs at once, and some schedules, are refused",
        "Set array_nulls = on for this role.",
    ),
    ("in_hot_standby", "on", Level.PROBLEM, "this is a standby", "Connect to the primary."),
)
_LIMITS: Final = (
    ("statement_timeout", 5_000),
    ("lock_timeout", 1_000),
    ("idle_in_transaction_session_timeout", 1_000),
    ("transaction_timeout", 5_000),
)

# As the role has them: our own sessions lift some limits for themselves.
_READ_SETTINGS: Final = """
select name, case context when 'internal' then setting else reset_val end
from pg_settings where name = any ($1::text[])
"""


def settings(context: Context) -> Operation[list[Finding]]:
    """Read the settings that can lose or stop jobs, as this role has them."""
    del context
    names = [name for name, *_ in _SETTINGS] + [name for name, _ in _LIMITS]
    rows = yield Call(_READ_SETTINGS, (names,))
    found: dict[str, str] = dict(rows)
    findings = [
        Finding("settings", level, f"{name} = {wrong}: {meaning}", remedy)
        for name, wrong, level, meaning, remedy in _SETTINGS
        if found.get(name) == wrong
    ]
    findings += [
        Finding(
            "settings",
            Level.WARNING,
            f"{name} = {found[name]} ms for this role can break off a client's statements under load",
            f"Set {name} = 0 (no limit) or to at least {least} ms for the role that enqueues.",
        )
        for name, least in _LIMITS
        if 0 < int(found.get(name, "0")) < least
    ]
    return findings or [Finding("settings", Level.OK, "durable, vacuumed, and without limits that bite")]
