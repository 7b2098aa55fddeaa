"""Schedules while leaders die: every tick once, whoever makes it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

import jobq
from tests.support.polling import eventually
from tests.support.workers import Site

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython
    from tests.support.workers import WorkerProcess

SECOND = timedelta(seconds=1)
STORM_S = 20.0


@pytest.mark.slow
def test_s55_each_tick_makes_one_job_while_the_leader_is_killed_every_second(
    spawn_python: SpawnPython, dsn: str, tmp_path: Path
) -> None:
    site = Site(spawn_python, dsn, tmp_path)
    workers = [site.start() for _ in range(3)]
    with jobq.Client(dsn, pool_max_size=1) as client:
        client.periodic.add(
            "beat", "wait", {"s": 0.0}, every=SECOND, catch_up="all", catch_up_max=1000, max_attempts=1000
        )
    began = datetime.now(UTC)
    kills = 0
    ends_at = time.monotonic() + STORM_S
    while time.monotonic() < ends_at:
        killed = kill_leader(site, workers)
        kills += killed
        if killed:
            workers.append(site.start(wait=False))
        time.sleep(1.0)  # the storm's own pace
    assert kills >= 4, "hardly anybody was elected"
    ended = datetime.now(UTC)
    last = eventually(lambda: newest_tick(site, ended), 30.0, what="it has caught up")
    rows = site.sql(
        "select tick, job_id, skipped from jobq.periodic_tick where tick <= %s order by tick", last
    )
    ticks = [tick for tick, _, _ in rows]
    assert ticks[0] - began < 2 * SECOND
    assert ticks == [ticks[0] + n * SECOND for n in range(len(ticks))], "one was lost"
    assert all(skipped is None for _, _, skipped in rows)
    jobs = [job_id for _, job_id, _ in rows]
    assert len(set(jobs)) == len(jobs)
    [(made,)] = site.sql("select count(*) from jobq.job where kind = 'wait'")
    [(noted,)] = site.sql("select count(*) from jobq.periodic_tick where job_id is not null")
    assert made == noted, "a job without a tick"


def kill_leader(site: Site, workers: list[WorkerProcess]) -> bool:
    """Kill the process that leads; whether there was one."""
    found = site.sql(
        "select w.pid from jobq.leader l join jobq.worker w on w.id = l.worker_id"
        " where l.lease_until > clock_timestamp() and w.ended_at is null"
    )
    for worker in workers:
        if found and worker.process.pid == found[0][0] and worker.process.running:
            worker.kill()
            return True
    return False


def newest_tick(site: Site, after: datetime) -> datetime | None:
    [(tick,)] = site.sql("select max(tick) from jobq.periodic_tick")
    return tick if tick is not None and tick > after else None
