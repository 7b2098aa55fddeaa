"""Half of the top speed, held for long: memory, connections, tables and pickup stay as they were.

And where they do not, it is seen: in applications that leak, behind a transaction that is left open, and of
a database that loses jobs.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

import psycopg
import pytest

from tests.chaos import vitals
from tests.chaos.endurance import Endurance, Plan
from tests.chaos.stage import LONG, assert_kept
from tests.conftest import APP_DATABASE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import DurableServer, SpawnPython

MINUTES: Final = float(os.environ.get("JOBQ_ENDURANCE_MINUTES", "30"))
SHORT: Final = Plan(seconds=15.0, most=200.0)
PLAN: Final = Plan(seconds=MINUTES * 60) if LONG else SHORT
SEEN_SOON: Final = Plan(seconds=10.0)
_AROUND_S: Final = 120.0  # the top speed, start and end

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


@pytest.mark.timeout(PLAN.seconds + _AROUND_S)
def test_half_of_the_top_speed_is_held(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    server = durable_server(settings=PLAN.settings)
    assert_kept(Endurance(spawn_python, server, server.dsn(APP_DATABASE), tmp_path, PLAN).run())


@contextlib.contextmanager
def nothing_more(_dsn: str) -> Iterator[None]:
    """Leave the database as it is."""
    yield


@contextlib.contextmanager
def a_transaction_left_open(dsn: str) -> Iterator[None]:
    """Keep vacuum from removing anything."""
    with psycopg.connect(dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("select count(*) from jobq.job")
        yield


@contextlib.contextmanager
def jobs_that_get_lost(dsn: str) -> Iterator[None]:
    """Have the database lose one job of a hundred without a word."""
    with psycopg.connect(dsn) as connection:
        connection.execute(
            "create function lose() returns trigger language plpgsql as 'begin return null; end';"
            "create trigger lose before insert on jobq.running for each row"
            " when (new.job_id % 100 = 0) execute function lose()"
        )
    yield


@pytest.mark.parametrize(
    ("leak", "fault", "promise", "what"),
    [
        ("memory", nothing_more, "it_stays_as_it_was", vitals.MEMORY),
        ("connections", nothing_more, "it_stays_as_it_was", vitals.CONNECTIONS),
        (None, a_transaction_left_open, "it_stays_as_it_was", vitals.DEAD),
        (None, jobs_that_get_lost, "what_was_acknowledged_completes_once", ""),
    ],
)
def test_what_does_not_stay_is_found_out(
    spawn_python: SpawnPython,
    durable_server: DurableServer,
    tmp_path: Path,
    leak: str | None,
    fault: Callable[[str], contextlib.AbstractContextManager[None]],
    promise: str,
    what: str,
) -> None:
    server = durable_server(settings=SEEN_SOON.settings)
    dsn = server.dsn(APP_DATABASE)
    with fault(dsn):
        verdict = Endurance(spawn_python, server, dsn, tmp_path, SEEN_SOON, leak=leak).hold(200.0, {})
    [found] = [problem for problem in verdict.problems if problem.promise == promise]
    assert any(what in str(one) for one in found.what), str(verdict)
