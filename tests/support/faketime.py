"""Processes whose wall clock is wrong and can be stepped while they run, by Debian's libfaketime.

Their monotonic clock stays, as it does when somebody sets a computer's time.
"""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from typing import Final

from jobq._embedded.binaries import find_binaries

# where scripts/get-libfaketime unpacks it for those who may not install packages
_UNPACKED: Final = Path(__file__).parents[2] / ".db" / "libfaketime" / "usr"
_PLACES: Final = ("lib*/*/faketime", "lib*/faketime")
_LIBRARY: Final = "libfaketimeMT.so.1"  # the one for processes with threads


def find_libfaketime() -> Path | None:
    """Return the library's path, ``None`` when it is not installed."""
    roots = itertools.product((_UNPACKED, Path("/usr")), _PLACES)
    return next((path for root, place in roots for path in root.glob(f"{place}/{_LIBRARY}")), None)


class Clock:
    """A wall clock that a test steps.

    Args:
        folder: for its file; every process that goes by the clock must be able to read it.
        offset_s: how far it is ahead of the true time at first.
    """

    def __init__(self, folder: Path, offset_s: int = 0) -> None:
        library = find_libfaketime()
        assert library is not None, "libfaketime is not installed: scripts/get-libfaketime"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "offset"
        self.env: Final = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",  # all its processes see a step at the same moment
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        self.set(offset_s)

    def set(self, offset_s: int) -> None:
        """Put it so many seconds ahead of the true time, or behind it."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset_s:+d}\n")
        new.replace(self._file)  # nobody reads half of it

    def server_programs(self, folder: Path) -> Path:
        """Make a folder for `EmbeddedPostgres.bin_dir`: its servers go by this clock."""
        binaries = find_binaries()
        folder.mkdir()
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        for program, before in (("postgres", f"env {settings} "), ("initdb", "")):
            path = folder / program
            path.write_text(f'#!/bin/sh\nexec {before}{shlex.quote(binaries.program(program))} "$@"\n')
            path.chmod(0o755)
        return folder
