"""The values that jobq hands to its users: what a job is, was, and became.

They are msgspec's structs, and not frozen dataclasses, for one is made in 0.06 µs and not in 1, which in a
bulk enqueue counts; and the classes themselves cost an import nothing.
"""

from __future__ import annotations

import enum
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, cast, final

import msgspec

from jobq._documents import read_document
from jobq._errors import ArgumentsDecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class JobState(enum.StrEnum):
    """Where a job is. The first three are live, the last three terminal."""

    SCHEDULED = "scheduled"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether a job in this state has ended."""
        return self in _TERMINAL


# A row that somebody wrote by hand may hold what Python's years cannot, infinity too.
_FIRST_MOMENT_S: Final = datetime.min.replace(tzinfo=UTC).timestamp()
_LAST_MOMENT_S: Final = datetime.max.replace(tzinfo=UTC).timestamp() - 1.0

_MAKING_A_FLAG: Final = threading.Lock()

_TERMINAL: Final = frozenset({JobState.COMPLETED, JobState.DISCARDED, JobState.CANCELLED})


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """What an enqueue did.

    Attributes:
        id: the job's id; with a unique key that is held, the id of the job that holds it.
        inserted: whether this call made the job.
        replaced: whether this call put what it was given in the place of what that job, which was
            waiting for its first start, had been given before.
    """

    id: int
    inserted: bool
    replaced: bool = False


class AttemptError(msgspec.Struct, frozen=True):
    """How one attempt of a job ended badly.

    Attributes:
        attempt: which start of the job it was.
        outcome: ``failed``, ``permanent``, ``timeout``, ``crashed`` or ``undecodable``.
        type: the exception's qualified name.
        message: its text, cut at 10,000 characters.
        traceback: its traceback, the middle cut out beyond 20,000 characters.
        worker: host, process id and id of the worker.
        started_at: when the worker claimed it, where known.
        ended_at: when the error was recorded.
        omitted: how many older errors of this job had been dropped by then.
    """

    attempt: int
    outcome: str
    type: str
    message: str
    traceback: str
    worker: str
    started_at: datetime | None
    ended_at: datetime
    omitted: int


class JobInfo(msgspec.Struct, frozen=True):
    """A job as the database shows it at one moment.

    A job that SQL or another language made may hold what Python's usual types do not. Then, in ``args``,
    ``meta`` and ``result``, a number beyond them is a ``Decimal``, and a document nested too deep for a
    stack here is a ``msgspec.Raw``, its JSON text. A moment outside the years 1 to 9999 is shown as the
    first or the last of them.

    Attributes:
        id, kind, queue, priority, args, meta, tags: as they were enqueued (``args`` as plain JSON).
        state: where it is; ``reason`` says why it waits or how it ended, where there is more to say.
        attempt: starts so far. ``failures``: those that count against ``max_attempts``.
        crashes: workers that died with it.
        timeout_s: seconds that one attempt may take, ``None`` for no limit.
        unique_key: the key it was enqueued with, as people read it.
        run_at: when it becomes or became ready; ``None`` once it was claimed.
        claimed_at, finished_at, worker_id, result: of its last attempt, where there was one.
    """

    id: int
    state: JobState
    reason: str | None
    kind: str
    queue: str
    priority: int
    args: object
    meta: Mapping[str, object]
    tags: tuple[str, ...]
    attempt: int
    failures: int
    crashes: int
    max_attempts: int
    timeout_s: float | None
    unique_key: str | None
    created_at: datetime
    run_at: datetime | None
    expires_at: datetime | None
    claimed_at: datetime | None
    finished_at: datetime | None
    worker_id: int | None
    result: object


class StopFlag(threading.Event):
    """An event that is also true or false: ``if job.cancelled:`` and ``job.cancelled.wait(5)`` both do.

    Attributes:
        seen: whether somebody who asked was told that it is set. Set by jobq alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __bool__(self) -> bool:
        return self.is_set()

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._answer(is_set=super().is_set())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for so many seconds at the most; return whether it is."""
        return self._answer(is_set=super().wait(timeout))

    def _answer(self, *, is_set: bool) -> bool:
        if is_set:
            self.seen = True
        return is_set


@final
class Job:
    """The attempt that a handler is running. Read-only.

    Attributes:
        id: the job's id, the key to make a handler idempotent with: every attempt has the same.
        kind: what the handler was registered for.
        queue: the lane it came from.
        priority: −9 to 9, the larger first.
        attempt: which start of this job it is, from 1; it only ever grows.
        failures: earlier attempts that count against ``max_attempts``.
        crashes: earlier attempts whose worker died with them.
        max_attempts: failures after which the job is discarded.
        timeout_s: seconds that this attempt may take, ``None`` for no limit.
        worker_id: the worker that runs it.
    """

    __slots__ = (
        "_cancelled",
        "_created",
        "_meta",
        "_tags",
        "attempt",
        "crashes",
        "failures",
        "id",
        "kind",
        "max_attempts",
        "priority",
        "queue",
        "timeout_s",
        "worker_id",
    )

    def __init__(  # one call per job on the hot path: positional, no defaults to resolve
        self,
        id: int,
        kind: str,
        queue: str,
        priority: int,
        attempt: int,
        failures: int,
        crashes: int,
        max_attempts: int,
        timeout_s: float | None,
        worker_id: int,
        created: float,
        meta: str | None,
        tags: Sequence[str] | None,
        /,
    ) -> None:
        self.id: Final = id
        self.kind: Final = kind
        self.queue: Final = queue
        self.priority: Final = priority
        self.attempt: Final = attempt
        self.failures: Final = failures
        self.crashes: Final = crashes
        self.max_attempts: Final = max_attempts
        self.timeout_s: Final = timeout_s
        self.worker_id: Final = worker_id
        self._created = created
        self._meta = meta
        self._tags = tags
        self._cancelled: StopFlag | None = None

    @property
    def created_at(self) -> datetime:
        """When the job was enqueued, by the database's clock."""
        created = min(max(self._created, _FIRST_MOMENT_S), _LAST_MOMENT_S)
        return datetime.fromtimestamp(created, UTC)

    @property
    def meta(self) -> dict[str, Any]:  # JSON written by the caller: nobody else knows its shape
        """What was enqueued beside the arguments.

        Raises:
            ArgumentsDecodeError: something else than jobq wrote it, and it cannot be read.
        """
        if not self._meta:
            return {}
        meta = read_document(self._meta)
        if not isinstance(meta, dict):
            raise ArgumentsDecodeError(f"job {self.id}: its meta is no object that can be read here")
        return cast("dict[str, Any]", meta)

    @property
    def tags(self) -> tuple[str, ...]:
        """The job's tags."""
        return tuple(self._tags or ())

    @property
    def cancelled(self) -> StopFlag:
        """True when this attempt should stop: an operator's cancel, time limit, shutdown, lost lease.

        An asyncio handler is cancelled and need not look. A sync handler in a thread cannot be
        stopped from outside, so a long one asks ``if job.cancelled: return`` now and then, waits with
        ``job.cancelled.wait(seconds)`` instead of sleeping, or calls :meth:`raise_if_cancelled`. A
        handler in a process of its own does not see it: it is ended by a signal.

        Who was told that it is true and returns has stopped, and not finished: what stopped it decides
        what becomes of the job, as if it had called :meth:`raise_if_cancelled`. So a handler that has
        done its work does not ask any more. One that never asked and returns has completed its job.
        """
        if self._cancelled is None:
            with _MAKING_A_FLAG:  # a handler's thread and the worker may come at one moment
                if self._cancelled is None:
                    self._cancelled = StopFlag()
        return self._cancelled

    def raise_if_cancelled(self) -> None:
        """Leave a sync handler when its attempt should stop. What stopped it decides what becomes of the job.

        At a shutdown, and when the worker's lease ends, the job is handed back without using a retry;
        at an operator's cancel it is cancelled; past its time limit it has failed.

        Raises:
            asyncio.CancelledError: :attr:`cancelled` is true. Let it pass, as an async handler does.
        """
        if self._cancelled is not None and self._cancelled.is_set():
            import asyncio  # noqa: PLC0415 - who only declares kinds loads no event loop

            raise asyncio.CancelledError

    def fields(self) -> tuple[Any, ...]:
        """Return what the constructor takes, to make the same job in another process."""
        return (
            self.id,
            self.kind,
            self.queue,
            self.priority,
            self.attempt,
            self.failures,
            self.crashes,
            self.max_attempts,
            self.timeout_s,
            self.worker_id,
            self._created,
            self._meta,
            self._tags,
        )

    def __repr__(self) -> str:
        return f"Job(id={self.id}, kind={self.kind!r}, queue={self.queue!r}, attempt={self.attempt})"
