"""A job to call a handler with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from jobq._kinds.jobtype import JobType
from jobq._kinds.options import DEFAULTS, check_kind, resolve
from jobq._types import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def make_job(  # noqa: D417 - what a Job has is told there
    kind: JobType[Any] | str = "test",
    *,
    id: int = 1,
    queue: str = "default",
    priority: int = 0,
    attempt: int = 1,
    failures: int | None = None,
    crashes: int = 0,
    max_attempts: int = 25,
    timeout: timedelta | None = timedelta(hours=1),
    worker_id: int = 1,
    created_at: datetime | None = None,
    meta: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
) -> Job:
    """Return a job to call a handler with: ``await send_email(make_job(), EmailArgs("a@example.com"))``.

    Args:
        kind: a declared kind, a handler or a name.
        id, queue, priority, attempt, crashes, max_attempts, timeout, worker_id: see :class:`jobq.Job`.
        failures: earlier failures; ``attempt - 1`` by default.
        created_at: now by default.
        meta, tags: what travels with the job.

    Raises:
        ConfigError, ArgumentsEncodeError: no job can have that; names what.
    """
    options = {"queue": queue, "priority": priority, "max_attempts": max_attempts}
    known = resolve({**options, "timeout": timeout, "meta": meta, "tags": tags}, DEFAULTS)
    return Job(
        id,
        kind.kind if isinstance(kind, JobType) else check_kind(kind),
        queue,
        priority,
        attempt,
        attempt - 1 if failures is None else failures,
        crashes,
        max_attempts,
        known.timeout_s,
        worker_id,
        (created_at or datetime.now(UTC)).timestamp(),
        known.meta,
        list(tags),
    )
