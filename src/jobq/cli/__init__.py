"""``jobqctl``: the command line.

Its libraries, click and rich, are an extra. They are imported when a command runs, so that an
installation without them says what it lacks instead of showing a traceback.

Exit codes: 0 fine; 1 failed; 2 wrong usage, settings that cannot work, or the extra is not
installed; 3 the schema lacks migrations (``migrate --check``); 128 plus the signal's number after a
second signal (``worker``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["main"]


def main() -> None:
    """Run ``jobqctl`` with the process's arguments and exit."""
    # Closed streams are None, on which whatever prints would fail.
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
    sys.stderr = sys.stderr or sys.stdout
    try:
        from jobq.cli.app import app  # noqa: PLC0415 - lazily, see above
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        sys.stderr.write(f"jobqctl needs {error.name}: pip install 'jobq[cli]'\n")
        raise SystemExit(2) from None
    try:
        app(prog_name="jobqctl")
    except OSError as error:  # a full disk behind standard output, and the like
        sys.stderr.write(f"jobqctl: {error}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in its buffer can go nowhere
        raise SystemExit(1) from None
