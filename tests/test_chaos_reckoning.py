"""What judges a load that is held for long: of each promise a case that breaks it, and is seen."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Final

import pytest

from tests.chaos import vitals
from tests.chaos.flatness import LIMITS, P99, Limit, not_flat, pickup_by_minute, rows_of, table
from tests.chaos.ledger import (
    COMPLETED,
    MADE,
    RAISED,
    REFUSED,
    STARTED,
    Ledger,
    Pace,
    Tally,
    Totals,
    percentile_s,
    read_ledgers,
    tally,
)
from tests.chaos.reckoning import PROMISES, Account, Books, reckon
from tests.chaos.vitals import Key, Sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# -- counts -------------------------------------------------------------------------------------------


def test_tallies_of_the_same_jobs_are_equal_in_any_order_and_any_parts() -> None:
    jobs = [*range(1, 200), *range(50, 100)]
    parts = tally(jobs[120:]) + tally(jobs[:120])
    assert parts == tally(reversed(jobs)) == tally(jobs)
    assert parts.count == len(jobs)


@pytest.mark.parametrize("other", [[], [1, 2], [1, 2, 4], [1, 1, 4], [2, 2, 2], [1, 2, 3, 3]])
def test_tallies_of_other_jobs_differ(other: list[int]) -> None:
    assert tally(other) != tally([1, 2, 3])


def test_ledgers_of_several_processes_add_up_while_they_are_written(tmp_path: Path) -> None:
    ledgers = [Ledger(tmp_path / f"{number}.ledger") for number in range(2)]
    (tmp_path / "just made.ledger").touch()

    def count(ledger: Ledger) -> None:
        for job_id in range(1_000):
            ledger.add(STARTED, [job_id])
            ledger.note_pickup(0.010 if job_id % 10 else 1.0)

    threads = [threading.Thread(target=count, args=[ledger]) for ledger in ledgers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    totals = read_ledgers(tmp_path.glob("*.ledger"))
    once = tally(range(1_000))
    assert totals[STARTED] == once + once + once + once
    assert totals[COMPLETED] == Tally()
    assert percentile_s(totals.pickups, 50) == pytest.approx(0.010, rel=0.05)
    assert percentile_s(totals.pickups, 99) == pytest.approx(1.0, rel=0.05)


def test_latencies_beyond_the_scale_are_kept_at_its_ends(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a.ledger")
    for seconds in (-1.0, 0.0, 1e9):
        ledger.note_pickup(seconds)
    pickups = read_ledgers([tmp_path / "a.ledger"]).pickups
    assert (pickups[0], pickups[-1]) == (2, 1)
    assert percentile_s([0] * len(pickups), 99) == 0.0


def test_a_pace_is_read_as_it_was_set_by_another(tmp_path: Path) -> None:
    ours, theirs = Pace(tmp_path / "pace"), Pace(tmp_path / "pace")
    assert theirs.get() == 0.0
    for pace in (12.5, math.inf, 0.0):
        ours.set(pace)
        assert theirs.get() == pace


# -- the account --------------------------------------------------------------------------------------


def good() -> Account:
    """Three jobs, the last of which was started twice, and two ticks."""
    made, done = Totals(), Totals()
    made.tallies[MADE] = tally([1, 2, 3])
    done.tallies[STARTED] = tally([1, 2, 3, 3, 8, 9])
    done.tallies[RAISED] = tally([3])
    done.tallies[COMPLETED] = tally([1, 2, 3, 8, 9])
    return Account(made, done, Books(finished=3, came=5, left=2, ticks=[(100, 8), (101, 9)]))


def set_workers(account: Account, name: str, *job_ids: int) -> None:
    account.workers.tallies[name] = tally(job_ids)


COMPLETES_ONCE: Final = "what_was_acknowledged_completes_once"

BREAKS: Final[list[tuple[str, Callable[[Account], object]]]] = [
    (COMPLETES_ONCE, lambda a: set_workers(a, COMPLETED, 1, 3, 8, 9)),  # one was lost
    (COMPLETES_ONCE, lambda a: set_workers(a, COMPLETED, 1, 1, 3, 8, 9)),  # and another done twice
    (COMPLETES_ONCE, lambda a: set_workers(a, COMPLETED, 1, 2, 3, 4, 8, 9)),  # one that was rolled back
    ("each_start_ends_once", lambda a: set_workers(a, STARTED, 1, 2, 3, 3, 3, 8, 9)),
    ("each_start_ends_once", lambda a: set_workers(a, STARTED, 1, 2, 3, 8, 9)),
    ("each_start_ends_once", lambda a: set_workers(a, RAISED, 2)),
    ("the_tables_tell_the_same", lambda a: setattr(a.books, "came", 6)),
    ("the_tables_tell_the_same", lambda a: setattr(a.books, "left", 3)),
    ("the_tables_tell_the_same", lambda a: setattr(a.books, "torn", 1)),
    ("no_call_is_refused", lambda a: a.producers.tallies.update({REFUSED: Tally(1)})),
    ("nothing_is_stranded", lambda a: setattr(a.books, "waiting", 1)),
    ("nothing_is_given_up", lambda a: setattr(a.books, "given_up", 1)),
    ("each_second_has_its_tick", lambda a: a.books.ticks.append((103, 10))),
    ("each_second_has_its_tick", lambda a: a.books.ticks.append((102, None))),
    ("each_second_has_its_tick", lambda a: a.books.ticks.clear()),
    ("workers_keep_their_leases", lambda a: setattr(a.books, "workers_ended", 1)),
    ("keys_are_held_once", lambda a: a.books.keys_doubled.add("key")),
]


def test_a_good_account_breaks_nothing() -> None:
    assert reckon(good()) == []


@pytest.mark.parametrize(("promise", "damage"), BREAKS)
def test_what_breaks_a_promise_is_found(promise: str, damage: Callable[[Account], object]) -> None:
    account = good()
    damage(account)
    assert promise in {problem.promise for problem in reckon(account)}


def test_every_promise_has_a_case_that_breaks_it() -> None:
    assert {name for name, _ in BREAKS} == {promise.__name__ for promise in PROMISES}


# -- what stays as it was -----------------------------------------------------------------------------

CALM: Final = {
    Key(vitals.MEMORY, "worker 1"): 50.0,
    Key(vitals.FILES, "worker 1"): 20.0,
    Key(vitals.CONNECTIONS, "server"): 25.0,
    Key(vitals.HEAP, "job"): 10.0,
    Key(vitals.INDEXES, "job"): 4.0,
    Key(vitals.DEAD, "job"): 1_000.0,
    Key(vitals.WAITING, "queue"): 5.0,
    Key(vitals.WAL, "server"): 0.0,
}


def watched(
    change: Callable[[float], dict[Key, float]], pickups: Callable[[float], list[int]]
) -> list[Sample]:
    """Return samples of 100 s, one a second, of what is calm but for what ``change`` says of each moment."""
    return [Sample(float(at_s), {**CALM, **change(at_s / 100)}, pickups(at_s)) for at_s in range(101)]


def steady_pickups(at_s: float) -> list[int]:
    """99 pickups a second of 1 ms, and one of 10 ms."""
    ms1, ms10 = (int(math.log2(s / 1e-5) * 16) for s in (0.001, 0.010))
    return [int(at_s * {ms1: 990, ms10: 10}.get(bucket, 0)) for bucket in range(432)]


def slower_pickups(at_s: float) -> list[int]:
    """The same, until in the last fifth one of twenty takes a second."""
    pickups = steady_pickups(at_s)
    pickups[int(math.log2(1.0 / 1e-5) * 16)] += int(max(0.0, at_s - 80) * 50)
    return pickups


def test_what_is_calm_is_flat_and_its_figures_are_right() -> None:
    samples = watched(lambda part: {Key(vitals.WAL, "server"): 300.0 * part}, steady_pickups)
    rows = {row.key.what: row for row in rows_of(samples)}
    assert not_flat(rows.values()) == []
    assert rows[vitals.WAL].fifths == pytest.approx([3.0] * 5)
    assert rows[P99].fifths == pytest.approx([1.0] * 5, rel=0.05)
    minutes = pickup_by_minute(samples)
    assert len(minutes) == 16  # of 5 s each
    assert minutes[0] == pytest.approx((1.0, 1.0), rel=0.05)
    assert "not flat" not in table(list(rows.values()))


@pytest.mark.parametrize(
    ("key", "grow"),
    [
        (Key(vitals.MEMORY, "worker 1"), lambda part: 50.0 + 10.0 * part),
        (Key(vitals.MEMORY, "worker 1"), lambda part: 500.0 + 20.0 * part),
        (Key(vitals.FILES, "worker 1"), lambda part: 20.0 + 10.0 * part),
        (Key(vitals.CONNECTIONS, "server"), lambda part: 25.0 + 5.0 * part),
        (Key(vitals.CONNECTIONS, "server"), lambda part: 25.0 - 5.0 * part),
        (Key(vitals.HEAP, "job"), lambda part: 10.0 + 20.0 * part),
        (Key(vitals.INDEXES, "job"), lambda part: 4.0 + 10.0 * part),
        (Key(vitals.DEAD, "job"), lambda part: 1_000.0 + 10_000.0 * part),
        (Key(vitals.WAITING, "queue"), lambda part: 1_000.0 * part),
    ],
)
def test_what_grows_is_not_flat(key: Key, grow: Callable[[float], float]) -> None:
    rows = rows_of(watched(lambda part: {key: grow(part)}, steady_pickups))
    assert [row.key for row in not_flat(rows)] == [key]
    assert table(rows).count("**not flat**") == 1


def test_pickup_that_becomes_slower_is_not_flat() -> None:
    samples = watched(lambda _: {}, slower_pickups)
    assert [row.key.what for row in not_flat(rows_of(samples))] == [P99]
    assert pickup_by_minute(samples)[-1] == pytest.approx((1.0, 1_000.0), rel=0.05)


def test_one_moment_does_not_decide() -> None:
    rows = rows_of(
        watched(lambda part: {Key(vitals.HEAP, "job"): 90.0 if part == 0.95 else 10.0}, steady_pickups)
    )
    assert not_flat(rows) == []


def test_a_limit_says_what_the_end_may_be() -> None:
    assert Limit(factor=1.1, most=10.0).ceiling(50.0) == pytest.approx(55.0)
    assert Limit(factor=1.1, most=10.0).ceiling(500.0) == 510.0
    assert Limit(slack=2.0, both_ways=True).allows(10.0, 8.0)
    assert not Limit(slack=2.0, both_ways=True).allows(10.0, 7.0)
    assert Limit(slack=2.0).allows(10.0, 0.0)
    assert {row.what for row in CALM} - LIMITS.keys() == {vitals.WAL}
