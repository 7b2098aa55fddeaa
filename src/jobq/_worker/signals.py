"""The second signal: it ends the process whatever the event loop does.

The event loop hears of a signal by a byte in a pipe, and acts on it when it comes to read. A handler that
blocks the loop keeps it from that, and a user who presses Ctrl-C twice is waiting for nothing. So the
bytes go through a thread of ours, which counts and passes them on: the interpreter writes them at
once, also while the main thread sits in a system call or a library that looks at no signal.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from jobq._worker.exit_codes import AT_ONCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

logger = logging.getLogger("jobq.worker")

_LAST_WORDS_S: Final = 0.5  # a log that blocks must not keep the process
_READ_BYTES: Final = 256
_ending = threading.Lock()


class SignalCount:
    """Counts signals; two within a moment are one, for launchers signal a process and then its group."""

    def __init__(self) -> None:
        self._count = 0
        self._at = 0.0

    def note(self) -> int:
        """Take note of one; return its number in the row, from 1, 0 when it belongs to the one before."""
        now = time.monotonic()
        if self._count and now - self._at < AT_ONCE_S:
            return 0
        self._count += 1
        self._at = now
        return self._count


class SecondSignal:
    """Calls ``on_second`` from a thread of its own with the second of some signals that comes.

    Made, and closed, in the main thread, after the event loop has taken the signals over.

    Args:
        numbers: which signals.
        on_second: called with the number of the second one.
    """

    def __init__(self, numbers: Collection[int], on_second: Callable[[int], None]) -> None:
        self._numbers = frozenset(numbers)
        self._on_second = on_second
        self._count = SignalCount()
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)  # noqa: FBT003 - the interpreter asks for it
        # Where the bytes went until now, and still have to go: the event loop's end of its own pipe.
        self._loops_end = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="jobq-signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the signals back."""
        ours = self._write_end.fileno()
        current = signal.set_wakeup_fd(self._loops_end, warn_on_full_buffer=False)
        if current != ours:  # somebody has taken them since
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        self._write_end.close()
        self._thread.join()
        self._read_end.close()

    def _run(self) -> None:
        while data := self._read_end.recv(_READ_BYTES):
            if self._loops_end >= 0:
                with contextlib.suppress(OSError):  # full: it has enough to wake up for
                    os.write(self._loops_end, data)
            for number in data:
                if number in self._numbers and self._count.note() == 2:
                    self._on_second(number)


def end_process(code: int, level: int, message: str, *arguments: object) -> None:
    """Say why, and end the process here and now, from any thread.

    Does not return, but where another thread is about to do the same.

    Args:
        code: its exit code.
        level: the log line's.
        message: the log line.
        arguments: what to put into it.
    """
    if not _ending.acquire(blocking=False):
        return
    try:
        # The thread that blocks the loop may hold the lock of a log.
        speaker = threading.Thread(target=_say, args=(level, message, *arguments), daemon=True)
        speaker.start()
        speaker.join(_LAST_WORDS_S)
    finally:
        os._exit(code)


def _say(level: int, message: str, *arguments: object) -> None:
    logger.log(level, message, *arguments)
    logging.shutdown()
