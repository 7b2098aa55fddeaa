"""Wall clocks that are wrong and stepped: the database's own, and those of workers and producers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest

from tests.chaos import faults
from tests.chaos.clocks import DAY_S, HOUR_S, DatabaseClock, stepping
from tests.chaos.stage import Stage, assert_kept
from tests.conftest import APP_DATABASE
from tests.support.faketime import Clock
from tests.support.polling import eventually

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from tests.conftest import DurableServer, SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

STEPS_S: Final = (0, HOUR_S, -HOUR_S, 5, -5)

# What a client says when its clock is wrong; it prints the ids of the jobs, and what it was refused.
CLIENT: Final = """
import json, sys
from datetime import UTC, datetime, timedelta
import jobq

now, hour = datetime.now(UTC), timedelta(hours=1)
options = {
    "due now": {"run_at": now},
    "put off": {"delay": hour},
    "in a slot": {"unique": jobq.Unique("key", period=hour)},
    "good for a minute": {"expires_at": now + timedelta(minutes=1)},
    "good for a minute after all": {"expires_at": now - hour + timedelta(minutes=1)},
}
said = {}
with jobq.Client(sys.argv[1]) as client:
    client.periodic.add("hourly", "k", {}, every=hour)
    for name, given in options.items():
        try:
            said[name] = client.enqueue("k", {}, **given).id
        except jobq.ConfigError as error:
            said[name] = str(error)
print("SAID", json.dumps(said))
"""


def test_workers_whose_clocks_disagree(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    """Some are a day ahead or behind, and some are stepped by an hour all the time; producers as well."""
    clocks = [Clock(tmp_path / str(offset_s), offset_s) for offset_s in (DAY_S, -DAY_S)]
    stepped = Clock(tmp_path / "stepped")
    stage = Stage(spawn_python, dsn, tmp_path, clocks=[*clocks, stepped], ticks=True)
    with stepping(stepped, STEPS_S, every_s=0.7):
        assert_kept(stage.run(faults.kill_started_workers, 8.0))


def test_what_a_client_reckons_by_its_own_clock(
    spawn_python: SpawnPython, dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    """Moments that it names are its own; lengths of time and slots are the database's."""
    ahead = Clock(tmp_path / "ahead", HOUR_S)
    client = spawn_python("-c", CLIENT, dsn, env=ahead.env)
    assert client.wait(60.0) == 0, client.output
    said = json.loads(client.output.split("SAID ")[1])

    def after_s(moment: str, table: str, name: str) -> float:
        """Return how long after now, by the database's clock, something of a job is."""
        key = "id" if table == "job" else "job_id"
        text = f"select extract(epoch from {moment} - now())::float8 from jobq.{table} where {key} = %s"
        row = db.execute(text.encode(), [said[name]]).fetchone()
        assert row is not None
        return float(row[0])

    assert after_s("run_at", "scheduled", "due now") == pytest.approx(HOUR_S, abs=60)
    assert after_s("run_at", "scheduled", "put off") == pytest.approx(HOUR_S, abs=60)
    assert 0 < after_s("held_until", "unique_key", "in a slot") + 60 < HOUR_S + 60
    assert after_s("expires_at", "job", "good for a minute") == pytest.approx(HOUR_S, abs=120)
    assert "has passed" in said["good for a minute after all"]
    row = db.execute("select next_at - now() < interval '1 hour' from jobq.periodic").fetchone()
    assert row == (True,)


def test_a_worker_whose_clock_is_wrong_judges_nothing_by_it(
    spawn_python: SpawnPython, dsn: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    stage = Stage(spawn_python, dsn, tmp_path, clocks=[Clock(tmp_path / "behind", -DAY_S)], ticks=True)
    late, due = stage.make("work", do="work"), stage.make("work", do="work")
    expire = "update jobq.job set expires_at = now() + %s * interval '1 hour' where id = %s"
    db.execute(expire, [0, late])  # which is tomorrow by the worker's clock
    db.execute(expire, [1, due])
    stage.start_worker(wait=False).wait_for_output("works on", 60.0)
    state = "select state from jobq.jobs where id = %s"
    eventually(lambda: db.execute(state, [due]).fetchone() == ("completed",), what="it works")
    eventually(lambda: db.execute(state, [late]).fetchone() == ("discarded",), what="it drops what is late")
    ticks = "select count(*) >= 2 from jobq.periodic_tick where now() - tick between '0 s' and '3 s'"
    eventually(lambda: db.execute(ticks).fetchone() == (True,), what="the schedule ticks every second")
    stage.stop_workers()


@pytest.mark.parametrize("kills", [False, True], ids=["steps", "steps-and-kills"])
def test_a_databases_clock_that_is_stepped(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path, kills: bool
) -> None:
    clock = Clock(tmp_path / "clock")
    server = durable_server(bin_dir=clock.server_programs(tmp_path / "programs"))
    stepped = DatabaseClock(clock, server.dsn(APP_DATABASE), kills=kills)
    stage = Stage(spawn_python, server.dsn(APP_DATABASE), tmp_path, ticks=True, true_times=stepped.true_times)
    verdict = stage.run(stepped.fault, 0.0)
    assert_kept(verdict)
    ended = dict(stage.sql("select end_reason, count(*) from jobq.worker group by 1"))
    assert ended.get("lease ended", 0) == verdict.figures.get("kill -9", 0), "and nobody who lived"
    assert verdict.figures["s longest gap between ticks"] < 20
    if not kills:
        assert verdict.figures["crashes"] == 0
