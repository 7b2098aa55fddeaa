"""Handlers of the worst kind under a supervisor: their own job pays, and no other is lost or given up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.chaos import faults
from tests.chaos.misbehaviour import MISDEEDS
from tests.chaos.stage import Stage, assert_kept

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


def test_children_of_a_supervisor_killed_at_random(
    spawn_python: SpawnPython, dsn: str, tmp_path: Path
) -> None:
    verdict = Stage(spawn_python, dsn, tmp_path, supervised=True).run(faults.kill_children, 8.0)
    assert_kept(verdict)
    assert verdict.figures["kill -9"] >= 3


def test_handlers_that_do_what_no_handler_should(spawn_python: SpawnPython, dsn: str, tmp_path: Path) -> None:
    verdict = Stage(spawn_python, dsn, tmp_path, supervised=True).run(faults.misbehave, 14.0)
    assert_kept(verdict)
    assert all(verdict.figures[f"({misdeed})"] for misdeed in MISDEEDS)
