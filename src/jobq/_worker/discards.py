"""Tells an application's `on_discard` callbacks what was discarded, whoever discarded it.

At most once and after the fact: the discard is committed before anybody is told, and a worker that
dies in between tells nobody. What must not be missed belongs in a query on the view `jobs`.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING

from jobq._duties import discarded
from jobq._errors import Error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._jobs import Jobs, OnDiscard
    from jobq._types import AttemptError, Job
    from jobq._worker.link import Link

logger = logging.getLogger("jobq.worker")


class DiscardNotices:
    """Calls the callbacks of one `Jobs`."""

    def __init__(self, link: Link, schema: str, jobs: Jobs) -> None:
        self._link = link
        self._schema = schema
        self._jobs = jobs

    async def tell(self, job_ids: Sequence[int]) -> None:
        """Tell the callbacks of each job that was discarded."""
        if not any(self._jobs.discard_callbacks(kind) for kind in (None, *self._jobs.kinds)):
            return
        try:
            found = await self._link.run(discarded(self._schema, job_ids))
        except Error:
            logger.exception("on_discard could not be told of jobs %s", list(job_ids))
            return
        for job, error in found:
            for callback in self._jobs.discard_callbacks(job.kind):
                await self._call(callback, job, error)

    async def _call(self, callback: OnDiscard, job: Job, error: AttemptError) -> None:
        try:
            answer = callback(job, error)
            if inspect.isawaitable(answer):
                await answer
        except Exception:
            logger.exception("on_discard failed for job %d (%s)", job.id, job.kind)
