"""Arguments that are what most are: a dataclass of strings, integers and booleans. Written in one go.

What `_json.encode` and the check of what was written do for any object, a look at the members' types does
for such a class: when each is just of its declared type, msgspec writes the same document as `encode`, and
a worker can read it. That is two calls of C and one of Python in the place of ten, and after a wait for
a commit, when everything is cold, that makes 10 µs. Many objects are looked at and written by C alone:
0.4 µs each in a thousand, and 1.1 one after the other.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import operator
import sys
import types
import typing
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    _Shapes: TypeAlias = frozenset[tuple[type, ...]]

_PLAIN: Final = frozenset({str, int, bool, type(None)})
_NUL: Final = b"\\u0000"  # PostgreSQL cannot hold one
_MAX_SHAPES: Final = 64  # each optional member doubles them
_SHORT: Final = sys.int_info.str_digits_check_threshold  # so many digits can always be read
_PLAIN_BITS: Final = 64

_encoder: Final = msgspec.json.Encoder()
_write: Final = _encoder.encode
_write_lines: Final = _encoder.encode_lines


class FlatWriter(NamedTuple):
    """Writes the objects of one class.

    Attributes:
        one: takes an object and the most bytes that its document may have, and returns ``None`` for what
            has to go the long way: it is of another class, has a member of another type than declared,
            or holds what cannot be stored.
        many: does the same for many objects; ``None`` when one of them has to go the long way.
    """

    one: Callable[[object, int], str | None]
    many: Callable[[Sequence[object], int], list[str] | None]


def flat_writer(cls: object) -> FlatWriter | None:
    """Return what writes such a class's objects, or ``None`` when the class is of another sort."""
    shapes = _shapes_of(cls)
    if shapes is None:
        return None
    members = _Members.of_class(cls)
    return FlatWriter(_one_writer(cls, members, shapes), _many_writer(cls, members, shapes))


class _Members(NamedTuple):
    """What reads the members of a class's objects as msgspec does.

    A member that was deleted, or that a constructor of the user's own did not set, may have its default on
    the class. msgspec leaves it out, so then only an object's own members are looked at.

    Attributes:
        own: takes an object, and returns what holds its members; ``None`` where it is the object itself.
        get: returns the members from there, the last one twice: a single one would make no tuple.
    """

    own: Callable[[Any], Any] | None
    get: Callable[[Any], tuple[object, ...]]

    @classmethod
    def of_class(cls, wanted: Any) -> _Members:
        """Return what reads the objects of a dataclass."""
        names = [field.name for field in dataclasses.fields(wanted)]
        if all(map(_is_slot, _on_class(wanted))):
            return cls(None, operator.attrgetter(*names, names[-1]))
        return cls(operator.attrgetter("__dict__"), operator.itemgetter(*names, names[-1]))

    def of_each(self, values: Iterable[object]) -> Iterator[tuple[object, ...]]:
        """Return the members of each object, read by C alone."""
        return map(self.get, values if self.own is None else map(self.own, values))


def _one_writer(cls: object, members: _Members, shapes: _Shapes) -> Callable[[object, int], str | None]:
    wanted: Any = cls
    own, get = members

    def write(value: object, max_bytes: int) -> str | None:
        if type(value) is not wanted:
            return None
        try:
            found = get(value if own is None else own(value))
            if tuple(map(type, found)) not in shapes:
                return None
            document = _write(value)
        except Exception:  # noqa: BLE001 - a lone surrogate, a member deleted: the long way says where
            return None
        if _NUL in document or len(document) > max_bytes:
            return None
        return None if len(document) > _SHORT and _is_odd(found) else document.decode()

    return write


def _many_writer(
    cls: object, members: _Members, shapes: _Shapes
) -> Callable[[Sequence[object], int], list[str] | None]:
    def write(values: Sequence[object], max_bytes: int) -> list[str] | None:
        try:
            if set(map(type, values)) != {cls}:
                return None
            columns = zip(*members.of_each(values), strict=True)
            if not shapes.issuperset(zip(*(map(type, column) for column in columns), strict=True)):
                return None
            lines = _write_lines(values)
        except Exception:  # noqa: BLE001 - as above
            return None
        if _NUL in lines or (len(lines) > max_bytes and max(map(len, lines.split(b"\n"))) > max_bytes):
            return None
        documents = lines.decode().split("\n")[:-1]
        if max(map(len, documents)) > _SHORT and any(map(_is_odd, members.of_each(values))):
            return None
        return documents

    return write


def _is_odd(members: Iterable[object]) -> bool:
    """Whether there is an integer that may have more digits than Python or msgspec reads."""
    return any(type(member) is int and member.bit_length() > _PLAIN_BITS for member in members)


def _shapes_of(cls: object) -> _Shapes | None:
    """Return the tuples of types that an object's members may have, the last one's twice."""
    if not isinstance(cls, type) or not all(map(dataclasses.is_dataclass, cls.__mro__[:-1])):
        return None
    if hasattr(cls, "__post_init__") or hasattr(cls, "__pydantic_validator__"):
        return None  # it may refuse values of the right types
    if any("__getattribute__" in vars(one) or "__getattr__" in vars(one) for one in cls.__mro__[:-1]):
        return None  # it may say that it has other members than it has
    if any(inspect.isdatadescriptor(one) and not _is_slot(one) for one in _on_class(cls)):
        return None  # likewise
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
        # not those without init: what stands on the class alone, msgspec leaves out
        choices = [
            _plain_types(hints[field.name]) if field.init else frozenset[type]()
            for field in dataclasses.fields(cls)
        ]
    except Exception:  # noqa: BLE001 - names that are not known yet, or whatever else stands for a type
        return None
    if not choices or not all(choices) or math.prod(map(len, choices)) > _MAX_SHAPES:
        return None
    return frozenset((*shape, shape[-1]) for shape in itertools.product(*choices))


def _on_class(cls: Any) -> list[object]:
    """Return what stands on a dataclass itself under the names of its fields: defaults, slots, properties."""
    missing = dataclasses.MISSING
    found = (inspect.getattr_static(cls, field.name, missing) for field in dataclasses.fields(cls))
    return [one for one in found if one is not missing]


def _is_slot(found: object) -> bool:
    return isinstance(found, types.MemberDescriptorType)


def _plain_types(hint: Any) -> frozenset[type]:
    """Return the classes that a hint stands for, none if one of them is not plain."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = frozenset(typing.get_args(hint) if union else (hint,))
    return parts if parts <= _PLAIN else frozenset()
