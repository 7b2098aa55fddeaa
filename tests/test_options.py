"""Options mean the same everywhere, and a mistake is refused with the option's name."""

from __future__ import annotations

import enum
import hashlib
import json
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from types import MappingProxyType
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobq._errors import ArgumentsEncodeError, ConfigError
from jobq._kinds.jobtype import JobType
from jobq._kinds.options import (
    DEFAULTS,
    JobOptions,
    JobTypeOptions,
    ResolvedOptions,
    changes,
    check_kind,
    declared_changes,
    resolve,
)
from jobq._kinds.unique import unique_key

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001


class Queue(str, enum.Enum):  # noqa: UP042 - whose str() is not its value
    MAIL = "mail"


class Urgency(enum.IntEnum):
    HIGH = 9


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BrokenZone(tzinfo):
    def utcoffset(self, _: datetime | None) -> timedelta:
        raise RuntimeError("no zone")

    tzname = dst = utcoffset  # type: ignore[assignment]


def test_the_defaults() -> None:
    assert (
        DEFAULTS
        == resolve({}, DEFAULTS)
        == ResolvedOptions("default", 0, 25, 3600.0, None, None, None, None, None, None, None)
    )


@pytest.mark.parametrize(
    ("options", "stored"),
    [
        ({"queue": "mail"}, {"queue": "mail"}),
        ({"queue": "ü" * 64}, {"queue": "ü" * 64}),
        ({"queue": "一 👩‍👩‍👧"}, {"queue": "一 👩‍👩‍👧"}),
        ({"priority": -9}, {"priority": -9}),
        ({"priority": 9}, {"priority": 9}),
        ({"max_attempts": 1}, {"max_attempts": 1}),
        ({"max_attempts": 32_767}, {"max_attempts": 32_767}),
        ({"timeout": timedelta(minutes=2)}, {"timeout_s": 120.0}),
        ({"timeout": None}, {"timeout_s": None}),
        ({"run_at": NOON}, {"run_at": NOON}),
        ({"run_at": None}, {}),
        ({"run_at": NOON, "delay": None}, {"run_at": NOON}),
        ({"delay": timedelta(seconds=1.5)}, {"delay_s": 1.5}),
        ({"run_at": None, "delay": timedelta(seconds=1)}, {"delay_s": 1.0}),
        ({"delay": timedelta(0)}, {}),
        ({"delay": timedelta(days=36_525)}, {"delay_s": 3_155_760_000.0}),
        ({"expires_at": NOON}, {"expires_at": NOON}),
        ({"expires_at": None}, {}),
        ({"unique": "a"}, {"unique_key": unique_key("a"), "unique_name": "a"}),
        ({"unique": None}, {}),
        ({"meta": {"a": [1, NOON]}}, {"meta": '{"a":[1,"2030-01-01T12:00:00+00:00"]}'}),
        ({"meta": MappingProxyType({"a": 1})}, {"meta": '{"a":1}'}),
        ({"meta": {}}, {}),
        ({"meta": None}, {}),
        ({"tags": ["a", 'b"\\,{}']}, {"tags": '{"a","b\\"\\\\,{}"}'}),
        ({"tags": ()}, {}),
        ({"tags": ["x" * 100] * 20}, {"tags": "{" + ",".join(['"' + "x" * 100 + '"'] * 20) + "}"}),
    ],
    ids=str,
)
def test_what_is_stored(options: dict[str, Any], stored: dict[str, Any]) -> None:
    assert resolve(options, DEFAULTS) == DEFAULTS._replace(**stored)


def test_enums_are_stored_as_what_they_stand_for() -> None:
    resolved = resolve({"queue": Queue.MAIL, "priority": Urgency.HIGH, "tags": [Queue.MAIL]}, DEFAULTS)
    assert (resolved.queue, resolved.priority, resolved.tags) == ("mail", 9, '{"mail"}')
    assert type(resolved.queue) is str
    assert type(resolved.priority) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queue": ""}, "queue='': 1 to 128 bytes"),
        ({"queue": "ü" * 65}, "queue=.*: 1 to 128 bytes of UTF-8, not 130"),
        ({"queue": "a\nb"}, r"queue='a\\nb': without control characters"),
        ({"queue": "a\x7f"}, "queue=.*: without control characters"),
        ({"queue": "a\0"}, "queue=.*NUL"),
        ({"queue": "a\ud800"}, "queue=.*surrogate"),
        ({"queue": None}, "queue=None: a string"),
        ({"queue": b"mail"}, "queue=b'mail': a string"),
        ({"priority": 10}, "priority=10: an integer from -9 to 9"),
        ({"priority": -10}, "priority=-10"),
        ({"priority": 1.0}, "priority=1.0"),
        ({"priority": True}, "priority=True"),
        ({"priority": None}, "priority=None"),
        ({"priority": 10**5000}, "priority=<int>"),
        ({"max_attempts": 0}, "max_attempts=0: an integer from 1 to 32,767"),
        ({"max_attempts": 32_768}, "max_attempts=32768"),
        ({"max_attempts": Broken()}, "max_attempts=<Broken>"),
        ({"timeout": timedelta(0)}, "timeout=.*: more than 0; None for no limit"),
        ({"timeout": timedelta(seconds=-1)}, "timeout=.*: a timedelta, 0 or more"),
        ({"timeout": 60}, "timeout=60: a timedelta"),
        ({"timeout": timedelta.max}, "timeout=.*at most 100 years"),
        ({"delay": timedelta(microseconds=-1)}, "delay=.*: a timedelta, 0 or more"),
        ({"delay": 5}, "delay=5: a timedelta"),
        ({"delay": timedelta.max}, "delay=.*at most 100 years"),
        ({"run_at": NAIVE}, "run_at=.*: naive; give it a time zone"),
        ({"run_at": NOON.date()}, "run_at=.*: a datetime with a time zone"),
        ({"run_at": "2030-01-01"}, "run_at='2030-01-01': a datetime"),
        ({"run_at": NOON, "delay": timedelta(0)}, "run_at and delay: give one of them"),
        ({"expires_at": NAIVE}, "expires_at=.*: naive"),
        ({"expires_at": timedelta(1)}, "expires_at=.*: a datetime"),
        ({"expires_at": NOON, "run_at": NOON}, "expires_at=.*before its run_at"),
        ({"expires_at": NOON, "delay": timedelta(days=36_525)}, "expires_at=.*before its delay is over"),
        ({"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, "expires_at=.*: that has passed"),
        ({"run_at": datetime.max.replace(tzinfo=UTC)}, "run_at=.*: from 0001-01-02 to 9999-12-30"),
        ({"run_at": datetime.min.replace(tzinfo=UTC)}, "run_at=.*: from 0001-01-02"),
        (
            {"run_at": datetime.min.replace(tzinfo=timezone(timedelta(hours=1)))},
            "run_at=.*: date value",
        ),
        ({"run_at": NOON.replace(tzinfo=BrokenZone())}, "run_at=.*: no zone"),
        ({"unique": ""}, "unique='': at least 1 character"),
        ({"unique": 5}, "unique=5: a string"),
        ({"unique": "a\0"}, "unique=.*NUL"),
        ({"unique": "\udc00"}, "unique=.*surrogate"),
        ({"meta": [1]}, r"meta=\[1\]: a mapping"),
        ({"meta": {1: "a"}}, "meta: its keys are strings, and 1 is none"),
        ({"meta": "x" * 1000}, "meta='x{79}…: a mapping"),
        ({"tags": "urgent"}, "tags='urgent': a sequence of strings"),
        ({"tags": {"a"}}, "tags={'a'}: a sequence of strings"),
        ({"tags": [1]}, "tags: 1 is no string"),
        ({"tags": [""]}, "tags='': 1 to 100 bytes"),
        ({"tags": ["x" * 101]}, "tags=.*: 1 to 100 bytes of UTF-8, not 101"),
        ({"tags": ["\0"]}, "tags=.*NUL"),
        ({"tags": ["a"] * 21}, "tags: at most 20"),
        *(
            ({name: 1}, rf"{name}: no option of a job, .* unique=jobq\.Unique\({name}=…\)")
            for name in ("replace", "on_conflict", "period", "by_args", "until", "max_wait")
        ),
        ({"prority": 1}, "prority: no such option; there are queue, priority, run_at"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_mistake_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(options, DEFAULTS)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"a": {"b": float("nan")}}, r"^meta\.a\.b: nan is no JSON number"),
        ({"a": b"x"}, r"^meta\.a: bytes"),
        ({"a": "x" * 16_384}, r"^meta: the document has 16,392 bytes and may have 16,384"),
    ],
    ids=["nan", "bytes", "size"],
)
def test_meta_is_held_to_the_rules_of_arguments(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentsEncodeError, match=message):
        resolve({"meta": meta}, DEFAULTS)


def test_one_option_list_and_every_option_in_it_can_be_read() -> None:
    with pytest.raises(ConfigError) as caught:
        changes({"nothing": 1})
    known = str(caught.value).split("there are ")[1].split(", ")
    assert set(known) == set(get_type_hints(JobOptions))
    assert set(get_type_hints(JobOptions)) - set(get_type_hints(JobTypeOptions)) == {"run_at", "expires_at"}


class TestPrecedence:
    client = resolve({"queue": "client", "priority": 1, "max_attempts": 3, "timeout": None}, DEFAULTS)

    def test_a_call_counts_before_the_kind_and_that_before_the_client(self) -> None:
        job_type = JobType("k", dict, queue="kind", priority=2)
        resolved = resolve({"priority": 3}, job_type.resolved(self.client))
        assert resolved == DEFAULTS._replace(queue="kind", priority=3, max_attempts=3, timeout_s=None)

    def test_a_kind_serves_clients_with_different_defaults(self) -> None:
        job_type = JobType("k", dict, priority=2)
        for defaults in (DEFAULTS, self.client, DEFAULTS, self.client):
            assert job_type.resolved(defaults) == defaults._replace(priority=2)

    def test_a_kinds_options_are_resolved_once(self) -> None:
        job_type = JobType("k", dict, unique="only one", meta={"a": 1})
        assert job_type.resolved(self.client) is job_type.resolved(self.client)

    def test_a_moment_to_expire_is_held_against_the_kinds_delay(self) -> None:
        delayed = JobType("k", dict, delay=timedelta(days=36_525)).resolved(DEFAULTS)
        with pytest.raises(ConfigError, match="before its delay is over"):
            resolve({"expires_at": NOON}, delayed)
        assert resolve({"expires_at": NOON, "delay": None}, delayed).expires_at == NOON

    def test_a_moment_takes_the_place_of_the_kinds_delay(self) -> None:
        delayed = JobType("k", dict, delay=timedelta(minutes=5)).resolved(DEFAULTS)
        assert delayed.delay_s == 300
        at_noon = resolve({"run_at": NOON}, delayed)
        assert (at_noon.run_at, at_noon.delay_s) == (NOON, None)
        assert resolve({"delay": None}, delayed).delay_s is None
        assert resolve({"run_at": None}, delayed).delay_s == 300

    def test_none_takes_the_kinds_value_away(self) -> None:
        declared = JobType("k", dict, unique="x", meta={"a": 1}, tags=["t"], timeout=timedelta(1))
        resolved = resolve(
            {"unique": None, "meta": None, "tags": [], "timeout": None}, declared.resolved(DEFAULTS)
        )
        assert resolved == DEFAULTS._replace(timeout_s=None)

    def test_meta_replaces_and_does_not_merge(self) -> None:
        declared = JobType("k", dict, meta={"a": 1}).resolved(DEFAULTS)
        assert resolve({"meta": {"b": 2}}, declared).meta == '{"b":2}'

    @pytest.mark.parametrize("option", ["run_at", "expires_at"])
    def test_a_declaration_takes_no_moment(self, option: str) -> None:
        with pytest.raises(ConfigError, match=f"{option}: belongs to one job's enqueue"):
            declared_changes({option: NOON})


class TestUniqueKey:
    def test_it_is_what_the_sql_function_computes(self) -> None:
        # In the migrations: sha256 over convert_to over normalize, its first 16 bytes.
        assert unique_key("order 7") == hashlib.sha256(b"order 7").digest()[:16]

    def test_spellings_of_one_text_are_one_key(self) -> None:
        composed, decomposed = "caf\u00e9", "cafe\u0301"
        assert unique_key(composed) == unique_key(decomposed)
        assert resolve({"unique": decomposed}, DEFAULTS).unique_name == composed

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
    def test_any_text_makes_a_key_of_one_size_and_a_bounded_name(self, text: str) -> None:
        resolved = resolve({"unique": text}, DEFAULTS)
        assert resolved.unique_key is not None
        assert resolved.unique_name is not None
        assert len(resolved.unique_key) == 16
        assert len(resolved.unique_name) <= 200

    def test_long_keys_differ_beyond_the_part_that_is_shown(self) -> None:
        first, second = (resolve({"unique": "x" * 10_000 + end}, DEFAULTS) for end in "ab")
        assert first.unique_name == second.unique_name == "x" * 200
        assert first.unique_key != second.unique_key


class TestKind:
    @pytest.mark.parametrize("kind", ["k", "send_email", "a.b/c d", "ü" * 64, "一" * 42])
    def test_any_readable_name_will_do(self, kind: str) -> None:
        assert check_kind(kind) == kind

    @pytest.mark.parametrize("kind", ["", "ü" * 65, "a\tb", "a\0", "\ud800", "\x85"])
    def test_other_names_are_refused(self, kind: str) -> None:
        with pytest.raises(ConfigError, match=r"^kind="):
            check_kind(kind)

    @pytest.mark.parametrize("kind", [None, 5, b"k", print, ["k"]], ids=str)
    def test_what_is_no_name_is_refused_with_what_would_be_one(self, kind: object) -> None:
        with pytest.raises(ConfigError, match="a JobType, a handler, or a string"):
            check_kind(kind)

    @given(st.text(min_size=1))
    def test_what_passes_fits_the_database(self, kind: str) -> None:
        try:
            checked = check_kind(kind)
        except ConfigError:
            return
        assert checked == kind
        assert 1 <= len(checked.encode()) <= 128
        assert "\0" not in checked
        assert json.loads(json.dumps(checked)) == kind
