"""What a worker counts about itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobq._outcomes import Settlement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._worker.outcome import Outcome


@dataclass(slots=True)
class Counters:
    """Totals since the worker's start.

    Attributes:
        claimed: jobs taken from the queues.
        completed: outcomes recorded as completed; ``settled`` the others, by where the job went
            and why (``scheduled: retry``, ``discarded``, ``ready`` for handed back …).
        lost_leases: outcomes dropped since the job had been taken back.
        uncertain: outcomes sent twice because a reply was lost, of which nobody can say more.
        stuck: handlers that went on after they were told to stop.
        rescued: jobs taken back from dead workers; ``promoted``: due jobs made ready.
        removed: finished jobs that had reached their age.
    """

    claimed: int = 0
    completed: int = 0
    settled: Counter[str] = field(default_factory=Counter[str])
    lost_leases: int = 0
    uncertain: int = 0
    stuck: int = 0
    rescued: int = 0
    promoted: int = 0
    removed: int = 0
    _database_away: bool = False

    def count(self, outcomes: Sequence[Outcome]) -> None:
        """Count recorded outcomes."""
        for outcome in outcomes:
            if isinstance(outcome, Settlement):
                reason = f": {outcome.reason}" if outcome.to == "scheduled" else ""
                self.settled[outcome.to + reason] += 1
            else:
                self.completed += 1

    def note_database_away(self) -> bool:
        """Remember that the database is away; ``True`` the first time, when it is worth a line."""
        first, self._database_away = not self._database_away, True
        return first

    def note_database_back(self) -> None:
        """Remember that it answers."""
        self._database_away = False
