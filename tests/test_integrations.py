"""What holds for every integration."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import jobq

FOLDER: Final = Path(__file__).parents[1] / "src/jobq/integrations"
MODULES: Final = sorted(path for path in FOLDER.glob("*.py") if path.name != "__init__.py")


def test_there_are_these() -> None:
    assert [path.stem for path in MODULES] == ["opentelemetry", "prometheus", "sentry"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_it_uses_public_names_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name.partition(".")[0] == "jobq"} == {"jobq"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jobq"
    }
    assert used
    assert used <= set(jobq.__all__)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_nothing_else_loads_it_or_its_library(path: Path) -> None:
    library = {"prometheus": "prometheus_client", "sentry": "sentry_sdk"}.get(path.stem, path.stem)
    code = (
        "import sys, jobq, jobq.testing, jobq.cli\n"
        "from jobq import *\n"
        f"print([name for name in sys.modules if name.startswith(({library!r}, 'jobq.integrations'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
