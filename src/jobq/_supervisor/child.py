"""A supervisor's end of one worker process: the process, and the socket to it.

The socket carries three things. To the child: its settings, one line of JSON, so that no password
stands in a command line; and the word ``stop``. A word and not a signal, because whoever stops a service
often signals every process of it (systemd does): passed on as well, one SIGTERM would arrive as two, and
a second one means "at once". From the child: a line of JSON for each worker id that it registers, and
one that says that it is about to end in order. And for both, its end says that the other is dead.

Beside it they share a table of the jobs that the child has begun (`jobq._worker.started`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from jobq._worker.started import make_table, read_table

if TYPE_CHECKING:
    from collections.abc import Sequence

_READ_BYTES: Final = 4096
_MOST_WORKER_IDS: Final = 1000  # of one process: it ends its older ones itself, once they hold nothing
_MOST_UNREAD_BYTES: Final = 64 << 10  # of one line: whoever sends more is not our child
STOP_WORD: Final = b"stop\n"


class Report(msgspec.Struct, omit_defaults=True):
    """One line from the child.

    Attributes:
        worker_id: an id that it has registered.
        ending: it ends in order now, with this exit code.
    """

    worker_id: int | None = None
    ending: int | None = None


class Child:
    """One worker process, in a process group of its own.

    Args:
        command: what to run; the numbers of its end of the socket and of its table are added.
        settings: a line of JSON for it, without the newline.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        self._table = make_table()
        self._socket, theirs = socket.socketpair()
        descriptors = theirs.fileno(), self._table
        try:
            self._popen = subprocess.Popen(
                [*command, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,  # the terminal's Ctrl-C is for the supervisor alone
            )
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
        self.started_at = time.monotonic()
        self.worker_ids: deque[int] = deque(maxlen=_MOST_WORKER_IDS)
        self.ending: int | None = None
        self.ending_at: float | None = None
        self.was_killed = False
        self._unread = b""
        self._send(settings + b"\n")
        self._socket.settimeout(0.0)

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        return self._popen.pid

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    def ask_to_stop(self) -> None:
        """Ask for a graceful stop."""
        self._send(STOP_WORD)

    def kill(self) -> None:
        """Kill its whole group."""
        self.was_killed = True
        self._kill_group()

    def poll(self) -> int | None:
        """Return its exit code once it has ended, else ``None``.

        What it leaves behind in its group is killed first, unless it ended in order: nothing may go
        on working at jobs that are about to be given to others.
        """
        if not self._has_ended():
            return None
        self.read_reports()
        if self.ending != 0:
            self._kill_group()
        return self._popen.wait()

    def read_reports(self) -> bool:
        """Read what it has reported; return whether more may come."""
        with contextlib.suppress(BlockingIOError):
            while chunk := self._receive():
                *lines, self._unread = (self._unread + chunk).split(b"\n")
                for line in lines:
                    self._note(line)
                if len(self._unread) > _MOST_UNREAD_BYTES:
                    self._unread = b""
            return False
        return True

    def started(self) -> frozenset[int] | None:
        """Return the jobs that it had begun and not recorded, ``None`` when nobody can tell."""
        return read_table(self._table)

    def close(self) -> None:
        """Close the socket and the table."""
        self._socket.close()
        os.close(self._table)

    def _note(self, line: bytes) -> None:
        try:
            report = msgspec.json.decode(line, type=Report)
        except msgspec.DecodeError:
            return  # a library in there wrote to every descriptor that it could find
        if report.worker_id is not None:
            self.worker_ids.append(report.worker_id)
        if report.ending is not None:
            self.ending, self.ending_at = report.ending, time.monotonic()

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_READ_BYTES)
        except ConnectionError:
            return b""

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(ConnectionError, BlockingIOError):  # dead, or too ill to read
            self._socket.sendall(line)

    def _has_ended(self) -> bool:
        """Look without reaping, where the system can: a zombie's group number is nobody else's yet."""
        if sys.platform == "darwin":
            return self._popen.poll() is not None
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; macOS says so of zombies
            os.killpg(self.pid, signal.SIGKILL)
