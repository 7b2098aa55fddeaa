"""Plans of the hot statements on large tables, whatever the statistics say.

Statistics are taken when all is well, or at the worst moment: the tables are empty but for dead rows
that a pinned horizon keeps, so that the planner takes thousands of rows for one.
"""

from __future__ import annotations

import contextlib
import functools
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg import sql

import jobq
from jobq._kinds.unique import Unique
from jobq._marks import LaneMarks
from jobq._operation import Call, Operation, in_schema
from jobq._postgres import text_params
from jobq._statements import keys
from jobq._statements.bulk import APPLIES_TO, BulkRun
from jobq._statements.bulk_sql import Settings, When
from jobq._statements.cancel import cancel_job
from jobq._statements.claim import claim, refresh, restamp
from jobq._statements.control import apply_requests, poll
from jobq._statements.duties import discarded, promote, renew, rescue
from jobq._statements.enqueue import enqueue_one
from jobq._statements.enqueue_unique import FIND_FASTER, GIVE_UP
from jobq._statements.filter import JobFilter
from jobq._statements.keys import FIRST_KEY, look_at_keys
from jobq._statements.leader import Term
from jobq._statements.operate import get_job, job_errors, retry_job
from jobq._statements.operator_log import Entry
from jobq._statements.outcomes import Settlement, complete, find_finished, settle
from jobq._statements.pauses import WAKE
from jobq._statements.retention import Rule, Walk, remove_finished
from tests.support.polling import eventually
from tests.support.storage import BOOM, SCHEMA, Storage, enqueue_rows, hold, job_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._statements.bulk import Action
    from jobq._types import JobState
    from jobq.embedded import Databases, EmbeddedPostgres

ROWS: Final = 50_000
BATCH: Final = 100
WORKER: Final = 1
HOT: Final = ("job", "ready", "scheduled", "running", "finished", "attempt_error", "unique_key")
KEYS: Final = [n.to_bytes(16, "big") for n in range(1, BATCH + 1)]
REPLACING: Final = Unique("k", on_conflict="replace")
TERM: Final = Term(WORKER, 1)
COMPLETED: Final = Rule(86_400.0, ("completed",), (), ())
FENCES: Final = [(3 * ROWS + n, 1) for n in range(1, BATCH + 1)]

# Ids: ready, scheduled, finished, running, each with its own 50,000; the payloads are 200,000.
FILL: Final = """
insert into jobq.job (id, kind, args, max_attempts, unique_key)
    select n, 'noop', '{"to": "somebody"}', 25,
        case when n <= %(rows)s then decode(lpad(to_hex(n), 32, '0'), 'hex') end
    from generate_series(1, 4 * %(rows)s) n;
insert into jobq.ready (job_id, queue, priority) select n, 'default', 0 from generate_series(1, %(rows)s) n;
insert into jobq.scheduled (job_id, run_at, reason, queue, priority)
    select %(rows)s + n, now() + (n - %(rows)s / 2) * interval '1 second', 'scheduled', 'default', 0
    from generate_series(1, %(rows)s) n;
insert into jobq.finished (job_id, state, queue, priority, worker_id, attempt, failures, crashes)
    select 2 * %(rows)s + n, 'completed', 'default', 0, 1, 1, 0, 0 from generate_series(1, %(rows)s) n;
insert into jobq.running (job_id, worker_id, queue, priority, attempt, failures, crashes)
    select 3 * %(rows)s + n, 1, 'default', 0, 1, 0, 0 from generate_series(1, %(rows)s) n;
insert into jobq.attempt_error (job_id, attempt, outcome, type, message, traceback, worker)
    select 3 * %(rows)s + n / 2, 1 + n %% 2, 'failed', 'E', 'm', 't', 'w' from generate_series(2, %(rows)s) n;
insert into jobq.unique_key (key, generation, job_id)
    select decode(lpad(to_hex(n), 32, '0'), 'hex'), 1, n from generate_series(1, %(rows)s) n;
"""


def fill(dsn: str, rows: int) -> None:
    with psycopg.ClientCursor(psycopg.connect(dsn, autocommit=True)) as cursor:
        cursor.execute(FILL, {"rows": rows})
        cursor.connection.close()


def empty_and_analyze(dsn: str) -> None:
    """Let ANALYZE see no live row in tables that are full of dead ones."""
    tables = ", ".join(f"jobq.{table}" for table in HOT)
    with psycopg.connect(dsn, autocommit=True) as reader, psycopg.connect(dsn, autocommit=True) as writer:
        reader.execute("begin isolation level repeatable read; select 1 from jobq.ready limit 1")
        for table in HOT:
            writer.execute(f"delete from jobq.{table}".encode())
        writer.execute(f"analyze {tables}".encode())
        statistics = writer.execute(
            "select relpages, reltuples from pg_class where oid = 'jobq.ready'::regclass"
        )
        row = statistics.fetchone()
    assert row is not None
    assert row[0] > 0
    assert row[1] == 0


@pytest.fixture(scope="module", params=["fresh statistics", "statistics of an empty moment"])
def large(
    request: pytest.FixtureRequest, server: EmbeddedPostgres, databases: Databases, template: str
) -> Iterator[str]:
    """The address of a database with large tables, whose statistics are as the parameter says."""
    name = databases.create(template=template)
    dsn = server.dsn(name)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for table in HOT:  # nobody else may take statistics meanwhile
            connection.execute(f"alter table jobq.{table} set (autovacuum_enabled = off)".encode())
        if request.param == "fresh statistics":
            fill(dsn, ROWS)
            connection.execute("analyze")
        else:
            fill(dsn, 2000)
            empty_and_analyze(dsn)
            fill(dsn, ROWS)
        connection.execute(
            "insert into jobq.worker (id, name, host, pid, version, queues, kinds, lease_until)"
            " values (1, 'w', 'h', 1, '0', '{}', '{}', now() + interval '1 day')"
        )
        connection.execute("select setval('jobq.job_id_seq', 10000000)")
    yield dsn
    databases.drop(name)


# -- reading plans ---------------------------------------------------------------------------------


def explain(store: Storage, call: Call, options: str = "") -> dict[str, Any]:
    """Return the plan of a statement as it would be run, prepared; with ``analyze`` it is run."""
    store.sql("prepare planned as " + call.sql)
    try:
        values = ", ".join(sql.Literal(_text(v)).as_string() for v in text_params(call.params))
        answer = store.value(f"explain ({options} format json) execute planned({values})")
    finally:
        store.sql("deallocate planned")
    plan: dict[str, Any] = (json.loads(answer) if isinstance(answer, str) else answer)[0]["Plan"]
    return plan


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def whole_scans(plan: dict[str, Any]) -> list[str]:
    """Return where a plan reads a hot table from end to end, through an index or not."""
    found = []
    for node in nodes(plan):
        kind, table = node["Node Type"], node.get("Relation Name")
        if table not in HOT:
            continue
        is_bounded = "Index Cond" in node or "TID Cond" in node
        if kind == "Seq Scan" or (kind.startswith(("Index", "Bitmap Index")) and not is_bounded):
            found.append(f"{kind} on {table}")
    return found


# -- the statements --------------------------------------------------------------------------------


def marks() -> LaneMarks:
    """Marks in use: lanes that begin somewhere, and an ended straggler."""
    known = LaneMarks()
    known.lanes = dict.fromkeys(known.lanes, (900, 1))
    known.ended = ((0, 800), (5, 800))
    return known


def settlements() -> list[Settlement]:
    ways: list[dict[str, Any]] = [
        {"to": "scheduled", "reason": "retry", "delay_s": 1.0, "failed": True, "failure": BOOM},
        {"to": "ready"},
        {"to": "discarded", "reason": "r", "failed": True, "failure": BOOM},
    ]
    return [Settlement(*fence, **ways[i % 3]) for i, fence in enumerate(FENCES)]


def in_bulk(action: Action, state: JobState) -> Operation[Any]:
    """One batch, somewhere in the middle of its walk; completed jobs are walked in the order of their end."""
    when, ids = When(None, 60.0), range(1, 4 * ROWS, ROWS // 100)
    chosen = (
        JobFilter(states=[state], ids=ids) if state.is_terminal else JobFilter(states=[state], kinds=["noop"])
    )
    run = BulkRun(SCHEMA, action, chosen, Entry(action, {}), Settings(when=when, priority=1), BATCH)
    step = run.step()
    assert step is not None
    return step


WORKERS: Final[dict[str, Callable[[], Operation[Any]]]] = {
    "claim": lambda: claim(SCHEMA, "default", marks().ranges(), BATCH, WORKER),
    "first claim": lambda: claim(SCHEMA, "default", LaneMarks().ranges(), BATCH, WORKER),
    "refresh": lambda: refresh(SCHEMA, "default", marks().ranges(), 0.0),
    "complete": lambda: complete(SCHEMA, WORKER, FENCES, {}),
    "settle": lambda: settle(SCHEMA, WORKER, "w", settlements(), notify=True),
    "promote": lambda: promote(SCHEMA, None, BATCH, notify=True),
    "find finished": lambda: find_finished(SCHEMA, WORKER, [(2 * ROWS + n, 1) for n in range(1, BATCH)]),
    "restamp": lambda: restamp(SCHEMA, "default"),
    "renew": lambda: renew(SCHEMA, WORKER, 30.0),
    "control poll": lambda: poll(SCHEMA, [fence[0] for fence in FENCES]),
    "apply requests": lambda: apply_requests(SCHEMA),
    "discarded": lambda: discarded(SCHEMA, [2 * ROWS + n for n in range(1, BATCH)]),
    "remove finished": lambda: remove_finished(SCHEMA, TERM, Walk(COMPLETED, datetime.now(UTC))),
    "first remove finished": lambda: remove_finished(SCHEMA, TERM, Walk(COMPLETED)),
    "look at keys": lambda: look_at_keys(SCHEMA, FIRST_KEY),
    "lock keys": lambda: _one(Call(in_schema(keys.LOCK, SCHEMA), (KEYS, [1] * BATCH))),
    "forget keys": lambda: _one(Call(in_schema(keys.FORGET, SCHEMA), (KEYS, [1] * BATCH))),
}
CLIENTS: Final[dict[str, Callable[[], Operation[Any]]]] = {
    "enqueue": lambda: enqueue_one(SCHEMA, job_row(), notify=True),
    "enqueue many": lambda: enqueue_rows([job_row(priority=n % 3) for n in range(9)], notify=True),
    "unique enqueue": lambda: enqueue_rows([job_row(unique_key=key) for key in KEYS], notify=True),
    "one unique enqueue": lambda: enqueue_rows([job_row(unique_key=KEYS[0])], notify=True),
    "replacing enqueue": lambda: enqueue_rows(
        [job_row(unique_key=key, unique=REPLACING) for key in KEYS], notify=True
    ),
    "one replacing enqueue": lambda: enqueue_rows(
        [job_row(unique_key=KEYS[0], unique=REPLACING)], notify=True
    ),
    "find faster": lambda: _one(Call(in_schema(FIND_FASTER, SCHEMA), (KEYS, [2] * BATCH))),
    "give up": lambda: _one(Call(in_schema(GIVE_UP, SCHEMA), (KEYS, [1] * BATCH, [1] * BATCH))),
    "cancel": lambda: cancel_job(SCHEMA, ROWS, "no"),
    "retry": lambda: retry_job(SCHEMA, 3 * ROWS, notify=True),
    "wake": lambda: _one(Call(in_schema(WAKE, SCHEMA), ("noop", 60.0, BATCH))),
    **{
        f"{action} in bulk, {state}": functools.partial(in_bulk, action, state)
        for action, states in APPLIES_TO.items()
        for state in states
    },
    "get": lambda: get_job(SCHEMA, ROWS),
    "errors": lambda: job_errors(SCHEMA, 3 * ROWS + BATCH),
}


def _one(call: Call) -> Operation[Any]:
    return (yield call)


@pytest.mark.parametrize("statement", WORKERS)
def test_a_workers_statement_reads_no_hot_table_from_end_to_end(large: str, statement: str) -> None:
    with Storage(large) as store:
        plan = explain(store, hold(WORKERS[statement]()))
    assert whole_scans(plan) == []


@pytest.mark.parametrize("statement", WORKERS)
def test_it_does_not_when_its_plan_was_made_before_there_was_a_single_row(dsn: str, statement: str) -> None:
    """A worker keeps its plans; it may have made them in a new database, just analyzed."""
    with Storage(dsn) as store:
        store.sql("analyze")
        plan = explain(store, hold(WORKERS[statement]()))
    assert whole_scans(plan) == []


def test_a_rescue_reads_the_running_jobs_once_and_nothing_else_from_end_to_end(large: str) -> None:
    with Storage(large) as store:
        plan = explain(store, hold(rescue(SCHEMA, 3, BATCH)))
    assert len(whole_scans(plan)) == 1
    assert whole_scans(plan)[0].endswith(" on running")


@pytest.mark.parametrize("statement", CLIENTS)
@pytest.mark.parametrize("cache_mode", ["force_generic_plan", "force_custom_plan"])
def test_a_clients_statement_does_not_either_on_a_connection_without_our_settings(
    large: str, statement: str, cache_mode: str
) -> None:
    with Storage(large, plan_settings=False) as store:
        store.sql(f"set plan_cache_mode = {cache_mode}")
        plan = explain(store, hold(CLIENTS[statement]()))
    assert whole_scans(plan) == []


FEWER: Final = 20_000


def rows_read_whole(dsn: str) -> int:
    """Return how many rows of our tables were read by scans of whole tables so far."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "select coalesce(sum(seq_tup_read), 0) from pg_stat_user_tables where schemaname = 'jobq'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def reading(client: jobq.Client, job_id: int) -> None:
    """Use each of the rare verbs on a job that has ended, or is not there."""
    for verb in (client.get, client.errors, client.cancel, client.retry, client.cancel):
        with contextlib.suppress(jobq.JobNotFound, jobq.JobConflict):
            verb(job_id)


@pytest.mark.matrix
def test_a_clients_plans_from_when_there_was_not_a_single_row_read_no_table_whole_later(dsn: str) -> None:
    with jobq.Client(dsn, pool_max_size=1) as client:
        for _ in range(8):  # from the sixth time on PostgreSQL may keep a plan
            reading(client, 3 * FEWER)
        before = rows_read_whole(dsn)
        fill(dsn, FEWER)
        reading(client, 3 * FEWER)
        assert client.get(3 * FEWER).state is jobq.JobState.CANCELLED
    with psycopg.connect(dsn, autocommit=True) as connection:
        # A session's counts arrive when it ends, and on 14 a little later.
        eventually(
            lambda: connection.execute(
                "select true from pg_stat_user_tables"
                " where schemaname = 'jobq' and relname = 'finished' and n_tup_del >= 1"
            ).fetchone(),
            10.0,
        )
    assert rows_read_whole(dsn) - before < FEWER


# -- what a claim reads ----------------------------------------------------------------------------

ROUNDS: Final = 60
PER_ROUND: Final = 500


def hits_of_each_round(store: Storage, *, uses_marks: bool) -> list[int]:
    """Return how many buffers the claims of each round read, while nothing that is dead goes away."""
    known, hits = LaneMarks(), []
    with Storage(store.dsn) as reader:
        reader.sql("begin isolation level repeatable read")
        reader.sql("select 1 from jobq.ready limit 1")
        for round_ in range(ROUNDS):
            left = store.enqueue(PER_ROUND)
            hits.append(0)
            while left:
                store.refresh(known, float(round_))
                ranges = (known if uses_marks else LaneMarks()).ranges()
                call = hold(claim(SCHEMA, "default", ranges, BATCH, WORKER))
                plan = explain(store, call, "analyze, buffers, timing off,")
                hits[-1] += plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
                mine, left = left[:BATCH], left[BATCH:]
                done = store.run(complete(SCHEMA, WORKER, [(job_id, 1) for job_id in mine], {}))
                assert done == set(mine), "it claimed others"
    return hits


@pytest.mark.parametrize("uses_marks", [True, False], ids=["with marks", "without"])
def test_with_marks_a_claim_under_a_pinned_horizon_reads_no_more_after_many_others(
    dsn: str, *, uses_marks: bool
) -> None:
    with Storage(dsn) as store:
        store.worker(WORKER)
        store.sql("analyze")
        hits = hits_of_each_round(store, uses_marks=uses_marks)
    first, last = sum(hits[2:7]), sum(hits[-5:])
    if uses_marks:
        assert last <= 1.1 * first, hits
    else:
        assert last > 1.3 * first, f"there was nothing for the marks to save: {hits}"
