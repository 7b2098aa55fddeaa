"""What an object becomes on its way to JSON: one step plainer, class by class.

The JSON writer knows str, int, float, bool, None, dict, list and tuple, and asks here for the
rest. A class is looked at once; after that its converter is a cached look-up. The forms are those
that msgspec and pydantic read back: ISO 8601 for times, strings for UUID and Decimal (a JSON
number would lose digits), an Enum's value, a model's fields by their wire names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, TypeAlias, cast

import msgspec

Converter: TypeAlias = Callable[[Any], object]

_MAX_STEP: Final = 60  # characters of a key that a path shows


class Unencodable(Exception):
    """A value that is refused.

    Attributes:
        reason: what is wrong with it.
        path: where it stands below the converted object, such as ``.items[2]``.
    """

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.path = path


def to_plain(value: object) -> object:
    """Return ``value`` one step plainer; the result may need another step.

    Raises:
        Unencodable: the value has no JSON form, or one that would not come back as it went.
    """
    convert: Converter = converter(type(value))  # type: ignore[arg-type]  # a class is hashable
    return convert(value)


@functools.lru_cache(maxsize=1024)
def converter(cls: type) -> Converter:
    """Return what makes an instance of ``cls`` one step plainer."""
    for known, convert in _KNOWN:
        if issubclass(cls, known):
            return convert
    if dataclasses.is_dataclass(cls):
        return _dataclass_converter(cls)
    if issubclass(cls, msgspec.Struct):
        return _struct_converter(cls)
    if is_pydantic_model(cast("object", cls)):
        return _plain_pydantic
    if issubclass(cls, Mapping):
        return dict
    return _refuse_unknown


def is_pydantic_model(cls: object) -> bool:
    """Whether ``cls`` is a pydantic (2) model, told without importing pydantic."""
    return hasattr(cls, "__pydantic_validator__") and hasattr(cls, "model_validate_json")


def step(key: object) -> str:
    """Write the path's step to an object's member, cut where the key is absurdly long."""
    if isinstance(key, str):
        if key.isidentifier() and len(key) <= _MAX_STEP:
            return f".{key}"
        key = key[: _MAX_STEP + 1]
    try:
        shown = ascii(key)
    except Exception:  # noqa: BLE001 - a key of the user's own, or an integer too long to show
        shown = type(key).__name__
    return f"[{shown}]" if len(shown) <= _MAX_STEP else f"[{shown[:_MAX_STEP]}…]"


def _dataclass_converter(cls: type) -> Converter:
    names = tuple(field.name for field in dataclasses.fields(cls))
    if len(names) < 2:  # attrgetter of one name returns a bare value
        return lambda value: {name: getattr(value, name) for name in names}
    values = operator.attrgetter(*names)
    known = frozenset(names)

    def convert(value: Any) -> object:
        members: dict[str, object] | None = getattr(value, "__dict__", None)
        if members is not None and members.keys() == known:
            return members  # read only from here on, and 0.3 µs less than a copy
        return dict(zip(names, values(value), strict=True))

    return convert


def _struct_converter(cls: type[msgspec.Struct]) -> Converter:
    config = cls.__struct_config__
    names, wire_names = cls.__struct_fields__, cls.__struct_encode_fields__
    if config.array_like:
        head = [] if config.tag is None else [config.tag]
        return lambda value: [*head, *(getattr(value, name) for name in names)]
    tag = {} if config.tag is None else {config.tag_field: config.tag}

    def convert(value: object) -> object:
        members = zip(wire_names, (getattr(value, name) for name in names), strict=True)
        return tag | {name: member for name, member in members if member is not msgspec.UNSET}

    return convert


def _plain_pydantic(model: Any) -> object:
    # pydantic writes some of what is refused elsewhere (NaN as null, a naive time as it is): the
    # same rule holds for every sort of model, so its Python values are looked at first.
    _judge(model.model_dump(mode="python", by_alias=True, round_trip=True), "")
    document: object = model.model_dump(mode="json", by_alias=True, round_trip=True)
    return document


def _judge(value: object, path: str) -> None:
    """Refuse what is refused everywhere; leave what only pydantic knows to pydantic."""
    if isinstance(value, dict):
        for key, member in cast("dict[object, object]", value).items():
            _judge(member, path + step(key))
    elif isinstance(value, list | tuple):
        for index, member in enumerate(cast("list[object]", value)):
            _judge(member, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise Unencodable(not_finite(value), path)
    elif isinstance(value, _JUDGED):
        try:
            to_plain(cast("object", value))
        except Unencodable as refused:
            raise Unencodable(refused.reason, path) from None
    elif hasattr(value, "get_secret_value"):
        raise Unencodable("a secret, which pydantic writes as asterisks; jobs keep no secrets", path)


def not_finite(value: object) -> str:
    """Say why a number without a finite value is refused."""
    return f"{value} is no JSON number"


def _plain_enum(value: Enum) -> object:
    return value.value


def _plain_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise Unencodable(not_finite(value))
    return str(value)


def _plain_datetime(value: datetime) -> str:
    offset = value.utcoffset()
    if offset is None:
        raise Unencodable("a naive datetime; give it a time zone (tzinfo)")
    if offset % timedelta(minutes=1):  # a local mean time of long ago; RFC 3339 has whole minutes
        value = value.astimezone(UTC)
    return value.isoformat()


def _plain_time(value: time) -> str:
    offset = value.utcoffset()
    if offset is None:
        raise Unencodable("a naive time; give it a time zone with a fixed offset (tzinfo)")
    if offset % timedelta(minutes=1):
        raise Unencodable("a time whose offset from UTC is no whole number of minutes")
    return value.isoformat()


def _plain_date(value: date) -> str:
    return value.isoformat()


def _plain_timedelta(value: timedelta) -> object:
    duration: object = msgspec.to_builtins(value)  # ISO 8601, such as P1DT2.5S
    return duration


def _refuse_bytes(value: object) -> object:
    raise Unencodable(f"{type(value).__name__}, which JSON lacks; encode it as text (base64, hex) yourself")


def _refuse_set(value: object) -> object:
    raise Unencodable(f"a {type(value).__name__}, which JSON lacks and has no order; pass a sorted list")


def _refuse_unknown(value: object) -> object:
    if isinstance(value, type):
        raise Unencodable(f"the class {value.__qualname__} itself, not an instance of it")
    cls = type(value)
    raise Unencodable(
        f"an object of {cls.__module__}.{cls.__qualname__}, which has no JSON form here;"
        " pass plain values, a dataclass, a TypedDict, or a pydantic or msgspec model"
    )


# Looked through in order: an Enum may also be a date, and a datetime is a date.
_KNOWN: Final[tuple[tuple[type | tuple[type, ...], Converter], ...]] = (
    (Enum, _plain_enum),
    (uuid.UUID, str),
    (Decimal, _plain_decimal),
    (datetime, _plain_datetime),
    (date, _plain_date),
    (time, _plain_time),
    (timedelta, _plain_timedelta),
    ((bytes, bytearray, memoryview), _refuse_bytes),
    ((set, frozenset), _refuse_set),
)
_JUDGED: Final = (Decimal, datetime, time, bytes, bytearray, memoryview, set, frozenset)
