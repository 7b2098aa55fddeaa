"""A job to call a handler with."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from jobq._errors import ConfigError
from jobq._kinds.jobtype import JobType
from jobq._kinds.options import DEFAULTS, check_kind, resolve
from jobq._types import Job

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta


class JobFields(TypedDict, total=False):
    """Options of a job that its handler can see: those that are left out are the declaration's.

    Attributes:
        queue, priority, max_attempts, timeout, meta, tags: see :class:`jobq.JobTypeOptions`.
    """

    queue: str
    priority: int
    max_attempts: int
    timeout: timedelta | None
    meta: Mapping[str, object] | None
    tags: Sequence[str]


def make_job(  # noqa: D417 - what a Job has is told there
    kind: JobType[Any] | str = "test",
    *,
    id: int = 1,
    attempt: int = 1,
    failures: int | None = None,
    crashes: int = 0,
    worker_id: int = 1,
    created_at: datetime | None = None,
    **options: Unpack[JobFields],
) -> Job:
    """Return a job to call a handler with: ``await send_email(make_job(), EmailArgs("a@example.com"))``.

    Args:
        kind: a declared kind or a handler, whose options it has then; or a name.
        id, attempt, crashes, worker_id: see :class:`jobq.Job`.
        failures: earlier failures; ``attempt - 1`` by default.
        created_at: now by default.
        options: ``queue``, ``priority``, ``max_attempts``, ``timeout``, ``meta`` and ``tags`` instead of
            those of the declaration, or of the general defaults.

    Raises:
        ConfigError, ArgumentsEncodeError: no job can have that; names what.
    """
    names = JobFields.__annotations__
    for name in options:
        if name not in names:
            raise ConfigError(f"{name}: no option of make_job; there are {', '.join(names)}")
    declared = kind if isinstance(kind, JobType) else None
    known = resolve({**options}, declared.resolved(DEFAULTS) if declared is not None else DEFAULTS)
    own = declared.options.get("tags", ()) if declared is not None else ()
    return Job(
        id,
        declared.kind if declared is not None else check_kind(kind),
        known.queue,
        known.priority,
        attempt,
        attempt - 1 if failures is None else failures,
        crashes,
        known.max_attempts,
        known.timeout_s,
        worker_id,
        (created_at or datetime.now(UTC)).timestamp(),
        known.meta,
        list(options.get("tags", own)),
    )
