"""Schedules in the database, and the duty that makes their jobs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pytest

import jobq
import jobq._worker.scheduler as scheduler_module
from jobq._clients.periodic import AsyncPeriodic, Periodic
from jobq._kinds.options import DEFAULTS
from jobq._kinds.schedule import make_schedule
from jobq._statements.duties import Registration, end, register
from jobq._statements.leader import Deposed, Term, elect, resign
from jobq._statements.periodic import Fired, fire, look, pass_over
from jobq._statements.periodic_declare import add_periodic, declare, prepare_schedule
from jobq._statements.periodic_operate import (
    list_periodic,
    pause_periodic,
    remove_periodic,
    resume_periodic,
    trigger_periodic,
)
from jobq._worker.scheduler import Scheduler
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import SCHEMA, Storage

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from jobq._operation import Operation, Row
    from jobq._statements.periodic_declare import Prepared
    from jobq._statements.periodic_operate import PeriodicInfo

T = TypeVar("T")

# Within the real lease of nobody: every decision about ticks is by the test's clock, and the
# database's own only decides who is alive.
NOON: Final = datetime(2031, 1, 1, 12, tzinfo=UTC)
SECOND: Final = timedelta(seconds=1)
MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
DAY: Final = timedelta(days=1)
LEASE_S: Final = 600.0

REPORT: Final = jobq.JobType("report", dict)
PING: Final = jobq.JobType("ping", None)


class Fleet:
    """One leader with its scheduler, workers, and a clock that the test sets."""

    def __init__(self, store: Storage, leader_id: int = 1) -> None:
        self.store = store
        self.run = store.run
        self.now = NOON
        self.worker(leader_id)
        self.term = self.elected(leader_id)
        self.scheduler = self.new_scheduler()

    def new_scheduler(self) -> Scheduler:
        return Scheduler(StoreLink(self.store), SCHEMA, notify=False, now=lambda: self.now)  # type: ignore[arg-type]

    def worker(self, worker_id: int, *schedules: Prepared) -> list[str]:
        """Register a worker that declares schedules; return what it took over."""
        names = [schedule.name for schedule in schedules]
        self.run(
            register(SCHEMA, Registration(worker_id, "w", "host", 1, "0", ["default"], [], names), LEASE_S)
        )
        return self.run(declare(SCHEMA, worker_id, schedules, now=self.now))

    def elected(self, worker_id: int) -> Term:
        term = self.run(elect(SCHEMA, worker_id, "w", LEASE_S))
        assert term is not None
        return term

    def add(self, name: str = "s", **options: Any) -> None:
        self.run(add_periodic(SCHEMA, schedule(name, **options), now=self.now))

    def step(self, by: timedelta = timedelta(0)) -> float:
        """Let the clock go on, or back, and do one pass."""
        self.now += by
        return asyncio.run(self.scheduler.run_once(self.term))

    def settle(self) -> None:
        """Do passes until nothing is due."""
        for _ in range(100):
            if self.step() > 0.01:
                return
        raise AssertionError("passes without an end")

    def info(self, name: str = "s") -> PeriodicInfo:
        [found] = [info for info in self.run(list_periodic(SCHEMA)) if info.name == name]
        return found

    def ticks(self, name: str = "s") -> list[tuple[timedelta, int | None, str | None]]:
        """Return a schedule's ticks from noon on: when, its job, why there is none."""
        rows = self.store.sql(
            "select tick, job_id, skipped from jobq.periodic_tick where name = %s order by tick", name
        )
        return [(tick - NOON, job_id, skipped) for tick, job_id, skipped in rows]

    def fired(self, name: str = "s") -> list[timedelta]:
        return [tick for tick, job_id, _ in self.ticks(name) if job_id is not None]

    def jobs(self) -> list[Row]:
        return self.store.sql("select id, kind, queue, state, run_at from jobq.jobs order by id")

    def finish(self, job_id: int | None) -> None:
        """Let a job that waits end."""
        self.store.sql(
            "with r as (delete from jobq.ready where job_id = %s returning *)"
            " insert into jobq.finished (job_id, state, queue, priority, attempt, failures, crashes)"
            " select job_id, 'completed', queue, priority, attempt, failures, crashes from r",
            job_id,
        )


class StoreLink:
    """Lets the scheduler work on the test's own connection."""

    def __init__(self, store: Storage) -> None:
        self._store = store

    async def run(self, operation: Operation[T]) -> T:
        return self._store.run(operation)


def schedule(name: str = "s", kind: Any = REPORT, args: Any = None, **options: Any) -> Prepared:
    if kind is REPORT and args is None:
        args = {}
    if not {"every", "cron"} & options.keys():
        options["every"] = MINUTE
    return prepare_schedule(make_schedule(name, kind, args, options), DEFAULTS)


@pytest.fixture
def store(dsn: str) -> Iterator[Storage]:
    with Storage(dsn) as storage:
        yield storage


@pytest.fixture
def other(dsn: str) -> Iterator[Storage]:
    """A second connection."""
    with Storage(dsn) as storage:
        yield storage


@pytest.fixture
def fleet(store: Storage) -> Fleet:
    return Fleet(store)


# -- ticks and clocks --------------------------------------------------------------------------------


@pytest.mark.matrix
def test_each_tick_makes_one_job_with_the_options_of_the_schedule(fleet: Fleet) -> None:
    fleet.add(
        args={"all": True},
        queue="reports",
        priority=3,
        max_attempts=2,
        timeout=HOUR,
        meta={"m": 1},
        tags=["t"],
    )
    assert fleet.step() == 1.0, "the next tick is a minute away, and somebody may add one"
    assert fleet.jobs() == []
    fleet.step(MINUTE)
    fleet.step()
    fleet.step(30 * SECOND)
    assert fleet.fired() == [MINUTE]
    [(job_id, kind, queue, state, _)] = fleet.jobs()
    assert (kind, queue, state) == ("report", "reports", "ready")
    tick = "2031-01-01T12:01:00+00:00"
    assert fleet.store.sql(
        "select args, priority, max_attempts, timeout, meta, tags from jobq.jobs where id = %s", job_id
    ) == [({"all": True}, 3, 2, HOUR, {"m": 1, "schedule": {"name": "s", "tick": tick}}, ["t"])]
    info = fleet.info()
    assert (info.last_at, info.last_job_id, info.next_at) == (NOON + MINUTE, job_id, NOON + 2 * MINUTE)


def test_the_pause_until_the_next_pass_ends_with_the_next_tick(fleet: Fleet) -> None:
    """It is shorter than reckoned by what the pass itself took."""
    fleet.add()
    fleet.step()
    assert 0.0 < fleet.step(MINUTE - 400 * SECOND / 1000) <= 0.4
    fleet.add("often", every=SECOND)
    assert 0.0 < fleet.step() <= 0.4
    fleet.now += 400 * SECOND / 1000
    assert 0.4 < fleet.step() <= 1.0, "until the next tick of the one that ticked just now"
    assert fleet.fired("often") == [MINUTE]


def test_s55_a_clock_that_wakes_early_or_late_or_steps_makes_each_tick_fire_once(fleet: Fleet) -> None:
    fleet.add()
    fleet.step()
    wait_s = fleet.step(MINUTE - timedelta(milliseconds=5))  # it woke 5 ms early
    assert fleet.fired() == []
    assert 0.002 <= wait_s <= 0.005, "neither lost nor looked for in a busy loop"
    fleet.step(timedelta(milliseconds=5))
    fleet.step(MINUTE + 3 * SECOND)  # 3 s late
    assert fleet.fired() == [MINUTE, 2 * MINUTE]
    fleet.step(-5 * SECOND)  # to 2 s before a tick that was dealt with
    fleet.step(3 * SECOND)
    assert fleet.fired() == [MINUTE, 2 * MINUTE]
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE, 2 * MINUTE, 3 * MINUTE]
    fleet.step(89 * SECOND)  # from 12:03:01 to 12:04:30
    assert fleet.fired() == [MINUTE, 2 * MINUTE, 3 * MINUTE, 4 * MINUTE]
    assert len(fleet.jobs()) == 4


def test_s55_slots_that_a_step_of_the_clock_passes_over_are_one_job_and_told(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add()
    fleet.step()
    fleet.step(MINUTE)
    with caplog.at_level(logging.WARNING):
        fleet.step(90 * SECOND + MINUTE)  # to 12:03:30
    assert fleet.fired() == [MINUTE, 3 * MINUTE]
    [(at, job_id, why)] = [tick for tick in fleet.ticks() if tick[2] is not None]
    assert (at, job_id) == (2 * MINUTE, None)
    assert why == "missed, as all ticks until 2031-01-01T12:03:00+00:00"
    assert "were missed" in caplog.text


@pytest.mark.parametrize("restarted", [False, True])
def test_s55_a_clock_that_was_a_year_ahead_for_a_while_stops_no_schedule(
    fleet: Fleet, restarted: bool
) -> None:
    fleet.add()
    fleet.step()
    fleet.step(MINUTE)
    fleet.step(365 * DAY)
    ahead = fleet.info().next_at
    assert ahead is not None
    assert ahead > NOON + 365 * DAY
    if restarted:  # a new leader has not seen the clock go back
        fleet.scheduler = fleet.new_scheduler()
    fleet.step(-365 * DAY)
    assert fleet.info().next_at == NOON + 2 * MINUTE
    fleet.step(-MINUTE)
    fleet.settle()
    fleet.step(MINUTE)
    fleet.settle()
    assert fleet.fired() == [MINUTE, 365 * DAY + MINUTE]
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE, 2 * MINUTE, 365 * DAY + MINUTE], "goes on where it was"


def test_s58_restarts_do_not_shift_an_interval(fleet: Fleet) -> None:
    every = 70 * SECOND
    one = schedule(every=every)
    expected = [one.schedule.timetable.next_after(NOON)]
    while expected[-1] < NOON + 10 * MINUTE:
        expected.append(one.schedule.timetable.next_after(expected[-1]))
    for start in range(2, 2 + 61):
        fleet.worker(start, one)
        fleet.scheduler = fleet.new_scheduler()
        fleet.step(10 * SECOND)
        fleet.run(end(SCHEMA, start, "stopped"))
    assert [NOON + tick for tick in fleet.fired()] == [tick for tick in expected if tick <= fleet.now]
    assert len(fleet.fired()) in (8, 9)


# -- what was missed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "fired"),
    [
        ({}, [6 * HOUR]),
        ({"catch_up": "one"}, [6 * HOUR]),
        ({"catch_up": "skip"}, []),
        ({"catch_up": "all"}, [HOUR, 2 * HOUR, 3 * HOUR, 4 * HOUR, 5 * HOUR, 6 * HOUR]),
        ({"catch_up": "all", "catch_up_max": 2}, [5 * HOUR, 6 * HOUR]),
    ],
)
def test_after_a_downtime_missed_ticks_make_the_jobs_that_were_asked_for(
    fleet: Fleet, options: dict[str, Any], fired: list[timedelta]
) -> None:
    fleet.add(every=HOUR, **options)
    fleet.step()
    fleet.step(6 * HOUR + 30 * MINUTE)
    fleet.settle()
    assert fleet.fired() == fired
    assert fleet.info().next_at == NOON + 7 * HOUR
    fleet.step(30 * MINUTE)
    assert fleet.fired() == [*fired, 7 * HOUR]


def test_a_schedule_that_has_much_to_catch_up_lets_the_others_have_their_turn(fleet: Fleet) -> None:
    fleet.add("behind", catch_up="all", catch_up_max=1000)
    fleet.add("on time", every=HOUR)
    fleet.step()
    assert fleet.step(HOUR) < 0.01
    assert len(fleet.fired("behind")) == 20
    assert fleet.fired("on time") == [HOUR]
    fleet.settle()
    assert fleet.fired("behind") == [n * MINUTE for n in range(1, 61)]


def test_more_schedules_than_a_pass_takes_all_tick(fleet: Fleet) -> None:
    for n in range(130):
        fleet.add(f"s{n}")
    fleet.step()
    fleet.step(MINUTE)
    fleet.settle()
    assert fleet.store.count("ready") == 130


# -- overlap, jitter, unique -------------------------------------------------------------------------


def test_overlap_skip_leaves_a_tick_out_while_the_previous_job_is_unfinished(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add(overlap="skip")
    fleet.add("free")
    fleet.step()
    fleet.step(MINUTE)
    first = fleet.info().last_job_id
    with caplog.at_level(logging.INFO, "jobq"):
        fleet.step(MINUTE)
    assert fleet.ticks()[1] == (2 * MINUTE, None, f"the previous job {first} is unfinished")
    assert f"the previous job {first} is unfinished" in caplog.text
    info = fleet.info()
    assert (info.skipped_at, info.last_at) == (NOON + 2 * MINUTE, NOON + MINUTE)
    assert info.skip_reason == f"the previous job {first} is unfinished"
    fleet.finish(first)
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE, 3 * MINUTE]
    assert fleet.info().skip_reason is None
    assert fleet.fired("free") == [MINUTE, 2 * MINUTE, 3 * MINUTE]


def test_a_schedule_that_makes_no_job_says_so_once_until_that_changes(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        lines = [line.getMessage() for line in caplog.records if line.levelno >= logging.INFO]
        caplog.clear()
        return [line for line in lines if "makes no job" in line]

    caplog.set_level(logging.DEBUG, "jobq")
    fleet.add(overlap="skip")
    fleet.step()
    fleet.step(MINUTE)
    first = fleet.info().last_job_id
    for _ in range(3):
        fleet.step(MINUTE)
    [line] = told()
    assert line.endswith(f"the previous job {first} is unfinished")
    fleet.finish(first)
    fleet.step(MINUTE)
    assert told() == []
    second = fleet.info().last_job_id
    for _ in range(2):
        fleet.step(MINUTE)
    [line] = told()
    assert line.endswith(f"the previous job {second} is unfinished")


def test_s61_a_unique_job_whose_previous_one_still_waits_is_skipped_and_told(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.add("unique", unique="the report")
    fleet.add("other")
    fleet.step()
    fleet.step(MINUTE)
    first = fleet.info("unique").last_job_id
    with caplog.at_level(logging.INFO, "jobq"):
        fleet.step(MINUTE)
        fleet.step(MINUTE)
    assert f"job {first} holds its unique key" in caplog.text
    assert fleet.ticks("unique") == [
        (MINUTE, first, None),
        (2 * MINUTE, None, f"job {first} holds its unique key"),
        (3 * MINUTE, None, f"job {first} holds its unique key"),
    ]
    assert fleet.fired("other") == [MINUTE, 2 * MINUTE, 3 * MINUTE]
    fleet.finish(first)
    fleet.step(MINUTE)
    assert fleet.fired("unique") == [MINUTE, 4 * MINUTE]
    assert fleet.info("unique").problem is None


@pytest.mark.parametrize(
    ("unique", "reason"),
    [
        (jobq.Unique(by_args=True), "holds its unique key"),
        (jobq.Unique(by_args=["a"], on_conflict="raise"), "unique key"),
        (jobq.Unique("k", on_conflict="replace", replace=["args"]), "was updated instead"),
        (jobq.Unique(by_args=[], period=HOUR, by_queue=True), "holds its unique key"),
    ],
)
def test_s61_every_sort_of_unique_key_skips_the_tick_and_says_so(
    fleet: Fleet, unique: jobq.Unique, reason: str
) -> None:
    fleet.add("unique", args={"a": 1}, unique=unique)
    fleet.add("other")
    fleet.step()
    fleet.step(MINUTE)
    fleet.step(MINUTE)
    first, second = fleet.ticks("unique")
    assert first[1] is not None
    assert second[1] is None
    assert f"job {first[1]}" in (second[2] or "")
    assert reason in (second[2] or "")
    assert fleet.fired("other") == [MINUTE, 2 * MINUTE]
    assert fleet.info("unique").problem is None


def test_jitter_and_delay_put_the_job_off_and_not_the_tick(fleet: Fleet) -> None:
    fleet.add("spread", jitter=10 * MINUTE)
    fleet.add("later", delay=HOUR)
    fleet.step()
    fleet.step(MINUTE)
    starts = {row[1]: row[4] for row in fleet.store.sql(
        "select j.id, p.name, j.state, j.queue, j.run_at from jobq.jobs j"
        " join jobq.periodic p on p.last_job_id = j.id"
    )}  # fmt: skip
    assert NOON + MINUTE <= starts["spread"] <= NOON + 11 * MINUTE
    assert starts["later"] == NOON + MINUTE + HOUR
    assert fleet.fired("spread") == fleet.fired("later") == [MINUTE]


# -- the term ----------------------------------------------------------------------------------------


def test_a_leader_that_was_replaced_between_its_decision_and_its_write_changes_nothing(fleet: Fleet) -> None:
    fleet.add()
    fleet.step()
    fleet.now += MINUTE
    [row] = fleet.run(look(SCHEMA, [], 10, now=fleet.now)).due
    fleet.run(resign(SCHEMA, fleet.term))
    fleet.worker(2)
    fleet.elected(2)
    before = fleet.store.sql("select * from jobq.periodic")
    tick = NOON + MINUTE
    with pytest.raises(Deposed):
        fleet.run(fire(SCHEMA, fleet.term, row, tick, tick + MINUTE, row.job(tick), notify=False))
    assert not fleet.run(pass_over(SCHEMA, fleet.term, row, tick + MINUTE, "missed"))
    with pytest.raises(Deposed):
        fleet.step()
    assert fleet.store.sql("select * from jobq.periodic") == before
    assert fleet.ticks() == fleet.jobs() == []


def test_two_leaders_that_saw_the_same_tick_make_one_job(fleet: Fleet) -> None:
    fleet.add()
    fleet.step()
    fleet.now += MINUTE
    [row] = fleet.run(look(SCHEMA, [], 10, now=fleet.now)).due
    fleet.step()
    tick = NOON + MINUTE
    again = fire(SCHEMA, fleet.term, row, tick, tick + MINUTE, row.job(tick), notify=False)
    assert fleet.run(again) == Fired(overtaken=True)
    fleet.store.sql("update jobq.periodic set next_at = %s", tick)  # by hand, or from a backup
    fleet.step()
    assert fleet.fired() == [MINUTE]
    assert fleet.info().next_at == NOON + 2 * MINUTE
    assert len(fleet.jobs()) == 1


def test_a_schedule_that_changes_between_decision_and_write_is_looked_at_again(fleet: Fleet) -> None:
    fleet.add()
    fleet.step()
    fleet.now += MINUTE
    [row] = fleet.run(look(SCHEMA, [], 10, now=fleet.now)).due
    tick = NOON + MINUTE
    for change in (
        pause_periodic(SCHEMA, "s"),
        resume_periodic(SCHEMA, "s", now=fleet.now),
        remove_periodic(SCHEMA, "s"),
    ):
        fleet.run(change)
        fired = fleet.run(fire(SCHEMA, fleet.term, row, tick, tick + MINUTE, row.job(tick), notify=False))
        assert fired == Fired(overtaken=True)
    assert fleet.jobs() == fleet.ticks() == []


# -- what is wrong with one --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        ("options = '{\"nonsense\": 1}'", "written by another version"),
        ('options = \'{"priority": "high"}\'', "written by another version"),
        ("options = '[]'", "written by another version"),
        ("cron = '0 0 30 2 *', every_s = null", "never comes"),
        ("cron = '* * * * *', tz = 'Mars/Olympus', every_s = null", "no such time zone"),
        ("options = options || '{\"priority\": 100}'", "priority"),
    ],
)
def test_s60_one_bad_schedule_shows_its_problem_and_never_stops_the_others(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, spoil: str, problem: str
) -> None:
    fleet.add("bad")
    fleet.add("good")
    fleet.step()
    fleet.store.sql(f"update jobq.periodic set {spoil} where name = 'bad'")
    fleet.step(MINUTE)
    fleet.step(MINUTE)
    assert fleet.fired("good") == [MINUTE, 2 * MINUTE]
    shown = fleet.info("bad").problem
    assert shown is not None
    assert problem in shown
    assert fleet.info("good").problem is None
    assert len([r for r in caplog.records if "cannot tick" in r.message]) == 1, "told once"


def test_s60_a_schedule_that_is_put_right_ticks_again_and_its_problem_is_gone(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.add("bad", cron="* * * * *", tz="Europe/Berlin")
    fleet.step()
    fleet.store.sql("update jobq.periodic set tz = 'Mars/Olympus'")
    fleet.step(MINUTE)
    assert "no such time zone" in (fleet.info("bad").problem or "")
    fleet.store.sql("update jobq.periodic set tz = 'Europe/Berlin'")
    fleet.step()
    assert fleet.fired("bad") == [], "it is left alone for a while"
    monkeypatch.setattr(scheduler_module, "_SET_ASIDE_S", 0.0)
    fleet.scheduler = fleet.new_scheduler()
    fleet.step()
    assert fleet.fired("bad") == [MINUTE]
    assert fleet.info("bad").problem is None


def test_a_kind_that_nobody_runs_is_no_problem_of_the_schedules(fleet: Fleet) -> None:
    fleet.add(kind="nobody.knows", args={"x": 1})
    fleet.step()
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE]
    assert fleet.info().problem is None


def test_an_open_transaction_that_took_the_key_holds_up_its_schedule_and_no_other(
    fleet: Fleet, other: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobq._statements.periodic._LOCK_TIMEOUT", "100ms")
    fleet.add("a unique one", unique="k")
    fleet.add("other")
    fleet.step()
    other.sql("begin")
    other.sql("select * from jobq.enqueue('x', '{}', unique_key => 'k')")
    with pytest.raises(jobq.DatabaseUnavailable):  # it may be the server as well
        fleet.step(MINUTE)
    fleet.step()
    assert fleet.fired("a unique one") == []
    assert "lock timeout" in (fleet.info("a unique one").problem or "")
    assert fleet.fired("other") == [MINUTE]
    other.sql("rollback")
    fleet.scheduler = fleet.new_scheduler()
    fleet.step()
    assert fleet.fired("a unique one") == [MINUTE]
    assert fleet.info("a unique one").problem is None


# -- declared by workers -----------------------------------------------------------------------------


@pytest.mark.matrix
def test_a_declared_schedule_ticks_while_a_live_worker_declares_it(fleet: Fleet) -> None:
    one = schedule()
    fleet.worker(2, one)
    fleet.worker(3, one)
    fleet.step(MINUTE)
    fleet.run(end(SCHEMA, 2, "stopped"))
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE, 2 * MINUTE]
    assert fleet.info().active
    fleet.run(end(SCHEMA, 3, "died"))
    fleet.step(MINUTE)
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE, 2 * MINUTE]
    info = fleet.info()
    assert (info.active, info.dynamic, info.next_at) == (False, False, None), "listed, and not active"
    fleet.worker(4, one)
    fleet.step()
    assert fleet.fired() == [MINUTE, 2 * MINUTE, 4 * MINUTE], "one job for what was missed"


def test_a_worker_whose_lease_has_run_out_declares_nothing(fleet: Fleet) -> None:
    fleet.worker(2, schedule())
    fleet.store.sql("update jobq.worker set lease_until = clock_timestamp() where id = 2")
    fleet.step(MINUTE)
    assert fleet.fired() == []
    assert not fleet.info().active


def test_in_a_rolling_deploy_the_newest_code_counts_and_nothing_flips_back(fleet: Fleet) -> None:
    old, new = schedule(args={"v": 1}), schedule(args={"v": 2}, every=HOUR)
    fleet.worker(2, old)
    fleet.worker(3, new)
    assert fleet.info().every == HOUR
    # The old one, which started before, comes to write only now: it is slow, or has a new identity.
    fleet.run(declare(SCHEMA, 2, [old], now=fleet.now))
    assert (fleet.info().every, fleet.info().args) == (HOUR, {"v": 2})
    fleet.worker(4, old)  # a rollback
    assert (fleet.info().every, fleet.info().args) == (MINUTE, {"v": 1})


def test_changed_times_tick_from_now_on_neither_twice_nor_for_the_past(fleet: Fleet) -> None:
    fleet.worker(2, schedule(every=MINUTE))
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE]
    fleet.now += 30 * SECOND
    fleet.worker(3, schedule(every=20 * SECOND))
    assert fleet.info().next_at == NOON + MINUTE + 40 * SECOND
    fleet.step(20 * SECOND)
    assert fleet.fired() == [MINUTE, MINUTE + 40 * SECOND]
    fleet.now += HOUR  # nobody leads for an hour
    fleet.worker(4, schedule(cron="* * * * *"))
    fleet.step()
    assert fleet.fired() == [MINUTE, MINUTE + 40 * SECOND], "the past is that of the old times"
    fleet.step(MINUTE)
    assert fleet.fired() == [MINUTE, MINUTE + 40 * SECOND, HOUR + 2 * MINUTE]


def test_unchanged_times_keep_what_is_to_be_caught_up_whatever_else_changes(fleet: Fleet) -> None:
    fleet.worker(2, schedule(every=HOUR, args={"v": 1}))
    fleet.now += 90 * MINUTE
    fleet.worker(3, schedule(every=HOUR, args={"v": 2}, queue="other"))
    fleet.step()
    assert fleet.fired() == [HOUR]
    assert [(row[2]) for row in fleet.jobs()] == ["other"]


def test_workers_that_declare_many_in_other_orders_do_not_meet_in_a_deadlock(
    fleet: Fleet, other: Storage
) -> None:
    from tests.support.storage import in_background

    names = [f"s{n}" for n in range(5)]
    fleet.worker(2)
    fleet.worker(3)
    forwards = [schedule(name) for name in names]
    first = declare(SCHEMA, 2, forwards)
    rows: Any = None
    for _ in range(2):  # begin, and the locks
        rows = fleet.store.call(first.send(rows) if rows is not None else next(first))
    first.close()
    with (
        Storage(fleet.store.dsn) as watcher,
        in_background(watcher, other.pid, lambda: other.run(declare(SCHEMA, 3, forwards[::-1]))),
    ):
        fleet.store.sql("rollback")
    assert [info.name for info in fleet.run(list_periodic(SCHEMA))] == names


def test_run_at_start_makes_a_job_when_the_schedule_comes_into_force_and_only_then(fleet: Fleet) -> None:
    one = schedule(every=DAY, run_at_start=True)
    fleet.now += HOUR
    fleet.worker(2, one)
    fleet.worker(3, one)
    fleet.step(SECOND)
    assert fleet.fired() == [HOUR]
    fleet.run(end(SCHEMA, 2, "stopped"))
    fleet.worker(4, one)  # a rolling deploy
    fleet.step(SECOND)
    assert fleet.fired() == [HOUR]
    for worker_id in (3, 4):
        fleet.run(end(SCHEMA, worker_id, "stopped"))
    fleet.now += HOUR
    fleet.worker(5, one)
    fleet.step(SECOND)
    assert fleet.fired() == [HOUR, 2 * HOUR + 2 * SECOND]
    fleet.step(12 * HOUR)
    assert fleet.fired()[2:] == [12 * HOUR], "midnight, by its timetable"


def test_a_deploy_after_the_clock_was_set_back_is_no_start_of_a_schedule(fleet: Fleet) -> None:
    one = schedule(every=DAY, run_at_start=True)
    fleet.worker(2, one)
    fleet.step(SECOND)
    assert len(fleet.jobs()) == 1
    fleet.store.sql("update jobq.worker set started_at = started_at + interval '1 hour'")
    fleet.worker(3, one)
    fleet.step(SECOND)
    assert len(fleet.jobs()) == 1


def test_run_at_start_of_an_added_schedule(fleet: Fleet) -> None:
    fleet.add(every=DAY, run_at_start=True)
    fleet.step()
    fleet.add(every=DAY, run_at_start=True)
    fleet.step()
    assert fleet.fired() == [timedelta(0)]


def test_a_declaration_takes_over_what_a_client_added(fleet: Fleet) -> None:
    fleet.add()
    assert fleet.info().dynamic
    assert fleet.worker(2, schedule()) == ["s"]
    info = fleet.info()
    assert (info.dynamic, info.active) == (False, True)
    assert fleet.worker(3, schedule()) == []


# -- what people do ----------------------------------------------------------------------------------


def test_a_pause_holds_through_deploys_and_a_resume_forgets_what_was_missed(fleet: Fleet) -> None:
    fleet.worker(2, schedule(catch_up="all"))
    fleet.run(pause_periodic(SCHEMA, "s", "too slow", "ada"))
    fleet.worker(3, schedule(catch_up="all"))
    fleet.step(5 * MINUTE)
    info = fleet.info()
    assert (info.paused, info.paused_by, info.pause_reason, info.next_at) == (True, "ada", "too slow", None)
    fleet.now += 30 * SECOND
    fleet.run(resume_periodic(SCHEMA, "s", now=fleet.now))
    info = fleet.info()
    assert (info.paused, info.paused_by, info.pause_reason) == (False, None, None)
    assert info.next_at == NOON + 6 * MINUTE
    fleet.step(30 * SECOND)
    assert fleet.fired() == [6 * MINUTE]


def test_a_second_pause_keeps_the_first_ones_time(fleet: Fleet) -> None:
    fleet.add()
    fleet.run(pause_periodic(SCHEMA, "s", "a", "ada"))
    since = fleet.info().paused_at
    fleet.run(pause_periodic(SCHEMA, "s", "b", "bob"))
    info = fleet.info()
    assert (info.paused_at, info.paused_by, info.pause_reason) == (since, "bob", "b")


def test_resuming_what_is_not_paused_changes_nothing(fleet: Fleet) -> None:
    fleet.add()
    fleet.now += 5 * MINUTE
    fleet.run(resume_periodic(SCHEMA, "s", now=fleet.now))
    fleet.step()
    assert fleet.fired() == [5 * MINUTE], "what was missed is still caught up with"


def test_a_trigger_makes_the_job_now_beside_the_ticks(fleet: Fleet) -> None:
    fleet.add(queue="q", overlap="skip")
    fleet.run(pause_periodic(SCHEMA, "s"))
    made = fleet.run(trigger_periodic(SCHEMA, "s", notify=False))
    assert made.inserted
    assert [(row[0], row[2], row[3]) for row in fleet.jobs()] == [(made.id, "q", "ready")]
    info = fleet.info()
    assert (info.last_job_id, info.last_at) == (made.id, None)
    assert fleet.ticks() == []
    fleet.run(resume_periodic(SCHEMA, "s", now=fleet.now))
    fleet.step(MINUTE)
    assert fleet.ticks() == [(MINUTE, None, f"the previous job {made.id} is unfinished")]


def test_a_trigger_whose_key_is_held_names_the_holder(fleet: Fleet) -> None:
    fleet.add(unique="k")
    first = fleet.run(trigger_periodic(SCHEMA, "s", notify=False))
    again = fleet.run(trigger_periodic(SCHEMA, "s", notify=False))
    assert again == jobq.Enqueued(first.id, inserted=False)


def test_what_is_added_again_is_replaced(fleet: Fleet) -> None:
    fleet.add(args={"v": 1})
    fleet.add(args={"v": 2}, cron="0 9 * * mon-fri", tz="Europe/Berlin")
    info = fleet.info()
    assert (info.args, info.every, info.cron, info.tz) == ({"v": 2}, None, "0 9 * * mon-fri", "Europe/Berlin")
    assert info.next_at == datetime(2031, 1, 2, 8, tzinfo=UTC)


def test_what_workers_declare_is_neither_replaced_nor_removed(fleet: Fleet) -> None:
    fleet.worker(2, schedule())
    with pytest.raises(jobq.PeriodicConflict, match="declared in the code"):
        fleet.add(every=HOUR)
    with pytest.raises(jobq.PeriodicConflict, match="declared in the code"):
        fleet.run(remove_periodic(SCHEMA, "s"))
    assert fleet.info().every == MINUTE
    fleet.run(end(SCHEMA, 2, "stopped"))
    fleet.add(every=HOUR)
    assert (fleet.info().every, fleet.info().dynamic) == (HOUR, True)
    fleet.run(remove_periodic(SCHEMA, "s"))
    assert fleet.run(list_periodic(SCHEMA)) == []


def test_a_schedule_that_was_removed_takes_its_ticks_along_and_leaves_its_jobs(fleet: Fleet) -> None:
    fleet.add()
    fleet.step()
    fleet.step(MINUTE)
    fleet.run(remove_periodic(SCHEMA, "s"))
    assert fleet.ticks() == []
    assert len(fleet.jobs()) == 1


@pytest.mark.parametrize(
    "verb",
    [
        lambda: pause_periodic(SCHEMA, "none"),
        lambda: resume_periodic(SCHEMA, "none"),
        lambda: remove_periodic(SCHEMA, "none"),
        lambda: trigger_periodic(SCHEMA, "none", notify=False),
    ],
)
def test_what_is_not_there_says_so(fleet: Fleet, verb: Any) -> None:
    with pytest.raises(jobq.PeriodicNotFound, match="no schedule 'none'"):
        fleet.run(verb())
    assert fleet.store.count("operator_log") == 0


@pytest.mark.matrix
def test_every_action_is_in_the_operator_log(fleet: Fleet) -> None:
    fleet.run(add_periodic(SCHEMA, schedule(), "because", "ada"))
    fleet.run(pause_periodic(SCHEMA, "s", "because", "ada"))
    fleet.run(resume_periodic(SCHEMA, "s", "because", "ada"))
    fleet.run(resume_periodic(SCHEMA, "s", "because", "ada"))  # it runs already: nothing was done
    fleet.run(trigger_periodic(SCHEMA, "s", "because", "ada", notify=False))
    fleet.run(remove_periodic(SCHEMA, "s", "because", "ada"))
    rows = fleet.store.sql("select actor, action, target, jobs, reason from jobq.operator_log order by id")
    assert {(row[0], row[2]["periodic"], row[4]) for row in rows} == {("ada", "s", "because")}
    assert [(row[1], row[3]) for row in rows] == [
        ("add periodic", None),
        ("pause periodic", None),
        ("resume periodic", None),
        ("trigger periodic", 1),
        ("remove periodic", None),
    ]


def test_what_the_log_cannot_keep_is_refused_before_anything_happens(fleet: Fleet) -> None:
    fleet.add()
    for verb in (pause_periodic, resume_periodic, remove_periodic):
        with pytest.raises(jobq.ConfigError, match="reason"):
            fleet.run(verb(SCHEMA, "s", "x" * 1001))
    assert not fleet.info().paused


def test_old_ticks_are_forgotten_in_batches(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_PRUNE_BATCH", 3)
    monkeypatch.setattr(scheduler_module, "_INTERVAL_S", 0.0)
    fleet.store.sql(
        "insert into jobq.periodic_tick (name, tick, made_at)"
        " select 's', now() - n * interval '1 day', now() - n * interval '1 day'"
        " from generate_series(1, 12) n"
    )
    fleet.step()
    assert fleet.store.count("periodic_tick") == 9
    fleet.step()
    fleet.step()
    assert fleet.store.value("select min(now() - tick) < interval '2 days' from jobq.periodic_tick")
    assert fleet.store.count("periodic_tick") == 6


# -- declarations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "every, cron"),
        ({"every": MINUTE, "cron": "* * * * *"}, "every, cron"),
        ({"cron": "60 * * * *"}, "cron="),
        ({"cron": "* * * * *", "tz": "Nowhere"}, "tz="),
        ({"every": MINUTE, "catch_up": "some"}, "catch_up='some': one of 'one', 'skip', 'all'"),
        ({"every": MINUTE, "catch_up_max": 0}, "catch_up_max=0"),
        ({"every": MINUTE, "catch_up_max": 1001}, "catch_up_max=1001"),
        ({"every": MINUTE, "catch_up_max": True}, "catch_up_max=True"),
        ({"every": MINUTE, "overlap": "queue"}, "overlap='queue'"),
        ({"every": MINUTE, "jitter": 5}, "jitter=5"),
        ({"every": MINUTE, "jitter": -MINUTE}, "jitter="),
        ({"every": MINUTE, "run_at_start": 1}, "run_at_start=1"),
        ({"every": MINUTE, "queue": ""}, "queue="),
        ({"every": MINUTE, "priority": 10}, "priority=10"),
        ({"every": MINUTE, "run_at": NOON}, "run_at: no such option of a schedule"),
        ({"every": MINUTE, "evry": 1}, "evry: no such option of a schedule; there are .*catch_up"),
        ({"every": MINUTE, "meta": {"x": float("nan")}}, r"meta\.x"),
    ],
)
def test_whatever_cannot_work_is_refused_where_it_is_declared(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(jobq.ConfigError, match=f"schedule 's': .*{complaint}"):
        jobq.Jobs().add_periodic("s", REPORT, {}, **options)


def test_a_name_and_arguments_are_refused_where_they_are_declared() -> None:
    jobs = jobq.Jobs()
    for name in ("", "x" * 129, "a\nb", 5):
        with pytest.raises(jobq.ConfigError, match="name="):
            jobs.add_periodic(name, PING, every=MINUTE)  # type: ignore[arg-type]
    with pytest.raises(jobq.ConfigError, match=r"schedule 's': \$\.x: .*set"):
        jobs.add_periodic("s", REPORT, {"x": {1}}, every=MINUTE)
    with pytest.raises(jobq.ConfigError, match="schedule 's'"):
        jobs.add_periodic("s", PING, "none", every=MINUTE)  # type: ignore[misc]
    assert jobs.schedules == ()


def test_schedules_are_included_and_none_is_there_twice() -> None:
    jobs, part = jobq.Jobs(), jobq.Jobs()
    part.add_periodic("a", PING, every=MINUTE)
    jobs.include(part)
    assert [one.name for one in jobs.schedules] == ["a"]
    with pytest.raises(jobq.ConfigError, match="schedule 'a' is declared already"):
        jobs.add_periodic("a", PING, every=MINUTE)
    with pytest.raises(jobq.ConfigError, match="would not see it"):
        part.add_periodic("b", PING, every=MINUTE)
    twin = jobq.Jobs()
    twin.handler("k")(lambda job, args: None)
    twin.add_periodic("a", PING, every=MINUTE)
    with pytest.raises(jobq.ConfigError, match="schedule 'a' is declared already"):
        jobs.include(twin)
    assert jobs.kinds == (), "then nothing is taken over"


def test_both_clients_have_the_same_verbs_signatures_and_docstrings() -> None:
    verbs = {name for name in vars(AsyncPeriodic) if not name.startswith("_")}
    assert verbs == {"list", "add", "remove", "pause", "resume", "trigger"}
    assert verbs == {name for name in vars(Periodic) if not name.startswith("_")}
    for name in verbs:
        one, two = getattr(AsyncPeriodic, name), getattr(Periodic, name)
        assert inspect.signature(one) == inspect.signature(two), name
        assert one.__doc__ == two.__doc__, name
        assert one.__doc__, name


# -- whole workers -----------------------------------------------------------------------------------


async def test_a_worker_runs_what_it_declares_and_the_clients_see_and_steer_it(dsn: str) -> None:
    jobs = jobq.Jobs()
    ran: list[int] = []

    @jobs.handler("beat")
    async def beat(job: jobq.Job, args: None) -> None:
        ran.append(job.id)

    jobs.add_periodic("heart", beat, every=SECOND, run_at_start=True)
    async with working(dsn, jobs) as bench:
        await eventually_async(lambda: len(ran) >= 3, what="it beats")
        [info] = await bench.client.periodic.list()
        assert (info.name, info.kind, info.every, info.active, info.dynamic) == (
            "heart", "beat", SECOND, True, False,
        )  # fmt: skip
        await bench.client.periodic.pause("heart", reason="rest", by="ada")
        made = await bench.client.periodic.trigger("heart")
        await bench.ended(made.id)
        with pytest.raises(jobq.PeriodicConflict):
            await bench.client.periodic.remove("heart")
        with jobq.Client(dsn) as client:
            client.periodic.add("brain", "beat", every=SECOND)
            assert [(one.name, one.paused, one.dynamic) for one in client.periodic.list()] == [
                ("brain", False, True),
                ("heart", True, False),
            ]
            client.periodic.resume("heart")
            client.periodic.remove("brain")


async def test_schedules_tick_through_a_transaction_pooler(pooled_dsn: str, db: psycopg.Connection) -> None:
    jobs = jobq.Jobs()
    ran: list[int] = []

    @jobs.handler("beat")
    async def beat(job: jobq.Job, args: None) -> None:
        ran.append(job.id)

    jobs.add_periodic("heart", beat, every=SECOND, unique=jobq.Unique(by_args=True))
    async with working(pooled_dsn, jobs):
        await eventually_async(lambda: len(ran) >= 2, what="it beats")
    made = db.execute("select count(*) from jobq.periodic_tick where job_id is not null").fetchone()
    assert made is not None
    assert made[0] >= 2


async def test_ticks_of_an_idle_worker_are_punctual(dsn: str) -> None:
    jobs = jobq.Jobs()

    @jobs.handler("beat")
    async def beat(job: jobq.Job, args: None) -> None: ...

    jobs.add_periodic("heart", beat, every=SECOND)
    async with working(dsn, jobs) as bench:

        def late() -> list[float]:
            rows = bench.rows(
                "select extract(epoch from made_at - tick)::float8 as s from jobq.periodic_tick"
            )
            return [row["s"] for row in rows]

        await eventually_async(lambda: len(late()) >= 5, what="five ticks")
        lateness = late()
    assert all(s >= 0 for s in lateness), "none comes early"
    assert min(lateness) < 0.25, "a wide bound, for the machine may be busy: 2 ms when it is not"
