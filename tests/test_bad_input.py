"""Whatever is handed to the clients, or written by SQL: an error of jobq's that names it, or it works."""

from __future__ import annotations

import decimal
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg
import pytest

import jobq
from tests.support.inprocess import working
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


NOTHING: Final[Any] = None
NO_CONFIG: Final[Any] = {}


@dataclass(frozen=True)
class Args:
    to: str


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[jobq.Client]:
    with jobq.Client(address) as client:
        yield client


@pytest.fixture(scope="module")
def tx(address: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(address) as connection:
        yield connection


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        (None, "enqueue_many: an iterable of NewJob, not None"),
        (5, "enqueue_many: an iterable of NewJob, not 5"),
        ("abc", "item 0: a NewJob, not an object of str"),
        ([None], "item 0: a NewJob, not an object of NoneType"),
        ([jobq.NewJob("k", 1), {"kind": "k"}], "item 1: a NewJob, not an object of dict"),
        ([jobq.NewJob(NOTHING, 1)], "item 0: kind=None"),
        ([jobq.NewJob("k", 1, tags="abc")], "item 0: tags='abc': a sequence of strings"),
    ],
)
def test_what_is_no_list_of_jobs_is_named(client: jobq.Client, jobs: Any, message: str) -> None:
    with pytest.raises(jobq.ConfigError, match=f"^{message}"):
        client.enqueue_many(jobs)


def test_a_generator_that_raises_midway_makes_nothing_and_its_own_error_comes_out(
    client: jobq.Client, tx: psycopg.Connection
) -> None:
    def jobs() -> Iterator[jobq.NewJob]:
        yield jobq.NewJob("generated", 1)
        raise LookupError("of the caller's own")

    for given_tx in (None, tx):
        with pytest.raises(LookupError, match="of the caller's own"):
            client.enqueue_many(jobs(), tx=given_tx)
    assert tx.execute("select count(*) from jobq.job where kind = 'generated'").fetchone() == (0,)
    tx.rollback()
    assert client.enqueue("after", None).inserted


class Unhashable(type):
    __hash__ = None  # type: ignore[assignment]

    def __eq__(cls, other: object) -> bool:
        return True


class Strange(metaclass=Unhashable):
    """An object whose class cannot be looked up in a dictionary."""


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda a, _: jobq.Worker(a, NOTHING), jobq.ConfigError, "jobs=None: a jobq.Jobs"),
        (lambda a, _: jobq.Worker(a, jobq.Jobs(), NO_CONFIG), jobq.ConfigError, "config={}: a jobq"),
        (lambda _, c: jobq.Worker(c, jobq.Jobs()), jobq.ConfigError, "pass a jobq.AsyncClient"),
        (lambda _, c: c.enqueue("k", tx=0), jobq.TransactionError, "tx=builtins.int"),
        (lambda _, c: c.enqueue("k", tx=Strange()), jobq.TransactionError, "Strange: not a connection"),
        (lambda _, c: c.enqueue("k", tx=c.pool), jobq.TransactionError, "OwnPool: not a connection"),
        (lambda _, c: jobq.Jobs().include(NOTHING), jobq.ConfigError, "include: a Jobs, not None"),
        (lambda _, c: jobq.JobType("k", dict, aliases=NOTHING), jobq.ConfigError, "aliases=None: a sequence"),
        (lambda _, c: jobq.migrate(NOTHING), jobq.ConfigError, "migrate.. takes a connection string"),
        (lambda _, c: jobq.migrate("", schema=NOTHING), jobq.ConfigError, "schema=None"),
    ],
)
def test_other_misuse_is_named(
    address: str,
    client: jobq.Client,
    misuse: Callable[[jobq.AsyncClient, jobq.Client], object],
    error: type[jobq.Error],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        misuse(jobq.AsyncClient(address), client)


@pytest.mark.parametrize("grace", [5, timedelta(-1), timedelta.max, "x"])
async def test_a_worker_is_not_stopped_with_a_grace_that_is_none(address: str, grace: Any) -> None:
    worker = jobq.Worker(jobq.AsyncClient(address), jobq.Jobs())
    with pytest.raises(jobq.ConfigError, match=r"^Worker\.stop: grace="):
        await worker.stop(grace=grace)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lock_timeout_s", float("nan")),
        ("lock_timeout_s", -1),
        ("lock_timeout_s", 1e300),
        ("lock_timeout_s", "2"),
        ("attempts", 0),
        ("attempts", "x"),
    ],
)
def test_a_migration_refuses_settings_that_cannot_be(empty_dsn: str, setting: str, value: Any) -> None:
    with pytest.raises(jobq.ConfigError, match=f"^{setting}="):
        jobq.migrate(empty_dsn, **{setting: value})


def test_a_closed_connection_is_not_taken_for_one_in_a_transaction(address: str) -> None:
    connection = psycopg.connect(address)
    connection.close()
    with pytest.raises(jobq.TransactionError, match="the connection is closed"):
        jobq.migrate(connection)


# -- what SQL can make -----------------------------------------------------------------------------

# Documents as they stand in a row, and what they are in Python.
EXTREMES: Final[dict[str, tuple[str, object]]] = {
    "1e400": ("1e400", 10**400),
    "-1e4299": ("[-1e4299]", [-(10**4299)]),
    "5000 digits": ("9" * 5000, Decimal("9" * 5000)),
    "1e100000": ('{"a": [1e100000]}', {"a": [Decimal(10) ** 100_000]}),
    "beyond the floats": (f'{{"a": {"9" * 400}.5}}', {"a": Decimal("9" * 400 + ".5")}),
    "close to nothing": ("1e-5000", 0.0),
    "with a number and all else": (
        f'[{"9" * 5000}, 1.5, "ü", null, true, -7]',
        [Decimal("9" * 5000), 1.5, "ü", None, True, -7],
    ),
}
exact = decimal.Context(prec=200_000)


def make(db: psycopg.Connection, kind: str, args: str) -> int:
    row = db.execute("select id from jobq.enqueue(%s, %s::text::jsonb)", [kind, args]).fetchone()
    assert row is not None
    job_id: int = row[0]
    return job_id


@pytest.mark.parametrize("name", EXTREMES)
def test_numbers_beyond_pythons_usual_types_are_shown_exactly(
    dsn: str, db: psycopg.Connection, name: str
) -> None:
    document, expected = EXTREMES[name]
    with decimal.localcontext(exact), jobq.Client(dsn) as client:
        info = client.get(make(db, "k", document))
        assert info.args == expected
        assert type(info.args) is type(expected)


def by_hand(db: psycopg.Connection, change: str) -> int:
    """Make a job and change its rows past all checks; return its id."""
    row = db.execute("select id from jobq.enqueue('k')").fetchone()
    assert row is not None
    db.execute(f"with {change} select 1".encode())
    job_id: int = row[0]
    return job_id


def test_a_document_that_is_too_deep_for_a_stack_is_shown_as_its_text_beside_all_the_rest(
    dsn: str, db: psycopg.Connection
) -> None:
    deep = "repeat('[', 5000) || repeat(']', 5000)"
    job_id = by_hand(db, f"x as (update jobq.job set args = ({deep})::jsonb returning 1)")
    with jobq.Client(dsn) as client:
        info = client.get(job_id)
    assert isinstance(info.args, msgspec.Raw)
    assert bytes(info.args) == b"[" * 5000 + b"]" * 5000
    assert (info.kind, info.state) == ("k", jobq.JobState.READY)


def test_meta_that_nobody_can_read_is_named(dsn: str, db: psycopg.Connection) -> None:
    job_id = by_hand(db, "x as (update jobq.job set meta = '[1]' returning 1)")
    with (
        jobq.Client(dsn) as client,
        pytest.raises(jobq.ArgumentsDecodeError, match=f"job {job_id}: its meta"),
    ):
        client.get(job_id)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("moment", "shown"),
    [
        ("infinity", datetime.max.replace(tzinfo=UTC)),
        ("294276-12-31 23:59:59+00", datetime.max.replace(tzinfo=UTC)),
        ("10000-01-01 00:00:00+00", datetime.max.replace(tzinfo=UTC)),
        ("9999-12-31 23:59:59.999999+00", datetime.max.replace(tzinfo=UTC)),
        ("-infinity", datetime.min.replace(tzinfo=UTC)),
        ("4713-01-01 00:00:00+00 BC", datetime.min.replace(tzinfo=UTC)),
        ("0001-01-01 00:00:00+00", datetime.min.replace(tzinfo=UTC)),
    ],
)
def test_moments_beyond_pythons_years_are_shown_as_the_first_and_the_last(
    dsn: str, db: psycopg.Connection, moment: str, shown: datetime
) -> None:
    columns = "job_id, attempt, outcome, type, message, traceback, worker, started_at, ended_at"
    job_id = by_hand(
        db,
        f"x as (update jobq.job set created_at = '{moment}', expires_at = '{moment}' returning 1),"
        f" y as (update jobq.ready set ready_at = '{moment}' returning 1),"
        f" z as (insert into jobq.attempt_error ({columns}) select id, 1, 'failed', 't', 'm', '', 'w',"
        f" '{moment}', '{moment}' from jobq.job returning 1)",
    )
    with jobq.Client(dsn) as client:
        info = client.get(job_id)
        (error,) = client.errors(job_id)
    assert (info.created_at, info.expires_at, info.run_at) == (shown, shown, shown)
    assert (error.started_at, error.ended_at) == (shown, shown)
    assert (info.claimed_at, info.finished_at) == (None, None)


@pytest.mark.parametrize("limit", ["Infinity", "-1", "1e300", "0.0000001"])
def test_a_time_limit_beyond_an_interval_is_shown(dsn: str, db: psycopg.Connection, limit: str) -> None:
    job_id = by_hand(db, f"x as (update jobq.job set timeout_s = '{limit}' returning 1)")
    with jobq.Client(dsn) as client:
        assert client.get(job_id).timeout_s == float(limit)


@pytest.mark.parametrize(
    ("tags", "shown"),
    [
        ("'[5:6]={a,b}'::text[]", ("a", "b")),
        ("array[E'\\x01\"\\\\{},', 'NULL', 'ü\u202e']", ('\x01"\\{},', "NULL", "ü\u202e")),
        ("'{}'", ()),
    ],
)
def test_odd_tags_come_back(dsn: str, db: psycopg.Connection, tags: str, shown: tuple[str, ...]) -> None:
    row = db.execute(f"select id from jobq.enqueue('k', tags => {tags})".encode()).fetchone()
    assert row is not None
    with jobq.Client(dsn) as client:
        assert client.get(row[0]).tags == shown


@pytest.mark.parametrize(
    "option",
    [
        "run_at => 'infinity'",
        "run_at => '-infinity'",
        "run_at => '294276-01-01'",
        "run_at => '4713-01-01 BC'",
        "expires_at => 'infinity'",
        "expires_at => now()",
        "timeout => '178000000 years'",
        "timeout => '-1 day'",
        "tags => '{{a,b}}'",
        "tags => array[null]",
        "tags => array['']",
        "meta => 'null'",
        "args => null",
        "priority => null",
        "unique_key => ''",
    ],
)
def test_the_sql_function_refuses_by_name_what_no_client_could_read(
    db: psycopg.Connection, option: str
) -> None:
    name = option.partition(" ")[0]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=f"jobq: {name}"):
        db.execute(f"select jobq.enqueue('k', {option})".encode())


async def test_a_job_that_cannot_be_read_fails_alone(dsn: str, db: psycopg.Connection) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("any")
    async def untyped(job: jobq.Job, args: Any) -> None:
        assert job.created_at.tzinfo is UTC
        assert isinstance(job.meta, dict)

    @jobs.handler("typed")
    async def typed(job: jobq.Job, args: Args) -> None: ...

    documents = [document for document, _ in EXTREMES.values()]
    bad = [make(db, kind, document) for kind in ("any", "typed") for document in documents]
    good = [make(db, "typed", '{"to": "a"}') for _ in range(3)]
    odd = [make(db, "any", "1") for _ in range(4)]
    changes = (
        "args = (repeat('[', 5000) || repeat(']', 5000))::jsonb",
        "created_at = 'infinity', expires_at = 'infinity'",
        "created_at = '-infinity', timeout_s = 'NaN'",
        "meta = '{\"a\": 1e5000}'",
    )
    for job_id, change in zip(odd, changes, strict=True):
        db.execute(f"update jobq.job set {change} where id = {job_id}".encode())
    db.execute("update jobq.job set max_attempts = 1")

    def all_ended() -> bool:
        return db.execute("select count(*) from jobq.finished").fetchone() == (len(bad + good + odd),)

    async with working(dsn, jobs):
        await eventually_async(all_ended, 20.0, what="all jobs end")
    ended: dict[int, str] = dict(db.execute("select job_id, state from jobq.finished").fetchall())
    outcomes: dict[int, str] = dict(db.execute("select job_id, outcome from jobq.attempt_error").fetchall())
    assert {ended[job_id] for job_id in good + odd[1:]} == {"completed"}
    assert ended[odd[0]] == "discarded"
    assert set(outcomes) == {job_id for job_id, state in ended.items() if state == "discarded"}
    assert set(outcomes.values()) == {"undecodable"}
    # Only of the untyped are some within what a worker decodes.
    assert {ended[job_id] for job_id in bad[len(documents) :]} == {"discarded"}
