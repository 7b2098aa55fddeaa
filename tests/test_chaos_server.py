"""A server that restarts, ends its sessions, has no connection left: nothing lost or doubled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos import disk, faults
from tests.chaos.stage import Stage, assert_kept
from tests.conftest import APP_DATABASE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import DurableServer, SpawnPython

pytestmark = pytest.mark.slow


def test_a_server_that_restarts_in_every_way(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    server = durable_server()
    stage = Stage(spawn_python, server.dsn(APP_DATABASE), tmp_path)
    verdict = stage.run(faults.restart_server(server), 6.0)
    assert_kept(verdict)
    assert verdict.figures["restarts (kill -9)"] >= 1


def test_backends_that_are_terminated_at_random(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    verdict = Stage(spawn_python, dsn, tmp_path).run(faults.terminate_backends, 8.0)
    assert_kept(verdict)
    assert verdict.figures["backends ended"] >= 20


def test_a_server_without_a_free_connection(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    server = durable_server(settings={"max_connections": "60"})
    verdict = Stage(spawn_python, server.dsn(APP_DATABASE), tmp_path).run(faults.use_up_connections, 8.0)
    assert_kept(verdict)
    assert verdict.figures["backends ended"] >= 5


def test_a_disk_of_the_log_that_is_full_and_has_room_again(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    server = durable_server(settings=disk.SETTINGS)
    try:
        with disk.small_disk(tmp_path / "disk") as small:
            disk.move_log(server, small)
            stage = Stage(spawn_python, server.dsn(APP_DATABASE), tmp_path)
            verdict = stage.run(disk.FullDisk(server, small).fault, 6.0)
            server.stop()
    except disk.CannotMountError as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    assert_kept(verdict)
    assert verdict.figures["times the disk was full"] >= 1
