"""jobq as it was before its newest migration, from the repository's history."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]

# From the first release on: its tag. The newest migration is the one that came after it.
NEWEST_MIGRATION: Final = "0002_operation.sql"


def unpack_version_before(folder: Path) -> Path:
    """Unpack jobq as it was before its newest migration; return what to put on its path.

    A copy of the repository without its history has none, and the test is skipped.
    """
    try:
        migration = f"src/jobq/migrations/{NEWEST_MIGRATION}"
        added = _git("log", "--format=%H", "--diff-filter=A", "--", migration).decode().split()[-1]
        archive = _git("archive", f"{added}^", "src")
    except (OSError, subprocess.CalledProcessError, IndexError):
        pytest.skip("there is no history to take the version before from")
    with tarfile.open(fileobj=BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "src"


def migrate_with(code: Path, dsn: str) -> None:
    """Bring a database to the schema of a version's code."""
    program = "import sys, jobq; jobq.migrate(sys.argv[1])"
    env = {**os.environ, "PYTHONPATH": str(code)}
    subprocess.run([sys.executable, "-c", program, dsn], check=True, env=env)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True).stdout
