"""What a server says of itself in postmaster.pid."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PidFile:
    """The lines of a postmaster.pid that matter.

    Attributes:
        pid: of the server's first process.
        data: its data folder.
        port: its number, in the socket's name too.
        socket_dir: where its socket is; empty until it is up.
        tcp: whether it also listens on TCP.
        ready: whether it takes connections.
    """

    pid: int
    data: Path
    port: int
    socket_dir: str
    tcp: bool
    ready: bool

    @property
    def alive(self) -> bool:
        """Whether that process lives and is that server, and not one that was given its old number."""
        return lives_in(self.pid, self.data)


def lives_in(pid: int, data: Path) -> bool:
    """Whether a process lives and works in a data folder, as all of a server's do."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # it lives, as somebody else
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == data.resolve()
    except PermissionError:
        return True
    except OSError:  # it ended just now, or this system has no /proc to ask
        return not Path("/proc/self").exists()


def children_of(pid: int) -> list[int]:
    """Return a process's children, none where the system does not tell."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def read_pid_file(data: Path) -> PidFile | None:
    """Read a data folder's postmaster.pid; ``None`` when there is none, or not enough of it yet.

    The last line, the state, is written when the server is ready: it is the signal to wait for.
    """
    try:
        lines = (data / "postmaster.pid").read_text(errors="replace").splitlines()
        pid, port = int(lines[0]), int(lines[3])
    except (OSError, ValueError, IndexError):
        return None
    rest = [*lines[4:], "", "", "", ""]
    return PidFile(
        pid=pid,
        data=data,
        port=port,
        socket_dir=rest[0],
        tcp=bool(rest[1].strip()),
        ready=rest[3].strip() in {"ready", "standby"},
    )
