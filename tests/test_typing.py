"""Wrong arguments are red in the editor: both type checkers judge the files in `typing/`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
FILES = sorted(Path(__file__).parent.joinpath("typing").glob("*.py"))
PROGRAMS = Path(sys.executable).parent

Complaints = set[tuple[str, int]]


def mypy(folder: Path) -> Complaints:
    """Return the (file, line) of each error of mypy, with this project's settings."""
    command: list[str | Path] = [PROGRAMS / "mypy", "--cache-dir", folder, "--no-pretty", *FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^tests/typing/(\S+?):(\d+): error:", done.stdout, re.MULTILINE)
    assert found or "Success" in done.stdout, done.stdout
    return {(name, int(line)) for name, line in found}


def pyright(folder: Path) -> Complaints:
    """Return the (file, line) of each error of pyright, by its own standard rules."""
    settings = {
        "include": [str(FILES[0].parent)],
        "exclude": [],  # the project's settings leave the bad files out
        "extraPaths": [str(ROOT / "src"), str(ROOT)],
        "pythonVersion": "3.11",
        "typeCheckingMode": "standard",
        "venvPath": str(PROGRAMS.parent.parent),
        "venv": PROGRAMS.parent.name,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command: list[str | Path] = [PROGRAMS / "basedpyright", "--outputjson", "-p", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(FILES), done.stdout
    return {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in report["generalDiagnostics"]
        if each["severity"] == "error"
    }


def expected() -> Complaints:
    return {
        (path.name, number)
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.endswith("# red")
    }


@pytest.mark.parametrize("check", [mypy, pyright], ids=["mypy", "pyright"])
def test_wrong_calls_are_red_and_right_ones_are_not(
    check: Callable[[Path], Complaints], tmp_path: Path
) -> None:
    wanted = expected()
    assert len(wanted) > 30
    found = check(tmp_path)
    assert sorted(found - wanted) == [], "red, and should not be"
    assert sorted(wanted - found) == [], "not red, and should be"
