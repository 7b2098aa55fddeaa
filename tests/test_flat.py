"""Flat arguments go the short way to the same document, and all others the long one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jobq
from jobq._json.encode import encode
from jobq._json.flat import FlatWriter, flat_writer
from jobq._kinds.jobtype import prepare_many
from jobq._kinds.options import DEFAULTS
from tests.support.odd import fuzz, odd, one_of

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
class OwnConstructor:
    text: str = "a"
    number: int = 1

    def __init__(self) -> None:
        self.number = 2


@dataclass(slots=True)
class Slots:
    text: str = "a"
    number: int | None = 1


@dataclass
class Union:
    value: str | int | bool | None
    other: None = None


@dataclass
class Property:
    number: int  # pyright: ignore[reportRedeclaration]

    @property  # type: ignore[no-redef]
    def number(self) -> object:
        return float("nan")

    @number.setter
    def number(self, value: int) -> None:
        self.__dict__["number"] = value


@dataclass
class Answering:
    text: str

    def __getattr__(self, name: str) -> object:
        return "a"


@dataclass
class Rewritten:
    text: str

    def __getattribute__(self, name: str) -> object:
        return float("nan") if name == "text" else object.__getattribute__(self, name)


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
        both = f"{text}{maybe}"
        assert "\0" in both or "\\u0000" in both or not both.isprintable()
    else:
        assert document == encode(args)


@given(st.lists(st.builds(Flat, st.text(), st.integers(), st.booleans(), st.none() | st.text()), min_size=1))
def test_many_are_written_as_each_is_or_left_to_the_long_way(many: list[Flat]) -> None:
    documents = [writer(Flat).one(args, LIMIT) for args in many]
    assert writer(Flat).many(many, LIMIT) == (None if None in documents else documents)


# Around the bounds of machine words, and of what Python and msgspec read: 4,300 digits, the sign among them.
INTEGERS: Final = tuple(
    sign * number + more
    for sign in (1, -1)
    for number in (2**31, 2**53, 2**63, 2**64, 10**639, 10**640, 10**4298, 10**4299, 10**4300)
    for more in (-1, 0, 1)
)
members: Final = st.text() | st.integers() | st.booleans() | st.none() | one_of(INTEGERS) | odd


@st.composite
def anything(draw: st.DrawFn, cls: type) -> Any:
    """Return an object of a class: its members plain or odd, some of them deleted, others added."""
    value: Any = object.__new__(cls)
    names = [field.name for field in fields(cls)]
    added = [] if hasattr(cls, "__slots__") else ["stranger"]
    for name in (
        draw(st.lists(st.sampled_from([*names, *added]), unique=True)) if draw(st.booleans()) else names
    ):
        object.__setattr__(value, name, draw(members))
    return value


def said(encoder: Any, *args: object) -> str:
    try:
        return str(encoder(*args))
    except jobq.ArgumentsEncodeError as error:
        return f"refused: {error}"


@fuzz(60)
@given(st.data())
@pytest.mark.parametrize("cls", [Flat, One, Child, OwnConstructor, Slots, Union])
def test_whatever_an_object_holds_both_ways_write_it_alike_or_refuse_it_alike(
    cls: type, data: st.DataObject
) -> None:
    kind: jobq.JobType[Any] = jobq.JobType("k", cls)
    slow: jobq.JobType[Any] = jobq.JobType("k", cls)
    slow._flat = None  # type: ignore[misc]
    values = data.draw(st.lists(anything(cls), min_size=1, max_size=4))
    for value in values:
        assert said(kind.encode, value) == said(slow.encode, value)
    many, each = (
        said(
            lambda one: list(prepare_many([jobq.NewJob(one, value) for value in values], DEFAULTS).args), one
        )
        for one in (kind, slow)
    )
    assert many == each


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


@pytest.mark.parametrize("cls", [Flat, One, Child, OwnConstructor, Slots, Union])
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
        Property,
        Answering,
        Rewritten,
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
        Child("a", -(10**4299)),  # which Python reads, and msgspec does not
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
