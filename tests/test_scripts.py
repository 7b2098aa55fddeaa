"""The developer's commands: small, explained, and quick when there is nothing to do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)


def test_every_make_target_is_explained_by_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert phony is not None
    shown = {line.split()[0] for line in run("make", "--no-print-directory").stdout.splitlines()}
    assert shown == set(phony[1].split()) == set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_script_parses_and_says_what_it_does() -> None:
    scripts = [*(ROOT / "scripts").iterdir(), ROOT / ".ci" / "run"]
    for script in (path for path in scripts if path.suffix != ".py" and path.is_file()):
        shebang, about, *_ = script.read_text().splitlines()
        assert shebang == "#!/bin/bash", script
        assert about.startswith("# "), script
        checked = run("bash", "-n", script)
        assert checked.returncode == 0, checked.stderr


def test_a_python_is_looked_for_by_running_it() -> None:
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert run("scripts/find-python", ours).stdout.strip()
    assert run("scripts/find-python", "any").stdout.strip()
    missing = run("scripts/find-python", "2.99")
    assert (missing.returncode, missing.stdout) == (1, "")
