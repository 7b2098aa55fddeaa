"""A primary is killed and its standby promoted: synchronous, nothing is lost; else nothing is mixed up."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from tests.chaos.auditor import Allowed
from tests.chaos.stage import Load, Stage, assert_kept
from tests.chaos.standby import Pair

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


@pytest.mark.parametrize("is_synchronous", [True, False], ids=["synchronous", "asynchronous"])
def test_a_standby_that_takes_over(
    spawn_python: SpawnPython, tmp_path_factory: pytest.TempPathFactory, is_synchronous: bool
) -> None:
    folder: Path = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, folder, is_synchronous=is_synchronous)
        load = Load(pause_s=0.01, run_s=(0.0,) * 12 + (0.02,) * 6 + (0.5, 2.0))
        stage = Stage(spawn_python, pair.dsn, folder, load=load)
        allowed = Allowed(lost_commits=not is_synchronous)
        verdict = stage.run(pair.fail_over, 8.0, allowed=allowed)
    assert_kept(verdict)
    assert verdict.figures["failovers"] == 1
