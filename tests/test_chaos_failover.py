"""A standby takes over, by our hand or Patroni's: synchronous, nothing is lost; else nothing is mixed up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import pytest

from tests.chaos import patroni_faults
from tests.chaos.auditor import Allowed
from tests.chaos.stage import Load, Stage, assert_kept
from tests.chaos.standby import Pair
from tests.support.patroni import PatroniCluster, find_etcd, find_patroni

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

# Some jobs run when the server goes, and all are worked off while it stays.
LOAD: Final = Load(pause_s=0.01, run_s=(0.0,) * 12 + (0.02,) * 6 + (0.5, 2.0))


@pytest.mark.parametrize("is_synchronous", [True, False], ids=["synchronous", "asynchronous"])
def test_a_standby_that_takes_over(
    spawn_python: SpawnPython, tmp_path_factory: pytest.TempPathFactory, is_synchronous: bool
) -> None:
    folder: Path = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, folder, is_synchronous=is_synchronous)
        stage = Stage(spawn_python, pair.dsn, folder, load=LOAD)
        allowed = Allowed(lost_commits=not is_synchronous)
        verdict = stage.run(pair.fail_over, 8.0, allowed=allowed)
        assert_workers_went_on(stage)
    assert_kept(verdict)
    assert verdict.figures["failovers"] == 1


@pytest.mark.parametrize(
    "once",
    [
        patroni_faults.kill_host,
        patroni_faults.freeze_patroni,
        patroni_faults.lose_etcd,
        patroni_faults.switch_over,
    ],
    ids=lambda once: once.__name__,
)
def test_patroni_with_a_synchronous_standby(
    spawn_python: SpawnPython, tmp_path: Path, once: patroni_faults.Once
) -> None:
    with patroni(tmp_path, is_synchronous=True) as cluster:
        stage = Stage(spawn_python, patroni_faults.make_database(cluster), tmp_path, load=LOAD)
        verdict = stage.run(patroni_faults.again_and_again(cluster, once), 2.0)
        assert_workers_went_on(stage)
        assert_kept(verdict)


def test_patroni_with_an_asynchronous_standby(spawn_python: SpawnPython, tmp_path: Path) -> None:
    with patroni(tmp_path, is_synchronous=False) as cluster:
        stage = Stage(spawn_python, patroni_faults.make_database(cluster), tmp_path, load=LOAD)
        fault = patroni_faults.again_and_again(cluster, patroni_faults.kill_host_ahead)
        verdict = stage.run(fault, 2.0, allowed=Allowed(lost_commits=True))
        assert_workers_went_on(stage)
        assert_kept(verdict)
        assert verdict.figures["completed"] < verdict.figures["acknowledged"], "the follower lacked nothing"


def patroni(folder: Path, *, is_synchronous: bool) -> PatroniCluster:
    if find_patroni() is None or find_etcd() is None:
        pytest.skip("Patroni or etcd is not there: `make chaos` fetches them")
    return PatroniCluster(folder, is_synchronous=is_synchronous)


def assert_workers_went_on(stage: Stage) -> None:
    """Fail if a worker ended by itself, with what it said."""
    assert not stage.ended, "\n".join(worker.output for worker in stage.ended)
