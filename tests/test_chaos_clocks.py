"""Workers and producers whose clocks disagree with the database's, and with each other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.chaos import faults
from tests.chaos.stage import Stage, assert_kept

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]

DAY_S: Final = 86_400.0
CLOCKS: Final = (
    {"offset_s": DAY_S},
    {"offset_s": -DAY_S},
    {"steps_s": [0.0, 3600.0, -3600.0, 5.0, -5.0], "every_s": 0.7},
)


def test_workers_whose_clocks_disagree(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    stage = Stage(spawn_python, dsn, tmp_path, clocks=CLOCKS)
    assert_kept(stage.run(faults.kill_workers, 8.0))
