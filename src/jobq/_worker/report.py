"""What a worker tells of itself: while it runs, and when it has ended."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStats:
    """What a worker is doing and has done.

    Attributes:
        running, held, stuck: jobs in this process: being run, waiting for a slot, and left behind.
        claimed, completed, lost_leases, promoted, rescued: totals.
        removed: finished jobs that this worker, as the leader, removed since they had reached their age.
        settled: totals of other outcomes, by where the job went and why.
        unrecorded: outcomes that wait to be recorded.
        uncertain: outcomes sent twice because a reply was lost, of which nobody can say more.
        renewals: heartbeats so far.
        listening: whether notifications arrive.
        is_leader: whether this worker does the fleet's duties now; ``term`` says since which election,
            ``None`` when it does not.
    """

    running: int = 0
    held: int = 0
    stuck: int = 0
    claimed: int = 0
    completed: int = 0
    settled: dict[str, int] = field(default_factory=dict[str, int])
    lost_leases: int = 0
    promoted: int = 0
    rescued: int = 0
    removed: int = 0
    unrecorded: int = 0
    uncertain: int = 0
    renewals: int = 0
    listening: bool = False
    is_leader: bool = False
    term: int | None = None
