"""What becomes of a job whose handler did not return: pure decisions, no I/O.

A failure counts against `max_attempts`; a snooze, a hand-back and a crash do not. Whatever a handler
raises, its record fits and hurts no other: texts are bounded and made storable (`describe`), and a wait
is one that can be stored.
"""

from __future__ import annotations

import contextlib
import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from jobq._documents import read_document
from jobq._errors import ArgumentsDecodeError, Cancel, Permanent, Retry, Snooze
from jobq._kinds.backoff import DEFAULT_BACKOFF
from jobq._limits import MAX_WAIT
from jobq._redaction import Secrets
from jobq._statements.outcomes import Failure, Settlement
from jobq._statements.pauses import PUT_BACK_S
from jobq._worker.describe import REASON_LIMIT, brief, describe, storable, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._kinds.jobs import Handler
    from jobq._statements.claim import Claimed
    from jobq._types import Job

UNKNOWN_KIND_DELAY_S: Final = 10.0
_RETURNS_A_SECOND: Final = 2_000  # of jobs of unknown kinds: what a worker parks again beside its work
_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing
TIME_LIMIT_TYPE: Final = "jobq.TimeLimit"


def secrets_of(handler: Handler[Any, Any], job: Job, args: str | None) -> Secrets:
    """Return what a job's errors must not quote."""
    return Secrets(handler.redaction, lambda: _documents(job, args))


def _documents(job: Job, args: str | None) -> Iterator[object]:
    yield read_document(args or "null")
    with contextlib.suppress(ArgumentsDecodeError):
        yield job.meta


def on_exception(
    job: Job, error: BaseException, backoff: Callable[[int], timedelta], secrets: Secrets
) -> Settlement:
    """Decide what an exception that left a handler means for its job.

    Args:
        job: the attempt.
        error: what was raised: a signal, or anything else.
        backoff: from the number of failures so far, this one included, to the wait.
        secrets: what no text may quote.
    """
    if isinstance(error, Snooze):
        return Settlement(job.id, job.attempt, "scheduled", "snooze", delay_s=_seconds(error.delay))
    if isinstance(error, Cancel):
        reason = secrets.out_of(storable(text_of(error.reason), REASON_LIMIT))
        return Settlement(job.id, job.attempt, "cancelled", reason)
    if isinstance(error, Permanent):
        failure = describe(error, "permanent", secrets)
        return Settlement(
            job.id, job.attempt, "discarded", brief(failure.message), failed=True, failure=failure
        )
    outcome = "undecodable" if isinstance(error, ArgumentsDecodeError) else "failed"
    after = error.after if isinstance(error, Retry) else None
    return on_failure(job, describe(error, outcome, secrets), backoff, after)


def undecidable(job: Job, broken: BaseException) -> Settlement:
    """Decide for a job whose exception or result failed while it was looked at: a failure like any other.

    Nothing of the application's takes part, not even its backoff: one of its objects has failed just now.
    """
    message = f"what the handler raised or returned cannot be described: {type(broken).__name__}"
    return on_failure(job, Failure("failed", "jobq.Undecidable", message, ""), DEFAULT_BACKOFF)


def on_timeout(job: Job, backoff: Callable[[int], timedelta], frames: str = "") -> Settlement:
    """Decide what an overrun of the time limit means; ``frames`` is where the handler stood."""
    message = f"took longer than its time limit of {job.timeout_s:g} s"
    return on_failure(job, Failure("timeout", TIME_LIMIT_TYPE, message, frames), backoff)


def on_failure(
    job: Job, failure: Failure, backoff: Callable[[int], timedelta], after: timedelta | None = None
) -> Settlement:
    """Retry after ``after`` or the backoff, or discard when this failure was the last one allowed."""
    failures = job.failures + 1
    if failures >= job.max_attempts:
        reason = f"failed {failures} of {job.max_attempts} times: {failure.message}"
        return Settlement(job.id, job.attempt, "discarded", brief(reason), failed=True, failure=failure)
    delay_s = _seconds(after if after is not None else backoff(failures))
    return Settlement(job.id, job.attempt, "scheduled", "retry", delay_s, failed=True, failure=failure)


class Parking:
    """When the jobs come back that a worker has no handler for: soon, but not faster than it can park them.

    Tens of thousands of one kind that come back together would be all that a worker with few slots claims.
    """

    def __init__(self) -> None:
        self._last = 0.0

    def delay_s(self, now: float) -> float:
        """Return for how long to park one more, by the monotonic clock's ``now``."""
        self._last = max(now + UNKNOWN_KIND_DELAY_S, self._last + 1 / _RETURNS_A_SECOND)
        return self._last - now


def refuse(
    row: Claimed, *, is_known: bool, is_paused: bool = False, park_s: float = UNKNOWN_KIND_DELAY_S
) -> Settlement | None:
    """Decide what becomes of a claimed job that must not be started here; ``None``: it may be.

    Args:
        row: the claimed job.
        is_known: whether there is a handler for its kind.
        is_paused: whether an operator has paused its kind.
        park_s: for how long it is parked where there is none.
    """
    if row.kind is None:
        return Settlement(row.job_id, row.attempt, "discarded", "its payload is missing")
    if row.expired:
        return Settlement(row.job_id, row.attempt, "discarded", "expired before it was started")
    if not is_known:
        # Parked, not failed: a worker of another version may know it.
        return Settlement(row.job_id, row.attempt, "scheduled", "unknown kind", delay_s=park_s)
    return put_back(row.job_id, row.attempt) if is_paused else None


def put_back(job_id: int, attempt: int) -> Settlement:
    """Keep a job of a paused kind away from the workers for a while: no retry used."""
    return Settlement(job_id, attempt, "scheduled", "paused", delay_s=_RNG.uniform(*PUT_BACK_S))


def cancelled(decided: Settlement, reason: str | None) -> Settlement:
    """Decide for a job that was to be cancelled and did not complete: it is, and its failure is kept."""
    return decided._replace(
        to="cancelled",
        reason=decided.reason if decided.to == "cancelled" and not reason else reason,
        delay_s=0.0,
    )


def hand_back(job_id: int, attempt: int) -> Settlement:
    """Give a job back as it was: no retry used."""
    return Settlement(job_id, attempt, "ready")


def _seconds(wait: timedelta) -> float:
    """Return a wait in seconds, within what a timestamp can still be moved by."""
    # by timedelta's own method: a subclass may have one of its own, and the server has to take the answer
    return max(0.0, min(timedelta.total_seconds(wait), MAX_WAIT.total_seconds()))
