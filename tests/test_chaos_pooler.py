"""Behind PgBouncer in transaction mode with four server connections: the faults of workers once more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos import faults
from tests.chaos.stage import Stage, assert_kept

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("direct_listener", [True, False], ids=["direct listener", "polling"])
def test_everybody_behind_a_transaction_pooler(
    spawn_python: SpawnPython, dsn: str, pooled_dsn: str, tmp_path: Path, direct_listener: bool
) -> None:
    stage = Stage(
        spawn_python,
        dsn,
        tmp_path,
        worker_dsn=pooled_dsn,
        producer_dsn=pooled_dsn,
        client={"listen_dsn": dsn} if direct_listener else {},
    )
    verdict = stage.run(faults.kill_workers, 8.0)
    assert_kept(verdict)
    outputs = [worker.output for worker in (*stage.workers, *stage.ended)]
    assert not any("prepared statement" in output for output in outputs)
    assert any("no notifications" in output for output in outputs) is not direct_listener
