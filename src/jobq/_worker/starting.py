"""The start of a worker: it waits for a database that is not ready for it, and says what for.

By then the database has answered once, so it is the right one; what fails is a matter of time: a table
that somebody alters for a minute, a server that restarts. Ending with an error would only have the worker
started again, and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from typing import TYPE_CHECKING, Final

from jobq._errors import DatabaseUnavailable, Error
from jobq._postgres import reconnect_delay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import Any

    from jobq._statements.locks import Holder

logger = logging.getLogger("jobq.worker")

LOCK_WAIT_S: Final = 2.0  # for one try; many short ones, since a stop may come meanwhile
_LONGEST_PAUSE_S: Final = 1.0
_WARN_EVERY_S: Final = 30.0
_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing


class StartAbandonedError(Exception):
    """A stop was asked for while the start had to wait."""


class Patience:
    """Tries a step of the start until it succeeds.

    Args:
        stop: set when nobody wants the worker any more.
        holders: asks who holds locks that a start may wait for.
    """

    def __init__(self, stop: asyncio.Event, holders: Callable[[], Awaitable[Sequence[Holder]]]) -> None:
        self._stop = stop
        self._holders = holders
        self._warned_at = float("-inf")

    async def through(
        self, step: Callable[[], Coroutine[Any, Any, None]], *, can_be_cancelled: bool = True
    ) -> None:
        """Run a step, which may be repeated, until it succeeds.

        Args:
            step: makes one try, within a few seconds.
            can_be_cancelled: whether a try ends when its task is cancelled; a thread does not.

        Raises:
            StartAbandonedError: a stop was asked for.
            Error: what no waiting mends.
        """
        began, failures = time.monotonic(), 0
        while not await self._succeeds(step, can_be_cancelled=can_be_cancelled):
            failures += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(reconnect_delay(failures, _RNG), _LONGEST_PAUSE_S)):
                    await self._stop.wait()
        if self._stop.is_set():
            raise StartAbandonedError
        if failures:
            logger.warning("the worker's start goes on after %.1f s", time.monotonic() - began)

    async def _succeeds(
        self, step: Callable[[], Coroutine[Any, Any, None]], *, can_be_cancelled: bool
    ) -> bool:
        if self._stop.is_set():
            raise StartAbandonedError
        trying = asyncio.create_task(step())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([trying, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if can_be_cancelled:
                trying.cancel()
            await asyncio.wait([trying])  # whatever comes of it, nothing goes on behind our back
        if trying.cancelled():
            raise StartAbandonedError
        try:
            trying.result()
        except DatabaseUnavailable as error:
            await self._warn(error)
            return False
        return True

    async def _warn(self, error: Error) -> None:
        now = time.monotonic()
        if now - self._warned_at < _WARN_EVERY_S:
            return
        self._warned_at = now
        holders: Sequence[Holder] = ()
        with contextlib.suppress(Error, TimeoutError):  # the error that we have must do, then
            async with asyncio.timeout(LOCK_WAIT_S):
                holders = await self._holders()
        reasons = "; ".join([str(error), *map(str, holders)])
        logger.warning("the worker cannot start yet, and tries on: %s", reasons)
