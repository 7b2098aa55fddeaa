"""Counts in the place of notes, for runs whose millions of jobs nobody can write a line each about.

Each process has a file of numbers, mapped into its memory: to count costs a microsecond, others may look
while it works, and what a killed process has counted stays. A *tally* is a number of jobs and their
fingerprint, the sum of the hashes of their ids. Two tallies are equal when both are of the same jobs, each
as many times (or by one chance in 2^64), so they show that something was lost, doubled or put in another's
place, but not which job it was.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
import threading
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MADE: Final = "made"  # jobs that a producer was told to exist
STARTED: Final = "started"  # jobs whose handler was started, once for each start
RAISED: Final = "raised"  # those of which it did not return
COMPLETED: Final = "completed"  # those of which a worker was told that their completion is recorded
HELD: Final = "held"  # enqueues that were told that another job holds their key
REPLACED: Final = "replaced"  # those that took the place of what that job had been given
ROLLED_BACK: Final = "rolled back"
REFUSED: Final = "refused"  # calls that failed
_NAMES: Final = (MADE, STARTED, RAISED, COMPLETED, HELD, REPLACED, ROLLED_BACK, REFUSED)

_A_DOUBLING: Final = 16  # buckets, so that a latency is known to 4 %
_SHORTEST_S: Final = 1e-5
_BUCKETS: Final = 27 * _A_DOUBLING  # up to 20 minutes
_CELLS: Final = 2 * len(_NAMES) + _BUCKETS
_MASK: Final = (1 << 64) - 1


def _hash(job_id: int) -> int:
    """Return 64 bits that look random, those of SplitMix64."""
    x = (job_id * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many jobs, and the sum of their hashes."""

    count: int = 0
    fingerprint: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, (self.fingerprint + other.fingerprint) & _MASK)

    def __str__(self) -> str:
        return f"{self.count:,} ({self.fingerprint:016x})"


def tally(job_ids: Iterable[int]) -> Tally:
    """Return the tally of jobs."""
    hashes = list(map(_hash, job_ids))
    return Tally(len(hashes), sum(hashes) & _MASK)


@dataclass(slots=True)
class Totals:
    """What one ledger says, or several together.

    Attributes:
        tallies: by name.
        pickups: how many pickups took how long, by bucket; see `percentile_s`.
    """

    tallies: dict[str, Tally] = field(default_factory=lambda: dict.fromkeys(_NAMES, Tally()))
    pickups: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    def __getitem__(self, name: str) -> Tally:
        return self.tallies[name]


class Ledger:
    """One process's counts. Safe to use from several threads.

    Args:
        path: its file, which nobody else writes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, bytes(8 * _CELLS))
        self._cells = memoryview(mmap.mmap(fd, 8 * _CELLS)).cast("Q")
        os.close(fd)
        self._lock = threading.Lock()

    def add(self, name: str, job_ids: Iterable[int]) -> None:
        """Count jobs."""
        more, at = tally(job_ids), 2 * _NAMES.index(name)
        with self._lock:
            self._cells[at] += more.count
            self._cells[at + 1] = (self._cells[at + 1] + more.fingerprint) & _MASK

    def note_pickup(self, seconds: float) -> None:
        """Count how long a job waited for its start."""
        doublings = math.log2(max(seconds, _SHORTEST_S) / _SHORTEST_S)
        bucket = min(int(doublings * _A_DOUBLING), _BUCKETS - 1)
        with self._lock:
            self._cells[2 * len(_NAMES) + bucket] += 1


def read_ledgers(paths: Iterable[Path]) -> Totals:
    """Add up what several processes have counted so far."""
    totals = Totals()
    for path in paths:
        cells = array("Q", path.read_bytes())
        if len(cells) < _CELLS:
            continue  # it is being made
        for number, name in enumerate(_NAMES):
            totals.tallies[name] += Tally(cells[2 * number], cells[2 * number + 1])
        totals.pickups = [a + b for a, b in zip(totals.pickups, cells[2 * len(_NAMES) :], strict=True)]
    return totals


def percentile_s(pickups: Sequence[int], percent: float) -> float:
    """Return what so many percent of the pickups took at most; 0 when there were none."""
    wanted = sum(pickups) * percent / 100
    if not wanted:
        return 0.0
    passed = itertools.accumulate(pickups)
    bucket = next(bucket for bucket, count in enumerate(passed) if count >= wanted)
    return _SHORTEST_S * float(2.0 ** ((bucket + 1) / _A_DOUBLING))


class Pace:
    """How fast each producer is to go: a number in a file that they read and the stage writes.

    Args:
        path: its file; made when missing, with a pace of 0.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._fd).st_size == 0:
            self.set(0.0)

    def set(self, jobs_a_second: float) -> None:
        """Have them make so many jobs a second; ``inf`` is as many as they can, and 0 none."""
        os.pwrite(self._fd, struct.pack("d", jobs_a_second), 0)

    def get(self) -> float:
        """Return how many jobs a second are asked for."""
        return float(struct.unpack("d", os.pread(self._fd, 8, 0))[0])
