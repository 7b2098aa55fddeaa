"""Whatever is handed to the clients: an error of jobq's that says what is wrong, or an exact round trip."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

import jobq
from jobq._statements.bulk import APPLIES_TO
from tests.support.odd import (
    OPTIONS,
    REFUSED,
    assert_told,
    documents,
    fuzz,
    holding,
    kinds,
    moments,
    odd,
    one_of,
    options,
    plain,
    some_of,
    texts,
    waits,
)
from tests.support.odd_objects import UNSTORABLE, OddError, OddList

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.fuzz


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[jobq.Client]:
    with jobq.Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def caller(address: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(address) as connection:
        yield connection


@contextlib.contextmanager
def transaction(caller: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """Begin a transaction of the caller's; fail when it is not as whole at the end; roll it back."""
    caller.execute("select 1")
    try:
        yield caller
        assert caller.info.transaction_status == TransactionStatus.INTRANS
    finally:
        caller.rollback()


# -- enqueues --------------------------------------------------------------------------------------


def assert_stored(tx: psycopg.Connection, job_id: int, kind: object, given: dict[str, Any]) -> None:
    """Check a job against the options that were taken."""
    query = """select kind, queue, priority, max_attempts, tags, meta::text, run_at, expires_at
        from jobq.jobs where id = %s"""
    row = tx.execute(query, [job_id]).fetchone()
    assert row is not None
    assert row[0] == kind
    assert row[1] == given.get("queue", "default")
    assert row[2] == given.get("priority", 0)
    assert row[3] == given.get("max_attempts", 25)
    assert (row[4] or []) == list(given.get("tags", []))
    assert (row[5] is not None) == bool(given.get("meta"))
    if given.get("run_at") is not None and given["run_at"] > datetime.now(UTC):
        assert row[6] == given["run_at"]
    assert row[7] == given.get("expires_at")


@fuzz(75)
@given(kind=kinds, args=documents | odd | holding, options=options, own=st.booleans())
def test_an_enqueue_of_anything_works_or_is_refused_before_anything_is_sent(
    client: jobq.Client,
    caller: psycopg.Connection,
    kind: Any,
    args: Any,
    options: dict[str, Any],
    *,
    own: bool,
) -> None:
    with transaction(caller) as tx:
        try:
            made = client.enqueue(kind, args, tx=None if own else tx, **options)
        except REFUSED as refused:
            assert_told(refused)
        else:
            assert_stored(tx, made.id, kind, options)


@fuzz(50)
@given(
    jobs=st.lists(st.builds(jobq.NewJob, texts, documents) | odd, max_size=4) | odd,
    options=options,
    own=st.booleans(),
)
def test_many_of_anything_are_made_together_or_refused_before_anything_is_sent(
    client: jobq.Client, caller: psycopg.Connection, jobs: Any, options: dict[str, Any], *, own: bool
) -> None:
    if type(jobs) is list:
        jobs = [*jobs, jobq.NewJob("k", None, **options)]
        assert all(repr(job) for job in jobs if isinstance(job, jobq.NewJob))
    with transaction(caller) as tx:
        try:
            made = client.enqueue_many(jobs, tx=None if own else tx)
        except REFUSED as refused:
            assert_told(refused)
        except OddError:
            assert isinstance(jobs, OddList)  # what the caller's own iterable raises is the caller's
        else:
            assert len(made) == len(list(jobs))


def new(kind: str = "good", args: object = None, **options: Any) -> jobq.NewJob:
    return jobq.NewJob(kind, args, **options)


BAD_OPTIONS: Final[list[dict[str, Any]]] = [
    {"queue": ""},
    {"priority": 10},
    {"max_attempts": 0},
    {"timeout": timedelta(0)},
    {"delay": timedelta(-1)},
    {"run_at": datetime(2030, 1, 1)},  # noqa: DTZ001 - the mistake under test
    {"unique": ""},
    {"unique": jobq.Unique(by_args=["none"])},
    {"meta": []},
    {"tags": [""]},
    {"expires_at": datetime(2000, 1, 1, tzinfo=UTC)},
    {"unknown": 1},
]
# Items that are refused whatever else is said of them.
BAD_ITEMS: Final = (
    one_of(UNSTORABLE).map(lambda one: new(args={"a": one}))
    | st.sampled_from([float("nan"), "\0", "\ud800", b"x", {1.5: 1}]).map(lambda args: new(args=args))
    | st.sampled_from(["", "x" * 129, "a\nb", "\ud800", "\0"]).map(new)
    | st.sampled_from(BAD_OPTIONS).map(lambda bad: new(**bad))
    | st.none()
)


@fuzz(30)
@given(good=st.integers(0, 30), bad=BAD_ITEMS, place=st.integers(0, 30), own=st.booleans())
def test_one_bad_item_among_good_ones_is_named_by_its_place_and_nothing_is_made(
    client: jobq.Client, caller: psycopg.Connection, good: int, bad: Any, place: int, *, own: bool
) -> None:
    count = "select count(*) from jobq.job where kind = 'good'"
    place = min(place, good)
    jobs = [new(args={"n": n}, unique=f"key {n}" if n % 3 == 0 else None) for n in range(good)]
    with transaction(caller) as tx:
        before = tx.execute(count).fetchone()
        with pytest.raises(
            (jobq.ConfigError, jobq.ArgumentsEncodeError), match=rf"^item {place}: "
        ) as refused:
            client.enqueue_many([*jobs[:place], bad, *jobs[place:]], tx=None if own else tx)
        assert_told(refused.value)
        if isinstance(refused.value, jobq.ArgumentsEncodeError):
            assert refused.value.index == place
        assert tx.execute(count).fetchone() == before


@fuzz(30)
@given(key=texts)
def test_a_key_of_any_text_is_one_key_for_the_clients_and_for_sql(
    client: jobq.Client, caller: psycopg.Connection, key: str
) -> None:
    by_sql = "select id, inserted from jobq.enqueue('other', unique_key => %s)"
    with transaction(caller) as tx:
        try:
            made = client.enqueue("k", unique=key, tx=tx)
        except REFUSED as refused:
            assert_told(refused)
        else:
            assert tx.execute(by_sql, [key]).fetchone() == (made.id, False)


UNIQUE: Final[dict[str, st.SearchStrategy[Any]]] = {
    "key": texts,
    "by_args": st.booleans() | st.lists(st.sampled_from(["a", "b", "é", "\ud800", ""]), max_size=3),
    "by_queue": st.booleans(),
    "period": waits,
    "until": st.sampled_from(["finished", "started"]),
    "on_conflict": st.sampled_from(["return", "raise", "replace"]),
    "replace": st.lists(st.sampled_from(["args", "run_at", "priority", "queue"]), max_size=4),
    "max_wait": waits,
}


@fuzz(100)
@given(given=some_of(UNIQUE), args=st.dictionaries(st.sampled_from(["a", "b", "é"]), plain, max_size=3))
def test_a_unique_of_anything_is_refused_or_makes_one_job_of_two_enqueues(
    client: jobq.Client, caller: psycopg.Connection, given: dict[str, Any], args: dict[str, Any]
) -> None:
    with transaction(caller) as tx:
        try:
            unique = jobq.Unique(**given)
            first = client.enqueue("unique", args, unique=unique, tx=tx)
        except REFUSED as refused:
            assert_told(refused)
            return
        assert first.inserted
        try:
            again = client.enqueue("unique", args, unique=unique, tx=tx)
        except jobq.UniqueConflict as conflict:
            assert unique.on_conflict == "raise"
            assert conflict.job_id == first.id  # noqa: PT017 - it need not be raised
        else:
            assert again == jobq.Enqueued(first.id, inserted=False, replaced=unique.on_conflict == "replace")


# -- what is made in Python alone ------------------------------------------------------------------


@fuzz(30)
@given(
    settings=st.dictionaries(
        st.sampled_from(
            [
                "schema",
                "pool_min_size",
                "pool_max_size",
                "args_limit_bytes",
                "notify",
                "listen_dsn",
                "max_ready",
                *OPTIONS,
            ]
        ),
        odd,
        min_size=1,
        max_size=3,
    )
)
def test_a_client_of_anything_is_refused_by_name_or_made(settings: dict[str, Any]) -> None:
    try:
        jobq.Client("dbname=none", **settings)
    except REFUSED as refused:
        assert_told(refused)
        assert any(name in str(refused) for name in (*settings, "connection string"))  # noqa: PT017


@fuzz(30)
@given(
    settings=some_of({field.name: waits | st.integers() for field in dataclasses.fields(jobq.WorkerConfig)})
)
def test_a_workers_settings_of_anything_are_refused_by_name_or_made(settings: dict[str, Any]) -> None:
    try:
        jobq.WorkerConfig(**settings)
    except jobq.ConfigError as refused:
        assert_told(refused)
        assert any(name in str(refused) for name in (*settings, "heartbeat"))  # noqa: PT017


NUMBERS = st.floats() | st.integers() | odd


@fuzz(30)
@given(base=waits | odd, number=NUMBERS, cap=waits | odd, jitter=NUMBERS, failures=st.integers(-1, 10**6))
def test_a_backoff_of_anything_is_refused_or_answers_with_a_wait(
    base: Any, number: Any, cap: Any, jitter: Any, failures: int
) -> None:
    for make in (
        lambda: jobq.ConstantBackoff(base, jitter=jitter),
        lambda: jobq.ExponentialBackoff(base, number, cap, jitter),
        lambda: jobq.PolynomialBackoff(base, number, cap, jitter),
    ):
        try:
            policy = make()
        except jobq.ConfigError as refused:
            assert_told(refused)
        else:
            assert timedelta(0) <= policy(failures) <= timedelta(days=36_525)


@fuzz(30)
@given(wait=waits | odd, reason=odd)
def test_a_signal_of_anything_is_refused_or_made(wait: Any, reason: Any) -> None:
    for make in (lambda: jobq.Snooze(wait), lambda: jobq.Retry(reason), lambda: jobq.Retry(after=wait)):
        try:
            make()
        except jobq.ConfigError as refused:
            assert_told(refused)


# -- operators -------------------------------------------------------------------------------------


@fuzz(30)
@given(job_id=odd, reason=texts | odd, by=texts | odd)
def test_a_look_at_any_id_says_that_there_is_none(
    client: jobq.Client, job_id: Any, reason: Any, by: Any
) -> None:
    for verb in (client.get, client.errors, client.cancel, client.retry, client.delete):
        with pytest.raises(REFUSED, match=r"no job|job_id="):
            verb(job_id)
    for steer in (client.cancel, client.retry, client.delete):
        with pytest.raises(REFUSED, match=r"no job|job_id=|reason|by") as refused:
            steer(job_id, reason=reason, by=by)
        assert_told(refused.value)


names = st.lists(texts, max_size=3)
FILTERS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "ids": st.lists(st.integers(), max_size=4) | st.sampled_from([range(200_000), range(2**70)]),
    "queues": names,
    "kinds": names,
    "states": st.lists(st.sampled_from([*jobq.JobState, "done", ""]), max_size=3),
    "tags": names,
    "older_than": waits,
    "newer_than": waits,
    "error": texts,
    "worker": st.integers(),
}


@pytest.fixture(scope="module")
def some_jobs(client: jobq.Client) -> None:
    """Jobs in four states, for filters to find."""
    odd_texts = ["k", "ü\u202e", '"{},\\', "NULL", "%s $1 '"]
    made = client.enqueue_many(
        jobq.NewJob(text, {"t": text}, queue=text, tags=[text], delay=timedelta(days=n % 2))
        for n, text in enumerate(odd_texts * 6)
    )
    for one in made[::5]:
        client.cancel(one.id, reason="no")


def chosen_by(given: dict[str, Any]) -> jobq.JobFilter | None:
    try:
        return jobq.JobFilter(**given)
    except REFUSED as refused:
        assert_told(refused)
        return None


@pytest.mark.usefixtures("some_jobs")
@fuzz(100)
@given(given=some_of(FILTERS), limit=st.integers(1, 12))
def test_a_filter_of_anything_is_refused_or_lists_what_it_counts(
    client: jobq.Client, given: dict[str, Any], limit: int
) -> None:
    chosen = chosen_by(given)
    if chosen is None:
        return
    listed: list[int] = []
    after = None
    for _ in range(5_000):  # other tests of this file have made jobs, too
        page = client.list(chosen, after=after, limit=limit)
        listed += [job.id for job in page.jobs]
        if (after := page.next) is None:
            break
    assert after is None, "it would never end"
    assert len(set(listed)) == len(listed) == client.bulk.count(chosen, limit=None).jobs


STEERED: Final[dict[str, st.SearchStrategy[Any]]] = {
    "reason": texts,
    "by": texts,
    "batch": st.integers(-1, 2000),
    "on_progress": st.none() | st.just(lambda _: None),
}
MORE: Final[dict[str, st.SearchStrategy[dict[str, Any]]]] = {
    "reschedule": some_of({"run_at": moments, "delay": waits}),
    "move": some_of({"queue": texts, "priority": st.integers(-12, 12)}),
}


@pytest.mark.usefixtures("some_jobs")
@fuzz(100)
@given(
    action=st.sampled_from(sorted(APPLIES_TO)),
    chosen=some_of(FILTERS).map(chosen_by) | odd,
    how=some_of(STEERED),
    data=st.data(),
)
def test_a_bulk_action_of_anything_is_refused_before_it_begins_or_does_what_was_counted(
    client: jobq.Client, action: Any, chosen: Any, how: dict[str, Any], data: st.DataObject
) -> None:
    how |= data.draw(MORE[action]) if action in MORE else {}
    client.enqueue_many([jobq.NewJob("k", n, delay=timedelta(days=n % 2)) for n in range(3)])
    before = client.operator_log(limit=1)
    try:
        count = client.bulk.count(chosen, action=action, limit=None).jobs
        result = getattr(client.bulk, action)(chosen, **how)
    except REFUSED as refused:
        assert_told(refused)
        assert client.operator_log(limit=1) == before
    else:
        assert result.changed + result.requested + result.conflicts == count


@fuzz(50)
@given(
    after=texts
    | odd
    | st.builds(
        "{}.{}.{}".format,
        st.sampled_from([*jobq.JobState, "done"]),
        st.integers() | texts,
        texts
        | st.sampled_from(["", "infinity", "now", "2030-01-01T00:00:00+00:00", "20300101", "2030-W01-1"]),
    ),
    limit=st.integers(-1, 1002) | odd,
)
@pytest.mark.usefixtures("some_jobs")
def test_a_page_after_anything_is_refused_or_a_page(client: jobq.Client, after: Any, limit: Any) -> None:
    try:
        page = client.list(after=after, limit=limit)
    except jobq.ConfigError as refused:
        assert_told(refused)
    else:
        assert len(page.jobs) <= limit


@fuzz(30)
@given(limit=st.integers(-1, 1002) | odd, before=st.integers() | odd, job_id=st.none() | st.integers() | odd)
def test_the_operator_log_by_any_bounds_is_refused_or_shown(
    client: jobq.Client, limit: Any, before: Any, job_id: Any
) -> None:
    try:
        entries = client.operator_log(limit=limit, before=before, job_id=job_id)
    except jobq.ConfigError as refused:
        assert_told(refused)
    else:
        assert len(entries) <= limit
        assert all(before is None or entry.id < before for entry in entries)


# -- queues ----------------------------------------------------------------------------------------


@fuzz(75)
@given(given=some_of({"queue": texts, "kind": texts, "reason": texts, "by": texts, "until": moments}))
def test_a_pause_of_anything_is_refused_or_stands_as_it_was_said(
    client: jobq.Client, given: dict[str, Any]
) -> None:
    known = {(pause.scope, pause.name) for pause in client.queues.pauses()}
    try:
        client.queues.pause(**given)
    except jobq.ConfigError as refused:
        assert_told(refused)
        assert {(pause.scope, pause.name) for pause in client.queues.pauses()} <= known
        return
    scope = "queue" if given.get("queue") is not None else "kind"
    until = given.get("until")
    found = [p for p in client.queues.pauses() if (p.scope, p.name) == (scope, given[scope])]
    if until is None or until > datetime.now(UTC):
        [pause] = found
        assert (pause.reason or "", pause.until) == (given.get("reason", ""), until)
        assert given.get("by") is None or pause.paused_by == given["by"]
    assert client.queues.resume(**{scope: given[scope]}) is bool(found)


AGES = waits | st.just("keep")


@fuzz(75)
@given(
    given=some_of(
        {
            "queue": texts,
            "completed": AGES,
            "discarded": AGES,
            "cancelled": AGES,
            "reason": texts,
            "by": texts,
        }
    )
)
def test_a_retention_of_anything_is_refused_or_stands_as_it_was_said(
    client: jobq.Client, given: dict[str, Any]
) -> None:
    before = client.queues.retention()
    try:
        client.queues.set_retention(**given)
    except jobq.ConfigError as refused:
        assert_told(refused)
        assert client.queues.retention() == before
        return
    queue = given.get("queue")
    found = [one for one in client.queues.retention() if one.queue == queue]
    for state in ("completed", "discarded", "cancelled"):
        if given.get(state) is not None:
            assert [getattr(one, state) for one in found] == [given[state]]
    client.queues.set_retention(queue)  # as it was at first


@fuzz(30)
@given(ended_within=waits | odd)
def test_workers_that_ended_within_anything_are_refused_or_listed(
    client: jobq.Client, ended_within: Any
) -> None:
    try:
        assert client.workers(ended_within=ended_within) == []
    except jobq.ConfigError as refused:
        assert_told(refused)


# -- schedules -------------------------------------------------------------------------------------

fields = st.sampled_from(
    ["*", "0", "*/7", "1-5", "59", "60", "L", "LW", "1#2", "mon", "feb", "31", "٣", "²", "1,2", "-"]
)
crons = texts | st.lists(fields, min_size=4, max_size=6).map(" ".join)
SCHEDULES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "every": waits,
    "cron": crons,
    "tz": texts | st.sampled_from(["UTC", "Europe/Berlin", "localtime", "../etc/passwd", "", "Europe"]),
    "catch_up": st.sampled_from(["one", "skip", "all", "none"]),
    "catch_up_max": st.integers(-1, 1002),
    "overlap": st.sampled_from(["allow", "skip", "none"]),
    "jitter": waits,
    "run_at_start": st.booleans(),
    **{name: strategy for name, strategy in OPTIONS.items() if name not in {"run_at", "expires_at"}},
}
_serial = itertools.count()


@fuzz(100)
@given(
    name=texts | odd,
    kind=texts,
    args=documents | odd | holding,
    when=st.fixed_dictionaries({"every": waits}) | st.fixed_dictionaries({"cron": crons}) | st.just({}),
    given=some_of(SCHEDULES, most=3),
    reason=texts | odd,
)
def test_a_schedule_of_anything_is_refused_or_listed_triggered_and_removed(
    client: jobq.Client,
    name: Any,
    kind: Any,
    args: Any,
    when: dict[str, Any],
    given: dict[str, Any],
    reason: Any,
) -> None:
    given = when | given
    try:
        client.periodic.add(name, kind, args, reason=reason, **given)
    except REFUSED as refused:
        assert_told(refused)
        assert client.periodic.list() == []
        for verb in (
            client.periodic.pause,
            client.periodic.resume,
            client.periodic.trigger,
            client.periodic.remove,
        ):
            with pytest.raises((jobq.PeriodicNotFound, *REFUSED)):
                verb(name, reason=reason)
        return
    [found] = client.periodic.list()
    assert (found.name, found.kind, found.every, found.cron) == (
        name,
        kind,
        given.get("every"),
        given.get("cron"),
    )
    assert found.next_at is not None
    assert found.next_at > datetime.now(UTC) - timedelta(minutes=1) or given.get("run_at_start")
    client.periodic.pause(name)
    made = client.periodic.trigger(name)
    client.periodic.resume(name)
    client.periodic.remove(name)
    assert client.get(made.id).kind == kind


@fuzz(75)
@given(
    expression=crons, tz=st.sampled_from(["UTC", "Europe/Berlin", "Asia/Kathmandu"]), count=st.integers(1, 4)
)
def test_a_cron_expression_is_refused_or_ticks_for_ever(expression: str, tz: str, count: int) -> None:
    jobs = jobq.Jobs()
    try:
        jobs.add_periodic("n", "k", None, cron=expression, tz=tz)
    except jobq.ConfigError as refused:
        assert_told(refused)
        return
    [schedule] = jobs.schedules
    instant = datetime(2031, 3, 29, tzinfo=UTC)
    for _ in range(count):
        tick = schedule.timetable.next_after(instant)
        assert tick > instant
        assert schedule.timetable.last_until(tick) == tick
        instant = tick
