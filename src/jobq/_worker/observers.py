"""The application's observers, none of whom can stop the worker."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from jobq._kinds.middleware import Settled, describe
from jobq._worker.stats import name_of_outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobq._kinds.middleware import WorkerObserver
    from jobq._types import Job
    from jobq._worker.outcome import Outcome

logger = logging.getLogger("jobq.worker")


class Observers:
    """Tells each of them; false when there is none, so that nothing is prepared for nobody.

    Args:
        observers: whom to tell.
    """

    def __init__(self, observers: Sequence[WorkerObserver]) -> None:
        self._observers = tuple(observers)
        self._failed: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._observers)

    def claimed(self, queue: str, jobs: Sequence[Job], took_s: float) -> None:
        """Tell of jobs that were claimed."""
        for observer in self._observers:
            self._tell(observer, functools.partial(observer.claimed, queue, jobs, took_s))

    def settled(self, outcomes: Sequence[Outcome], took_s: float) -> None:
        """Tell of outcomes that were recorded."""
        settled = [Settled(one.job_id, one.attempt, name_of_outcome(one)) for one in outcomes]
        for observer in self._observers:
            self._tell(observer, functools.partial(observer.settled, settled, took_s))

    def _tell(self, observer: WorkerObserver, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            # The application's own fault, told once, or it would fill the log.
            if id(observer) not in self._failed:
                self._failed.add(id(observer))
                logger.warning(
                    "the observer %s failed, and is to be mended; its next failures are not logged",
                    describe(observer),
                    exc_info=True,
                )
