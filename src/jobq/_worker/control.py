"""Control: what operators want of this worker while it runs, asked for once a second.

Asking is enough by itself; a notification only makes it prompt. It goes on while the worker drains,
so that a job which still runs then can be cancelled too.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from jobq._errors import DatabaseUnavailable, Error
from jobq._statements.control import MAX_APPLIED, apply_requests, poll

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobq._statements.control import Orders
    from jobq._worker.executor import Executor
    from jobq._worker.lines import Line
    from jobq._worker.link import Link

logger = logging.getLogger("jobq.worker")

POLL_S: Final = 1.0
_MOST_PASSES: Final = 20  # of what was asked of jobs that nobody runs, so that the next poll comes in time
_REFUSED_PAUSE_S: Final = 10.0


class Control:
    """Reads pauses and requests to cancel, and has the worker's parts obey.

    Args:
        link: a connection that answers soon.
        schema: where the queue lives.
        lines: the worker's queues.
        executor: runs their jobs.
        on_resumed: called with each queue that may be claimed from again, ``None`` for any of them.
    """

    def __init__(
        self,
        link: Link,
        schema: str,
        lines: Sequence[Line],
        executor: Executor,
        on_resumed: Callable[[str | None], None],
    ) -> None:
        self._link = link
        self._schema = schema
        self._lines = lines
        self._executor = executor
        self._on_resumed = on_resumed
        self._alerted = asyncio.Event()

    def note_alert(self) -> None:
        """Somebody has said something: look now."""
        self._alerted.set()

    async def run(self) -> None:
        """Ask and obey until cancelled."""
        while True:
            pause_s = POLL_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._alerted.wait()
            except TimeoutError:
                pass  # nobody said anything, which may be a notification that was lost
            self._alerted.clear()
            try:
                await self.run_once()
            except DatabaseUnavailable:
                await asyncio.sleep(min(self._link.retry_delay_s(), POLL_S))
            except Error:
                logger.exception("pauses and requests to cancel cannot be read, trying again")
                await asyncio.sleep(_REFUSED_PAUSE_S)

    async def run_once(self) -> None:
        """Ask once and obey."""
        orders = await self._link.run(poll(self._schema, self._executor.job_ids()))
        self._obey(orders)
        if orders.has_requests:
            await self._apply_others()

    def _obey(self, orders: Orders) -> None:
        self._executor.cancel(orders.cancels)
        for line in self._lines:
            was_paused, line.is_paused = line.is_paused, line.queue in orders.queues
            if line.is_paused:
                self._executor.give_back_held(line)
            if line.is_paused != was_paused:
                logger.info("queue %r is %s", line.queue, "paused" if line.is_paused else "resumed")
            if was_paused and not line.is_paused:
                self._on_resumed(line.queue)
        self._executor.pause_kinds(orders.kinds)

    async def _apply_others(self) -> None:
        """Cancel what was asked to be and is in nobody's hands, so that no worker will hear of it."""
        for _ in range(_MOST_PASSES):
            cancelled = await self._link.run(apply_requests(self._schema))
            for job_id in cancelled:
                logger.info("job %d is cancelled: it was asked to be while it ran", job_id)
            if len(cancelled) < MAX_APPLIED:
                return
