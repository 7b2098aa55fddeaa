"""The folder in which a server keeps everything: data, socket, log, password.

A temporary one is removed at the end by its process. What a killed process left behind is
removed by the next one that makes a temporary folder beside it: each folder is locked by its
process for as long as that lives, so a folder that can be locked belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from jobq._embedded.errors import EmbeddedError
from jobq._embedded.pidfile import read_pid_file

_PREFIX: Final = "jobq-pg-"
_SWEEP_MAX: Final = 64
_MEMORY_ROOT: Final = Path("/dev/shm")  # noqa: S108 - each folder in it is made private
_MEMORY_MIN_BYTES: Final = 1 << 30
_SOCKET_PATH_MAX_BYTES: Final = 100  # sun_path holds 108 on Linux, 104 on BSD and macOS
_SOCKET_NAME_BYTES: Final = len("/.s.PGSQL.65535")


class TemporaryFolder:
    """A private folder that goes when `remove` is called, or some time after its process died."""

    def __init__(self, *, in_memory: bool) -> None:
        root = memory_root() if in_memory else None
        root = root or Path(tempfile.gettempdir())
        _sweep(root)
        made = Path(tempfile.mkdtemp(prefix="jobq-new-", dir=root))
        self._lock = os.open(made / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # named for the sweepers only now that it is locked
        self.path = made.rename(root / made.name.replace("jobq-new-", _PREFIX))

    def remove(self) -> None:
        """Remove the folder and all that is in it; harmless when done twice."""
        shutil.rmtree(self.path, ignore_errors=True)  # what a dying server adds meanwhile, a sweeper finds
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def memory_root() -> Path | None:
    """Return a folder that is kept in memory and has room for a small server, if there is one."""
    try:
        free = shutil.disk_usage(_MEMORY_ROOT).free
    except OSError:
        return None
    fits = free >= _MEMORY_MIN_BYTES and os.access(_MEMORY_ROOT, os.W_OK | os.X_OK)
    return _MEMORY_ROOT if fits else None


def _sweep(root: Path) -> None:
    """Remove folders whose processes died without doing it."""
    for path in sorted(root.glob(f"{_PREFIX}*"))[:_SWEEP_MAX]:
        with contextlib.suppress(OSError):  # another user's, or another sweeper was faster
            if path.stat().st_uid == os.geteuid() or os.geteuid() == 0:
                _remove_orphan(path)


def _remove_orphan(path: Path) -> None:
    lock = os.open(path / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        running = read_pid_file(path / "data")
        if running is None or not running.alive:  # a server may need a moment to follow its parent
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)


def socket_folder(home: Path) -> Path:
    """Return where the socket of a server goes: in its folder, or elsewhere if that cannot serve.

    It depends on ``home`` alone, so a server that was started again is found where it was.
    """
    inside = home / "socket"
    fits = len(os.fsencode(inside)) + _SOCKET_NAME_BYTES <= _SOCKET_PATH_MAX_BYTES
    if fits and "," not in str(inside):  # libpq takes a comma in a host for the next host
        return inside
    name = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    return Path("/tmp") / f"jobq-{os.geteuid()}-{name}"  # noqa: S108 - make_private checks whose it is


def make_private(folder: Path) -> None:
    """Make a folder that nobody else can enter.

    Raises:
        EmbeddedError: it is there and belongs to someone else, or is open to others.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or (found.st_uid != os.geteuid() and os.geteuid() != 0):
        raise EmbeddedError(f"{folder} is not a private folder of ours; remove it, or use another path")


def give_to(owner: tuple[int, int], *folders: Path) -> None:
    """Give folders, with all that is in them, to another user."""
    for folder in folders:
        os.chown(folder, *owner)
        for parent, subfolders, files in os.walk(folder):
            for name in (*subfolders, *files):
                os.chown(Path(parent) / name, *owner, follow_symlinks=False)
