"""When schedules tick: exact instants, both ways through every change of a clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jobq
from jobq._kinds.cron import EPOCH, Cron, Every, due_ticks, make_timetable, ticks_after
from jobq._kinds.schedule import PUNCTUAL, decide
from jobq.testing import next_ticks

if TYPE_CHECKING:
    from jobq._kinds.cron import Timetable

MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def upcoming(cron: str, tz: str, after: str, count: int) -> list[str]:
    ticks = ticks_after(Cron(cron, tz), utc(after), count)
    assert all(tick.tzinfo is UTC for tick in ticks)
    return [tick.replace(tzinfo=None).isoformat(" ", "minutes") for tick in ticks]


# -- the clock's changes -----------------------------------------------------------------------------


def test_s56_daily_ticks_keep_their_local_time_through_both_changes_of_the_clock() -> None:
    assert upcoming("4 16 * * *", "America/New_York", "2025-03-08", 3) == [
        "2025-03-08 21:04",
        "2025-03-09 20:04",
        "2025-03-10 20:04",
    ]
    assert upcoming("0 12 * * *", "Europe/Berlin", "2025-10-25", 4) == [
        "2025-10-25 10:00",
        "2025-10-26 11:00",
        "2025-10-27 11:00",
        "2025-10-28 11:00",
    ]


def test_s56_a_local_time_that_does_not_exist_ticks_at_the_next_one_that_does() -> None:
    assert upcoming("30 2 * * *", "America/New_York", "2026-03-07", 3) == [
        "2026-03-07 07:30",
        "2026-03-08 07:00",  # 03:00 by the new clock: 02:30 was stepped over
        "2026-03-09 06:30",
    ]


def test_several_local_times_that_do_not_exist_tick_once_together() -> None:
    assert upcoming("*/20 2 * * *", "Europe/Berlin", "2026-03-28 12:00", 4) == [
        "2026-03-29 01:00",
        "2026-03-30 00:00",
        "2026-03-30 00:20",
        "2026-03-30 00:40",
    ]
    assert upcoming("0,30 2,3 * * *", "Europe/Berlin", "2026-03-28 12:00", 3) == [
        "2026-03-29 01:00",  # 02:00 and 02:30, which do not exist, and 03:00, which does
        "2026-03-29 01:30",
        "2026-03-30 00:00",
    ]


@pytest.mark.parametrize("cron", ["30 2 * * *", "*/30 2 * * *", "30 */2 * * *", "30 1-3 26 10 *"])
def test_s56_a_local_time_that_comes_twice_ticks_once(cron: str) -> None:
    ticks = upcoming(cron, "Europe/Berlin", "2025-10-25 22:30", 20)
    local = [utc(tick).astimezone(ZoneInfo("Europe/Berlin")).replace(tzinfo=None) for tick in ticks]
    assert len(set(local)) == len(local)
    assert "2025-10-26 00:30" in ticks, "the first of the two"
    assert "2025-10-26 01:30" not in ticks, "the second of them"


def test_what_comes_every_hour_goes_by_elapsed_time() -> None:
    """An hourly job neither pauses for two hours nor runs twice at once when clocks are changed."""
    for cron in ("0 * * * *", "0 0-23 * * *", "0 */1 * * *"):
        for after in ("2025-10-25 22:00", "2026-03-28 22:00"):
            ticks = [utc(tick) for tick in upcoming(cron, "Europe/Berlin", after, 6)]
            assert [tick - utc(after) for tick in ticks] == [n * HOUR for n in range(1, 7)]


def test_a_day_that_was_left_out_ticks_at_the_beginning_of_the_next() -> None:
    """Samoa went over the date line: there was no 30 December 2011."""
    assert upcoming("0 12 30 12 *", "Pacific/Apia", "2011-12-01", 1) == ["2011-12-30 10:00"]
    every_hour = upcoming("0 * 30 12 *", "Pacific/Apia", "2011-12-01", 1)
    assert every_hour == ["2012-12-29 10:00"], "no time passed on that day"


def test_a_midnight_that_does_not_exist() -> None:
    assert upcoming("0 0 * * *", "America/Santiago", "2025-09-06 12:00", 2) == [
        "2025-09-07 04:00",  # 01:00 by the new clock
        "2025-09-08 03:00",
    ]


# -- what can be written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cron", "complaint"),
    [
        ("0 0 30 2 *", "no such month has a day 30"),
        ("0 0 31 4 *", "no such month has a day 31"),
        ("0 0 31 2,4,6 *", "no such month has a day 31"),
        ("60 * * * *", "bad minute, 0-59"),
        ("* 24 * * *", "bad hour, 0-23"),
        ("* * 0 * *", "bad day of the month"),
        ("* * * 13 *", "bad month"),
        ("* * * * 8", "bad day of the week"),
        ("* * * * mon-", "bad day of the week"),
        ("5-2 * * * *", "bad minute"),
        ("*/0 * * * *", "bad minute"),
        ("٣ * * * *", "bad minute"),
        ("", "five fields"),
        ("* * * *", "five fields"),
        ("* * * * * *", "five fields"),
        ("@daily", "five fields"),
        ("1" * 501 + " * * * *", "five fields"),
        ("1" * 450 + " * * * *", "bad minute"),
    ],
)
def test_s60_what_is_malformed_or_never_comes_is_refused_at_once(cron: str, complaint: str) -> None:
    with pytest.raises(jobq.ConfigError, match=f"^cron=.*{complaint}"):
        Cron(cron)


def test_s60_the_29th_of_february_comes_in_the_next_leap_year() -> None:
    assert upcoming("0 0 29 2 *", "UTC", "2026-01-01", 3) == [
        "2028-02-29 00:00",
        "2032-02-29 00:00",
        "2036-02-29 00:00",
    ]
    assert upcoming("0 0 29 2 *", "UTC", "2096-03-01", 1) == ["2104-02-29 00:00"], "2100 is no leap year"


@pytest.mark.parametrize(
    "tz", ["Europe/Berln", "", "../../etc/passwd", "/etc/localtime", "Europe", "localtime"]
)
def test_an_unknown_time_zone_is_refused(tz: str) -> None:
    with pytest.raises(jobq.ConfigError, match=r"^tz=.*no such time zone"):
        Cron("0 9 * * *", tz)


def test_names_steps_lists_and_last_days() -> None:
    assert upcoming("0 9 * * mon-fri", "UTC", "2026-11-27 12:00", 2) == [
        "2026-11-30 09:00",
        "2026-12-01 09:00",
    ]
    assert upcoming("0 0 L * *", "UTC", "2026-02-01", 2) == ["2026-02-28 00:00", "2026-03-31 00:00"]
    assert upcoming("0 0 * JAN Mon#2", "UTC", "2026-01-01", 1) == ["2026-01-12 00:00"]
    assert upcoming("0 0 13 * 5", "UTC", "2026-11-01", 3) == [
        "2026-11-06 00:00",  # either day suffices
        "2026-11-13 00:00",
        "2026-11-20 00:00",
    ]


@pytest.mark.parametrize(
    ("every", "cron", "tz", "complaint"),
    [
        (None, None, None, "every, cron: a schedule has one of them"),
        (HOUR, "* * * * *", None, "every, cron: a schedule has one of them"),
        (HOUR, None, "UTC", "tz: belongs to cron"),
        (timedelta(milliseconds=999), None, None, "every="),
        (timedelta(0), None, None, "every="),
        (-HOUR, None, None, "every="),
        (36_526 * DAY, None, None, "every="),
        (60, None, None, "every=60"),
        ("1h", None, None, "every='1h'"),
        (None, 5, None, "cron=5"),
        (None, "* * * * *", ZoneInfo("UTC"), "tz="),
    ],
)
def test_what_is_no_timetable_is_refused_by_name(
    every: object, cron: object, tz: object, complaint: str
) -> None:
    with pytest.raises(jobq.ConfigError, match=f"^{complaint}"):
        make_timetable(every=every, cron=cron, tz=tz)


def test_users_ask_when_their_schedules_tick() -> None:
    friday = datetime(2026, 11, 27, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    assert next_ticks("0 9 * * mon-fri", tz="Europe/Berlin", after=friday, count=2) == [
        datetime(2026, 11, 30, 9, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2026, 12, 1, 9, tzinfo=ZoneInfo("Europe/Berlin")),
    ]
    assert next_ticks(every=DAY, after=friday, count=1) == [utc("2026-11-28")]
    [soon] = next_ticks(every=MINUTE, count=1)
    assert timedelta(0) < soon - datetime.now(UTC) <= MINUTE
    with pytest.raises(jobq.ConfigError, match=r"after=.*naive"):
        next_ticks(every=DAY, after=friday.replace(tzinfo=None))
    with pytest.raises(jobq.ConfigError, match="count=-1"):
        next_ticks(every=DAY, count=-1)


# -- forwards and backwards --------------------------------------------------------------------------


def test_an_interval_is_a_grid_from_the_epoch() -> None:
    every = Every(timedelta(seconds=70))
    assert every.next_after(EPOCH) == EPOCH + timedelta(seconds=70)
    assert every.next_after(EPOCH + timedelta(seconds=69.999999)) == EPOCH + timedelta(seconds=70)
    assert every.last_until(EPOCH + timedelta(seconds=70)) == EPOCH + timedelta(seconds=70)
    assert Every(DAY).next_after(utc("2026-05-05 05:05")) == utc("2026-05-06")


ZONES: Final = [
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "America/Santiago",  # changes at midnight
    "Africa/Cairo",  # and back at midnight
    "Africa/Casablanca",  # winter is the exception
    "Australia/Lord_Howe",  # changes by half an hour
    "Asia/Kathmandu",  # 5:45
    "Pacific/Apia",
]
CRONS: Final = [
    "* * * * *",
    "*/7 * * * *",
    "0 * * * *",
    "30 */2 * * *",
    "30 2 * * *",
    "15,45 0-3 * * *",
    "0 0 * * *",
    "59 23 * * sun",
    "*/30 * 1,30 * 1",
    "* 2 * 3,10,11 *",
    "0 12 L * *",
]
INSTANTS: Final = st.integers(0, 20 * 365 * 86_400).map(lambda s: utc("2011-01-01") + timedelta(seconds=s))
NEAR_CHANGES: Final = st.builds(
    lambda change, offset_s: utc(change) + timedelta(seconds=offset_s),
    st.sampled_from(
        ["2025-03-30 01:00", "2025-10-26 01:00", "2026-03-08 07:00", "2026-11-01 06:00", "2011-12-30 10:00",
         "2025-09-07 04:00", "2026-04-05 03:00", "2025-10-30 21:00", "2025-10-04 15:30", "2026-04-04 15:00"]
    ),
    st.floats(-3 * 3600, 3 * 3600),
)  # fmt: skip


def brute_force(cron: Cron, start: datetime, end: datetime) -> list[datetime]:
    """Return the ticks within (start, end], found by looking at each minute of the wall clock."""
    zone = ZoneInfo(cron.tz)
    every_hour = cron.expression.split()[1] == "*"
    # by cronsim without any zone, from far enough before; its reading of the fields is taken for granted
    wall = start.astimezone(zone).replace(tzinfo=None) - 26 * HOUR
    found: set[datetime] = set()
    matches = set(walls(cron.expression, wall, end.astimezone(zone).replace(tzinfo=None) + 2 * DAY))
    minute = start.replace(second=0, microsecond=0) - 26 * HOUR
    seen_walls: set[datetime] = set()
    previous: datetime | None = None
    while minute <= end:
        local = minute.astimezone(zone).replace(tzinfo=None)
        stepped_over = (
            {m for m in matches if previous < m < local and not every_hour}
            if previous is not None and local - previous > MINUTE
            else set[datetime]()
        )
        if stepped_over or (local in matches and (every_hour or local not in seen_walls)):
            found.add(minute)
        seen_walls.add(local)
        previous = local
        minute += MINUTE
    return sorted(tick for tick in found if tick > start)


def walls(expression: str, start: datetime, end: datetime) -> list[datetime]:
    from cronsim import CronSim

    found: list[datetime] = []
    for wall in CronSim(expression, start):
        if wall > end:
            break
        found.append(wall)
    return found


@pytest.mark.parametrize("tz", ZONES)
@settings(max_examples=40, deadline=None)  # each looks at two thousand minutes
@given(cron=st.sampled_from(CRONS), instant=NEAR_CHANGES)
def test_ticks_are_those_that_somebody_sees_who_watches_the_clock(
    tz: str, cron: str, instant: datetime
) -> None:
    timetable = Cron(cron, tz)
    end = instant + 5 * HOUR
    expected = brute_force(timetable, instant, end)
    ticks: list[datetime] = []
    tick = instant
    while (tick := timetable.next_after(tick)) <= end:
        ticks.append(tick)
    assert ticks == expected


@settings(deadline=None)  # the machine may be busy
@given(
    timetable=st.one_of(
        st.builds(Cron, st.sampled_from(CRONS), st.sampled_from(ZONES)),
        st.builds(Every, st.timedeltas(timedelta(seconds=1), 400 * DAY)),
    ),
    instant=st.one_of(INSTANTS, NEAR_CHANGES),
)
def test_the_last_tick_and_the_next_one_meet(timetable: Timetable, instant: datetime) -> None:
    following = timetable.next_after(instant)
    last = timetable.last_until(instant)
    assert last <= instant < following
    assert timetable.next_after(last) == following, "there is none between them"
    assert timetable.last_until(following) == following
    assert timetable.last_until(following - timedelta(microseconds=1)) == last


# -- what is done about ticks that have come -----------------------------------------------------------


def test_ticks_that_have_come_are_counted_from_the_newest() -> None:
    every = Every(MINUTE)
    first, now = utc("2026-01-01 00:00"), utc("2026-01-01 00:09:30")
    assert due_ticks(every, first, first, 3) == [first]
    assert due_ticks(every, first, now, 10) == [first + n * MINUTE for n in range(10)]
    assert due_ticks(every, first, now, 3) == [first + n * MINUTE for n in (7, 8, 9)]
    beside = first + timedelta(seconds=10)
    assert due_ticks(every, beside, now, 10) == [beside, *(first + n * MINUTE for n in range(1, 10))]
    assert due_ticks(every, beside, beside, 1) == [beside]


def test_a_downtime_of_years_is_looked_through_from_its_end() -> None:
    """Forwards, a minutely schedule would be stepped through five million times."""
    now = utc("2026-01-01 00:00:30")
    ticks = due_ticks(Cron("* * * * *", "Europe/Berlin"), utc("2016-01-01"), now, 2)
    assert ticks == [utc("2025-12-31 23:59"), utc("2026-01-01 00:00")]


def test_one_makes_one_job_for_all_that_was_missed() -> None:
    due = decide(Every(MINUTE), "one", 1, utc("2026-01-01 00:00"), utc("2026-01-01 05:00:10"))
    assert due == ([utc("2026-01-01 05:00")], utc("2026-01-01 05:00"), utc("2026-01-01 05:01"))
    punctual = decide(Every(MINUTE), "one", 1, utc("2026-01-01 00:00"), utc("2026-01-01 00:00:01"))
    assert punctual == ([utc("2026-01-01 00:00")], None, utc("2026-01-01 00:01"))


def test_skip_makes_a_job_only_for_a_tick_that_is_found_in_time() -> None:
    tick = utc("2026-01-01 09:00")
    late = decide(Every(DAY / 24), "skip", 1, tick, tick + PUNCTUAL + timedelta(seconds=1))
    assert late == ([], tick + HOUR, tick + HOUR)
    in_time = decide(Every(DAY / 24), "skip", 1, tick, tick + PUNCTUAL)
    assert in_time == ([tick], None, tick + HOUR)
    newest_in_time = decide(Every(MINUTE), "skip", 1, tick, tick + 10 * MINUTE)
    assert newest_in_time == ([tick + 10 * MINUTE], tick + 10 * MINUTE, tick + 11 * MINUTE)


def test_all_makes_a_job_for_each_up_to_its_bound() -> None:
    tick = utc("2026-01-01 09:00")
    due = decide(Every(MINUTE), "all", 3, tick, tick + 10 * MINUTE)
    assert due == ([tick + n * MINUTE for n in (8, 9, 10)], tick + 8 * MINUTE, tick + 11 * MINUTE)
    within = decide(Every(MINUTE), "all", 11, tick, tick + 10 * MINUTE)
    assert within == ([tick + n * MINUTE for n in range(11)], None, tick + 11 * MINUTE)
