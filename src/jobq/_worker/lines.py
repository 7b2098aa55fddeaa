"""A queue's line in this worker: its slots, the jobs held for them, and when to look for more.

Pure but for the clock that it is handed: what to ask for, and when, are decisions about numbers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from jobq._marks import LaneMarks

if TYPE_CHECKING:
    from jobq._worker.config import WorkerConfig
    from jobq._worker.execution import Execution

_RUN_TIME_WEIGHT: Final = 0.2  # of the newest run in the moving mean
_UNKNOWN_RUN_TIME_S: Final = 1.0  # until something has run: hold nothing
_FIRST_POLL_S: Final = 0.01  # after a claim that found too little; doubled up to the poll interval
_ARM_FROM_S: Final = 0.02  # an interval from which a notification is worth its price
_MAX_CLAIM: Final = 500
_REFUSED_OFTEN: Final = 8  # claims in a row of which nothing may be started: then more are asked for
_HELD_TOO_LONG_FACTOR: Final = 8  # of the horizon: the run times were misjudged, give the jobs back


class Line:
    """State of one queue in one worker.

    Attributes:
        queue: its name.
        slots: how many of its jobs may run at once.
        running: how many do (stuck ones apart).
        stuck: handlers that went on after they were told to stop, and whose slot was given away.
        is_paused: an operator wants none of its jobs started.
        held: claimed jobs that wait for a slot; at ``refill_at`` or fewer it is time to claim.
        marks: where its live rows can begin.
        mean_run_s: moving mean of how long its handlers run.
    """

    __slots__ = (
        "_config",
        "_horizon_s",
        "_poll_s",
        "_refused",
        "_refused_claims",
        "held",
        "interval_s",
        "is_paused",
        "marks",
        "marks_generation",
        "mean_run_s",
        "next_poll_at",
        "queue",
        "refill_at",
        "refreshed_at",
        "rescan_at",
        "running",
        "slots",
        "stuck",
    )

    def __init__(self, queue: str, slots: int, config: WorkerConfig) -> None:
        self.queue = queue
        self.slots = slots
        self._config = config
        self._poll_s = config.poll.total_seconds()
        self._horizon_s = config.prefetch_horizon.total_seconds()
        self._refused = self._refused_claims = 0
        self.running = 0
        self.stuck = 0
        self.is_paused = False
        self.held: deque[Execution] = deque()
        self.marks = LaneMarks()
        self.marks_generation = -1
        self.mean_run_s = _UNKNOWN_RUN_TIME_S
        self.refill_at = 0
        self.interval_s = _FIRST_POLL_S
        self.next_poll_at = 0.0
        self.refreshed_at = 0.0
        self.rescan_at = 0.0

    def note_run(self, seconds: float) -> None:
        """Take a finished run into the mean."""
        self.mean_run_s += (seconds - self.mean_run_s) * _RUN_TIME_WEIGHT

    def hold_target(self) -> int:
        """Return how many jobs to hold beside those that run: what finishes within the horizon.

        With 20 slots and no more, claims would be batches of 20; with this, short jobs come in
        large batches, and long ones never wait in a busy worker.
        """
        target = int(self.slots * self._horizon_s / max(self.mean_run_s, 1e-6))
        return min(target, self._config.prefetch)

    @property
    def has_slot(self) -> bool:
        """Whether a job that is claimed now would start at once."""
        return self.running + len(self.held) < self.slots

    def wanted(self) -> int:
        """Return how many jobs to claim now: none while enough are held, or the queue is paused."""
        if self.is_paused:
            return 0
        free = self.slots - self.running - len(self.held)
        target = self.hold_target()
        self.refill_at = target // 2
        if free <= 0 and len(self.held) > self.refill_at:
            return 0
        more = self._refused if free > 0 and self._refused_claims >= _REFUSED_OFTEN else 0
        return max(0, min(free + target + more, _MAX_CLAIM))

    def note_taken(self, claimed: int, startable: int) -> None:
        """Ask for more when there comes nothing that may be started: work may stand behind it.

        Not after a few, and no more than there were: what is claimed beyond the slots goes to the end of its
        lane when it is given back.
        """
        if claimed and not startable:
            self._refused, self._refused_claims = self._refused + claimed, self._refused_claims + 1
        else:
            self._refused = self._refused_claims = 0

    def note_claim(self, asked: int, got: int, now: float) -> None:
        """Decide when to look again: at once after a full claim, later and later after a poor one."""
        if got >= asked:
            self.interval_s = _FIRST_POLL_S
            self.next_poll_at = now
        elif got > 0:
            self.interval_s = _FIRST_POLL_S
            self.next_poll_at = now + self.interval_s
        else:
            self.interval_s = min(self.interval_s * 2, self._poll_s)
            self.next_poll_at = now + self.interval_s

    def note_news(self, now: float) -> None:
        """Something may have come: look now, and soon again."""
        self.interval_s = _FIRST_POLL_S
        self.next_poll_at = now

    def should_arm(self) -> bool:
        """Whether a notification would help: there is room, and polls come seldom by now."""
        return self.interval_s >= min(_ARM_FROM_S, self._poll_s)

    def holds_too_long(self, now: float) -> bool:
        """Whether the job at the head has waited so long that others should have it."""
        limit_s = max(0.25, self._horizon_s * _HELD_TOO_LONG_FACTOR)
        return bool(self.held) and now - self.held[0].claimed_at > limit_s

    def note_misjudged(self) -> None:
        """Jobs had to be given back: hold nothing until runs have shown to be short again."""
        self.mean_run_s = max(self.mean_run_s, _UNKNOWN_RUN_TIME_S)
