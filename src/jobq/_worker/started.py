"""Which jobs a worker process has begun: a table in memory that its supervisor reads when it has died.

A process that dies holds jobs that it had begun, one of which may have killed it, and jobs that it had
only claimed, which can have done nothing. Nobody but the process knows which is which, and a dead one
tells nothing; so it writes each start into memory that it shares with its supervisor: 0.5 µs a job, and
no message that could be lost in a buffer.

The table is an array of 64-bit words: the first is set when it was once full (then nobody knows, and all
jobs count as begun), each other one is the id of a job that was begun and whose outcome is not recorded
yet, or 0.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

ENTRIES: Final = 16_384  # more than the slots and unrecorded outcomes of any sensible worker
_WORD: Final = 8
_SIZE: Final = (1 + ENTRIES) * _WORD


class StartedJobs:
    """The worker's end: notes starts and recorded outcomes. In the event loop's thread only.

    Args:
        descriptor: what `make_table` returned, inherited or not.
    """

    def __init__(self, descriptor: int) -> None:
        self._words = _map(descriptor)
        self._free = list(range(ENTRIES, 0, -1))
        self._places: dict[tuple[int, int], int] = {}

    def add(self, job_id: int, attempt: int) -> None:
        """Note that a job is about to start."""
        if self._free:
            self._places[job_id, attempt] = place = self._free.pop()
            self._words[place] = job_id
        else:
            self._words[0] = 1

    def discard(self, fences: Iterable[tuple[int, int]]) -> None:
        """Note that nothing more is to be feared of these: their outcomes are recorded."""
        for fence in fences:
            place = self._places.pop(fence, None)
            if place is not None:
                self._words[place] = 0
                self._free.append(place)


def make_table() -> int:
    """Make an empty table; return the file descriptor that stands for it.

    Raises:
        OSError: there is no memory, or no descriptor, to be had.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("jobq-started")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, _SIZE)
    return descriptor


def read_table(descriptor: int) -> frozenset[int] | None:
    """Return the jobs that were begun and not recorded, ``None`` when the table cannot tell."""
    words = _map(descriptor)
    return None if words[0] else frozenset(filter(None, words[1:]))


def _map(descriptor: int) -> memoryview[int]:
    return memoryview(mmap.mmap(descriptor, _SIZE)).cast("q")
