"""One Python object to one JSON document that comes back as it went.

Two passes, of which most documents see only the first. The fast pass is the standard library's C
writer and a few searches of its output: about a microsecond for a small dataclass. It cannot say
where something is wrong, and lets some things through that do not come back (keys that are not
strings, NUL, lone surrogates). So whatever looks odd goes through the slow pass, a walk that
copies the object into plain values, knows its path, and refuses.

The document is stored as jsonb, which keeps values and not spelling:

* an object's members come back in another order;
* a number keeps its digits, and whether it had a point: so 1e300 is written with one, behind its 301 digits,
  or it would come back as an integer; −0.0 is 0.0;
* tuples, and named tuples, come back as lists unless their type is declared;
* keys that are integers, UUIDs, dates or Enums become strings, and come back through a declared
  type (``dict[int, str]``) only. Float, bool and None keys are refused.
"""

from __future__ import annotations

import json
import json.encoder
import math
import re
import sys
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from jobq._errors import ArgumentsEncodeError
from jobq._json.plain import Unencodable, not_finite, step, to_plain
from jobq._limits import MAX_ARGUMENTS_BYTES, MAX_DEPTH
from jobq._messages import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def encode(value: object, *, max_bytes: int = MAX_ARGUMENTS_BYTES, root: str = "$") -> str:
    """Write ``value`` as one compact JSON document.

    Args:
        value: plain values, dataclasses, Enum, UUID, Decimal, dates and aware times, timedelta,
            mappings, named tuples, msgspec structs and pydantic models, nested as you like.
        max_bytes: the most that the document may have, in bytes of UTF-8.
        root: what a path begins with, ``$`` for arguments.

    Raises:
        ArgumentsEncodeError: it holds what does not come back: NaN and infinities, NUL, lone
            surrogates, naive times, bytes, sets, cycles, a nesting over 100 levels, integers of
            more digits than Python reads, or unknown objects; or it is too long.
    """
    try:
        text = "".join(_write(value, 0))
    except Exception:  # noqa: BLE001 - the walk meets it again, and says where
        text = ""
    text = _with_points(text)
    size = len(text) if text.isascii() else _size(text)
    if not size or "\\u0000" in text or _ODD_KEY(text) or (size > 2 * MAX_DEPTH and _is_deep(text)):
        text = _with_points("".join(_write(_walk(value, root), 0)))
        size = _size(text)
    if size > max_bytes:
        raise ArgumentsEncodeError(root, _too_long(text, size, max_bytes))
    return text


def _make_writer() -> Callable[[object, int], Iterable[str]]:
    """Return the writer of one object: the C one, which `JSONEncoder` would build anew each time."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without the C accelerator
        encoder = json.JSONEncoder(
            ensure_ascii=False, check_circular=False, allow_nan=False, separators=(",", ":"), default=to_plain
        )
        return lambda value, _: (encoder.encode(value),)
    options = {"sort_keys": False, "skipkeys": False, "allow_nan": False}
    quote = json.encoder.encode_basestring
    # the first None: no markers to find cycles by; the recursion limit finds them
    writer: Callable[[object, int], Iterable[str]] = make(None, to_plain, quote, None, ":", ",", **options)
    return writer


_write: Final = _make_writer()

# What a key that was no string, or looks like one that was none, is written as.
_ODD_KEY: Final = re.compile(r'"(?:true|false|null|-?[0-9][0-9.e+-]*)":').search

# Strings, and floats that are written with an exponent because they are large.
_LARGE_FLOATS: Final = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9](?:\.[0-9]+)?e\+[0-9]+')

_UNFIT_KEYS: Final[tuple[type, ...]] = (bool, float, tuple)


def _with_points(text: str) -> str:
    """Write large floats in full, with a point, by which jsonb knows them from integers."""
    return _LARGE_FLOATS.sub(_with_point, text) if "e+" in text else text


def _with_point(found: re.Match[str]) -> str:
    return found[0] if found[0].startswith('"') else f"{Decimal(found[0]):f}.0"


def _size(text: str) -> int:
    """Count the bytes of UTF-8; 0 when there is no such form (a lone surrogate)."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0


def _is_deep(text: str) -> bool:
    """Whether containers stand deeper in one another than `MAX_DEPTH`. Only large documents can."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    try:
        document = msgspec.json.decode(text)
    except (RecursionError, msgspec.DecodeError):
        return True
    level: list[Any] = [document] if type(document) is dict or type(document) is list else []
    for _ in range(MAX_DEPTH):
        level = [
            member
            for container in level
            for member in _members(container)
            if type(member) is dict or type(member) is list
        ]
        if not level:
            return False
    return True


def _members(container: Any) -> Iterable[Any]:
    if type(container) is dict:
        return cast("dict[str, Any]", container).values()
    members: Iterable[Any] = container
    return members


def _too_long(text: str, size: int, max_bytes: int) -> str:
    reason = f"the document has {size:,} bytes and may have {max_bytes:,}"
    if not text.startswith('{"'):
        return reason
    members = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    name = max(members, key=lambda name: len(bytes(members[name])))
    return f"{reason}; its largest part is {step(name)[:80]} with {len(bytes(members[name])):,}"


def _walk(value: object, root: str) -> object:
    walk = _Walk(root)
    try:
        return walk.plain(value)
    except ArgumentsEncodeError:
        raise
    except RecursionError:
        raise walk.refusal("nested deeper than the stack here allows") from None
    except Exception as error:  # of an object of the user's own, when it was looked at
        raise walk.refusal(f"this object raised {told(error)}") from error


class _Walk:
    """A copy of an object in plain values, with the path to where it stands."""

    def __init__(self, root: str) -> None:
        self._path = [root]
        self._open: set[int] = set()  # containers that we are inside of
        self._depth = 0

    def refusal(self, reason: str, below: str = "") -> ArgumentsEncodeError:
        return ArgumentsEncodeError("".join(self._path) + below, reason)

    def plain(self, value: object) -> object:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, int):
            return self._integer(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise self.refusal(not_finite(float(value)))
            return float(value)
        return self._container(value)

    def _container(self, value: object) -> object:
        identity = id(value)
        if identity in self._open:
            raise self.refusal("a cycle: this object contains itself")
        self._open.add(identity)
        if isinstance(value, dict):
            result = self._object(cast("dict[object, object]", value))
        elif isinstance(value, list | tuple):
            result = self._array(cast("list[object]", value))
        else:
            result = self.plain(self._converted(value))
        self._open.discard(identity)
        return result

    def _text(self, value: str) -> str:
        text = str.__str__(value)
        if "\0" in text:
            raise self.refusal("a NUL character, which PostgreSQL cannot hold")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self.refusal(f"a lone surrogate at position {error.start}, which is no text") from None
        return text

    def _integer(self, value: int) -> int:
        try:
            int.__repr__(value)
        except ValueError:
            raise self.refusal(f"an integer of over {sys.get_int_max_str_digits():,} digits") from None
        return int(value)

    def _object(self, value: dict[object, object]) -> object:
        self._descend()
        result: dict[str, object] = {}
        for key, member in value.items():
            self._path.append(step(key))
            name = self._key(key)
            if name in result:
                raise self.refusal(f"another key is written {step(name)} too")
            result[name] = self.plain(member)
            self._path.pop()
        self._depth -= 1
        return result

    def _key(self, key: object) -> str:
        key_type = type(key).__name__
        if isinstance(key, str):
            return self._text(key)
        if isinstance(key, int) and not isinstance(key, bool):
            return int.__repr__(self._integer(key))
        if key is not None and not isinstance(key, _UNFIT_KEYS):
            plainer = self._converted(key)
            if isinstance(plainer, str | int):
                return self._key(plainer)
        raise self.refusal(f"a key of type {key_type}; keys are strings, integers, UUIDs or Enums")

    def _array(self, value: list[object]) -> object:
        self._descend()
        result: list[object] = []
        for index, member in enumerate(value):
            self._path.append(f"[{index}]")
            result.append(self.plain(member))
            self._path.pop()
        self._depth -= 1
        return result

    def _descend(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.refusal(f"nested deeper than {MAX_DEPTH} levels")

    def _converted(self, value: object) -> object:
        try:
            return to_plain(value)
        except Unencodable as refused:
            raise self.refusal(refused.reason, refused.path) from None
        except RecursionError:
            raise
        except Exception as error:
            raise self.refusal(f"{type(value).__qualname__}: {told(error)}") from error
