"""The enqueue statements: what they store, whom they wake, and what a unique key means to them."""

from __future__ import annotations

import contextlib
import json
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from psycopg.types.json import Jsonb

import jobq
from jobq._clients import base as _client_base
from jobq._kinds.jobtype import prepare
from jobq._kinds.options import DEFAULTS
from jobq._operation import run
from jobq._statements.enqueue import enqueue_one, notify_channel
from jobq._statements.enqueue_unique import MAX_UNIQUE_ROUNDS
from tests.support.storage import SCHEMA, Storage, enqueue_rows, in_background, job_row, join_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._operation import Call, Rows

PAST: Final = datetime(2020, 1, 2, tzinfo=UTC)
LATEST: Final = datetime(9999, 12, 31, tzinfo=UTC)
FUTURE: Final = datetime(2099, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
QUEUES: Final = ("default", "mail")


def nested(levels: int) -> dict[str, Any]:
    """Return an object in an object in an object, so many of them."""
    document: dict[str, Any] = {}
    for _ in range(levels - 1):
        document = {"a": document}
    return document


# Options as the clients take them, and as the SQL function does.
SAME: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "nothing": ({}, {}),
    "lane": ({"queue": "日本 '\"$1%s", "priority": -9}, {"queue": "日本 '\"$1%s", "priority": -9}),
    "attempts": ({"max_attempts": 32_767}, {"max_attempts": 32_767}),
    "no-limit": ({"timeout": None}, {"timeout": None}),
    "limit": ({"timeout": timedelta(days=36_525)}, {"timeout": timedelta(days=36_525)}),
    "short-limit": ({"timeout": timedelta(microseconds=1)}, {"timeout": timedelta(microseconds=1)}),
    "later": ({"run_at": FUTURE}, {"run_at": FUTURE}),
    "expires": ({"expires_at": FUTURE}, {"expires_at": FUTURE}),
    "meta": ({"meta": {"a": [1, "ü", None]}}, {"meta": Jsonb({"a": [1, "ü", None]})}),
    "deepest-meta": ({"meta": nested(100)}, {"meta": Jsonb(nested(100))}),
    "empty-meta": ({"meta": {}}, {"meta": Jsonb({})}),
    "tags": ({"tags": ["a,b", '{"', "ü"]}, {"tags": ["a,b", '{"', "ü"]}),
    "no-tags": ({"tags": []}, {"tags": []}),
    "most-tags": ({"tags": ["x" * 100] * 20}, {"tags": ["x" * 100] * 20}),
    "unique": ({"unique": "e\u0301" * 300}, {"unique_key": "e\u0301" * 300}),
}
REFUSED: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "queue-empty": ({"queue": ""}, {"queue": ""}),
    "queue-long": ({"queue": "ü" * 65}, {"queue": "ü" * 65}),
    "queue-newline": ({"queue": "a\nb"}, {"queue": "a\nb"}),
    "queue-c1": ({"queue": "a\x85b"}, {"queue": "a\x85b"}),
    "priority": ({"priority": 10}, {"priority": 10}),
    "attempts": ({"max_attempts": 0}, {"max_attempts": 0}),
    "attempts-many": ({"max_attempts": 32_768}, {"max_attempts": 32_768}),
    "no-time": ({"timeout": timedelta(0)}, {"timeout": timedelta(0)}),
    "a-century": ({"timeout": timedelta(days=36_526)}, {"timeout": timedelta(days=36_526)}),
    "unique": ({"unique": ""}, {"unique_key": ""}),
    "meta": ({"meta": [1]}, {"meta": Jsonb([1])}),
    "meta-large": ({"meta": {"a": "x" * 16_384}}, {"meta": Jsonb({"a": "x" * 16_384})}),
    "tags": ({"tags": ["x"] * 21}, {"tags": ["x"] * 21}),
    "tag-long": ({"tags": ["ü" * 51]}, {"tags": ["ü" * 51]}),
    "tag-empty": ({"tags": [""]}, {"tags": [""]}),
    "expired": (
        {"run_at": FUTURE, "expires_at": FUTURE},
        {"run_at": FUTURE, "expires_at": FUTURE},
    ),
    "expired-now": ({"expires_at": PAST}, {"expires_at": PAST}),
    "meta-deep": ({"meta": nested(101)}, {"meta": Jsonb(nested(101))}),
    "run-at-late": ({"run_at": LATEST}, {"run_at": LATEST}),
}
STORED: Final = """
select j.kind, j.args::text, j.max_attempts, j.timeout_s, j.expires_at, j.unique_key, j.unique_name,
       j.meta::text, j.tags, v.state, v.queue, v.priority, v.attempt, v.failures, v.crashes, v.reason,
       case when v.state = 'scheduled' then v.run_at end
from jobq.job j join jobq.jobs v using (id) order by id
"""


def sql_enqueue(db: psycopg.Connection[Any], kind: str, args: object, options: dict[str, Any]) -> Any:
    given = "".join(f", {name} => %({name})s" for name in options)
    call = f"select * from jobq.enqueue(%(kind_)s, %(args_)s{given})".encode()
    return db.execute(call, {"kind_": kind, "args_": Jsonb(args), **options}).fetchone()


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn, plan_settings=False) as store:
        yield store


@pytest.mark.matrix
def test_each_way_to_make_a_job_stores_the_same(dsn: str, db: psycopg.Connection[Any]) -> None:
    args = {"n": 2**70, "s": "ü \" \\ ' % $1", "list": [1, None, True]}
    with jobq.Client(dsn) as client:
        for name, (options, sql_options) in SAME.items():
            client.enqueue("k", args, **options)
            (single,) = db.execute(STORED).fetchall()
            db.execute("truncate jobq.job, jobq.ready, jobq.scheduled, jobq.unique_key")
            client.enqueue_many([jobq.NewJob("k", args, **options), jobq.NewJob("other", {})])
            (bulk, _) = db.execute(STORED).fetchall()
            db.execute("truncate jobq.job, jobq.ready, jobq.scheduled, jobq.unique_key")
            sql_enqueue(db, "k", args, sql_options)
            (by_sql,) = db.execute(STORED).fetchall()
            db.execute("truncate jobq.job, jobq.ready, jobq.scheduled, jobq.unique_key")
            assert single == bulk, name
            assert single == by_sql, name


@pytest.mark.parametrize("name", REFUSED)
def test_the_sql_function_refuses_what_the_clients_refuse(
    dsn: str, db: psycopg.Connection[Any], name: str
) -> None:
    options, sql_options = REFUSED[name]
    with jobq.Client(dsn) as client:
        with pytest.raises((jobq.ConfigError, jobq.ArgumentsEncodeError)):
            client.enqueue("k", {}, **options)
        with pytest.raises((jobq.ConfigError, jobq.ArgumentsEncodeError), match="item 1"):
            client.enqueue_many([jobq.NewJob("k", {}), jobq.NewJob("k", {}, **options)])
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="jobq: "):
        sql_enqueue(db, "k", {}, sql_options)
    assert db.execute(STORED).fetchall() == []


@pytest.mark.matrix
@pytest.mark.parametrize("innermost", ["{}", "[]", "1", "[1, 2]", '{"a": "b"}'])
def test_the_sql_function_takes_as_deep_a_document_as_the_clients(
    dsn: str, db: psycopg.Connection[Any], innermost: str
) -> None:
    inner: Any = json.loads(innermost)
    too_deep = "args: nested deeper than 100 levels"
    with jobq.Client(dsn) as client:
        for levels in (98, 99, 100, 101, 102):
            document = inner
            for level in range(levels):
                document = {"a": document} if level % 2 else [document, 1]
            try:
                client.enqueue("k", document)
            except jobq.ArgumentsEncodeError:
                with pytest.raises(psycopg.errors.InvalidParameterValue, match=too_deep):
                    sql_enqueue(db, "k", document, {})
            else:
                assert sql_enqueue(db, "k", document, {})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=too_deep):
        db.execute("select jobq.enqueue('k', (repeat('[', 5000) || repeat(']', 5000))::jsonb)")


@pytest.mark.parametrize("kind", ["", "x" * 129, "a\x1fb"], ids=["empty", "long", "control"])
def test_a_kind_that_cannot_be_is_refused_everywhere(
    dsn: str, db: psycopg.Connection[Any], kind: str
) -> None:
    with jobq.Client(dsn) as client, pytest.raises(jobq.ConfigError, match="kind"):
        client.enqueue(kind, {})
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="jobq: kind"):
        sql_enqueue(db, kind, {}, {})


def test_the_sql_function_and_the_clients_honour_each_others_keys(
    dsn: str, db: psycopg.Connection[Any]
) -> None:
    with jobq.Client(dsn) as client:
        by_client = client.enqueue("k", {}, unique="clié")
        assert sql_enqueue(db, "k", {}, {"unique_key": "clie\u0301"}) == (by_client.id, False)
        (by_sql, inserted) = sql_enqueue(db, "k", {}, {"unique_key": "sql"})
        assert inserted
        assert client.enqueue("k", {}, unique="sql") == jobq.Enqueued(by_sql, inserted=False)
        client.cancel(by_sql)
        (again, inserted) = sql_enqueue(db, "k", {}, {"unique_key": "sql"})
        assert inserted
        assert client.enqueue("k", {}, unique="sql") == jobq.Enqueued(again, inserted=False)


def test_a_column_with_and_without_values_keeps_each_items_own(store: Storage) -> None:
    rows = [
        job_row(timeout_s=None if n % 2 else float(n + 1), meta=None if n % 3 else f'{{"n": {n}}}')
        for n in range(50)
    ]
    made = store.run(enqueue_rows(rows, notify=False))
    stored: dict[int, str] = dict(store.sql("select id, (timeout_s, meta::text)::text from jobq.job"))
    shown = {job.id: row.options for job, row in zip(made, rows, strict=True)}
    for job_id, options in shown.items():
        limit = "" if options.timeout_s is None else f"{options.timeout_s:g}"
        document = "" if options.meta is None else '"' + options.meta.replace('"', '""') + '"'
        assert stored[job_id] == f"({limit},{document})"


# -- whom they wake ------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(dsn: str, *queues: str) -> Iterator[psycopg.Connection[Any]]:
    """Wait as a worker's listener does: a shared lock on each queue says that somebody waits."""
    with psycopg.connect(dsn, autocommit=True) as listener:
        listener.execute(f'listen "{notify_channel(SCHEMA)}"'.encode())
        for queue in queues:
            listener.execute("select pg_advisory_lock_shared(hashtext(%s), hashtext(%s))", [SCHEMA, queue])
        yield listener


def heard(listener: psycopg.Connection[Any]) -> list[str]:
    """Return what has arrived by now: a notification comes before the answer to a later query."""
    listener.execute("select 1")
    return [notice.payload for notice in listener.notifies(timeout=0)]


@pytest.mark.matrix
def test_a_bulk_call_wakes_each_waiting_queue_once(dsn: str) -> None:
    with jobq.Client(dsn) as client, listening(dsn, *QUEUES) as listener:
        client.enqueue_many(jobq.NewJob("k", {"n": n}, queue=QUEUES[n % 2]) for n in range(2000))
        assert sorted(heard(listener)) == sorted(QUEUES)
        client.enqueue_many(jobq.NewJob("k", {"n": n}, unique=f"{n}") for n in range(2000))
        assert heard(listener) == ["default"]


@pytest.mark.matrix
def test_a_single_call_wakes_its_own_queue(dsn: str, db: psycopg.Connection[Any]) -> None:
    with jobq.Client(dsn) as client, listening(dsn, *QUEUES) as listener:
        client.enqueue("k", {}, queue="mail")
        assert heard(listener) == ["mail"]
        client.enqueue("k", {}, unique="u")
        assert heard(listener) == ["default"]
        sql_enqueue(db, "k", {}, {"queue": "mail"})
        assert heard(listener) == ["mail"]


def test_nobody_is_woken_for_nothing(dsn: str, db: psycopg.Connection[Any]) -> None:
    with jobq.Client(dsn) as client, listening(dsn, "default") as listener:
        client.enqueue("k", {}, queue="mail")  # nobody waits for it
        client.enqueue("k", {}, delay=timedelta(hours=1))  # the promoter will
        held = client.enqueue("k", {}, unique="u", delay=timedelta(hours=1))
        assert client.enqueue("k", {}, unique="u") == jobq.Enqueued(held.id, inserted=False)
        sql_enqueue(db, "k", {}, {"run_at": FUTURE})
        with psycopg.connect(dsn) as connection:
            client.enqueue("k", {}, tx=connection)
            connection.rollback()
        with jobq.Client(dsn, notify=False) as quiet:
            quiet.enqueue("k", {})
            quiet.enqueue_many([jobq.NewJob("k", {})] * 2)
        assert heard(listener) == []


def test_an_enqueue_leaves_no_lock_behind(dsn: str, db: psycopg.Connection[Any]) -> None:
    with jobq.Client(dsn) as client, psycopg.connect(dsn) as connection:
        client.enqueue("k", {}, tx=connection)
        client.enqueue_many([jobq.NewJob("k", {}, queue=queue) for queue in QUEUES], tx=connection)
        sql_enqueue(connection, "k", {}, {})
        assert db.execute("select count(*) from pg_locks where locktype = 'advisory'").fetchone() == (0,)


# -- unique keys -----------------------------------------------------------------------------------


def test_calls_with_the_same_keys_in_opposite_orders_do_not_deadlock(dsn: str) -> None:
    failures: list[BaseException] = []
    answers: list[list[jobq.Enqueued]] = []
    start = threading.Barrier(4)

    def insert(client: jobq.Client, keys: list[str]) -> None:
        try:
            start.wait()
            for turn in range(20):
                new = [jobq.NewJob("k", {}, unique=f"{turn}-{key}") for key in keys]
                answers.append(client.enqueue_many(new))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            failures.append(error)

    keys = [f"{n}" for n in range(100)]
    with jobq.Client(dsn) as client:
        orders = (keys, keys[::-1], keys, keys[::-1])
        threads = [threading.Thread(target=insert, args=(client, order)) for order in orders]
        for thread in threads:
            thread.start()
        join_all(threads, 60)
    assert failures == []
    assert sum(job.inserted for answer in answers for job in answer) == 20 * len(keys)


def test_a_key_whose_holder_rolls_back_goes_to_who_waited(dsn: str, store: Storage) -> None:
    with psycopg.connect(dsn) as other, jobq.Client(dsn) as client, Storage(dsn) as waiter:
        client.enqueue("k", {"n": 1}, unique="u", tx=other)
        row = prepare("k", {"n": 2}, {"unique": "u"}, DEFAULTS)
        operation = enqueue_one(SCHEMA, row, notify=False)
        with in_background(store, waiter.pid, lambda: waiter.run(operation)) as results:
            other.rollback()
        (made,) = results
        assert made.inserted
        assert client.get(made.id).args == {"n": 2}


def test_a_key_that_is_lost_again_and_again_is_given_up_with_a_conflict() -> None:
    asked = 0

    def lose(call: Call) -> Rows:
        nonlocal asked
        asked += 1
        return [] if "ordinality k(" in call.sql else [(1, False, None, 1, False, 0)]

    row = job_row(unique_key=bytes(16), unique_name="u")
    with pytest.raises(jobq.JobConflict, match="try the enqueue again"):
        run(enqueue_rows([row], notify=False), lose)
    assert asked == 2 * MAX_UNIQUE_ROUNDS


@pytest.mark.matrix
def test_a_bulk_call_reuses_freed_keys_and_names_the_holders_of_the_others(dsn: str) -> None:
    with jobq.Client(dsn) as client:
        first = client.enqueue_many(jobq.NewJob("k", {}, unique=f"{n}") for n in range(100))
        for job in first[:50]:
            client.cancel(job.id)
        second = client.enqueue_many(jobq.NewJob("k", {}, unique=f"{n}") for n in range(100))
        assert all(job.inserted for job in second[:50])
        assert second[50:] == [jobq.Enqueued(job.id, inserted=False) for job in first[50:]]


# -- bounds ----------------------------------------------------------------------------------------


def test_a_call_has_a_bound_in_jobs_and_in_characters(
    dsn: str, db: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with jobq.Client(dsn) as client:
        monkeypatch.setattr(_client_base, "MAX_CALL_JOBS", 10)
        monkeypatch.setattr(_client_base, "MAX_CALL_CHARACTERS", 1000)
        endless = iter(lambda: jobq.NewJob("k", {}), None)
        with pytest.raises(jobq.ConfigError, match="more than 10 jobs"):
            client.enqueue_many(endless)
        with pytest.raises(jobq.ConfigError, match="at most 1,000"):
            client.enqueue_many([jobq.NewJob("k", {"a": "x" * 200})] * 5)
        for beside in ({"meta": {"a": "x" * 200}}, {"tags": ["x" * 100] * 3}, {"unique": "x" * 200}):
            with pytest.raises(jobq.ConfigError, match="at most 1,000"):
                client.enqueue_many(jobq.NewJob("k", {}, **_another(beside, n)) for n in range(6))
        assert len(client.enqueue_many([jobq.NewJob("k", {"a": "x" * 90})] * 10)) == 10
    assert db.execute("select count(*) from jobq.job").fetchone() == (10,)


def _another(options: dict[str, Any], n: int) -> Any:
    return {"unique": f"{n}{options['unique']}"} if "unique" in options else options


def test_the_limit_of_arguments_is_the_clients(dsn: str) -> None:
    with jobq.Client(dsn, args_limit_bytes=100) as client:
        client.enqueue("k", "x" * 98)
        with pytest.raises(jobq.ArgumentsEncodeError, match="100"):
            client.enqueue("k", "x" * 99)
        with pytest.raises(jobq.ArgumentsEncodeError, match=r"item 1.*100"):
            client.enqueue_many([jobq.NewJob("k", ""), jobq.NewJob("k", "ü" * 50)])
