"""What a worker tells of itself: while it runs, and when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jobq._units import counted

_MOST_SHOWN: Final = 20  # ids in a line for people


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """How a worker's run ended.

    Attributes:
        completed: jobs that it completed.
        handed_back: jobs that it gave back at the end, no retry used.
        left_running: ids of jobs whose handlers would not stop. In an embedded worker they stay
            leased until their threads end; `jobqctl worker` ends the process and hands them back.
        unrecorded: outcomes that could not be recorded before the end; their leases run out.
        clogged: the worker stopped by itself, because handlers that do not stop held as many
            slots again as some queue has; start it anew.
    """

    completed: int
    handed_back: int
    left_running: tuple[int, ...]
    unrecorded: int
    clogged: bool

    def __str__(self) -> str:
        """Say it in words."""
        parts = [f"{counted(self.completed, 'job')} completed, {self.handed_back:,} handed back"]
        if self.left_running:
            shown = ", ".join(map(str, self.left_running[:_MOST_SHOWN]))
            more = len(self.left_running) - _MOST_SHOWN
            parts.append(f"handlers would not stop: jobs {shown}" + (f" and {more} more" if more > 0 else ""))
        if self.unrecorded:
            parts.append(f"{self.unrecorded:,} outcomes not recorded, their jobs run again")
        if self.clogged:
            parts.append("it stopped by itself, since stuck handlers held its slots")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Latency:
    """How long the newest steps of one kind took, 1,000 at the most.

    Attributes:
        count: how many they are; 0 while there was none.
        p50_s, p99_s, max_s: seconds that half of them, 99 of 100, and all of them took at the most.
    """

    count: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What a worker is doing, and has done since its start.

    Attributes:
        slots: how many jobs may run at once, over all queues.
        busy, prefetched, stuck: jobs in this process: being run, claimed and waiting for a slot, and
            left behind by handlers that did not stop.
        claimed: jobs taken from the queues.
        completed, retried, snoozed, discarded, cancelled: attempts, by what was recorded of them.
        parked: jobs put off unstarted: of an unknown or a paused kind.
        handed_back: jobs given back, no retry used.
        lost_leases: outcomes that were dropped, since the job had been taken back meanwhile.
        uncertain: outcomes sent twice because a reply was lost, of which nobody can say more.
        unrecorded: outcomes that wait to be recorded.
        promoted, rescued: due jobs that it made ready, and jobs that it took back from dead workers.
        removed: finished jobs that this worker, as the leader, removed since they had reached their age.
        renewals: heartbeats so far.
        fetch, completion: how long claims took, and the recording of batches of outcomes.
        loop_lag: how late the event loop was: what blocks it delays everything in it.
        listening: whether notifications arrive; without them jobs are found by polling.
        is_leader: whether this worker does the fleet's duties now; ``term`` says since which election,
            ``None`` when it does not.
    """

    slots: int = 0
    busy: int = 0
    prefetched: int = 0
    stuck: int = 0
    claimed: int = 0
    completed: int = 0
    retried: int = 0
    snoozed: int = 0
    discarded: int = 0
    cancelled: int = 0
    parked: int = 0
    handed_back: int = 0
    lost_leases: int = 0
    uncertain: int = 0
    unrecorded: int = 0
    promoted: int = 0
    rescued: int = 0
    removed: int = 0
    renewals: int = 0
    fetch: Latency = Latency()
    completion: Latency = Latency()
    loop_lag: Latency = Latency()
    listening: bool = False
    is_leader: bool = False
    term: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """Whether a worker lives, and whether it takes jobs.

    Attributes:
        alive: its event loop runs, or has not begun or has ended in order. The database plays no part.
        ready: it claims jobs: its lease is fresh, the database answers, and it does not stop.
        problems: why it is not alive or not ready, for people; empty when it is both.
    """

    alive: bool
    ready: bool
    problems: tuple[str, ...] = ()
