"""A rolling upgrade: code and schema of one version before, and today's beside them, under load.

The version before is taken from the repository's history; a copy without one cannot run this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

import jobq
from tests.chaos.stage import Stage, assert_kept
from tests.support.versions import NEWEST_MIGRATION, migrate_with, unpack_version_before

if TYPE_CHECKING:
    from tests.conftest import SpawnPython

pytestmark = [pytest.mark.slow, pytest.mark.chaos]


@pytest.fixture
def old_code(tmp_path: Path) -> Path:
    return unpack_version_before(tmp_path / "old")


def test_old_and_new_code_beside_each_other_while_the_schema_is_upgraded(
    spawn_python: SpawnPython, empty_dsn: str, tmp_path: Path, old_code: Path
) -> None:
    migrate_with(old_code, empty_dsn)
    assert versions(empty_dsn) == [1]
    stage = Stage(spawn_python, empty_dsn, tmp_path)
    stage.code = old_code

    def roll(stage: Stage) -> None:
        stage.pause(1.0, 1.0)
        # while old producers and workers work, on a machine that may be slow to let their transactions end
        jobq.migrate(empty_dsn, attempts=100)
        stage.await_work()
        stage.code = None
        new = stage.start_producer()
        new.wait_for_output("PRODUCES")
        for worker in list(stage.workers):
            stage.retire(worker)
            stage.workers[-1].wait_for_output("works on")
            worker.terminate()
            assert worker.wait(15.0) == 0, worker.output
        stage.pause(1e9, 1e9)

    verdict = stage.run(roll, 8.0)
    assert_kept(verdict)
    assert stage.evidence().refusals == {}, "an upgrade fails nobody's enqueue"
    newest = max((Path(jobq.__file__).parent / "migrations").glob("*.sql"))
    assert newest.name == NEWEST_MIGRATION, "a new migration: the version before is the one before that"
    assert versions(empty_dsn) == [1, 2]


def versions(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("select version from jobq.schema_version order by 1")]
