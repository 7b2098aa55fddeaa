"""Failed jobs as events in Sentry; and the example of a run middleware.

Needs ``sentry-sdk`` (``pip install 'jobq[sentry]'``)::

    sentry_sdk.init(dsn=…)
    jobs.use(SentryMiddleware())

Whatever the handler reports by itself, and its breadcrumbs, carry the job as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import sentry_sdk

import jobq

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SentryMiddleware"]

_NO_FAILURES: Final = (jobq.Snooze, jobq.Cancel)


class SentryMiddleware:
    """A run middleware that reports failures with the job as tags and context.

    Args:
        report: which failures: ``"all"``, or ``"last"`` for those after which a job is discarded.

    Raises:
        ConfigError: ``report`` is neither.
    """

    def __init__(self, *, report: Literal["all", "last"] = "all") -> None:
        if report not in {"all", "last"}:
            raise jobq.ConfigError(f"report={report!r}: 'all' or 'last'")
        self._only_last = report == "last"

    async def __call__(self, job: jobq.Job, args: Any, call_next: jobq.CallNext) -> Any:  # noqa: ARG002
        """Run the job in a scope of its own."""
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.set_transaction_name(f"jobq {job.kind}")
            for name, value in _tags_of(job).items():
                scope.set_tag(name, value)
            scope.set_context("job", _about(job))
            try:
                return await call_next()
            except _NO_FAILURES:
                raise
            except Exception as error:
                if not self._only_last or _is_last(job, error):
                    if isinstance(error, jobq.ProcessFailure):
                        scope.set_context("process", {"traceback": error.traceback})
                    sentry_sdk.capture_exception(error)
                raise


def _is_last(job: jobq.Job, error: Exception) -> bool:
    return isinstance(error, jobq.Permanent) or job.failures + 1 >= job.max_attempts


def _tags_of(job: jobq.Job) -> Mapping[str, str]:
    return {"jobq.kind": job.kind, "jobq.queue": job.queue, "jobq.attempt": str(job.attempt)}


def _about(job: jobq.Job) -> dict[str, Any]:
    """Return what is known of a job but its arguments, which may be private."""
    return {
        "id": job.id,
        "kind": job.kind,
        "queue": job.queue,
        "attempt": job.attempt,
        "failures": job.failures,
        "max_attempts": job.max_attempts,
        "worker_id": job.worker_id,
        "created_at": job.created_at.isoformat(),
        "tags": list(job.tags),
    }
