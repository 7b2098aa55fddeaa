"""A schedule as it is declared: when it ticks, what job each tick makes, what becomes of missed ticks.

Everything that can be wrong with one shows here, when it is declared, and not in the middle of the
night on the host that leads just then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, cast

from jobq._errors import ArgumentsEncodeError, ConfigError
from jobq._kinds.cron import Timetable, due_ticks, make_timetable
from jobq._kinds.jobtype import prepare
from jobq._kinds.options import DEFAULTS, JobTypeOptions, check_name
from jobq._limits import MAX_ARGUMENTS_BYTES, MAX_WAIT
from jobq._messages import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jobq._kinds.jobtype import JobRow, JobType
    from jobq._kinds.options import ResolvedOptions

CatchUp: TypeAlias = Literal["one", "skip", "all"]
Overlap: TypeAlias = Literal["allow", "skip"]

MAX_CATCH_UP: Final = 1_000  # jobs that one schedule makes up for after a downtime
DEFAULT_CATCH_UP: Final = 100

# A tick that is found later than this was missed: with catch_up="skip" it makes no job. It is longer
# than a change of the leader takes.
PUNCTUAL: Final = timedelta(seconds=60)


class Timing(TypedDict, total=False):
    """What a schedule takes beside the options of its jobs; described in `PeriodicOptions`."""

    every: timedelta
    cron: str
    tz: str
    catch_up: CatchUp
    catch_up_max: int
    overlap: Overlap
    jitter: timedelta
    run_at_start: bool


class PeriodicOptions(Timing, JobTypeOptions, total=False):
    """What a schedule can set: when it ticks, and for each job all that its kind can.

    Attributes:
        every: the interval between ticks, 1 second to 100 years, on a grid that begins at
            1970-01-01 00:00 UTC. A schedule has either this or ``cron``.
        cron: minute, hour, day of the month, month, day of the week, such as ``"0 9 * * mon-fri"``.
        tz: whose wall clock ``cron`` is read on, such as ``"Europe/Berlin"``; "UTC".
        catch_up: what becomes of ticks that were missed because no worker ran, or the database was
            away: ``"one"`` job for all of them (default), ``"skip"`` (none, but one for the newest if that
            is found within a minute), or ``"all"``: a job for each.
        catch_up_max: with ``"all"``, jobs that are made up for at most, the newest, 1 to 1,000; 100.
        overlap: ``"allow"`` (default), or ``"skip"`` a tick while the previous job is unfinished.
        jitter: jobs start up to this much after their tick, by chance; 0.
        run_at_start: whether a job is also made when the schedule comes into force: when a worker
            that declares it starts and no other one that does is alive, or when a client adds it.
        queue, priority, delay, max_attempts, timeout, unique, meta, tags: of its jobs, see
            :class:`jobq.JobTypeOptions`.
    """


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule, checked. Made by `make_schedule`.

    Attributes:
        name: what it is known by, in the whole schema.
        timetable: when it ticks.
        kind, args, options: of its jobs, as they were given.
    """

    name: str
    timetable: Timetable
    kind: JobType[Any] | str
    args: object
    options: Mapping[str, object]
    catch_up: CatchUp
    catch_up_max: int
    overlap: Overlap
    jitter_s: float
    run_at_start: bool

    def prepare(self, defaults: ResolvedOptions = DEFAULTS, max_bytes: int = MAX_ARGUMENTS_BYTES) -> JobRow:
        """Return its job as it is stored, with a client's defaults.

        Raises:
            ConfigError: the arguments or an option cannot be what they are; names the schedule.
        """
        try:
            return prepare(self.kind, self.args, self.options, defaults, max_bytes)
        except (ConfigError, ArgumentsEncodeError) as error:
            raise ConfigError(f"schedule {self.name!r}: {error}") from error


def make_schedule(
    name: object, kind: JobType[Any] | str, args: object, given: Mapping[str, object]
) -> Schedule:
    """Return a schedule, everything of it checked.

    Args:
        name: what it is to be known by.
        kind: of its jobs.
        args: of its jobs.
        given: see :class:`PeriodicOptions`.

    Raises:
        ConfigError: something of it cannot work; the message names the schedule and the field.
    """
    name = check_name("name", name)
    try:
        schedule = Schedule(
            name,
            make_timetable(every=given.get("every"), cron=given.get("cron"), tz=given.get("tz")),
            kind,
            args,
            _job_options(given),
            cast("CatchUp", _one_of("catch_up", given.get("catch_up", "one"), ("one", "skip", "all"))),
            _catch_up_max(given.get("catch_up_max", DEFAULT_CATCH_UP)),
            cast("Overlap", _one_of("overlap", given.get("overlap", "allow"), ("allow", "skip"))),
            _jitter_s(given.get("jitter", timedelta(0))),
            _boolean("run_at_start", given.get("run_at_start", False)),
        )
    except ConfigError as error:
        raise ConfigError(f"schedule {name!r}: {error}") from error
    schedule.prepare()
    return schedule


def _job_options(given: Mapping[str, object]) -> dict[str, object]:
    unknown = given.keys() - PeriodicOptions.__annotations__.keys()
    if unknown:
        raise ConfigError(
            f"{', '.join(sorted(unknown))}: no such option of a schedule; there are "
            f"{', '.join(sorted(PeriodicOptions.__annotations__))}"
        )
    return {option: value for option, value in given.items() if option not in Timing.__annotations__}


class Due(NamedTuple):
    """What to do about a schedule whose tick has come.

    Attributes:
        fire: ticks that make a job, the oldest first.
        dropped_until: where some are passed over: the first tick that is not.
        next_at: the first tick after now.
    """

    fire: list[datetime]
    dropped_until: datetime | None
    next_at: datetime


def decide(
    timetable: Timetable, catch_up: CatchUp, catch_up_max: int, next_at: datetime, now: datetime
) -> Due:
    """Decide which ticks from ``next_at`` (which has come) to ``now`` make a job."""
    fire = due_ticks(timetable, next_at, now, catch_up_max if catch_up == "all" else 1)
    following = timetable.next_after(now)
    if catch_up == "skip" and now - fire[-1] > PUNCTUAL:
        return Due([], following, following)
    return Due(fire, None if fire[0] == next_at else fire[0], following)


def _one_of(field: str, value: object, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{field}={shown(value)}: one of {', '.join(map(repr, allowed))}")
    return value


def _catch_up_max(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_CATCH_UP:
        raise ConfigError(f"catch_up_max={shown(value)}: an integer from 1 to {MAX_CATCH_UP:,}")
    return value


def _jitter_s(value: object) -> float:
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= MAX_WAIT:
        raise ConfigError(f"jitter={shown(value)}: a timedelta, 0 or more, at most 100 years")
    return value.total_seconds()


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{field}={shown(value)}: True or False")
    return value
