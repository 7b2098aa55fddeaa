"""Arguments that are what most are: a dataclass of strings, integers and booleans. Written in one go.

What `_json.encode` and the check of what was written do for any object, a look at the members' types does
for such a class: when each is just of its declared type, msgspec writes the same document as `encode`, and
a worker can read it. That is two calls of C and one of Python in the place of ten, and after a wait for
a commit, when everything is cold, that makes 10 µs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import types
import typing
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

Writer: TypeAlias = "Callable[[object, int], str | None]"

_PLAIN: Final = frozenset({str, int, bool, type(None)})
_NUL: Final = b"\\u0000"  # PostgreSQL cannot hold one
_MAX_SHAPES: Final = 64  # each optional member doubles them

_write: Final = msgspec.json.Encoder().encode


def flat_writer(cls: object) -> Writer | None:
    """Return what writes such a class's objects, or ``None`` when the class is of another sort.

    The writer takes an object and the most bytes that its document may have, and returns ``None`` for
    what has to go the long way: it is of another class, has a member of another type than declared, or
    holds what cannot be stored.
    """
    shapes = _shapes_of(cls)
    if shapes is None:
        return None
    wanted: Any = cls
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    members: Callable[[object], tuple[object, ...]] = operator.attrgetter(*names, names[-1])

    def write(value: object, max_bytes: int) -> str | None:
        if type(value) is not wanted:
            return None
        try:
            if tuple(map(type, members(value))) not in shapes:
                return None
            document = _write(value)
        except Exception:  # noqa: BLE001 - a lone surrogate, a member deleted: the long way says where
            return None
        return None if _NUL in document or len(document) > max_bytes else document.decode()

    return write


def _shapes_of(cls: object) -> frozenset[tuple[type, ...]] | None:
    """Return the tuples of types that an object's members may have, the last one's twice."""
    if not isinstance(cls, type) or not all(map(dataclasses.is_dataclass, cls.__mro__[:-1])):
        return None
    if hasattr(cls, "__post_init__") or hasattr(cls, "__pydantic_validator__"):
        return None  # it may refuse values of the right types
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
    # the last one twice: of a single member, attrgetter would make no tuple
    return frozenset((*shape, shape[-1]) for shape in itertools.product(*choices))


def _plain_types(hint: Any) -> frozenset[type]:
    """Return the classes that a hint stands for, none if one of them is not plain."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = frozenset(typing.get_args(hint) if union else (hint,))
    return parts if parts <= _PLAIN else frozenset()
