"""A document goes in as one object and comes back as an equal one, or is refused with its path."""

from __future__ import annotations

import enum
import json
import math
import sys
import uuid  # noqa: TC003 - dataclasses look it up
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, cast
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobq._errors import ArgumentsDecodeError, ArgumentsEncodeError, ConfigError
from jobq._json import encode as _json
from jobq._json.arguments import ArgumentsDecoder
from jobq._json.encode import encode
from jobq._kinds.jobtype import JobType
from jobq._limits import MAX_ARGUMENTS_BYTES, MAX_DEPTH

pytestmark = pytest.mark.matrix  # json, dataclasses and annotations change with Python


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Place(enum.StrEnum):
    HOME = "home"


class OldStyle(str, enum.Enum):  # noqa: UP042 - whose str() is not its value
    A = "a"


class Member(NamedTuple):
    name: str
    age: int


class Address(TypedDict, total=False):
    street: str
    lines: list[str]


@dataclass(frozen=True)
class EmailArgs:
    to: str


@dataclass(frozen=True)
class UrgentEmailArgs(EmailArgs):
    stars: int = 5


@dataclass(frozen=True, slots=True)
class Slotted:
    name: str
    size: int = 0


@dataclass
class Nothing:
    pass


@dataclass
class Everything:
    text: str
    number: int
    ratio: float
    flag: bool
    maybe: str | None
    key: uuid.UUID
    price: Decimal
    at: datetime
    day: date
    clock: time
    wait: timedelta
    colour: Colour
    level: Level
    place: Place
    pair: tuple[int, str]
    many: list[Slotted]
    by_id: dict[int, str]
    by_key: dict[uuid.UUID, int]
    by_colour: dict[Colour, int]
    member: Member
    address: Address
    free: Any


class Item(msgspec.Struct, rename="camel", tag="item"):
    item_name: str
    note: str | msgspec.UnsetType = msgspec.UNSET


class Point(msgspec.Struct, array_like=True, tag="point"):
    x: int
    y: int = 0


class Order(pydantic.BaseModel):
    number: int = pydantic.Field(alias="orderNumber")
    total: Decimal
    at: datetime | None = None
    ratio: float = 0.0
    token: pydantic.SecretStr | None = None
    parts: list[Order] = []


class Loose(pydantic.BaseModel):
    value: Any = None


@dataclass
class Mixed:
    order: Order
    items: list[Item]
    points: list[Point]


def as_jsonb(text: str) -> str:
    """Spell a document as PostgreSQL's jsonb does: members by length, numbers without exponent."""

    def write(value: object) -> str:
        if isinstance(value, dict):
            keys = sorted(value, key=lambda key: (len(key.encode()), key.encode()))
            return "{" + ", ".join(f"{write(key)}: {write(value[key])}" for key in keys) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(map(write, value)) + "]"
        if isinstance(value, Decimal):
            return format(value or abs(value), "f")
        return json.dumps(value, ensure_ascii=False)

    return write(json.loads(text, parse_float=Decimal))


def type_name(value: object) -> str:
    return type(value).__name__


def through_the_database(value: Any, args_type: object = None) -> Any:
    return ArgumentsDecoder[Any]("kind", args_type or type(value)).decode(as_jsonb(encode(value)))


def refusal(value: object, **options: Any) -> ArgumentsEncodeError:
    with pytest.raises(ArgumentsEncodeError) as caught:
        encode(value, **options)
    return caught.value


def nested(depth: int) -> object:
    value: object = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
offsets = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
datetimes = st.datetimes(timezones=offsets | st.just(UTC) | st.just(ZoneInfo("America/New_York"))).filter(
    lambda moment: (
        datetime(2, 1, 1) < moment.replace(tzinfo=None) < datetime(9998, 1, 1)  # noqa: DTZ001
        # Python calls an ambiguous local time unequal to the same instant elsewhere
        and moment == moment.astimezone(UTC)
    )
)
integers = st.integers() | st.integers(-(10**400), 10**400)
floats = st.floats(allow_nan=False, allow_infinity=False)
everything = st.builds(
    Everything,
    text=texts,
    number=integers,
    ratio=floats,
    key=st.uuids(),
    price=st.decimals(allow_nan=False, allow_infinity=False),
    at=datetimes,
    clock=st.times(timezones=offsets),
    wait=st.timedeltas(),
    many=st.lists(st.builds(Slotted, texts, integers), max_size=3),
    pair=st.tuples(integers, texts),
    maybe=st.none() | texts,
    by_id=st.dictionaries(st.integers(), texts, max_size=3),
    by_key=st.dictionaries(st.uuids(), integers, max_size=3),
    by_colour=st.dictionaries(st.sampled_from(Colour), integers, max_size=3),
    member=st.builds(Member, texts, integers),
    address=st.fixed_dictionaries({}, optional={"street": texts, "lines": st.lists(texts, max_size=3)}),
    free=st.recursive(
        st.none() | st.booleans() | integers | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=10,
    ),
)


class TestWhatComesBack:
    @given(everything)
    def test_every_declared_type_comes_back_equal(self, value: Everything) -> None:
        back = through_the_database(value)
        assert back == value
        for name, member in vars(value).items():
            expected = datetime if name == "at" else type(member)
            assert type(getattr(back, name)) is expected

    @given(st.integers(min_value=-(10**4000), max_value=10**4000))
    def test_integers_of_any_size_come_back_exactly_even_untyped(self, number: int) -> None:
        assert through_the_database({"n": number}, Any) == {"n": number}

    @given(floats)
    def test_a_declared_float_is_a_float_however_the_database_spells_it(self, number: float) -> None:
        back = through_the_database(number, float)
        assert type(back) is float
        assert back == number

    @given(floats)
    @example(1e16)
    @example(1e23)
    @example(-1.7976931348623157e308)
    def test_a_float_of_an_untyped_document_is_the_same_float(self, number: float) -> None:
        document = {"n": [number, {"1e+23": f'"{number}, {number}'}], "\\": "1e+23"}
        back = through_the_database(document, dict)
        assert back == document
        assert type(back["n"][0]) is float

    def test_minus_zero_loses_its_sign(self) -> None:
        assert math.copysign(1, through_the_database([-0.0], Any)[0]) == 1

    @pytest.mark.parametrize(
        "value",
        [
            Item("lamp"),
            Item("lamp", note="red"),
            Point(1, 2),
            Order(orderNumber=1, total=Decimal("1.10"), at=datetime(2025, 1, 2, tzinfo=UTC)),
            Order(orderNumber=1, total=Decimal(1), parts=[Order(orderNumber=2, total=Decimal(2))]),
            Mixed(Order(orderNumber=1, total=Decimal("0.1")), [Item("a")], [Point(1)]),
            Slotted("a", 3),
            Member("a", 3),
            {"street": "x", "lines": ["y"]},
            "text",
            7,
            True,
            [1, "a", None],
        ],
        ids=type_name,
    )
    def test_models_and_builtins_come_back(self, value: object) -> None:
        assert through_the_database(value) == value

    def test_a_pydantic_dataclass_is_validated_by_pydantic(self) -> None:
        @pydantic.dataclasses.dataclass
        class Positive:
            n: int = pydantic.Field(gt=0)

        assert through_the_database(Positive(n=3)) == Positive(n=3)
        with pytest.raises(ArgumentsDecodeError, match=r"greater than 0 - at `\$\.n`"):
            ArgumentsDecoder[Any]("k", Positive).decode('{"n": -1}')

    def test_a_pydantic_root_model_comes_back(self) -> None:
        class Numbers(pydantic.RootModel[list[int]]):
            pass

        assert through_the_database(Numbers([1, 2])) == Numbers([1, 2])

    def test_the_same_instant_comes_back_from_an_ambiguous_or_odd_local_time(self) -> None:
        twice = datetime(2025, 10, 26, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1)
        long_ago = datetime(1880, 1, 1, tzinfo=ZoneInfo("Europe/Amsterdam"))  # +00:19:32
        for moment in (twice, long_ago):
            assert through_the_database(moment).timestamp() == moment.timestamp()

    def test_a_field_that_init_does_not_take_comes_back(self) -> None:
        @dataclass
        class Counted:
            a: int
            b: int = field(init=False, default=5)

            def __post_init__(self) -> None:
                self.c = "no field, so it is not written"

        assert encode(Counted(1)) == '{"a":1,"b":5}'
        assert through_the_database(Counted(1)) == Counted(1)

    def test_a_subclass_instance_goes_in_whole_and_comes_back_as_the_declared_type(self) -> None:
        assert encode(UrgentEmailArgs("a", 3)) == '{"to":"a","stars":3}'
        assert through_the_database(UrgentEmailArgs("a"), EmailArgs) == EmailArgs("a")


class TestWhatIsWritten:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (EmailArgs("a@b"), '{"to":"a@b"}'),
            (None, "null"),
            ({"a": (1, 2)}, '{"a":[1,2]}'),
            (Member("a", 1), '["a",1]'),
            ([Colour.RED, Level.HIGH, Place.HOME, OldStyle.A], '["red",2,"home","a"]'),
            (
                {Colour.RED: 1, Level.LOW: 2, Place.HOME: 3, OldStyle.A: 4},
                '{"red":1,"1":2,"home":3,"a":4}',
            ),
            ({date(2025, 1, 2): 1, Decimal("1.5"): 2}, '{"2025-01-02":1,"1.5":2}'),
            (MappingProxyType({"a": 1}), '{"a":1}'),
            (Decimal("1.10"), '"1.10"'),
            (timedelta(days=1, seconds=2.5), '"P1DT2.5S"'),
            (datetime(2025, 1, 2, 3, tzinfo=UTC), '"2025-01-02T03:00:00+00:00"'),
            (Item("lamp"), '{"type":"item","itemName":"lamp"}'),
            ("äöü 😀 \u2028", '"äöü 😀 \u2028"'),
            (Nothing(), "{}"),
        ],
        ids=type_name,
    )
    def test_the_document(self, value: object, text: str) -> None:
        assert encode(value) == text

    @pytest.mark.parametrize(
        "value",
        ["\\u0000", '\\\\u0000 "1":', {"1": 2, "true": 3, "null": 4}, {"k": "\\ud800"}, "\U0001f600"],
        ids=type_name,
    )
    def test_what_only_looks_odd_passes_unchanged(self, value: object) -> None:
        assert json.loads(encode(value)) == value

    @given(everything)
    def test_both_passes_write_the_same(self, value: Everything) -> None:
        slow = _json._walk(value, "$")
        assert json.loads(encode(value)) == json.loads(encode(slow))

    def test_the_writer_without_the_c_accelerator_writes_the_same(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        value = {"a": [1, 2.5, None, True, "ä"], "b": {"c": EmailArgs("x")}}
        expected = encode(value)
        monkeypatch.setattr(json.encoder, "c_make_encoder", None)
        monkeypatch.setattr(_json, "_write", _json._make_writer())
        assert encode(value) == expected
        assert refusal({"a": math.nan}).path == "$.a"


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("culprit", "reason"),
        [
            (math.nan, "nan is no JSON number"),
            (-math.inf, "-inf is no JSON number"),
            (Decimal("NaN"), "NaN is no JSON number"),
            (Decimal("-Infinity"), "-Infinity is no JSON number"),
            ("a\0b", "a NUL character"),
            ("a\ud800b", "a lone surrogate at position 1"),
            ("\ud83d\ude00", "a lone surrogate at position 0"),
            (datetime(2025, 1, 1), "a naive datetime"),  # noqa: DTZ001
            (time(1, 2), "a naive time"),
            (time(1, tzinfo=ZoneInfo("Europe/Berlin")), "a naive time"),
            (time(1, tzinfo=timezone(timedelta(seconds=1))), "no whole number of minutes"),
            (b"x", "bytes, which JSON lacks"),
            (bytearray(b"x"), "bytearray, which JSON lacks"),
            (memoryview(b"x"), "memoryview, which JSON lacks"),
            ({1}, "a set, which JSON lacks"),
            (frozenset(), "a frozenset, which JSON lacks"),
            (10**5000, "an integer of over 4,300 digits"),
            (object(), "an object of builtins.object"),
            (1j, "an object of builtins.complex"),
            ((n for n in [1]), "an object of builtins.generator"),
            (EmailArgs, "the class EmailArgs itself"),
            (datetime.min.replace(tzinfo=timezone(timedelta(seconds=1))), "date value out of range"),
            (Order(orderNumber=1, total=Decimal(1), token=pydantic.SecretStr("x")), "a secret"),
        ],
        ids=type_name,
    )
    def test_a_culprit_is_named_with_its_path_wherever_it_stands(self, culprit: Any, reason: str) -> None:
        below = ".token" if hasattr(culprit, "token") else ""
        for value, path in [
            (culprit, "$"),
            ({"customer": {"names": ["a", culprit]}}, "$.customer.names[1]"),
            ({"first name": (1, {"x": culprit})}, "$['first name'][1].x"),
            ([EmailArgs(culprit)], "$[0].to"),
            (Item(culprit), "$.itemName"),
            (MappingProxyType({"😀": culprit}), "$['\\U0001f600']"),
        ]:
            error = refusal(value)
            assert error.path == path + below
            assert reason in error.reason
            assert error.index is None

    @pytest.mark.parametrize(
        ("value", "path", "reason"),
        [
            (Loose(value=math.nan), "$.value", "nan is no JSON number"),
            (Loose(value={"a": [{1}]}), "$.value.a[0]", "a set"),
            (Loose(value=b"x"), "$.value", "bytes"),
            (Order(orderNumber=1, total=Decimal(1), at=datetime(2025, 1, 1)), "$.at", "naive"),  # noqa: DTZ001
            ([Loose(value=Loose(value="a\0"))], "$[0].value.value", "NUL"),
        ],
        ids=type_name,
    )
    def test_a_pydantic_model_is_held_to_the_same_rules(self, value: object, path: str, reason: str) -> None:
        error = refusal(value)
        assert error.path == path
        assert reason in error.reason

    @pytest.mark.parametrize(
        ("key", "path", "reason"),
        [
            (True, "$[True]", "a key of type bool"),
            (None, "$[None]", "a key of type NoneType"),
            (1.5, "$[1.5]", "a key of type float"),
            (math.nan, "$[nan]", "a key of type float"),
            ((1, 2), "$[(1, 2)]", "a key of type tuple"),
            (b"x", "$[b'x']", "bytes"),
            ("a\0", "$['a\\x00']", "a NUL character"),
            ("\udc00", "$['\\udc00']", "a lone surrogate"),
            (10**5000, "$[int]", "an integer of over 4,300 digits"),
            ("x" * 500 + "\0", "$['" + "x" * 59 + "…]", "a NUL character"),
        ],
        ids=type_name,
    )
    def test_a_key_that_would_not_come_back_is_refused(self, key: object, path: str, reason: str) -> None:
        error = refusal({key: 1})
        assert error.path == path
        assert reason in error.reason

    def test_keys_that_fall_together_are_refused(self) -> None:
        assert "another key is written ['1'] too" in refusal({1: "a", "1": "b"}).reason
        assert refusal({"x": {Colour.RED: 1, "red": 2}}).path == "$.x.red"

    def test_a_cycle_is_named_where_it_closes(self) -> None:
        looped: dict[str, Any] = {"a": [1]}
        looped["a"].append(looped)
        assert refusal(looped).path == "$.a[1]"
        assert "a cycle" in refusal(looped).reason

    def test_the_same_object_twice_is_no_cycle(self) -> None:
        shared = {"1": [1]}
        assert json.loads(encode([shared, shared])) == [{"1": [1]}, {"1": [1]}]

    def test_nesting_is_bounded_whatever_the_stack_would_take(self) -> None:
        assert json.loads(encode(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
        for depth in (MAX_DEPTH + 1, 500, 20_000):
            assert "nested deeper than 100 levels" in refusal(nested(depth)).reason
        assert "nested deeper" in refusal(["x" * 500, nested(MAX_DEPTH)]).reason

    def test_many_containers_side_by_side_are_not_deep(self) -> None:
        value: list[dict[str, list[int]]] = [{"a": []}] * 5000
        assert json.loads(encode(value)) == value
        assert json.loads(encode("[{" * 5000)) == "[{" * 5000

    def test_deep_nesting_on_a_nearly_full_stack_is_refused_and_not_a_crash(self) -> None:
        def at_depth(frames: int) -> ArgumentsEncodeError:
            return refusal({1: nested(MAX_DEPTH - 1)}) if frames == 0 else at_depth(frames - 1)

        used = len(__import__("inspect").stack(0))
        error = at_depth(sys.getrecursionlimit() - used - 100)
        assert "deeper than the stack here allows" in error.reason

    def test_a_model_that_fails_to_dump_is_refused_with_its_error(self) -> None:
        @dataclass
        class Unset:
            a: int
            b: int

        value = Unset(1, 2)
        del value.b
        error = refusal({"x": value})
        assert error.path == "$.x"
        assert "has no attribute 'b'" in error.reason
        assert isinstance(error.__cause__, AttributeError)

    @pytest.mark.parametrize("filler", ["x", "ä", "😀"])
    def test_the_limit_counts_bytes_of_utf8(self, filler: str) -> None:
        size = len(filler.encode())
        fits = filler * ((MAX_ARGUMENTS_BYTES - 2) // size)
        assert len(encode(fits).encode()) <= MAX_ARGUMENTS_BYTES
        assert "and may have 1,048,576" in refusal(fits + filler).reason
        assert encode(filler, max_bytes=2 + size)
        assert refusal(filler, max_bytes=1 + size).path == "$"

    def test_a_document_over_the_limit_names_its_largest_part(self) -> None:
        error = refusal({"a": 1, "body": "x" * 50, "b": 2}, max_bytes=50, root="result")
        assert str(error) == (
            "result: the document has 73 bytes and may have 50; its largest part is .body with 52"
        )
        assert "largest" not in refusal(["x" * 50], max_bytes=50).reason


class TestDecoding:
    @pytest.mark.parametrize("args_type", [Any, object, dict, dict[str, Any]], ids=str)
    def test_an_untyped_kind_gets_plain_values(self, args_type: object) -> None:
        text = '{"a": [1, 2.5, null, true], "big": 123456789012345678901234567890}'
        expected = {"a": [1, 2.5, None, True], "big": 123456789012345678901234567890}
        assert ArgumentsDecoder[Any]("k", args_type).decode(text) == expected
        assert ArgumentsDecoder[Any]("k", args_type).decode(text.encode()) == expected

    def test_dict_takes_objects_only(self) -> None:
        with pytest.raises(ArgumentsDecodeError, match="Expected `object`, got `array`"):
            ArgumentsDecoder[Any]("k", dict).decode("[]")

    @pytest.mark.parametrize("args_type", [None, type(None)])
    @pytest.mark.parametrize("raw", ["null", "{}", '{"newer": 1}'])
    def test_a_kind_without_arguments_takes_null_and_what_sql_stores_by_default(
        self, args_type: object, raw: str
    ) -> None:
        assert ArgumentsDecoder[Any]("k", args_type).decode(raw) is None

    def test_a_kind_without_arguments_takes_nothing_else(self) -> None:
        with pytest.raises(ArgumentsDecodeError, match="got `list`"):
            ArgumentsDecoder[Any]("k", None).decode("[1]")

    @pytest.mark.parametrize(
        ("args_type", "text"),
        [
            (EmailArgs, '{"to":"a","x":1}'),
            (Address, '{"street":"a","x":1}'),
            (Item, '{"itemName":"a","x":1}'),
        ],
    )
    def test_members_of_newer_code_are_skipped(self, args_type: type, text: str) -> None:
        back = ArgumentsDecoder[Any]("k", args_type).decode(text)
        assert back in (EmailArgs("a"), {"street": "a"}, Item("a"))

    @pytest.mark.parametrize(
        ("args_type", "text", "message"),
        [
            (EmailArgs, '{"to": 1}', r"arguments of kind 'k': Expected `str`, got `int` - at `\$\.to`"),
            (EmailArgs, "{}", "missing required field `to`"),
            (EmailArgs, "[]", "Expected `object`, got `array`"),
            (EmailArgs, "{", "truncated"),
            (int, "1.5", "Expected `int`, got `float`"),
            (Order, '{"orderNumber":"x","total":[]}', r"integer.* - at `\$\.orderNumber`; Decimal input"),
            (Order, '{"orderNumber":1,"total":1,"parts":[{}]}', r"at `\$\.parts\[0\]\.orderNumber`"),
            (list[Order], '[{"orderNumber":"x"}]', r"valid integer"),
            (list[complex], "[1]", r"`builtins\.complex` has no JSON form here"),
        ],
    )
    def test_a_document_that_does_not_fit_says_where(
        self, args_type: object, text: str, message: str
    ) -> None:
        with pytest.raises(ArgumentsDecodeError, match=message):
            ArgumentsDecoder[Any]("k", args_type).decode(text)

    def test_an_error_of_many_parts_is_cut(self) -> None:
        class Ten(pydantic.BaseModel):
            numbers: list[int]

        with pytest.raises(ArgumentsDecodeError, match=r"; and 5 more$"):
            ArgumentsDecoder[Any]("k", Ten).decode(json.dumps({"numbers": ["x"] * 10}))

    def test_whatever_a_models_own_code_raises_is_a_decode_error(self) -> None:
        @dataclass
        class Picky:
            a: int

            def __post_init__(self) -> None:
                raise LookupError("not today")

        with pytest.raises(ArgumentsDecodeError, match="LookupError: not today") as caught:
            ArgumentsDecoder[Any]("k", Picky).decode('{"a": 1}')
        assert caught.value.__cause__ is not None

    def test_a_type_that_cannot_be_decoded_shows_when_it_is_prepared(self) -> None:
        @dataclass
        class Forward:
            a: NotDefined  # type: ignore[name-defined]  # noqa: F821

        decoder = ArgumentsDecoder[Any]("k", Forward)
        with pytest.raises(ConfigError, match=r"kind 'k': arguments of type .*Forward cannot be decoded"):
            decoder.prepare()
        with pytest.raises(ArgumentsDecodeError, match="cannot be decoded"):
            decoder.decode("{}")

    def test_a_decoder_is_built_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decoder = ArgumentsDecoder[Any]("k", EmailArgs)
        decoder.prepare()
        monkeypatch.setattr("jobq._json.arguments._decoder_of", None)
        decoder.prepare()
        assert decoder.decode('{"to":"a"}') == EmailArgs("a")


@dataclass(frozen=True)
class Purchase:
    number: int
    to: EmailArgs
    lines: list[Member] = field(default_factory=list)
    at: datetime | None = None
    price: Decimal | None = None


class Postcard(msgspec.Struct):
    to: str


class Contact(pydantic.BaseModel):
    to: str


def looks_away(_: dict[str, Any]) -> dict[str, Any]:
    raise AssertionError("a new document needs no upgrade")


class TestTypesOfMembers:
    """Nothing checks a dataclass when it is made; what no worker could decode is refused at enqueue."""

    @pytest.mark.parametrize(
        ("args", "path"),
        [
            (EmailArgs(5), "$.to"),  # type: ignore[arg-type]
            (Postcard(None), "$.to"),  # type: ignore[arg-type]
            (Slotted("a", "b"), "$.size"),  # type: ignore[arg-type]
            (Purchase("7", EmailArgs("a")), "$.number"),  # type: ignore[arg-type]
            (Purchase(True, EmailArgs("a")), "$.number"),
            (Purchase(7, EmailArgs(b"a".hex)), "$.to.to"),  # type: ignore[arg-type]
            (Purchase(7, EmailArgs("a"), [Member("a", 1), Member("b", 1.5)]), "$.lines[1][1]"),  # type: ignore[arg-type]
            (Purchase(7, EmailArgs("a"), at="tomorrow"), "$.at"),  # type: ignore[arg-type]
        ],
    )
    def test_a_member_of_another_type_is_refused_with_its_path(self, args: object, path: str) -> None:
        with pytest.raises(ArgumentsEncodeError) as refused:
            JobType("k", type(args)).encode(args)
        assert refused.value.path == path

    @pytest.mark.parametrize(
        ("args_type", "args"),
        [
            (dict[str, int], {"a": "b"}),
            (list[EmailArgs], [EmailArgs("a"), Nothing()]),
            (Address, {"lines": "one"}),
        ],
    )
    def test_so_is_one_of_a_container(self, args_type: Any, args: object) -> None:
        job_type: JobType[Any] = JobType("k", args_type)
        with pytest.raises(ArgumentsEncodeError, match=r"^\$.+: .+, by the type of kind 'k'"):
            job_type.encode(args)

    @pytest.mark.parametrize(
        "args",
        [
            Purchase(2**70, EmailArgs("ü"), [Member("a", 1)], datetime.now(UTC), Decimal("1.10")),
            UrgentEmailArgs("a", 5),
            Postcard("a"),
            Slotted("a", 1),
            Nothing(),
            Contact(to="a"),
        ],
    )
    def test_what_comes_back_is_taken(self, args: object) -> None:
        job_type: JobType[Any] = JobType("k", type(args), upgrade=looks_away)
        assert job_type.encode(args)

    def test_a_subclass_is_held_to_the_declared_type(self) -> None:
        assert JobType("k", EmailArgs).encode(UrgentEmailArgs("a", "many"))  # type: ignore[arg-type]

    def test_a_type_that_only_a_worker_can_resolve_is_left_to_it(self) -> None:
        @dataclass
        class Elsewhere:
            to: OfAnotherModule  # type: ignore[name-defined]  # noqa: F821

        assert JobType("k", Elsewhere).encode(Elsewhere("a")) == '{"to":"a"}'

    def test_what_a_model_raises_at_that_is_told(self) -> None:
        @dataclass
        class Even:
            number: int

            def __post_init__(self) -> None:
                if self.number % 2:
                    raise ValueError("odd")

        args = Even(2)
        args.number = 3
        with pytest.raises(ArgumentsEncodeError, match="odd"):
            JobType("k", Even).encode(args)


class TestUpgrade:
    @staticmethod
    def upgrade(document: dict[str, Any]) -> dict[str, Any]:
        if "address" in document:
            document["to"] = document.pop("address")
        return document

    def test_old_and_new_documents_both_decode(self) -> None:
        decoder = ArgumentsDecoder[Any]("k", EmailArgs, self.upgrade)
        assert decoder.decode('{"address": "a"}') == EmailArgs("a")
        assert decoder.decode('{"to": "a"}') == EmailArgs("a")

    def test_it_may_put_in_values_and_not_only_json(self) -> None:
        @dataclass
        class Timed:
            at: datetime

        moment = datetime(2025, 1, 1, tzinfo=UTC)
        assert ArgumentsDecoder[Any]("k", Timed, lambda _: {"at": moment}).decode("{}") == Timed(moment)

    def test_a_kind_that_took_nothing_starts_from_an_empty_document(self) -> None:
        decoder = ArgumentsDecoder[Any]("k", EmailArgs, lambda document: {"to": "nobody", **document})
        assert decoder.decode("null") == EmailArgs("nobody")

    def test_other_documents_are_decoded_as_they_are(self) -> None:
        decoder = ArgumentsDecoder[Any]("k", list[int], lambda _: {})
        assert decoder.decode("[1]") == [1]

    def test_its_errors_are_decode_errors(self) -> None:
        decoder = ArgumentsDecoder[Any]("k", EmailArgs, lambda document: document["missing"])
        with pytest.raises(ArgumentsDecodeError, match="KeyError: 'missing'"):
            decoder.decode("{}")
        with pytest.raises(ArgumentsDecodeError, match=r"\$\.to: nan"):
            ArgumentsDecoder[Any]("k", EmailArgs, lambda _: {"to": math.nan}).decode("{}")


def unwritten(name: str) -> str:
    """Return a name as a module has it that was just loaded: no JSON writer has seen this string."""
    return "".join(list(name))


@pytest.mark.parametrize("name", ["größe", "日本", "naïve"])
def test_members_with_names_beyond_ascii_are_read_in_a_process_that_never_wrote_them(name: str) -> None:
    plain = make_dataclass("plain", [(unwritten(name), int)])
    assert ArgumentsDecoder[Any]("k", plain).decode(f'{{"{name}":5}}') == plain(5)
    optional = make_dataclass("optional", [(unwritten(name), int, 0)])
    nested = make_dataclass("nested", [("inner", list[optional | None])])  # type: ignore[valid-type]
    document = f'{{"inner":[{{"{name}":5}}]}}'
    assert ArgumentsDecoder[Any]("k", nested).decode(document) == nested([optional(5)])
    typed: Any = cast("Any", TypedDict)("typed", {unwritten(name): int}, total=False)
    assert ArgumentsDecoder[Any]("k", dict[str, typed]).decode(f'{{"a":{{"{name}":5}}}}') == {"a": {name: 5}}


@dataclass
class Tree:
    leaves: int
    branches: list[Tree]


def test_a_type_that_holds_itself_is_read() -> None:
    assert ArgumentsDecoder[Any]("k", Tree).decode(
        '{"leaves":1,"branches":[{"leaves":2,"branches":[]}]}'
    ) == Tree(1, [Tree(2, [])])
