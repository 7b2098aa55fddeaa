"""Flat arguments go the short way to the same document, and all others the long one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq._json.encode import encode
from jobq._json.flat import FlatWriter, flat_writer

LIMIT = 1_000_000


@dataclass
class Flat:
    text: str
    number: int
    flag: bool
    _maybe: str | None = None
    also: int | None = None


@dataclass(frozen=True, slots=True)
class One:
    text: str


@dataclass(frozen=True)
class Child(One):
    number: int


@dataclass
class Checked:
    text: str

    def __post_init__(self) -> None:
        raise ValueError(self.text)


@dataclass
class Nested:
    one: One


@dataclass
class Floating:
    number: float


@dataclass
class Constrained:
    text: Annotated[str, msgspec.Meta(max_length=3)]


@dataclass
class NotInitialised:
    text: str
    number: int = field(default=1, init=False)


@dataclass
class Empty:
    pass


@dataclass
class Unresolvable:
    text: Elsewhere  # type: ignore[name-defined]  # noqa: F821


@dataclass
class Mapping(dict[str, int]):
    number: int


def writer(cls: type) -> FlatWriter:
    found = flat_writer(cls)
    assert found is not None
    return found


@given(st.text(), st.integers(), st.booleans(), st.none() | st.text())
def test_the_document_is_the_same_or_left_to_the_long_way(
    text: str, number: int, flag: bool, maybe: str | None
) -> None:
    args = Flat(text, number, flag, maybe)
    document = writer(Flat).one(args, LIMIT)
    if document is None:
        assert "\0" in f"{text}{maybe}" or not f"{text}{maybe}".isprintable()
    else:
        assert document == encode(args)


@given(st.lists(st.builds(Flat, st.text(), st.integers(), st.booleans(), st.none() | st.text()), min_size=1))
def test_many_are_written_as_each_is_or_left_to_the_long_way(many: list[Flat]) -> None:
    documents = [writer(Flat).one(args, LIMIT) for args in many]
    assert writer(Flat).many(many, LIMIT) == (None if None in documents else documents)


@given(
    st.recursive(
        st.text() | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_no_document_has_a_bare_line_break_which_stands_between_documents_on_their_way(value: object) -> None:
    with contextlib.suppress(jobq.ArgumentsEncodeError):
        assert "\n" not in encode(value)


@pytest.mark.parametrize("cls", [Flat, One, Child])
def test_dataclasses_of_plain_members_are_flat(cls: type) -> None:
    assert flat_writer(cls) is not None


@pytest.mark.parametrize(
    "cls",
    [
        Checked,
        Nested,
        Floating,
        Constrained,
        NotInitialised,
        Empty,
        Unresolvable,
        Mapping,
        dict,
        str,
        None,
        list[int],
        Any,
    ],
)
def test_all_others_are_not(cls: object) -> None:
    assert flat_writer(cls) is None


@pytest.mark.parametrize(
    "args",
    [
        One(5),  # type: ignore[arg-type]
        One(b"a"),  # type: ignore[arg-type]
        One(None),  # type: ignore[arg-type]
        One(float("nan")),  # type: ignore[arg-type]
        One("a\0"),
        One("\ud800"),
        Child("a", True),
        Child("a", 10**5000),
        Flat("a", 1, 1),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_goes_the_long_way_and_is_refused_there(args: object) -> None:
    assert writer(type(args)).one(args, LIMIT) is None
    assert writer(type(args)).many([args], LIMIT) is None
    with pytest.raises(jobq.ArgumentsEncodeError):
        jobq.JobType("k", type(args)).encode(args)


def test_a_subclass_and_a_document_over_the_limit_go_the_long_way() -> None:
    one, many = writer(One)
    assert one(Child("a", 1), LIMIT) is None
    assert many([One("a"), Child("a", 1)], LIMIT) is None
    size = len(encode(One("ü")).encode())
    assert one(One("ü"), size) == '{"text":"ü"}'
    assert one(One("ü"), size - 1) is None
    assert many([One("ü"), One("u")], size) == ['{"text":"ü"}', '{"text":"u"}']
    assert many([One("u"), One("ü")], size - 1) is None
    with pytest.raises(jobq.ArgumentsEncodeError, match=f"has {size} bytes and may have {size - 1}"):
        jobq.JobType("k", One).encode(One("ü"), size - 1)
