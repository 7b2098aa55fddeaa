"""When a schedule would tick."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from jobq._errors import ConfigError
from jobq._kinds.cron import make_timetable, ticks_after

if TYPE_CHECKING:
    from datetime import timedelta

MAX_TICKS = 10_000


def next_ticks(
    cron: str | None = None,
    *,
    every: timedelta | None = None,
    tz: str | None = None,
    after: datetime | None = None,
    count: int = 5,
) -> list[datetime]:
    """Return the next ticks of a schedule, in UTC, by the same function that the workers use.

    Args:
        cron: the expression, as :meth:`jobq.Jobs.add_periodic` takes it; or
        every: the interval.
        tz: the time zone of ``cron``; UTC by default.
        after: the moment after which ticks are wanted, with a time zone; now by default.
        count: how many, up to 10,000.

    Raises:
        ConfigError: one of them cannot be what it is; the message names it.
    """
    if after is not None and after.utcoffset() is None:
        raise ConfigError(f"after={after}: naive; give it a time zone (tzinfo)")
    if not 0 <= count <= MAX_TICKS:
        raise ConfigError(f"count={count}: 0 to {MAX_TICKS:,}")
    timetable = make_timetable(cron=cron, every=every, tz=tz)
    return ticks_after(timetable, after or datetime.now(UTC), count)
