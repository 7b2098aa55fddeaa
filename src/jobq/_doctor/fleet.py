"""Checks of the fleet: workers, their listeners, the leader, and work that nobody does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from jobq._doctor.findings import Context, Finding, Level
from jobq._operation import Call, in_schema
from jobq._units import counted, duration

if TYPE_CHECKING:
    from jobq._operation import Operation

_STALE_S: Final = 60.0
_NO_LEADER_S: Final = 60.0
_LAG_S: Final = 300.0

_WORKERS: Final = """
select w.name, w.queues, date_part('epoch', clock_timestamp() - w.lease_until)::float8,
       w.host, w.pid, w.version
from {schema}.worker w where w.ended_at is null order by w.id
"""


def workers(context: Context) -> Operation[list[Finding]]:
    """Look for workers whose lease is long over, and at which versions run."""
    rows = yield Call(in_schema(_WORKERS, context.schema))
    if not rows:
        return [
            Finding("workers", Level.WARNING, "none is alive", "Start one: jobqctl worker MODULE:ATTRIBUTE.")
        ]
    stale = [row for row in rows if row[2] > _STALE_S]
    findings = [
        Finding(
            "workers",
            Level.WARNING,
            f"{name}: its lease has been over for {duration(over_s)}, and nobody has taken its jobs back",
            "No other worker is alive to rescue them: start one.",
        )
        for name, _, over_s, *_ in stale
    ]
    versions = sorted({row[5] for row in rows})
    said = f"{len(rows) - len(stale)} alive, of version {', '.join(versions)}"
    return findings or [Finding("workers", Level.OK, said)]


_LISTENERS: Final = """
select w.name from {schema}.worker w
where w.ended_at is null and w.lease_until > clock_timestamp()
  and w.started_at < clock_timestamp() - interval '30 seconds'
  and not exists (select from pg_stat_activity a
                  where a.application_name = left('jobq listener ' || w.name, 63))
"""


def listeners(context: Context) -> Operation[list[Finding]]:
    """Find workers that hear no notifications."""
    rows = yield Call(in_schema(_LISTENERS, context.schema))
    if not rows:
        return [Finding("listeners", Level.OK, "every worker has its connection")]
    names = ", ".join(name for (name,) in rows[:5])
    return [
        Finding(
            "listeners",
            Level.NOTE,
            f"{counted(len(rows), 'worker')} without a connection that listens ({names}), so they poll",
            "Behind a pooler, give them a direct listen_dsn; else look for the reason in their logs.",
        )
    ]


_LEADER: Final = """
select worker, date_part('epoch', clock_timestamp() - nullif(lease_until, '-infinity'))::float8,
       (select count(*) from {schema}.worker where ended_at is null and lease_until > clock_timestamp())::int4
from {schema}.leader
"""


def leader(context: Context) -> Operation[list[Finding]]:
    """Check that somebody does the duties of the fleet."""
    rows = yield Call(in_schema(_LEADER, context.schema))
    if not rows:
        return [
            Finding(
                "leader",
                Level.PROBLEM,
                "the table leader has lost its row",
                in_schema(
                    "insert into {schema}.leader (term, lease_until) values (0, '-infinity');", context.schema
                ),
            )
        ]
    name, over_s, alive = rows[0]
    if over_s is not None and over_s < 0:
        return [Finding("leader", Level.OK, f"{name}")]
    if not alive:
        return [Finding("leader", Level.NOTE, "none, for no worker is alive")]
    is_ = "is" if alive == 1 else "are"
    since = "yet" if over_s is None else f"for {duration(over_s)}"
    return [
        Finding(
            "leader",
            Level.PROBLEM if over_s is None or over_s > _NO_LEADER_S else Level.NOTE,
            f"none {since}, though {counted(alive, 'worker')} {is_} alive: no schedules, no retention",
            "Look for the reason in the workers' logs (jobq.leader), and whether all were told not to lead.",
        )
    ]


# Distinct queues by a loose scan of the lanes, and the head of each queue's first lanes.
_QUEUES: Final = """
with recursive q as (
    (select queue from {schema}.ready order by queue limit 1)
    union all
    select (select r.queue from {schema}.ready r where r.queue::text > q.queue::text order by r.queue limit 1)
    from q where q.queue is not null
)
select q.queue::text,
       exists (select from {schema}.worker w where w.ended_at is null and q.queue::text = any (w.queues)),
       exists (select from {schema}.pause p where p.scope = 'queue' and p.name = q.queue::text
               and (p.until is null or p.until > clock_timestamp())),
       (select max(date_part('epoch', clock_timestamp() - h.ready_at))::float8
        from generate_series(-9, 9) p(priority)
        cross join lateral (
            select ready_at from {schema}.ready r
            where r.queue::text = q.queue::text and r.priority::int2 = p.priority::int2
            order by xid, (job_id + 0) limit 1) h)
from q where q.queue is not null
"""


def queues(context: Context) -> Operation[list[Finding]]:
    """Find queues that wait: nobody serves them, or not fast enough."""
    findings: list[Finding] = []
    rows = yield Call(in_schema(_QUEUES, context.schema))
    for queue, is_served, is_paused, lag_s in rows:
        if is_paused:
            findings.append(
                Finding("queues", Level.NOTE, f"{queue!r} is paused", f"jobqctl resume --queue {queue}")
            )
        elif not is_served:
            findings.append(
                Finding(
                    "queues",
                    Level.WARNING,
                    f"{queue!r} has ready jobs, and no live worker serves it",
                    f"Start one: jobqctl worker MODULE:ATTRIBUTE --queue {queue}",
                )
            )
        elif (lag_s or 0.0) > _LAG_S:
            findings.append(
                Finding(
                    "queues",
                    Level.WARNING,
                    f"{queue!r}: its oldest ready job has waited for {duration(lag_s)}",
                    "Add slots or processes; see what its handlers wait for: jobqctl list --state running.",
                )
            )
    return findings or [Finding("queues", Level.OK, f"{len(rows)} with ready jobs, none left waiting")]


_UNKNOWN: Final = """
select j.kind::text, count(*)::int8 from (
    select job_id from {schema}.scheduled where reason = 'unknown kind' limit 10000) s
join lateral (select kind from {schema}.job where id = s.job_id limit 1) j on true
group by 1 order by 2 desc limit 5
"""


def unknown_kinds(context: Context) -> Operation[list[Finding]]:
    """Find jobs of kinds that no worker which met them knows."""
    rows = yield Call(in_schema(_UNKNOWN, context.schema))
    if not rows:
        return [Finding("kinds", Level.OK, "every kind is known to those that met it")]
    said = ", ".join(f"{count:,} of {kind!r}" for kind, count in rows)
    return [
        Finding(
            "kinds",
            Level.WARNING,
            f"put back by workers that do not know their kind: {said}",
            "Deploy the handler, give the queue to workers that have it, or rename it with aliases=.",
        )
    ]


_SCHEDULES: Final = """
select name, problem from {schema}.periodic where problem is not null order by name limit 20
"""


def schedules(context: Context) -> Operation[list[Finding]]:
    """Find schedules that cannot fire."""
    rows = yield Call(in_schema(_SCHEDULES, context.schema))
    if not rows:
        return [Finding("schedules", Level.OK, "none has a problem")]
    return [
        Finding("schedules", Level.WARNING, f"{name!r}: {problem}", "Correct its declaration.")
        for name, problem in rows
    ]
