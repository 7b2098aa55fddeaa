"""The table of begun jobs, and which suspects may run together."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from jobq._worker.started import ENTRIES, StartedJobs, make_table, read_table
from jobq._worker.suspects import Suspects, alone_from

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def table() -> Iterator[int]:
    descriptor = make_table()
    yield descriptor
    os.close(descriptor)


def test_the_table_shows_what_was_begun_and_is_not_recorded(table: int) -> None:
    assert read_table(table) == frozenset()
    started = StartedJobs(table)
    started.add(1, 1)
    started.add(2**63 - 1, 7)
    started.add(3, 1)
    started.discard([(1, 1), (4, 1)])
    assert read_table(table) == frozenset({2**63 - 1, 3})


def test_two_attempts_of_one_job_are_told_apart(table: int) -> None:
    started = StartedJobs(table)
    started.add(1, 1)  # its lease ended, and it goes on
    started.add(1, 2)
    started.discard([(1, 2)])
    assert read_table(table) == frozenset({1})
    started.discard([(1, 1)])
    assert read_table(table) == frozenset()


def test_places_are_used_again_and_a_table_that_was_full_tells_nothing_any_more(table: int) -> None:
    started = StartedJobs(table)
    for _ in range(3):
        for job_id in range(1, ENTRIES + 1):
            started.add(job_id, 1)
        assert read_table(table) == frozenset(range(1, ENTRIES + 1))
        started.discard([(job_id, 1) for job_id in range(1, ENTRIES + 1)])
    for job_id in range(1, ENTRIES + 2):
        started.add(job_id, 1)
    assert read_table(table) is None
    started.discard([(job_id, 1) for job_id in range(1, ENTRIES + 2)])
    assert read_table(table) is None, "it missed one, and may again"


@pytest.mark.parametrize(
    ("limit", "supervised", "expected"),
    [(1, True, 1), (2, True, 1), (3, True, 2), (10, True, 2), (3, False, 1), (10, False, 1)],
)
def test_from_how_many_crashes_on_a_job_runs_alone(limit: int, supervised: bool, expected: int) -> None:
    assert alone_from(limit, supervised=supervised) == expected


class FakeExecution:
    def __init__(self, crashes: int) -> None:
        self.claimed = SimpleNamespace(crashes=crashes)


def suspect(crashes: int) -> Any:
    return FakeExecution(crashes)


def test_suspects_run_together_until_one_has_to_be_alone() -> None:
    suspects = Suspects()
    suspects.alone_from = 2
    first, second, alone = suspect(1), suspect(1), suspect(2)
    assert suspects.admission(has_slot=True) == (2, True)
    assert suspects.admission(has_slot=False) == (1, False), "what it took would wait here"
    suspects.add(first)
    suspects.add(second)
    assert suspects.admission(has_slot=True) == (2, False)
    assert suspects.discard(first)
    assert not suspects.discard(first)
    assert suspects.discard(second)
    suspects.add(alone)
    assert suspects.admission(has_slot=True) == (1, False)
    assert suspects.discard(alone)
    assert suspects.admission(has_slot=True) == (2, True)
