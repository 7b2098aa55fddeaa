"""The queue as it is after months: millions of jobs that have ended, and more to do than is ever done."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg
import pytest
from click.testing import CliRunner

import jobq
from jobq._marks import LaneMarks
from jobq._statements.claim import claim, refresh
from jobq._statements.duties import promote, renew, rescue
from jobq._statements.leader import Term, elect
from jobq._statements.outcomes import complete, settle
from jobq._statements.retention import Rule, Walk, remove_finished
from jobq.cli.app import app
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import BOOM, SCHEMA, Storage, hold, settlement
from tests.test_plans import HOT, explain, whole_scans

if TYPE_CHECKING:
    from jobq._operation import Call

LONG: Final = os.environ.get("JOBQ_LONG") == "1"

# -- S74: a long history -------------------------------------------------------------------------------


class History(NamedTuple):
    """How many jobs stand beside those that are worked on."""

    finished: int
    scheduled: int
    retryable: int


# Of both sizes the indexes have about the same depth: a level more costs each look-up a hit, and should.
BEFORE: Final = History(20_000, 2_000, 1_000)
AFTER: Final = History(7_000_000, 1_000_000, 100_000) if LONG else History(200_000, 30_000, 5_000)
MAY_GROW: Final = 1.6 if LONG else 1.3  # the indexes of millions are a level deeper
CHUNK: Final = 500_000

BATCH: Final = 100
LIVING, DEAD = 1, 2
DAY_S: Final = 86_400.0

# Each ended a second after the one before it, so that some have reached the age at which they are removed.
MAKE_FINISHED: Final = """
with made as materialized (
    select nextval('jobq.job_id_seq') as id, n from generate_series(%(begin)s::int, %(end)s::int) n
), j as (
    insert into jobq.job (id, kind, args, max_attempts) select id, 'noop', '{"to": "somebody"}', 25 from made)
insert into jobq.finished (job_id, state, finished_at, queue, priority, worker_id, attempt, failures, crashes)
select id, 'completed', now() - n * interval '1 second', 'default', 0, 1, 1, 0, 0 from made
"""
MAKE_SCHEDULED: Final = """
with made as materialized (
    select nextval('jobq.job_id_seq') as id, n from generate_series(%(begin)s::int, %(end)s::int) n
), j as (
    insert into jobq.job (id, kind, args, max_attempts) select id, 'noop', '{"to": "somebody"}', 25 from made)
insert into jobq.scheduled (job_id, run_at, reason, queue, priority, attempt, failures)
select id, now() + interval '1 hour' + n * interval '1 second', %(reason)s, 'default', 0,
       (%(reason)s = 'retry')::int, (%(reason)s = 'retry')::int from made
"""
COME_DUE: Final = """
update jobq.scheduled set run_at = now() - interval '1 second' where job_id in (
    select job_id from jobq.scheduled where reason = 'scheduled' order by run_at limit %s)
"""


def make_history(dsn: str, rows: History) -> None:
    for count, sql, reason in (
        (rows.finished, MAKE_FINISHED, ""),
        (rows.scheduled, MAKE_SCHEDULED, "scheduled"),
        (rows.retryable, MAKE_SCHEDULED, "retry"),
    ):
        with psycopg.connect(dsn, autocommit=True) as connection:
            for begin in range(1, count + 1, CHUNK):
                values = {"begin": begin, "end": min(begin + CHUNK - 1, count), "reason": reason}
                connection.execute(sql.encode(), values)


class Course:
    """What the statements of worker, rescuer and leader read, for the same work on the same few jobs."""

    def __init__(self, store: Storage, term: Term) -> None:
        self._store = store
        self._term = term
        self.hits: dict[str, int] = {}
        self.whole: dict[str, list[str]] = {}

    def look(self, name: str, call: Call) -> None:
        """Run a statement; note what it read, and what of it from end to end."""
        plan = explain(self._store, call, "analyze, buffers, timing off,")
        self.hits[name] = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        self.whole[name] = whole_scans(plan)

    def run(self) -> Course:
        """Work on a few jobs in every way."""
        store, marks = self._store, LaneMarks()
        store.sql("vacuum jobq.ready")  # both are empty: dead rows of the course before are no history
        store.sql("vacuum jobq.running")
        store.enqueue(2 * BATCH)
        self.look("refresh", hold(refresh(SCHEMA, "default", marks.ranges(), 0.0)))
        self.look("claim", hold(claim(SCHEMA, "default", marks.ranges(), BATCH, LIVING)))
        fences = [
            (int(i), int(a)) for i, a in store.sql("select job_id, attempt from jobq.running order by 1")
        ]
        assert len(fences) == BATCH
        self.look("complete", hold(complete(SCHEMA, LIVING, fences, {})))
        failures = [
            settlement(job, "scheduled", "retry", delay_s=3600.0, failure=BOOM)
            for job in store.claim(LIVING, BATCH)
        ]
        self.look("retry", hold(settle(SCHEMA, LIVING, "w", failures, notify=True)))
        store.sql(COME_DUE, BATCH)
        self.look("promote", hold(promote(SCHEMA, None, BATCH, notify=True)))
        store.worker(DEAD)
        assert len(store.claim(DEAD, BATCH)) == BATCH
        store.end_lease(DEAD)
        self.look("rescue", hold(rescue(SCHEMA, 3, BATCH)))
        assert store.count("running") == 0
        store.sql("delete from jobq.worker where id = %s", DEAD)
        walk = Walk(Rule(DAY_S / 24, ("completed",), (), ()))
        self.look("clean", hold(remove_finished(SCHEMA, self._term, walk, BATCH)))
        self.look("renew", hold(renew(SCHEMA, LIVING, 60.0)))
        store.sql("delete from jobq.ready")
        return self


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["of an empty moment", "fresh"])
def test_s74_beside_a_long_history_every_statement_reads_by_index_and_no_more_than_before(
    dsn: str, statistics: str
) -> None:
    with Storage(dsn) as store:
        store.worker(LIVING)
        store.sql("analyze")
        for table in HOT:  # nobody else takes statistics meanwhile
            store.sql(f"alter table jobq.{table} set (autovacuum_enabled = off)")
        term = store.run(elect(SCHEMA, LIVING, "w", 3600.0))
        assert term is not None
        courses: list[Course] = []
        for rows in (BEFORE, AFTER):
            make_history(dsn, rows)
            if statistics == "fresh":
                store.sql("analyze")
            Course(store, term).run()  # extends tables, warms catalogues
            courses.append(Course(store, term).run())
    before, after = courses
    # what dead workers held has no index of its own, and no history: see the first migration
    rescued = after.whole.pop("rescue")
    assert len(rescued) == 1
    assert rescued[0].endswith(" on running")
    assert not any(after.whole.values()), after.whole
    for name, read in before.hits.items():
        assert after.hits[name] <= MAY_GROW * read + 10, f"{name}: {read} → {after.hits[name]} blocks"


# -- S78: urgent jobs without end ----------------------------------------------------------------------

SLOTS: Final = 2
BACKLOG: Final = 30  # urgent jobs that are ready at any moment
SEEN: Final = 300  # urgent jobs that run while the others wait
WAITED_S: Final = 1_200


async def test_s78_urgent_jobs_without_end_starve_the_others_whose_age_is_shown(dsn: str) -> None:
    """Priority is strict, as docs/guarantees.md says; what that costs can be seen."""
    jobs = jobq.Jobs()
    urgent_runs, started = itertools.count(1), list[int]()
    more_come = True
    seen = 0

    @jobs.handler("urgent", priority=5)
    async def urgent(job: jobq.Job, args: dict[str, Any]) -> None:
        nonlocal seen
        seen = next(urgent_runs)
        if more_come:
            await bench.client.enqueue(urgent, {})

    @jobs.handler("usual")
    async def usual(job: jobq.Job, args: dict[str, Any]) -> None:
        started.append(job.id)

    with jobq.Client(dsn) as client:
        others = [made.id for made in client.enqueue_many([jobq.NewJob(usual, {})] * 10)]
        client.enqueue_many([jobq.NewJob(urgent, {})] * BACKLOG)
    with Storage(dsn) as store:
        store.sql("update jobq.ready set ready_at = now() - %s * interval '1 s' where priority = 0", WAITED_S)
    async with working(dsn, jobs, queues={"default": SLOTS}, prefetch=0) as bench:
        await eventually_async(lambda: seen >= SEEN, 60.0, what="many urgent jobs run")
        assert started == []
        [shown] = json.loads(jobqctl(dsn, "stats", "--json"))
        assert shown["lag_s"] >= WAITED_S
        assert "its oldest ready job has waited for 20 min" in jobqctl(dsn, "doctor")
        assert started == []
        more_come = False
        for job_id in others:
            assert (await bench.ended(job_id, 30.0))["attempt"] == 1
    assert sorted(started) == others


def jobqctl(dsn: str, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, env={"DATABASE_URL": dsn, "COLUMNS": "200"})
    return result.stdout
