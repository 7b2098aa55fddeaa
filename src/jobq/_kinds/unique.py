r"""Unique keys: what makes two jobs the same, for how long, and what a second one does.

A key is the first 16 bytes of a SHA-256 over a normal form, so that its size is fixed whatever it was made
of. There are two sorts, which cannot meet, for PostgreSQL's text holds no NUL:

* a key of the caller's own: its text in Unicode's NFC, as UTF-8. It is one namespace for all kinds;
* a computed key: a NUL byte, and then a canonical JSON object as UTF-8. Its members are ``kind`` and ``args``
  (all arguments, or an object of the chosen ones), or ``key`` for a text of the caller's own; and
  ``queue`` where the queue belongs to the key.

Canonical JSON says each value in one way: no white space; members sorted by name, by code points; names and
strings in NFC, and only quotes, backslashes and characters below U+0020 escaped (as ``\n`` and the like
where JSON has such a form, else as ``\u001f``); a number by its value, in digits without exponent or
needless zeros, so that ``1``, ``1.0`` and ``1e0`` are one, and ``-0.0`` is ``0``. A member that is null is
another thing than one that is absent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import json.encoder
import typing
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from itertools import islice
from typing import Final, Literal, NamedTuple, TypeAlias, cast

from jobq._errors import ConfigError
from jobq._json.members import member_names
from jobq._limits import MAX_WAIT
from jobq._messages import shown, told
from jobq._redaction import DEFAULT, Redaction

UNIQUE_NAME_LENGTH: Final = 200  # characters of a unique key that are kept for people to read
_MAX_NAMES: Final = 100  # of members that a key is computed from
SHORTEST_PERIOD: Final = timedelta(seconds=1)

Until: TypeAlias = Literal["finished", "started"]
OnConflict: TypeAlias = Literal["return", "raise", "replace"]
Replaceable: TypeAlias = Literal["args", "run_at", "priority"]

# What a conflict means, as the statement takes it: the fields to replace, or RAISE, or nothing.
RETURN: Final = 0
REPLACE: Final[Mapping[Replaceable, int]] = {"args": 1, "run_at": 2, "priority": 4}
RAISE: Final = 8

_ALL_FIELDS: Final[tuple[Replaceable, ...]] = ("args", "run_at", "priority")


class KeyRule(NamedTuple):
    """How a key is held and what a conflict means, as the statement takes it.

    Attributes:
        period_us: the length of its time slots in microseconds, ``None`` when a job's life decides.
        until_started: whether it is free once its job has been claimed.
        conflict: `RETURN`, `RAISE`, or a sum of `REPLACE`'s values.
        max_wait_s: seconds after its making at which a replaced job is due at the latest.
    """

    period_us: int | None = None
    until_started: bool = False
    conflict: int = RETURN
    max_wait_s: float | None = None


PLAIN: Final = KeyRule()


@dataclass(frozen=True, slots=True)
class Unique:
    """What makes a job unique: while its key is held, no second job is made with it.

    Args:
        key: a key of your own, one namespace for all kinds.
        by_args: or computed from the kind and its arguments: ``True`` for all of them, or the names of some
            (as they are written in JSON; at most 100), an empty list for the kind alone.
        by_queue: whether the job's queue belongs to the key.
        period: the key is held for the time slot in which the job was made, whatever becomes of the job:
            from 1 second to 100 years. Slots count from 1970-01-01 00:00 UTC by the database's clock.
        until: without a period, whether the key is held until its job has ended, or only until its first
            start; from then on the job runs, and is retried, without it.
        on_conflict: return the holder's id, raise :class:`UniqueConflict`, or replace what ``replace``
            names in the holder, if that still waits for its first start.
        replace: ``args``, ``run_at``, ``priority``, or some of them.
        max_wait: a job is never replaced to a time later than this after it was made.

    Raises:
        ConfigError: something of it cannot work; the message names it.

    Attributes:
        rule: the same, as the statement takes it.
    """

    key: str | None = None
    _: dataclasses.KW_ONLY
    by_args: bool | Sequence[str] = False
    by_queue: bool = False
    period: timedelta | None = None
    until: Until = "finished"
    on_conflict: OnConflict = "return"
    replace: Sequence[Replaceable] = _ALL_FIELDS
    max_wait: timedelta | None = None
    rule: KeyRule = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        if self.key is not None:
            put("key", check_key("Unique(key=…)", self.key))
        put("by_args", _checked_by_args(self.key, self.by_args))
        if not isinstance(cast("object", self.by_queue), bool):
            raise _refusal("by_queue", self.by_queue, "True or False")
        _check_choice("until", self.until, typing.get_args(Until))
        _check_choice("on_conflict", self.on_conflict, typing.get_args(OnConflict))
        put("replace", _checked_fields(self.replace))
        self._check_times()
        if self.on_conflict != "replace" and self.replace != _ALL_FIELDS:
            raise _refusal("replace", self.replace, "goes with on_conflict='replace'")
        put("rule", self._rule())

    def _check_times(self) -> None:
        if self.period is not None:
            if not isinstance(cast("object", self.period), timedelta) or not (
                SHORTEST_PERIOD <= self.period <= MAX_WAIT
            ):
                raise _refusal("period", self.period, "a timedelta from 1 second to 100 years")
            if self.until != "finished":
                raise _refusal(
                    "until",
                    self.until,
                    "with a period, the key is held for its time slot and by nothing else",
                )
        if self.max_wait is None:
            return
        if not isinstance(cast("object", self.max_wait), timedelta) or not (
            timedelta(0) < self.max_wait <= MAX_WAIT
        ):
            raise _refusal("max_wait", self.max_wait, "a timedelta, more than 0, at most 100 years")
        if self.on_conflict != "replace" or "run_at" not in self.replace:
            raise _refusal("max_wait", self.max_wait, "goes with on_conflict='replace' of 'run_at'")

    def _rule(self) -> KeyRule:
        conflict = RAISE if self.on_conflict == "raise" else RETURN
        if self.on_conflict == "replace":
            conflict = sum(REPLACE[field] for field in self.replace)
        return KeyRule(
            None if self.period is None else self.period // timedelta(microseconds=1),
            self.until == "started",
            conflict,
            None if self.max_wait is None else self.max_wait.total_seconds(),
        )

    def check_type(self, kind: str, args_type: object) -> None:
        """Make sure that a kind's arguments have the members that the key is computed from.

        Raises:
            ConfigError: they have not.
        """
        members = member_names(args_type)
        if isinstance(self.by_args, bool) or members is None:
            return
        for name in self.by_args:
            if name not in members:
                there = ", ".join(sorted(members)) or "none"
                raise _refusal(
                    "by_args", list(self.by_args), f"kind {kind!r} has no {name!r}; there are: {there}"
                )

    def compute(
        self, kind: str, document: str, queue: str, args_type: object, redaction: Redaction = DEFAULT
    ) -> tuple[bytes, str]:
        """Return the key of one job, and what people read for it.

        Args:
            kind: the job's kind.
            document: its arguments as JSON.
            queue: its queue.
            args_type: the declared type of the arguments, ``Any`` where there is none.
            redaction: what people do not get to read.

        Raises:
            ConfigError: the arguments lack a member that the key is computed from.
        """
        where = f" @{queue}" if self.by_queue else ""
        if self.key is not None:
            if not self.by_queue:
                return unique_key(self.key), readable(self.key)
            return _computed_key({"key": self.key, "queue": queue}), readable(self.key, where)
        value: object = _read(document)
        if not isinstance(self.by_args, bool):
            value = self._chosen(kind, value, args_type)
        parts = {"kind": kind, "args": value, **({"queue": queue} if self.by_queue else {})}
        return _computed_key(parts), readable(f"{kind} {_canonical(redaction.document(value))}", where)

    def _chosen(self, kind: str, value: object, args_type: object) -> dict[str, object]:
        names = cast("tuple[str, ...]", self.by_args)
        if not names:
            return {}
        if not isinstance(value, dict):
            raise _refusal("by_args", list(names), f"the arguments of kind {kind!r} are no JSON object here")
        members = cast("dict[str, object]", value)
        chosen = {name: members[name] for name in names if name in members}
        if len(chosen) < len(names):
            # A member that the type knows may be left out. One that nobody knows is a slip, and would make
            # one key of all jobs.
            known = member_names(args_type) or frozenset()
            for name in names:
                if name not in chosen and name not in known:
                    raise _refusal("by_args", list(names), f"the arguments of kind {kind!r} have no {name!r}")
        return chosen


def unique_key(text: str) -> bytes:
    """Return the 16 bytes that stand for a key of the caller's own.

    For other programs that make jobs: Unicode's NFC of the text, as UTF-8, its SHA-256 cut to the first
    16 bytes.
    """
    return _hash(unicodedata.normalize("NFC", text).encode())


def readable(text: str, suffix: str = "") -> str:
    """Return what is kept of a key for people: its text, cut."""
    text = unicodedata.normalize("NFC", text)
    room = UNIQUE_NAME_LENGTH - len(suffix)
    return text[:room] + suffix if room > 0 else (text + suffix)[:UNIQUE_NAME_LENGTH]


def check_key(option: str, value: object) -> str:
    """Return a key of the caller's own as a plain string.

    Raises:
        ConfigError: it is no text, empty, or holds what PostgreSQL's text cannot.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{option}={shown(value)}: a string, or None for none")
    key = str.__str__(value)
    if not key:
        raise ConfigError(f"{option}={shown(key)}: at least 1 character")
    if "\0" in key:
        raise ConfigError(f"{option}={shown(key)}: PostgreSQL cannot hold a NUL character")
    try:
        key.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{option}={shown(key)}: a lone surrogate is no text") from None
    return key


def canonical(document: str) -> str:
    """Return the canonical form of a JSON document: equal values have equal forms."""
    return _canonical(_read(document))


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:16]


def _computed_key(parts: dict[str, object]) -> bytes:
    return _hash(b"\0" + _canonical(parts).encode())


_read: Final = json.JSONDecoder(parse_float=Decimal).decode
_quote: Final = json.encoder.encode_basestring  # escapes quotes, backslashes and control characters


def _canonical(value: object) -> str:
    if isinstance(value, str):
        return _quote(unicodedata.normalize("NFC", value))
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, Decimal):
        return _number(value)
    if isinstance(value, dict):
        members = cast("dict[str, object]", value).items()
        # Two names that are one in NFC both stay, in an order of their own.
        pairs = sorted((unicodedata.normalize("NFC", name), _canonical(member)) for name, member in members)
        return "{" + ",".join(f"{_quote(name)}:{member}" for name, member in pairs) + "}"
    return "[" + ",".join(map(_canonical, cast("list[object]", value))) + "]"


_MAX_ZEROS: Final = 400  # more than any float has; beyond, a number keeps an exponent


def _number(value: Decimal) -> str:
    """Write a number that was not an integer's digits by its value."""
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    stripped = text.rstrip("0")
    if not stripped:
        return "0"
    power = cast("int", exponent) + len(text) - len(stripped)
    minus = "-" if sign else ""
    if abs(power) > _MAX_ZEROS:
        return f"{minus}{stripped}e{power}"
    if power >= 0:
        return minus + stripped + "0" * power
    whole = stripped[:power] or "0"
    return f"{minus}{whole}.{stripped[power:].rjust(-power, '0')}"


def _refusal(field: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"Unique({field}={shown(value)}): {why}")


def _check_choice(field: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise _refusal(field, value, f"one of {', '.join(map(repr, allowed))}")


def _checked_by_args(key: str | None, by_args: object) -> bool | tuple[str, ...]:
    if isinstance(by_args, bool):
        if by_args is (key is not None):
            raise ConfigError(
                "Unique(key=…, by_args=…): give one of them: a key of your own, or by_args=True for all "
                "arguments, or a list of their names, an empty one for the kind alone"
            )
        return by_args
    if key is not None:
        raise _refusal("by_args", by_args, "goes with no key of your own")
    names = _sequence("by_args", by_args, "True, or a sequence of names such as a list")
    for name in names:
        if not isinstance(name, str):
            raise _refusal("by_args", names, f"{shown(name)} is no name")
    if len(set(names)) < len(names):
        raise _refusal("by_args", names, "a name stands there twice")
    return cast("tuple[str, ...]", names)


def _checked_fields(fields: object) -> tuple[str, ...]:
    why = f"some of {list(_ALL_FIELDS)}, each once"
    given = _sequence("replace", fields, why)
    if not given or not all(field in _ALL_FIELDS for field in given) or len(set(given)) < len(given):
        raise _refusal("replace", given, why)
    return tuple(field for field in _ALL_FIELDS if field in given)


def _sequence(field: str, value: object, why: str) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _refusal(field, value, why)
    names = cast("Sequence[object]", value)
    try:
        found = tuple(islice(names, _MAX_NAMES + 1))
    except Exception as error:  # of a sequence of the user's own
        raise _refusal(field, names, told(error)) from error
    if len(found) > _MAX_NAMES:
        raise _refusal(field, names, f"at most {_MAX_NAMES}")
    return found
