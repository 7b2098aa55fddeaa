"""Claim: take ready jobs, in order, and only as many as asked.

One statement locks the head of the lanes by ctid with SKIP LOCKED, deletes those rows from
`ready`, inserts them into `running` with the next attempt number, and brings their payload. The
LIMIT stands inside a lateral subquery under an outer LIMIT, so that no plan can lock more rows
than it returns (in an IN-subquery it can: all 50 were claimed where one was asked for).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobq._marks import PRIORITIES, Snapshot
from jobq._operation import Call, Operation, in_schema
from jobq._statements.duties import SERVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._marks import Position, Range

# The worker's own row is part of the claim: one whose lease was declared over gets nothing, even
# if it does not know yet. `left join`: a job whose payload is missing must end, not wait for ever;
# and lateral, with a limit: joined directly, `job` is read whole when ANALYZE saw it empty. Sorted before the
# payload comes: there is less to move (a twentieth of the claim), and nothing left for the outer sort.
# $10: the server that registered the worker. A standby that took its part over may lack its last claims and
# give their ids out again; claimed there by the same worker, a job would bear the fence of what still runs.
# $8, $9: of the jobs that a worker has died with, those with fewer crashes than $8, any number of them;
# or instead one that has as many or more, where it stands first. What is left was never claimed.
CLAIM: Final = f"""
with s as materialized (
    select l.tid, l.crashes
    from unnest($1::int2[], $2::text[]::xid8[], $3::int8[], $4::text[]::xid8[])
         o(priority, from_xid, from_id, to_xid)
    cross join lateral (
        select ctid as tid, crashes from {{schema}}.ready
        where queue::text = $5::text and priority::int2 = o.priority
          and (xid, (job_id + 0)) >= (o.from_xid, o.from_id) and xid <= o.to_xid
          and (crashes < $8::int4 or $9::bool)
        order by xid, (job_id + 0)
        limit $6::int4 for update skip locked
    ) l
    where exists (select from {{schema}}.worker where id = $7::int8 and ended_at is null)
      and coalesce($10::int8 = {SERVER}, true)
    limit $6::int4
), suspect as materialized (
    select tid, crashes from s where crashes > 0 limit 1
), x as (
    delete from {{schema}}.ready where ctid = any (array(
        select tid from s where crashes = 0 or tid = (select tid from suspect)
                             or (crashes < $8::int4 and (select crashes from suspect) < $8::int4)))
    returning *
), i as (
    insert into {{schema}}.running (job_id, worker_id, queue, priority, attempt, failures, crashes)
    select job_id, $7::int8, queue, priority, least(attempt, 2147483646) + 1, failures, crashes from x
)
select x.job_id, j.kind, x.queue, x.priority, least(x.attempt, 2147483646) + 1, x.failures, x.crashes,
       j.max_attempts, j.timeout_s, date_part('epoch', j.created_at), j.meta::text, j.tags,
       j.args::text, coalesce(j.expires_at <= statement_timestamp(), false)
from (select * from x order by priority desc, xid, job_id) x
left join lateral (select * from {{schema}}.job where id = x.job_id limit 1) j on true
order by x.priority desc, x.xid, x.job_id
"""

REFRESH: Final = f"""
select pg_snapshot_xmax(s)::text, array(select t::text from pg_snapshot_xip(s) t),
       array(select (
           select xid::text || ':' || job_id::text from {{schema}}.ready
           where queue::text = $5::text and priority::int2 = o.priority
             and (xid, (job_id + 0)) >= (o.from_xid, o.from_id) and xid <= o.to_xid
           order by xid, (job_id + 0) limit 1)
           from unnest($1::int2[], $2::text[]::xid8[], $3::int8[], $4::text[]::xid8[])
                with ordinality o(priority, from_xid, from_id, to_xid, ord)
           order by o.ord),
       {SERVER}
from pg_current_snapshot() s
"""

# After a dump was restored into a new cluster, or a logical replica took over, rows carry xids that
# this cluster has yet to reach. They are stamped anew: in their old order, as if just enqueued.
RESTAMP: Final = """
with s as materialized (
    select l.tid from pg_catalog.unnest($2::int2[]) o(priority)
    cross join lateral (
        select ctid as tid from {schema}.ready
        where queue::text = $1::text and priority::int2 = o.priority
          and xid >= pg_snapshot_xmax(pg_current_snapshot())
        order by xid limit 10000 for update skip locked
    ) l
), u as (
    update {schema}.ready set xid = pg_current_xact_id() where ctid = any (array(select tid from s))
    returning 1
)
select count(*) from u
"""


ANY_CRASHES: Final = 2**31 - 1


class Claimed(NamedTuple):
    """One row of a claim, in the statement's column order.

    Attributes:
        kind, max_attempts, created: ``None`` when the job's payload is missing.
        created: seconds since the epoch.
        meta, args: JSON documents as text.
        expired: whether its time to start had passed when it was claimed.
    """

    job_id: int
    kind: str | None
    queue: str
    priority: int
    attempt: int
    failures: int
    crashes: int
    max_attempts: int | None
    timeout_s: float | None
    created: float | None
    meta: str | None
    tags: list[str] | None
    args: str | None
    expired: bool


def claim(
    schema: str,
    queue: str,
    ranges: Sequence[Range],
    limit: int,
    worker_id: int,
    *,
    server: int | None = None,
    below: int = ANY_CRASHES,
    one_above: bool = True,
) -> Operation[list[Claimed]]:
    """Claim up to ``limit`` jobs of one queue for a worker, best lane first.

    With ``server``, as `register` returned it, another server gives nothing.

    Of the jobs that a worker has died with, those with fewer than ``below`` crashes (1 or more) are taken
    as any other. With ``one_above``, a single one with as many or more may come instead of those, where
    it stands before them.
    """
    parameters = [*_arrays(ranges), queue, limit, worker_id, below, one_above, server]
    rows = yield Call(in_schema(CLAIM, schema), parameters)
    return list(map(Claimed._make, rows))


def refresh(schema: str, queue: str, ranges: Sequence[Range], taken_s: float) -> Operation[Snapshot]:
    """Read what the marks need to move: one snapshot and the first row of each range."""
    rows = yield Call(in_schema(REFRESH, schema), [*_arrays(ranges), queue])
    xmax, in_progress, first, server = rows[0]
    return Snapshot(taken_s, int(xmax), frozenset(map(int, in_progress)), list(map(_position, first)), server)


def _arrays(ranges: Sequence[Range]) -> list[Any]:
    priorities, from_xids, from_ids, to_xids = zip(*ranges, strict=True)
    return [list(priorities), list(map(str, from_xids)), list(from_ids), list(map(str, to_xids))]


def _position(text: str | None) -> Position | None:
    if text is None:
        return None
    xid, job_id = text.split(":")
    return int(xid), int(job_id)


def restamp(schema: str, queue: str) -> Operation[int]:
    """Give rows whose xid is from another cluster's future one of today's. Returns how many."""
    total = 0
    while True:
        rows = yield Call(in_schema(RESTAMP, schema), (queue, list(PRIORITIES)))
        if rows[0][0] == 0:
            return total
        total += rows[0][0]
