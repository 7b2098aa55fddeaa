"""A job's options: written once here, the same in `enqueue`, `NewJob` and a kind's declaration.

What is given in a call counts before what the kind's `JobType` declares, and that before the
client's defaults. An option that is given replaces the whole of it: ``meta`` and ``tags`` are not
merged. ``None`` means none: no time limit, no unique key, no delay, no time to expire.
"""

from __future__ import annotations

import dataclasses
import functools
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Final, NamedTuple, TypedDict, cast

from jobq._errors import ConfigError, Error
from jobq._json.encode import encode
from jobq._kinds.unique import Unique, check_key, readable, unique_key
from jobq._limits import MAX_META_BYTES, MAX_WAIT
from jobq._messages import shown, told
from jobq._operation import array_literal

MAX_NAME_BYTES: Final = 128  # of a kind or a queue
MAX_TAGS: Final = 20
MAX_TAG_BYTES: Final = 100
MAX_ATTEMPTS: Final = 32_767
PRIORITIES: Final = range(-9, 10)
_OF_UNIQUE: Final = frozenset(field.name for field in dataclasses.fields(Unique))
# A day away from the ends of Python's calendar, so that a time zone of whoever reads cannot lead out of it.
_EARLIEST: Final = datetime(1, 1, 2, tzinfo=UTC)
_LATEST: Final = datetime(9999, 12, 30, tzinfo=UTC)


class JobTypeOptions(TypedDict, total=False):
    """What a kind's declaration can set for all its jobs.

    Attributes:
        queue: the lane's name, 1 to 128 bytes of UTF-8 without control characters; "default".
        priority: −9 to 9, the larger first; 0.
        delay: how long to wait from the database's now, up to 100 years; not with ``run_at``.
        max_attempts: failures after which a job is discarded, 1 to 32,767; 25.
        timeout: how long one attempt may take, ``None`` for no limit; 1 hour.
        unique: a key of your own; while a job with it is live, another is not made. Or a
            :class:`Unique`, which says more.
        meta: what travels beside the arguments, at most 16 KiB as JSON.
        tags: at most 20 words, each of 1 to 100 bytes.
    """

    queue: str
    priority: int
    delay: timedelta | None
    max_attempts: int
    timeout: timedelta | None
    unique: str | Unique | None
    meta: Mapping[str, object] | None
    tags: Sequence[str]


class JobOptions(JobTypeOptions, total=False):
    """What one job can set: all that its kind can, and moments in time.

    Attributes:
        run_at: when it is due, with a time zone; not with ``delay``.
        expires_at: not started by then, it is discarded.
    """

    run_at: datetime | None
    expires_at: datetime | None


class ResolvedOptions(NamedTuple):
    """Every option of a job, as the enqueue statement stores it, in its order.

    Attributes:
        timeout_s: seconds, ``None`` for no limit.
        run_at: when it is due; or ``delay_s``, seconds from the database's now; or neither.
        meta: a JSON document, ``None`` for none.
        tags: PostgreSQL's text form of a text array, ``None`` for none.
        unique_key: 16 bytes, see `unique`; ``unique_name`` is what people read.
        unique: how the key is held, where it is not the plain way; the key itself is computed with
            the job's arguments where it depends on them, and ``None`` until then.
    """

    queue: str = "default"
    priority: int = 0
    max_attempts: int = 25
    timeout_s: float | None = 3600.0
    run_at: datetime | None = None
    delay_s: float | None = None
    expires_at: datetime | None = None
    meta: str | None = None
    tags: str | None = None
    unique_key: bytes | None = None
    unique_name: str | None = None
    unique: Unique | None = None


DEFAULTS: Final = ResolvedOptions()


def resolve(options: Mapping[str, object], base: ResolvedOptions) -> ResolvedOptions:
    """Put a call's options over those that hold without it.

    Raises:
        ConfigError: an option is unknown, or cannot be what it is; the message names it.
        ArgumentsEncodeError: ``meta`` holds what JSON cannot.
    """
    if not options:
        return base
    resolved = base._replace(**changes(options))
    if resolved.expires_at is not None:
        _check_expiry(resolved.expires_at, resolved)
    return resolved


def changes(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of `ResolvedOptions` that the given options set. Raises as `resolve`."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        read = _READERS.get(name)
        if read is None:
            raise _unknown(name)
        try:
            fields.update(read(value))
        except Error:
            raise
        except Exception as error:  # of an object of the user's own, when it was looked at
            raise ConfigError(f"{name}={shown(value)}: {told(error)}") from error
    if options.get("run_at") is not None and options.get("delay") is not None:
        raise ConfigError("run_at and delay: give one of them")
    return fields


def _unknown(name: str) -> ConfigError:
    if name in _OF_UNIQUE:
        return ConfigError(f"{name}: no option of a job, but of its key: unique=jobq.Unique({name}=…)")
    return ConfigError(f"{name}: no such option; there are {', '.join(_READERS)}")


def _check_expiry(expires_at: datetime, resolved: ResolvedOptions) -> None:
    """Refuse a job that could never start. By the local clock, as its caller has reckoned the moment."""
    now = datetime.now(UTC)
    if expires_at <= now:
        raise ConfigError(f"expires_at={expires_at}: that has passed; the job would never start")
    if resolved.run_at is not None and expires_at <= resolved.run_at:
        raise ConfigError(
            f"expires_at={expires_at}: the job would expire before its run_at={resolved.run_at}"
        )
    if resolved.delay_s is not None and expires_at <= now + timedelta(seconds=resolved.delay_s):
        raise ConfigError(f"expires_at={expires_at}: the job would expire before its delay is over")


def declared_changes(options: Mapping[str, object]) -> dict[str, Any]:
    """Return what a declaration's options set. Raises as `resolve`, and for a moment in time."""
    for name in ("run_at", "expires_at"):
        if name in options:
            raise ConfigError(f"{name}: belongs to one job's enqueue; a declaration holds for all of them")
    return changes(options)


def check_kind(kind: object) -> str:
    """Return a bare kind's name as a plain string.

    Raises:
        ConfigError: it is no string of 1 to 128 bytes, or holds control characters.
    """
    if not isinstance(kind, str):
        raise ConfigError(
            f"kind={shown(kind)}: a JobType, a handler, or a string of 1 to {MAX_NAME_BYTES} bytes"
        )
    return _name("kind", kind)


def check_name(option: str, value: object) -> str:
    """Return a name of the same sort (1 to 128 bytes, no control characters) for another option.

    Raises:
        ConfigError: it is none; the message names the option.
    """
    return _name(option, value)


def _name(option: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{option}={shown(value)}: a string of 1 to {MAX_NAME_BYTES} bytes")
    return _checked_name(option, str.__str__(value))


@functools.lru_cache(maxsize=4096)
def _checked_name(option: str, value: str) -> str:
    _check_text(option, value, MAX_NAME_BYTES)
    for character in value:
        if unicodedata.category(character) == "Cc":
            raise ConfigError(f"{option}={shown(value)}: without control characters")
    return value


def _check_text(option: str, value: str, max_bytes: int) -> None:
    text = shown(value)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{option}={text}: a lone surrogate is no text") from None
    if "\0" in value:
        raise ConfigError(f"{option}={text}: PostgreSQL cannot hold a NUL character")
    if not 1 <= size <= max_bytes:
        raise ConfigError(f"{option}={text}: 1 to {max_bytes} bytes of UTF-8, not {size}")


def _integer(option: str, value: object, allowed: range) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise ConfigError(f"{option}={shown(value)}: an integer from {allowed[0]:,} to {allowed[-1]:,}")
    return int(value)


def _wait(option: str, value: object) -> timedelta:
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= MAX_WAIT:
        raise ConfigError(f"{option}={shown(value)}: a timedelta, 0 or more, at most 100 years")
    return value


def check_moment(option: str, value: object) -> datetime:
    """Return a moment in UTC: PostgreSQL knows fewer offsets from it than Python.

    Raises:
        ConfigError: it is none, has no time zone, or lies beyond what can be stored; names the option.
    """
    if not isinstance(value, datetime):
        raise ConfigError(f"{option}={shown(value)}: a datetime with a time zone")
    try:
        is_naive = value.utcoffset() is None
        moment = _EARLIEST if is_naive else value.astimezone(UTC)
    except Exception as error:  # a time zone of the user's own, or one that leads out of the calendar
        raise ConfigError(f"{option}={shown(value)}: {told(error)}") from error
    if is_naive:
        raise ConfigError(f"{option}={shown(value)}: naive; give it a time zone (tzinfo)")
    if not _EARLIEST <= moment <= _LATEST:
        raise ConfigError(f"{option}={shown(value)}: from {_EARLIEST.date()} to {_LATEST.date()}")
    return moment


def _read_queue(value: object) -> dict[str, Any]:
    return {"queue": _name("queue", value)}


def _read_priority(value: object) -> dict[str, Any]:
    return {"priority": _integer("priority", value, PRIORITIES)}


def _read_run_at(value: object) -> dict[str, Any]:
    return {} if value is None else {"run_at": check_moment("run_at", value), "delay_s": None}


def _read_delay(value: object) -> dict[str, Any]:
    # No delay is stored as none: the shorter statement serves a job that is ready at once.
    delay_s = None if value is None else _wait("delay", value).total_seconds() or None
    return {"delay_s": delay_s}


def _read_max_attempts(value: object) -> dict[str, Any]:
    return {"max_attempts": _integer("max_attempts", value, range(1, MAX_ATTEMPTS + 1))}


def _read_timeout(value: object) -> dict[str, Any]:
    if value is None:
        return {"timeout_s": None}
    if not _wait("timeout", value):
        raise ConfigError(f"timeout={shown(value)}: more than 0; None for no limit")
    return {"timeout_s": cast("timedelta", value).total_seconds()}


def _read_unique(value: object) -> dict[str, Any]:
    if value is None:
        return {"unique_key": None, "unique_name": None, "unique": None}
    if isinstance(value, Unique):
        return {"unique_key": None, "unique_name": None, "unique": value}
    key = check_key("unique", value)
    return {"unique_key": unique_key(key), "unique_name": readable(key), "unique": None}


def _read_meta(value: object) -> dict[str, Any]:
    if value is None:
        return {"meta": None}
    if not isinstance(value, Mapping):
        raise ConfigError(f"meta={shown(value)}: a mapping, or None for none")
    meta = cast("Mapping[object, object]", value)
    text = encode(meta, max_bytes=MAX_META_BYTES, root="meta")
    for key in meta:
        if not isinstance(key, str):
            raise ConfigError(f"meta: its keys are strings, and {shown(key)} is none")
    return {"meta": None if text == "{}" else text}


def _read_tags(value: object) -> dict[str, Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"tags={shown(value)}: a sequence of strings, such as a list")
    tags: list[str] = []
    for tag in islice(cast("Sequence[object]", value), MAX_TAGS + 1):
        if not isinstance(tag, str):
            raise ConfigError(f"tags: {shown(tag)} is no string")
        tags.append(str.__str__(tag))
        _check_text("tags", tags[-1], MAX_TAG_BYTES)
    if len(tags) > MAX_TAGS:
        raise ConfigError(f"tags: at most {MAX_TAGS}")
    return {"tags": array_literal(tags) if tags else None}


def _read_expires_at(value: object) -> dict[str, Any]:
    return {"expires_at": None if value is None else check_moment("expires_at", value)}


_READERS: Final[dict[str, Callable[[object], dict[str, Any]]]] = {
    "queue": _read_queue,
    "priority": _read_priority,
    "run_at": _read_run_at,
    "delay": _read_delay,
    "max_attempts": _read_max_attempts,
    "timeout": _read_timeout,
    "unique": _read_unique,
    "meta": _read_meta,
    "tags": _read_tags,
    "expires_at": _read_expires_at,
}
