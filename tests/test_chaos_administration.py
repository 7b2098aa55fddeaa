"""Rights, settings, limits and locks that come and go under load, and transactions that are left open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos import administration
from tests.chaos.stage import Stage, assert_kept
from tests.conftest import APP_DATABASE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import DurableServer, SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def test_rights_settings_and_limits_that_are_changed_and_taken_back(
    spawn_python: SpawnPython, durable_server: DurableServer, tmp_path: Path
) -> None:
    server = durable_server()
    dsn = server.dsn(APP_DATABASE)
    administration.make_role(dsn)
    own = server.dsn(APP_DATABASE, user=administration.ROLE)
    stage = Stage(spawn_python, dsn, tmp_path, worker_dsn=own, producer_dsn=own)
    verdict = stage.run(administration.change_and_take_back, 10.0)
    assert_kept(verdict)
    assert verdict.figures["changes"] >= len(administration.CHANGES)


def test_hot_tables_that_are_locked(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    verdict = Stage(spawn_python, dsn, tmp_path).run(administration.lock_tables, 10.0)
    assert_kept(verdict)
    assert verdict.figures["tables locked"] >= 3


@pytest.mark.parametrize("commit", [True, False])
def test_transactions_that_are_left_open(
    spawn_python: SpawnPython, dsn: str, tmp_path: Path, commit: bool
) -> None:
    stage = Stage(spawn_python, dsn, tmp_path)
    assert_kept(stage.run(administration.keep_transactions_open(commit=commit), 5.0))
