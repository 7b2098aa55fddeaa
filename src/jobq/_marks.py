"""Low-water marks: where, in each lane, live rows can begin.

What kills a queue in a table is dead index entries at the head of the line: under a pinned
vacuum horizon every claim walks over all that was ever claimed. So a worker remembers, for each
lane, a point before which nothing can be, and starts there. The mark lives in memory and is only
a hint where to begin; the rows are the truth.

Remembering "the last that I saw" would lose jobs, for transactions commit out of order. A lane is
therefore ordered by (xid, job_id), the enqueuing transaction's own id, and one snapshot tells
which of those are decided:

- below the snapshot's oldest undecided writer nothing can appear any more, so the mark may go up
  to the first row that the same snapshot shows;
- a writer that has been open for less than `YOUNG_S` bounds the mark;
- an older one is stepped over and remembered as a *straggler*. When it ends, its rows can stand
  only at its own xid: that one key range is scanned until it reads empty;
- a transaction that only reads has no xid, and holds nothing up.

Marks belong to one connection to one server: a new `LaneMarks` is made when either changes, or
when xids run backwards (seen after a crash with asynchronous commit). Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

PRIORITIES: Final = tuple(range(9, -10, -1))  # the larger runs first
YOUNG_S: Final = 0.1  # a writer open for less bounds the marks
_END: Final = 2**63 - 1  # beyond every job id
_LAST_XID: Final = 2**64 - 1

Position = tuple[int, int]  # (xid, job_id)


class Range(NamedTuple):
    """Where in one lane a claim looks: from (xid, job_id) to the end of ``to_xid``."""

    priority: int
    from_xid: int
    from_id: int
    to_xid: int


class Snapshot(NamedTuple):
    """What one refresh saw.

    Attributes:
        taken_s: the reader's monotonic time just before the statement was sent.
        xmax: no transaction at or beyond this id had begun.
        in_progress: transaction ids below ``xmax`` that were undecided.
        first: for each range that was asked about, its first visible row.
        server: identity of the server process; marks of another are worthless.
    """

    taken_s: float
    xmax: int
    in_progress: frozenset[int]
    first: Sequence[Position | None]
    server: int


@dataclass(slots=True)
class LaneMarks:
    """The marks of one queue's lanes, seen through one connection."""

    lanes: dict[int, Position] = field(default_factory=lambda: dict.fromkeys(PRIORITIES, (0, 0)))
    stragglers: frozenset[int] = frozenset()
    ended: tuple[tuple[int, int], ...] = ()  # (priority, xid) of ended stragglers that may hold rows
    samples: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])
    server: int | None = None
    xmax: int = 0

    def ranges(self) -> list[Range]:
        """Return where to look, in the order in which to claim: strict by priority, then by age."""
        ranges: list[Range] = []
        for priority in PRIORITIES:
            ranges += [Range(p, xid, 0, xid) for p, xid in self.ended if p == priority]
            from_xid, from_id = self.lanes[priority]
            ranges.append(Range(priority, from_xid, from_id, _LAST_XID))
        return ranges

    def refresh(self, ranges: Sequence[Range], snapshot: Snapshot) -> bool:
        """Move the marks to what ``snapshot`` proves; ``ranges`` are those that it read.

        Returns:
            Whether rows may stand where nobody looked before: stragglers have ended, or the marks
            were forgotten.
        """
        if self._is_foreign(snapshot):
            # What its ranges show proves nothing: they began at marks of another server.
            self.forget()
            self.server, self.xmax = snapshot.server, snapshot.xmax
            return True
        self.server, self.xmax = snapshot.server, snapshot.xmax
        bound = self._bound(snapshot)
        still_full: list[tuple[int, int]] = []
        for place, first in zip(ranges, snapshot.first, strict=True):
            if place.to_xid == _LAST_XID:
                seen = min(first or (snapshot.xmax, 0), (bound, 0))
                self.lanes[place.priority] = max(self.lanes[place.priority], seen)
            elif first is not None:
                still_full.append((place.priority, place.from_xid))
        gone = self.stragglers - snapshot.in_progress
        self.ended = tuple(sorted([*still_full, *_passed_over(gone, ranges)]))
        self.stragglers = frozenset(xid for xid in snapshot.in_progress if xid < bound)
        return bool(gone)

    def forget(self) -> None:
        """Start every lane from its beginning; nothing that was known is assumed."""
        self.rescan()
        self.stragglers = frozenset()
        self.samples.clear()
        self.server, self.xmax = None, 0

    def rescan(self) -> None:
        """Look at every lane from its beginning once more: the backstop, should the proof have a hole."""
        self.lanes = dict.fromkeys(PRIORITIES, (0, 0))
        self.ended = ()  # the lanes hold them

    def _is_foreign(self, snapshot: Snapshot) -> bool:
        return self.server is not None and (snapshot.server != self.server or snapshot.xmax < self.xmax)

    def _bound(self, snapshot: Snapshot) -> int:
        """Return the xid that no mark may pass: the oldest young writer, or the snapshot's end."""
        while len(self.samples) > 1 and self.samples[1][0] <= snapshot.taken_s - YOUNG_S:
            self.samples.popleft()
        if not self.samples or snapshot.taken_s - self.samples[-1][0] >= YOUNG_S / 8:
            self.samples.append((snapshot.taken_s, snapshot.xmax))
        oldest_taken_s, oldest_xmax = self.samples[0]
        known_old = oldest_xmax if oldest_taken_s <= snapshot.taken_s - YOUNG_S else 0
        return min((xid for xid in snapshot.in_progress if xid >= known_old), default=snapshot.xmax)


def _passed_over(gone: frozenset[int], ranges: Sequence[Range]) -> list[tuple[int, int]]:
    """Return where ended stragglers may have rows that no lane holds.

    A lane that had not come so far holds them by itself: it was read in the snapshot that shows them
    decided. A range of their own would serve them before older jobs, and twice.
    """
    lanes = [place for place in ranges if place.to_xid == _LAST_XID]
    return [
        (place.priority, xid) for xid in gone for place in lanes if (place.from_xid, place.from_id) > (xid, 0)
    ]
