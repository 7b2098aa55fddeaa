"""Workers that are killed, frozen, stopped in storms and cut off: nothing lost, doubled or stuck."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos import faults
from tests.chaos.stage import Load, Stage, assert_kept

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython
    from tests.support.proxy import TcpProxy

pytestmark = pytest.mark.slow


def test_workers_killed_at_random(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    verdict = Stage(spawn_python, dsn, tmp_path).run(faults.kill_workers, 8.0)
    assert_kept(verdict)
    assert verdict.figures["kill -9"] >= 3
    assert verdict.figures["crashes"] > 0, "nobody was killed with a job in his hands"


def test_workers_frozen_past_their_lease(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    stage = Stage(spawn_python, dsn, tmp_path, load=Load(run_s=(0.02,) * 6 + (0.3, 0.3, 1.0)))
    verdict = stage.run(faults.freeze_workers, 8.0)
    assert_kept(verdict)
    assert verdict.figures["crashes"] > 0, "nobody was frozen with a job in his hands"


def test_workers_stopped_in_storms(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    verdict = Stage(spawn_python, dsn, tmp_path).run(faults.stop_workers_in_storms, 8.0)
    assert_kept(verdict)
    assert verdict.figures["SIGTERM"] >= 4


def test_a_network_that_falls_silent(
    spawn_python: SpawnPython, dsn: str, proxy: TcpProxy, tmp_path: Path
) -> None:
    stage = Stage(spawn_python, dsn, tmp_path, worker_dsn=proxy.dsn, producer_dsn=proxy.dsn)
    verdict = stage.run(faults.silence_network(proxy), 9.0)
    assert_kept(verdict)
    assert verdict.figures["silences"] >= 2
