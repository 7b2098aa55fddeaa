"""Flat arguments go the short way to the same document, and all others the long one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq._json.encode import encode
from jobq._json.flat import flat_writer

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


@given(st.text(), st.integers(), st.booleans(), st.none() | st.text())
def test_the_document_is_the_same_or_left_to_the_long_way(
    text: str, number: int, flag: bool, maybe: str | None
) -> None:
    write = flat_writer(Flat)
    assert write is not None
    args = Flat(text, number, flag, maybe)
    document = write(args, LIMIT)
    if document is None:
        assert "\0" in f"{text}{maybe}" or not f"{text}{maybe}".isprintable()
    else:
        assert document == encode(args)


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
    write = flat_writer(type(args))
    assert write is not None
    assert write(args, LIMIT) is None
    with pytest.raises(jobq.ArgumentsEncodeError):
        jobq.JobType("k", type(args)).encode(args)


def test_a_subclass_and_a_document_over_the_limit_go_the_long_way() -> None:
    write = flat_writer(One)
    assert write is not None
    assert write(Child("a", 1), LIMIT) is None
    size = len(encode(One("ü")).encode())
    assert write(One("ü"), size) == '{"text":"ü"}'
    assert write(One("ü"), size - 1) is None
    with pytest.raises(jobq.ArgumentsEncodeError, match=f"has {size} bytes and may have {size - 1}"):
        jobq.JobType("k", One).encode(One("ü"), size - 1)
