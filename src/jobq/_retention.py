"""How long finished jobs are kept: the settings, and the statements that remove what is older."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeAlias, cast

from jobq._errors import ConfigError
from jobq._operation import Call, Operation, in_schema

Keep: TypeAlias = Literal["keep"]

_STATES: Final = ("completed", "discarded", "cancelled")
LONGEST_S: Final = 36_525 * 86_400.0  # 100 years

_READ: Final = """
select queue, completed_s::text, discarded_s::text, cancelled_s::text from {schema}.retention order by queue
"""

# Without a setting of its own a queue has no row.
_SET: Final = """
with gone as (
    delete from {schema}.retention
    where queue = $1::text and coalesce($2::float8, $3::float8, $4::float8) is null
)
insert into {schema}.retention (queue, completed_s, discarded_s, cancelled_s)
select $1::text, $2::float8, $3::float8, $4::float8
where coalesce($2::float8, $3::float8, $4::float8) is not null
on conflict (queue) do update
set completed_s = excluded.completed_s, discarded_s = excluded.discarded_s, cancelled_s = excluded.cancelled_s
"""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long finished jobs are kept, with their arguments, results and errors.

    Attributes:
        queue: whose jobs; ``None`` for all queues that say nothing of their own.
        completed, discarded, cancelled: the time after a job's end at which it is removed,
            ``"keep"`` for never, ``None`` for what holds for all queues.
    """

    queue: str | None
    completed: timedelta | Keep | None = None
    discarded: timedelta | Keep | None = None
    cancelled: timedelta | Keep | None = None


DEFAULT: Final = Retention(None, timedelta(hours=24), timedelta(days=7), timedelta(days=7))


def read_retention(schema: str) -> Operation[list[Retention]]:
    """Return what holds for all queues, without gaps, and then each queue's own settings."""
    rows = yield Call(in_schema(_READ, schema))
    own = [Retention(row[0] or None, *(_age(text) for text in row[1:])) for row in rows]
    for_all = own.pop(0) if own and own[0].queue is None else DEFAULT
    return [Retention(None, *(_or(getattr(for_all, n), getattr(DEFAULT, n)) for n in _STATES)), *own]


def set_retention(schema: str, retention: Retention) -> Operation[None]:
    """Put a queue's settings, or those of all, in the place of what they were.

    Raises:
        ConfigError: an age or the queue's name cannot be what it is.
    """
    queue = retention.queue
    if queue is not None and (
        not isinstance(cast("object", queue), str) or not 1 <= len(queue.encode(errors="replace")) <= 128
    ):
        raise ConfigError(f"queue={queue!r}: a name of 1 to 128 bytes, or None for all queues")
    ages = [_seconds(name, getattr(retention, name)) for name in _STATES]
    yield Call(in_schema(_SET, schema), (queue or "", *ages))


def _seconds(name: str, age: object) -> float | None:
    if age is None:
        return None
    if age == "keep":
        return math.inf
    if not isinstance(age, timedelta) or not 0 <= age.total_seconds() <= LONGEST_S:
        raise ConfigError(f"{name}={age!r}: a timedelta of 0 to 100 years, 'keep', or None for the default")
    return age.total_seconds()


def _age(text: str | None) -> timedelta | Keep | None:
    if text is None:
        return None
    seconds = float(text)
    return "keep" if math.isinf(seconds) else timedelta(seconds=seconds)


def _or(age: timedelta | Keep | None, default: timedelta | Keep | None) -> timedelta | Keep | None:
    return default if age is None else age  # not `or`: an age of nothing is an age
