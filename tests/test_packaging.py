"""What is built is what is tested: the wheel, installed into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "jobq"


def run(command: Sequence[str | Path], *, code: int = 0) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, timeout=110, cwd=ROOT
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # hatchling is among the test's requirements, so that building needs no network
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    run([*build, "--disable-pip-version-check", "--wheel-dir", folder, ROOT])
    (built,) = folder.glob("jobq-*.whl")
    return built


@pytest.fixture(scope="module")
def bare_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the wheel and its core dependencies, but none of the extras."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel])
    # the dependencies are those of the environment under test, one by one, so that extras stay out
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    ours = Path(sysconfig.get_path("purelib"))
    for name in (
        "cronsim",
        "psycopg",
        "psycopg_binary",
        "psycopg_binary.libs",
        "psycopg_pool",
        "msgspec",
        "typing_extensions.py",
    ):
        (site / name).symlink_to(ours / name)
    return python


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(PACKAGE.parent))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == files
    assert "jobq/py.typed" in packed
    assert any(name.startswith("jobq/migrations/0001_") for name in packed)


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name.rpartition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(names["METADATA"]).decode()
        assert archive.read(names["entry_points.txt"]).decode().split() == [
            "[console_scripts]",
            "jobqctl",
            "=",
            "jobq.cli:main",
            "[pytest11]",
            "jobq",
            "=",
            "jobq._pytest_plugin",
        ]
    assert "LICENSE" in names
    assert "License-Expression: MIT" in metadata
    core = [
        line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    required = sorted(line.split()[1].split(">")[0] for line in core)
    assert required == ["cronsim", "msgspec", "psycopg", "psycopg-pool"]


def test_the_installed_package_imports_without_any_extra(bare_python: Path) -> None:
    script = (
        "import sys, jobq, jobq.embedded\n"
        "print(jobq.__file__)\n"
        "print(sorted({'click', 'rich', 'pydantic', 'uvloop', 'asyncpg', 'django'} & set(sys.modules)))"
    )
    where, imported = run([bare_python, "-I", "-c", script]).splitlines()
    assert Path(where).is_relative_to(bare_python.parents[1])
    assert imported == "[]"


def test_the_installed_package_has_its_migrations(bare_python: Path) -> None:
    script = "from jobq._statements.schema import all_migrations; print(len(all_migrations()))"
    assert int(run([bare_python, "-I", "-c", script])) == len(list((PACKAGE / "migrations").glob("*.sql")))


def test_jobqctl_without_its_extra_says_what_to_install(bare_python: Path) -> None:
    answer = run([bare_python.with_name("jobqctl"), "--help"], code=2)
    assert "pip install 'jobq[cli]'" in answer
    assert "Traceback" not in answer
