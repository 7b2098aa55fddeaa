"""The record of results: one line of JSON each, with the moment and the commit, only ever appended to."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jobq

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.result import Result

_GIT_TIMEOUT_S: Final = 10.0
Record = dict[str, Any]


class Recorder:
    """Appends results to a file.

    Args:
        path: the file; made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit_of(Path(jobq.__file__).parent),  # of what was measured, not of the file
        }

    def add(self, result: Result) -> None:
        """Append one."""
        line = json.dumps(self._head | json.loads(result.as_json()), ensure_ascii=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def commit_of(folder: Path) -> str | None:
    """Return the commit that is checked out there, ``+`` behind it where the package differs."""
    head = _git(folder, "rev-parse", "--short=10", "HEAD")
    if head is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def read(path: Path) -> Iterator[Record]:
    """Return the records of a file, in its order.

    Raises:
        ValueError: a line is none.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
