"""What a worker counts about itself."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobq._statements.outcomes import Settlement
from jobq._worker.report import Latency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.middleware import Outcome as OutcomeName
    from jobq._worker.outcome import Outcome

_WINDOW: Final = 1_000  # the newest so many are what a latency is told of


class Window:
    """How long the newest of many things took. Written on the loop; read from any thread."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float) -> None:
        """Add one; the oldest goes."""
        self._seconds.append(seconds)

    def latency(self) -> Latency:
        """Return what can be said of them."""
        seconds = sorted(self._seconds.copy())  # one call of C: nobody appends meanwhile
        if not seconds:
            return Latency()
        count = len(seconds)
        return Latency(count, seconds[count // 2], seconds[min(count - 1, count * 99 // 100)], seconds[-1])


@dataclass(slots=True)
class Counters:
    """Totals since the worker's start, and how long the newest steps took.

    Attributes:
        claimed: jobs taken from the queues.
        outcomes: outcomes that were recorded, by what came of the attempts.
        lost_leases: outcomes dropped since the job had been taken back.
        uncertain: outcomes sent twice because a reply was lost, of which nobody can say more.
        stuck: handlers that went on after they were told to stop.
        rescued: jobs taken back from dead workers; ``promoted``: due jobs made ready.
        removed: finished jobs that had reached their age.
        fetch, completion: claims, and batches of outcomes.
        loop: by how much the event loop was late.
        is_database_away: whether the last that some part heard of it was that it is away.
    """

    claimed: int = 0
    outcomes: Counter[OutcomeName] = field(default_factory=Counter)
    lost_leases: int = 0
    uncertain: int = 0
    stuck: int = 0
    rescued: int = 0
    promoted: int = 0
    removed: int = 0
    fetch: Window = field(default_factory=Window)
    completion: Window = field(default_factory=Window)
    loop: Window = field(default_factory=Window)
    is_database_away: bool = False

    @property
    def completed(self) -> int:
        """How many jobs completed."""
        return self.outcomes["completed"]

    def count(self, outcomes: Sequence[Outcome]) -> None:
        """Count recorded outcomes."""
        self.outcomes.update(map(name_of_outcome, outcomes))

    def note_database_away(self) -> bool:
        """Remember that the database is away; ``True`` the first time, when it is worth a line."""
        first, self.is_database_away = not self.is_database_away, True
        return first

    def note_database_back(self) -> None:
        """Remember that it answers."""
        self.is_database_away = False


_NAMES: Final[dict[str, OutcomeName]] = {
    "retry": "retried",
    "snooze": "snoozed",
    "ready": "handed back",
    "discarded": "discarded",
    "cancelled": "cancelled",
}


def name_of_outcome(outcome: Outcome) -> OutcomeName:
    """Return what an outcome is called in statistics and metrics."""
    if not isinstance(outcome, Settlement):
        return "completed"
    if outcome.to == "scheduled":
        return _NAMES.get(outcome.reason or "", "parked")
    return _NAMES[outcome.to]
