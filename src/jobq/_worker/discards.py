"""Tells an application's `on_discard` callbacks what was discarded, whoever discarded it.

At most once and after the fact: the discard is committed before anybody is told, and a worker that
dies in between tells nobody. What must not be missed belongs in a query on the view `jobs`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from typing import TYPE_CHECKING, Final

from jobq._errors import Error
from jobq._logging import fields_of, set_current_job
from jobq._statements.duties import discarded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._kinds.jobs import Jobs, OnDiscard
    from jobq._types import AttemptError, Job
    from jobq._worker.link import Link

logger = logging.getLogger("jobq.worker")

_MOST_WAITING: Final = 10_000
_BATCH: Final = 100
_TIME_LIMIT_S: Final = 30.0


class DiscardNotices:
    """Calls the callbacks of one `Jobs`, on a task of its own: one that hangs delays only the next ones."""

    def __init__(self, link: Link, schema: str, jobs: Jobs) -> None:
        self._link = link
        self._schema = schema
        self._jobs = jobs
        self._waiting: asyncio.Queue[int] = asyncio.Queue(_MOST_WAITING)

    def tell(self, job_ids: Sequence[int]) -> None:
        """Have the callbacks told of each job that was discarded."""
        if not any(self._jobs.discard_callbacks(kind) for kind in (None, *self._jobs.kinds)):
            return
        for job_id in job_ids:
            try:
                self._waiting.put_nowait(job_id)
            except asyncio.QueueFull:
                logger.error(  # noqa: TRY400
                    "on_discard is too slow: it is not told of job %d", job_id, extra={"job_id": job_id}
                )

    async def told(self) -> None:
        """Wait until the callbacks have been told of everything so far."""
        await self._waiting.join()

    async def run(self) -> None:
        """Tell until cancelled."""
        while True:
            job_ids = [await self._waiting.get()]
            while len(job_ids) < _BATCH and not self._waiting.empty():
                job_ids.append(self._waiting.get_nowait())
            try:
                await self._tell(job_ids)
            finally:
                for _ in job_ids:
                    self._waiting.task_done()

    async def _tell(self, job_ids: Sequence[int]) -> None:
        try:
            found = await self._link.run(discarded(self._schema, job_ids))
        except Error:
            logger.exception("on_discard could not be told of jobs %s", list(job_ids))
            return
        for job, error in found:
            for callback in self._jobs.discard_callbacks(job.kind):
                call = asyncio.create_task(_call(callback, job, error))
                await asyncio.wait([call], timeout=_TIME_LIMIT_S)
                if not call.done():
                    call.cancel()
                    logger.error(
                        "on_discard took over %g s for job %d (%s) and was cancelled",
                        _TIME_LIMIT_S,
                        job.id,
                        job.kind,
                        extra=fields_of(job),
                    )


async def _call(callback: OnDiscard, job: Job, error: AttemptError) -> None:
    set_current_job(job)  # in this call's own context
    try:
        answer = callback(job, error)
        if inspect.isawaitable(answer):
            await answer
    except BaseException:  # a callback may raise anything, and none of it is ours to die of
        logger.exception("on_discard failed for job %d (%s)", job.id, job.kind, extra=fields_of(job))
