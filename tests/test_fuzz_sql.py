"""The SQL function, with anything, in sessions of any settings: refused by name, or stored as it was given.

It runs with its caller's settings, and psql, triggers and other languages have some that no client has.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from tests.support.odd import documents, fuzz, options, texts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq.embedded import Databases, EmbeddedPostgres

pytestmark = pytest.mark.fuzz

# Of sessions; the client's encoding is set apart, for it is libpq's.
SETTINGS: Final[dict[str, dict[str, str]]] = {
    "usual": {},
    "strings with escapes": {"standard_conforming_strings": "off", "escape_string_warning": "on"},
    "other output": {
        "DateStyle": "German, DMY",
        "IntervalStyle": "sql_standard",
        "extra_float_digits": "-15",
        "bytea_output": "escape",
        "TimeZone": "Asia/Kathmandu",
        "xmlbinary": "hex",
        "quote_all_identifiers": "on",
    },
    "no search path": {"search_path": ""},
    "a search path of others": {"search_path": "shadow, pg_catalog"},
    "serializable": {"default_transaction_isolation": "serializable", "row_security": "off"},
    "years BC": {"DateStyle": "Postgres, YMD", "TimeZone": "America/St_Johns", "IntervalStyle": "iso_8601"},
    "another planner": {
        "plan_cache_mode": "force_generic_plan",
        "enable_seqscan": "off",
        "enable_indexscan": "off",
        "jit_above_cost": "0",
        "from_collapse_limit": "1",
    },
    "a time limit": {"statement_timeout": "5s", "lock_timeout": "1s", "transform_null_equals": "on"},
    "LATIN1": {"client_encoding": "LATIN1"},
    "SQL_ASCII": {"client_encoding": "SQL_ASCII"},
}
NAMES: Final = (
    "kind", "args", "queue", "priority", "run_at", "max_attempts", "timeout", "unique_key", "meta", "tags",
    "expires_at",
)  # fmt: skip


@pytest.fixture(scope="module")
def address(server: EmbeddedPostgres, databases: Databases, template: str) -> Iterator[str]:
    name = databases.create(template=template)
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        # what a body that names no schema would find first
        connection.execute("create schema shadow")
        connection.execute("create function shadow.now() returns text language sql as 'select null::text'")
        connection.execute("create table shadow.job (id int); create table shadow.ready (id int)")
    yield server.dsn(name)
    databases.drop(name)


@pytest.fixture(scope="module", params=SETTINGS)
def session(address: str, request: pytest.FixtureRequest) -> Iterator[psycopg.Connection]:
    with psycopg.connect(address) as connection:
        for name, value in SETTINGS[request.param].items():
            connection.execute("select set_config(%s, %s, false)", [name, value])
        connection.commit()
        yield connection


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[jobq.Client]:
    with jobq.Client(address) as client:
        yield client


# -- what may be given, and whether it is right --------------------------------------------------------

sql_texts = texts.map(lambda text: text.replace("\0", "").encode("utf-8", "replace").decode())
long_texts = (
    sql_texts | st.integers(100, 300).map(lambda n: "ü" * n) | st.sampled_from(["", "a\nb", "\x85", "\x7f"])
)


def storable(value: object) -> str | None:
    """Return a document as JSON that PostgreSQL's parser takes; what it does not take never gets to us."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except ValueError:
        return "1"
    return "2" if "\\u0000" in text else text


nested = st.integers(0, 150).map(lambda n: "[" * n + "1" + "]" * n)
json_texts = (
    documents.map(storable)
    | nested
    | nested.map(lambda text: f'{{"a": {text}}}')
    | st.sampled_from(
        ["1e400", "9" * 5000, "-0.0", "1e-5000", "null", "{}", "[]", '"' + "x" * 1_048_577 + '"']
    )
)
sql_moments = st.sampled_from(
    [
        "infinity",
        "-infinity",
        "4714-11-24 00:00:00+00 BC",
        "294276-12-31 00:00:00+00",
        "9999-12-30 00:00:01+00",
    ]
) | st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat)
lengths = st.sampled_from(
    ["0", "-1 day", "1 microsecond", "100 years", "100 years 1 second", "36525 days", "-12 mons 361 days",
     "12 mons -359 days", "1 mon -30 days", "178000000 years"]
) | st.tuples(st.integers(-20, 1300), st.integers(-400, 40_000), st.integers(-(10**6), 10**6)).map(
    "{0[0]} mons {0[1]} days {0[2]} seconds".format
)  # fmt: skip
PARAMETERS: Final[dict[str, tuple[str, st.SearchStrategy[Any]]]] = {
    "kind": ("text", long_texts),
    "args": ("jsonb", json_texts),
    "queue": ("text", long_texts),
    "priority": ("integer", st.integers(-12, 12) | st.integers(-(2**31), 2**31 - 1)),
    "run_at": ("timestamptz", sql_moments),
    "max_attempts": ("integer", st.integers(-1, 40_000)),
    "timeout": ("interval", lengths),
    "unique_key": ("text", long_texts),
    "meta": ("jsonb", json_texts | st.dictionaries(sql_texts, sql_texts, max_size=2).map(storable)),
    "tags": ("text[]", st.lists(st.none() | long_texts, max_size=22)),
    "expires_at": ("timestamptz", sql_moments),
}


def depth_of(document: str) -> int:
    """Return how many containers stand in one another, strings apart."""
    deepest = depth = 0
    for char in re.sub(r'"(?:[^"\\]|\\.)*"', "", document):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(char, 0)
        deepest = max(deepest, depth)
    return deepest


def is_name(value: Any) -> bool:
    return 1 <= len(value.encode()) <= 128 and not re.search("[\x01-\x1f\x7f-\x9f]", value)


FITS: Final[dict[str, Callable[[Any], bool]]] = {
    "kind": is_name,
    "args": lambda text: depth_of(text) <= 100 and len(text) <= 1_048_576,
    "queue": is_name,
    "priority": lambda n: -9 <= n <= 9,
    "max_attempts": lambda n: 1 <= n <= 32_767,
    "unique_key": lambda text: text != "",
    "meta": lambda text: text.startswith("{") and depth_of(text) <= 100,
    "tags": lambda tags: (
        len(tags) <= 20 and all(tag is not None and 1 <= len(tag.encode()) <= 100 for tag in tags)
    ),
}
NEVER_NULL: Final = {"kind", "args", "queue", "priority", "max_attempts"}


def wrong_of(given: dict[str, Any]) -> set[str]:
    """Return which parameters have to be refused; of times only those that are nobody's."""
    wrong = {name for name in NEVER_NULL & given.keys() if given[name] is None}
    wrong |= {n for n, fits in FITS.items() if given.get(n) is not None and not fits(given[n])}
    return wrong | {n for n in ("run_at", "expires_at") if "infinity" in (given.get(n) or "")}


calls = st.lists(st.sampled_from(NAMES), max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.none() | PARAMETERS[name][1] for name in {*names, "kind"}})
)


@fuzz(20)
@given(given=calls)
def test_the_function_refuses_by_name_or_stores_what_it_was_given(
    session: psycopg.Connection, given: dict[str, Any]
) -> None:
    types = {name: PARAMETERS[name][0] for name in given}
    named = ", ".join(f"{name} => %({name})s::text::{types[name]}" for name in given if name != "tags")
    named += ", tags => %(tags)s::text[]" if "tags" in given else ""
    texts_given = {n: v if isinstance(v, list | None) else str(v) for n, v in given.items()}
    try:
        row = session.execute(
            f"select id, inserted from jobq.enqueue({named.lstrip(', ')})".encode(), texts_given
        )
        job_id, inserted = row.fetchone() or (0, False)
    except psycopg.errors.InvalidParameterValue as refused:
        told = str(refused).splitlines()[0]
        assert told.startswith("jobq: ")
        name = told.removeprefix("jobq: ").split(":")[0]
        assert name in given
        assert name in wrong_of(given) or name in {"run_at", "expires_at", "timeout", "meta"}
    except (UnicodeEncodeError, psycopg.errors.UntranslatableCharacter):
        assert session.info.encoding != "utf-8"  # the session's own encoding has no such characters
    else:
        assert not wrong_of(given)
        assert inserted
        assert_stored(session, job_id, given)
    finally:
        session.rollback()


def assert_stored(session: psycopg.Connection, job_id: int, given: dict[str, Any]) -> None:
    """Compare in the server, where no session's output takes part."""
    columns = """
        select j.kind = %(kind)s, coalesce(w.queue, s.queue) = coalesce(%(queue)s, 'default'),
            coalesce(w.priority, s.priority) = coalesce(%(priority)s::int, 0),
            j.args = coalesce(%(args)s::text::jsonb, '{}'),
            j.max_attempts = coalesce(%(max_attempts)s::int, 25),
            j.tags is not distinct from nullif(%(tags)s::text[], '{}'),
            j.meta is not distinct from nullif(%(meta)s::text::jsonb, '{}'),
            j.expires_at is not distinct from %(expires_at)s::text::timestamptz,
            s.run_at is not distinct from case when %(run_at)s::text::timestamptz > pg_catalog.now()
                then %(run_at)s::text::timestamptz end,
            j.unique_key is null = (%(unique_key)s::text is null),
            coalesce(j.timeout_s > 0 and j.timeout_s <= 3155760000, true)
        from jobq.job j left join jobq.ready w on w.job_id = j.id
            left join jobq.scheduled s on s.job_id = j.id
        where j.id = %(id)s"""
    row = session.execute(columns, dict.fromkeys(NAMES) | given | {"id": job_id}).fetchone()
    assert row == (True,) * 11


@fuzz(15)
@given(kind=sql_texts, args=documents, options=options)
def test_a_client_in_a_session_of_any_settings_makes_the_job_or_says_why_not(
    session: psycopg.Connection, client: jobq.Client, kind: str, args: Any, options: dict[str, Any]
) -> None:
    try:
        made = client.enqueue(kind, args, tx=session, **options)
    except (jobq.ConfigError, jobq.ArgumentsError):
        return
    except jobq.DatabaseError as error:
        assert "client_encoding" in str(error)  # noqa: PT017 - it need not be raised
        assert session.info.encoding != "utf-8"
        return
    else:
        query = "select kind = %s, queue = %s, args = %s::text::jsonb from jobq.jobs where id = %s"
        text = json.dumps(args, ensure_ascii=False)
        given = [kind, str.__str__(options.get("queue", "default")), text, made.id]
        assert session.execute(query, given).fetchone() == (True, True, True)
    finally:
        session.rollback()


# -- what the fuzzer found -----------------------------------------------------------------------------


def test_a_time_limit_that_is_less_than_nothing_in_seconds_is_refused(session: psycopg.Connection) -> None:
    """A month of 30 days in comparisons, a year of 365.25 days in seconds."""
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="jobq: timeout: more than 0"):
        session.execute("select jobq.enqueue('k', timeout => '-12 months 361 days')")
    session.rollback()


def test_no_session_is_warned_of_the_functions_own_strings(session: psycopg.Connection) -> None:
    notices: list[str | None] = []
    session.add_notice_handler(lambda notice: notices.append(notice.message_primary))
    session.execute("select jobq.enqueue('k')")
    session.rollback()
    assert notices == []


def test_columns_of_a_collation_that_knows_no_patterns_can_be_enqueued_from(address: str) -> None:
    with psycopg.connect(address) as db:
        try:
            db.execute("create collation any_case (provider = icu, locale = 'und', deterministic = false)")
        except psycopg.errors.FeatureNotSupported:
            pytest.skip("this server was built without ICU")
        db.execute("create table person (name text collate any_case)")
        db.execute("insert into person values ('Ada')")
        row = db.execute("select inserted from person, jobq.enqueue('k', queue => name, unique_key => name)")
        assert row.fetchone() == (True,)
        db.rollback()
