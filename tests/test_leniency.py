"""Leniency: what the database's clock may show, when it was stepped, and what a rescuer makes of it."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import pytest

import jobq
from jobq._statements import duties
from jobq._worker.leniency import Leniency
from tests.support.inprocess import working
from tests.support.polling import eventually_async
from tests.support.storage import Storage

if TYPE_CHECKING:
    import psycopg

S: Final = 1_000_000


class Watch:
    """A rescuer's looks, each so long after the one before, on clocks that the test sets."""

    def __init__(self) -> None:
        self.local_s = 1_000.0
        self.leniency = Leniency(lambda: self.local_s)
        self.shown_us = 0

    def look(self, after_s: float, shown_us: int, answer_s: float = 0.0) -> bool:
        """Look at the database; return whether a step forward was seen."""
        self.local_s += after_s
        self.latest_us = self.leniency.ask()
        self.local_s += answer_s
        return self.leniency.see(shown_us)


def test_who_has_just_come_declares_nothing_and_counts_from_then() -> None:
    watch = Watch()
    assert not watch.look(0, 50 * S)
    assert (watch.latest_us, watch.leniency.since_us) == (0, 50 * S)
    assert not watch.look(5, 55 * S)
    assert (watch.latest_us, watch.leniency.since_us) == (56 * S, 50 * S), (
        "and a second more, which is no step"
    )


@pytest.mark.parametrize("step_s", [5, 60, 3_600, 86_400])
def test_a_step_forward_is_seen_and_counts_as_a_renewal(step_s: int) -> None:
    watch = Watch()
    watch.look(0, 50 * S)
    stepped_us = (55 + step_s) * S
    assert watch.look(5, stepped_us)
    assert watch.latest_us < stepped_us, "nothing was declared by that look"
    assert watch.leniency.since_us == stepped_us
    assert not watch.look(5, stepped_us + 5 * S), "it is told once"


def test_a_slow_answer_is_no_step_but_declares_nothing_that_time() -> None:
    watch = Watch()
    watch.look(0, 50 * S)
    shown_us = 65 * S  # the statement came to the server 10 s late
    assert not watch.look(5, shown_us, answer_s=10)
    assert watch.latest_us < shown_us
    assert watch.leniency.since_us == 50 * S
    assert not watch.look(5, 70 * S)
    assert watch.latest_us >= 70 * S, "the next look may"


def test_a_step_back_is_no_step_forward() -> None:
    watch = Watch()
    watch.look(0, 5_000 * S)
    assert not watch.look(5, 1_405 * S)
    assert not watch.look(5, 1_410 * S)
    assert watch.latest_us == 1_411 * S


def test_after_an_outage_it_begins_anew() -> None:
    watch = Watch()
    watch.look(0, 50 * S)
    watch.leniency.begin()
    assert not watch.look(100, 150 * S)
    assert (watch.latest_us, watch.leniency.since_us) == (0, 150 * S)


async def test_a_step_forward_gives_the_living_time_to_renew(
    dsn: str, db: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock by which leases are judged is the database's, and as far ahead of it as a table says."""
    db.execute("create table public.ahead (by interval)")
    db.execute("insert into public.ahead values ('0')")
    stepped = "(clock_timestamp() + (select by from public.ahead))"
    monkeypatch.setattr(duties, "EXPIRE", duties.EXPIRE.replace("clock_timestamp()", stepped))
    lease_s = 8.0
    with Storage(dsn) as store:
        other, gone = store.worker(1, lease_s=lease_s), store.worker(2, lease_s=-1.0)
        async with working(dsn, jobq.Jobs(), rescue_interval=timedelta(milliseconds=20)):
            ended = "select array_agg(id) from jobq.worker where ended_at is not null"
            await eventually_async(lambda: store.value(ended) == [gone], what="it looks")
            assert store.run(duties.renew("jobq", other, lease_s))
            stepped_at = time.monotonic()
            with caplog.at_level(logging.WARNING, "jobq.worker"):
                db.execute("update public.ahead set by = interval '1 hour'")
                await eventually_async(lambda: "stepped forward" in caplog.text)
                await eventually_async(lambda: store.value(ended) != [gone], what="it does not renew")
    assert time.monotonic() > stepped_at + lease_s / 2
    assert f"worker {other} (w) is dead" in caplog.text
    assert caplog.text.count("stepped forward") == 1
