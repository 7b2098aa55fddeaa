"""``jobqctl``: the command line.

Its libraries, click and rich, are an extra. They are imported when a command runs, so that an
installation without them says what it lacks instead of showing a traceback.

Exit codes: 0 fine; 1 failed; 2 wrong usage, settings that cannot work, or the extra is not
installed; 3 the schema lacks migrations (``migrate --check``); 128 plus the signal's number after a
second signal (``worker``).
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run ``jobqctl`` with the process's arguments and exit."""
    try:
        from jobq.cli.app import app  # noqa: PLC0415 - lazily, see above
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        sys.stderr.write(f"jobqctl needs {error.name}: pip install 'jobq[cli]'\n")
        raise SystemExit(2) from None
    app(prog_name="jobqctl")
