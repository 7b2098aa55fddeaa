"""One claimed job in this process, from claim to outcome."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from jobq._types import Job
from jobq._worker.decide import secrets_of

if TYPE_CHECKING:
    import asyncio

    from jobq._kinds.jobs import Handler
    from jobq._redaction import Secrets
    from jobq._statements.claim import Claimed
    from jobq._worker.lease import Identity
    from jobq._worker.lines import Line
    from jobq._worker.processes import ProcessCall


class StopReason(enum.Enum):
    """Why a running handler was told to stop."""

    TIME_LIMIT = "its time limit"
    SHUTDOWN = "the worker's shutdown"
    LEASE = "the end of the worker's lease"
    CANCEL = "an operator's cancel"


class Execution:
    """A claimed job: waiting for a slot, then running, then told to stop perhaps.

    Attributes:
        claimed: the row as it was claimed.
        identity: the identity that it was claimed under, part of its fence.
        line: its queue's slots.
        handler: what runs it.
        claimed_at: the local monotonic time at which the claim arrived.
        started_at: likewise for its start, 0 before.
        deadline: when its time limit ends, infinity for none.
        stop_reason: set once, when it was told to stop; ``stopped_at`` says when.
        cancel_reason: what the operator said who cancelled it.
        is_stuck: it went on after that, and its slot was given away.
        task, process: what to cancel or kill.
    """

    __slots__ = (
        "cancel_reason",
        "claimed",
        "claimed_at",
        "deadline",
        "handler",
        "identity",
        "is_stuck",
        "job",
        "line",
        "process",
        "started_at",
        "stop_reason",
        "stopped_at",
        "task",
    )

    def __init__(
        self, claimed: Claimed, identity: Identity, line: Line, handler: Handler[Any, Any], claimed_at: float
    ) -> None:
        self.claimed = claimed
        self.identity = identity
        self.line = line
        self.handler = handler
        self.claimed_at = claimed_at
        self.started_at = 0.0
        self.deadline = float("inf")
        self.stop_reason: StopReason | None = None
        self.stopped_at = 0.0
        self.cancel_reason: str | None = None
        self.is_stuck = False
        self.task: asyncio.Task[None] | None = None
        self.process: ProcessCall | None = None
        c = claimed
        self.job = Job(
            c.job_id,
            c.kind or "",
            c.queue,
            c.priority,
            c.attempt,
            c.failures,
            c.crashes,
            c.max_attempts or 1,
            c.timeout_s,
            identity.id,
            c.created or 0.0,
            c.meta,
            c.tags,
        )

    @property
    def secrets(self) -> Secrets:
        """What no text about it may quote."""
        return secrets_of(self.handler, self.job, self.claimed.args)

    @property
    def is_suspect(self) -> bool:
        """Whether a worker has died with this job before."""
        return self.claimed.crashes > 0
