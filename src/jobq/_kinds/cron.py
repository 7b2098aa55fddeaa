"""When a schedule ticks: pure functions from an instant to the next one and to the last one.

An interval is a grid that begins at the epoch, so that no restart, leader or deployment shifts it. A
cron expression is read on the wall clock of its time zone:

- a local time that does not exist (clocks go forward) counts as the first moment after the gap, and
  several of them count as that one moment;
- a local time that comes twice (clocks go back) counts the first time;
- where the hour field allows every hour, elapsed time counts instead: such a schedule means "every
  15 minutes" or "at the full hour", and goes on through both changes without a pause or a burst.

`cronsim` parses expressions and steps over the wall clock. What a wall clock's time means as an
instant is decided here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias, cast
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from jobq._errors import ConfigError
from jobq._limits import MAX_WAIT
from jobq._messages import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
SHORTEST_INTERVAL: Final = timedelta(seconds=1)
MAX_CRON_LENGTH: Final = 500

_SECOND: Final = timedelta(seconds=1)
_CHECK_FROM: Final = datetime(2024, 1, 1, tzinfo=UTC)  # any will do: cronsim looks 50 years ahead
_FIELDS: Final = {
    "minute": "minute, 0-59",
    "hour": "hour, 0-23",
    "day-of-month": "day of the month, 1-31 or L",
    "month": "month, 1-12 or JAN-DEC",
    "day-of-week": "day of the week, 0-7 or SUN-SAT",
}


@dataclass(frozen=True, slots=True)
class Every:
    """Ticks at all multiples of an interval since 1970-01-01 00:00 UTC.

    Raises:
        ConfigError: it is no interval of a second to 100 years.
    """

    every: timedelta

    def __post_init__(self) -> None:
        every = cast("object", self.every)
        if not isinstance(every, timedelta) or not SHORTEST_INTERVAL <= every <= MAX_WAIT:
            raise ConfigError(f"every={shown(every)}: a timedelta of 1 second to 100 years")

    def next_after(self, instant: datetime) -> datetime:
        """Return the first tick after an instant."""
        return EPOCH + ((instant - EPOCH) // self.every + 1) * self.every

    def last_until(self, instant: datetime) -> datetime:
        """Return the last tick that is not after an instant."""
        return EPOCH + (instant - EPOCH) // self.every * self.every


@dataclass(frozen=True, slots=True)
class Cron:
    """Ticks when a cron expression of five fields matches the wall clock of a time zone.

    Args:
        expression: minute, hour, day of the month, month, day of the week; names, lists, ranges and
            steps, ``L`` and ``LW`` for the last day and the last weekday of a month, ``1#2`` and
            ``1L`` for its second and its last Monday. When both days are restricted (neither begins
            with ``*``), one of them suffices, as in every cron.
        tz: an IANA name such as ``Europe/Berlin``.

    Raises:
        ConfigError: it is malformed or never matches, or this host does not know the time zone.
    """

    expression: str
    tz: str = "UTC"

    def __post_init__(self) -> None:
        _zone(self.tz)
        _parse(self.expression)

    def next_after(self, instant: datetime) -> datetime:
        """Return the first tick after an instant, in UTC."""
        for tick in self._steps(instant, reverse=False):
            if tick > instant:
                return tick
        raise _never(self.expression)

    def last_until(self, instant: datetime) -> datetime:
        """Return the last tick that is not after an instant, in UTC."""
        # Stepping back over a wall clock that was set back misses what came twice; from a tick that
        # is close, stepping forward does not.
        for tick in self._steps(instant + _SECOND, reverse=True):
            if tick <= instant:
                break
        else:
            raise _never(self.expression)
        while (following := self.next_after(tick)) <= instant:
            tick = following
        return tick

    def _steps(self, instant: datetime, *, reverse: bool) -> Iterator[datetime]:
        """Yield ticks from about an instant on; a few on its wrong side come first."""
        zone = _zone(self.tz)
        expression, follows_elapsed_time = _parse(self.expression)
        local = instant.astimezone(zone)
        if follows_elapsed_time:
            for wall in CronSim(expression, local, reverse=reverse):
                tick = wall.astimezone(UTC)
                shown = tick.astimezone(zone).replace(tzinfo=None, fold=0)
                # cronsim may begin a day at a midnight that does not exist; on a whole day that was
                # left out, no time passes.
                if shown == wall.replace(tzinfo=None, fold=0) or _matches(expression, shown):
                    yield tick
        else:
            for wall in CronSim(expression, local.replace(tzinfo=None), reverse=reverse):
                yield _instant(wall, zone)


Timetable: TypeAlias = Every | Cron


def make_timetable(*, every: object = None, cron: object = None, tz: object = None) -> Timetable:
    """Return the timetable that the options of a schedule describe.

    Raises:
        ConfigError: not one of ``every`` and ``cron`` is given, or it cannot be what it is.
    """
    if (every is None) == (cron is None):
        raise ConfigError("every, cron: a schedule has one of them")
    if cron is None:
        if tz is not None:
            raise ConfigError("tz: belongs to cron; every counts elapsed time, from 1970-01-01 00:00 UTC")
        assert every is not None
        return Every(cast("timedelta", every))  # which checks it
    if not isinstance(cron, str):
        raise ConfigError(f"cron={shown(cron)}: a string of five fields, such as '0 9 * * mon-fri'")
    if tz is not None and not isinstance(tz, str):
        raise ConfigError(f"tz={shown(tz)}: the name of a time zone, such as 'Europe/Berlin'")
    return Cron(cron, "UTC" if tz is None else tz)


def ticks_after(timetable: Timetable, instant: datetime, count: int) -> list[datetime]:
    """Return the next ``count`` ticks after an instant."""
    return list(islice(_all_after(timetable, instant), count))


def due_ticks(timetable: Timetable, first: datetime, now: datetime, most: int) -> list[datetime]:
    """Return the newest ticks from ``first``, itself a tick, to ``now``, oldest first, at most ``most``."""
    ticks = [first]
    for tick in _all_after(timetable, first):
        if tick > now:
            return ticks
        ticks.append(tick)
        if len(ticks) > most:
            break
    newest = [timetable.last_until(now)]
    while len(newest) < most:
        newest.append(timetable.last_until(newest[-1] - _SECOND / 1000))
    return newest[::-1]


def _all_after(timetable: Timetable, instant: datetime) -> Iterator[datetime]:
    while True:
        instant = timetable.next_after(instant)
        yield instant


@functools.lru_cache(maxsize=256)
def _parse(expression: str) -> tuple[str, bool]:
    """Return an expression for cronsim, and whether it follows elapsed time."""
    fields = expression.split()
    if len(fields) != 5 or len(expression) > MAX_CRON_LENGTH:
        raise ConfigError(
            f"cron={shown(expression)}: five fields (minute, hour, day of the month, month, day of the week);"
            " what comes more often than every minute has every=timedelta(…)"
        )
    try:
        simulation = CronSim(expression, _CHECK_FROM)
    except (CronSimError, ValueError) as error:
        raise ConfigError(f"cron={shown(expression)}: {_what_is_wrong(fields, str(error))}") from None
    if next(simulation, None) is None:
        raise _never(expression)
    every_hour = len(simulation.hours) == 24
    if every_hour:
        fields[1] = "*"  # however it is written: cronsim goes by elapsed time where it sees a star
    return " ".join(fields), every_hour


def _matches(expression: str, wall: datetime) -> bool:
    return next(CronSim(expression, wall - _SECOND)) == wall


def _what_is_wrong(fields: list[str], complaint: str) -> str:
    name = complaint.removeprefix("Bad ")
    if name == "day-of-month":
        try:
            CronSim(" ".join([*fields[:3], "*", fields[4]]), _CHECK_FROM)
        except (CronSimError, ValueError):
            pass
        else:
            return f"never comes: no such month has a day {fields[2]}"
    return f"bad {_FIELDS.get(name, 'number')}"


def _never(expression: str) -> ConfigError:
    return ConfigError(f"cron={shown(expression)}: never comes")


@functools.lru_cache(maxsize=256)
def _zone(name: str) -> ZoneInfo:
    try:
        zone = ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # not there; no name; a folder
        zone = None
    if zone is None or name == "localtime":  # which is another one on each host
        raise ConfigError(
            f"tz={shown(name)}: this host knows no such time zone; an IANA name such as 'Europe/Berlin'"
            " (a host without time zones needs its tzdata package, or Python's)"
        )
    return zone


def _instant(wall: datetime, zone: ZoneInfo) -> datetime:
    """Return when a wall clock first shows a time; where it never does, when it steps over it."""
    instant = wall.replace(tzinfo=zone).astimezone(UTC)
    if instant.astimezone(zone).replace(tzinfo=None, fold=0) == wall:
        return instant
    # In a gap the offset before it gives an instant after the change, and the one after it one before.
    before = wall.replace(tzinfo=zone, fold=1).astimezone(UTC)
    after, offset = instant, instant.astimezone(zone).utcoffset()
    while after - before > _SECOND:
        middle = before + (after - before) // (2 * _SECOND) * _SECOND
        if middle.astimezone(zone).utcoffset() == offset:
            after = middle
        else:
            before = middle
    return after
