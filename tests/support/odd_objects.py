"""Objects whose own methods fail, and others that no document can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator


class OddError(Exception):
    """Raised by odd objects, and odd itself."""

    def __str__(self) -> str:
        raise ZeroDivisionError("no text")


class Unshowable:
    def __repr__(self) -> str:
        raise OddError


class Untyped:
    """It does not even say what it is."""

    @property
    def __class__(self) -> type:
        raise OddError

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise OddError


class OddText(str):
    """A text whose methods fail; its characters are fine."""

    __slots__ = ()

    def __contains__(self, part: object) -> bool:
        raise OddError

    def __len__(self) -> int:
        raise OddError

    def encode(self, *_: object, **__: object) -> bytes:
        raise OddError

    def __repr__(self) -> str:
        raise OddError


class OddMapping(dict[str, object]):
    def items(self) -> Any:
        raise OddError


class OddList(list[object]):
    def __iter__(self) -> Iterator[object]:
        raise OddError


@dataclass
class OddDataclass:
    to: str = "a"

    def __getattribute__(self, name: str) -> object:
        if name in {"to", "__dict__"}:
            raise OddError
        return object.__getattribute__(self, name)


@dataclass(frozen=True)
class Args:
    to: str


def endless() -> Iterator[object]:
    while True:
        yield "x"


def ring() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


# No document can hold these.
UNSTORABLE: Final = (
    10**5000,
    object(),
    object,
    print,
    OddDataclass(),
    Ellipsis,
    1j,
    range(2**70),
    ring(),
    Unshowable(),
    OddMapping(a=1),
    OddList([1]),
    OddError(),
    endless(),
)
OBJECTS: Final = (*UNSTORABLE, -(2**63), 2**63, Args("a"), OddText("x"))
WITHIN: Final = (*OBJECTS, Untyped())  # which is refused where nobody asks what it is
