"""Leading: one worker of the fleet does what must be done once, and others stand ready.

Every worker tries to be elected, a little more often than once a second: one small read while
somebody leads. The one that is elected opens a connection for the duties and runs each of them by
itself, with pauses of its own; a duty that fails waits longer each time while the others go on.

The term is renewed from the event loop on purpose: where the loop stands still, no duty is done,
and somebody else should lead. What the clock here says can only stop the duties sooner; that a term
is over is decided by the database, which refuses every write of an old one (see `leader`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final, Protocol

from jobq._errors import DatabaseUnavailable, Error
from jobq._statements.leader import Deposed, Term, elect, renew_term, resign

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jobq._worker.config import WorkerConfig
    from jobq._worker.lease import Lease
    from jobq._worker.link import Link

logger = logging.getLogger("jobq.leader")

_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing
_LOOK_S: Final = 0.8  # between two tries to be elected: a successor comes within a second
_GOODBYE_S: Final = 0.3  # for resigning in order; the end of the worker's own lease says the same
_STAND_BACK_S: Final = 10.0  # after an election that led to nothing, so that others are elected
_FIRST_RETRY_S: Final = 1.0  # of a duty that failed
_LONGEST_RETRY_S: Final = 60.0


class Duty(Protocol):
    """Something that the leader does for the fleet, again and again.

    Attributes:
        name: for the log.
        interval_s: the usual pause between two passes.
    """

    @property
    def name(self) -> str: ...
    @property
    def interval_s(self) -> float: ...

    async def run_once(self, term: Term) -> float | None:
        """Do one bounded pass; return the seconds until the next one, ``None`` for the usual pause.

        Every write carries the term (:data:`jobq._statements.leader.LED`), for it may be over by then.

        Raises:
            Deposed: the term is known to be over.
            Error: the pass failed; it is tried again.
        """
        ...


class Leader:
    """Tries to be elected, and while it is, does the duties.

    Args:
        link: for elections and renewals; shared with others, so what it is asked is small.
        duty_link: the duties' own; open only while this worker leads.
        schema: where the queue lives.
        config: lease and heartbeat, which hold for terms as well.
        lease: who this process is.
        worker: the process's name, for people.
        duties: what to do.
    """

    def __init__(
        self,
        link: Link,
        duty_link: Link,
        schema: str,
        config: WorkerConfig,
        lease: Lease,
        worker: str,
        duties: Sequence[Duty],
    ) -> None:
        self._link = link
        self._duty_link = duty_link
        self._schema = schema
        self._lease_s = config.lease.total_seconds()
        self._heartbeat_s = config.heartbeat.total_seconds()
        self._margin_s = min(self._heartbeat_s, self._lease_s / 6)
        self._lease = lease
        self._worker = worker
        self._duties = duties
        self._valid_until = 0.0
        self._renewed_at = 0.0
        self._doing: list[asyncio.Task[None]] = []
        self._deposed = asyncio.Event()
        self._refused = False
        self.term: Term | None = None
        """The term in which this worker leads, as far as it knows."""
        self.goodbye: asyncio.Task[bool] | None = None
        """A resignation that is under way."""

    async def run(self) -> None:
        """Stand for election and lead, until cancelled; then resign."""
        try:
            while True:
                try:
                    pause_s = await (self._stand() if self.term is None else self._lead_on(self.term))
                except DatabaseUnavailable:
                    pause_s = min(self._link.retry_delay_s(), self._heartbeat_s)
                except Error as error:
                    pause_s = _STAND_BACK_S
                    self._log_refusal(error)
                await self._pause(pause_s)
        finally:
            await self._say_goodbye()

    def _log_refusal(self, error: Error) -> None:
        """Say it once: it is about rights or the schema, and stays until somebody mends it."""
        level = logging.DEBUG if self._refused else logging.ERROR
        self._refused = True
        message = "this worker cannot be elected: %s. Check its role's rights on the table `leader`"
        logger.log(level, message, error)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past the end of the term, nor past the moment when a duty finds it over."""
        if self.term is not None:
            seconds = min(seconds, max(self._valid_until - self._margin_s - time.monotonic(), 0.0))
        try:
            async with asyncio.timeout(seconds):
                await self._deposed.wait()
        except TimeoutError:
            pass
        if self.term is not None and (
            self._deposed.is_set() or time.monotonic() >= self._valid_until - self._margin_s
        ):
            await self._step_down("its lease was not renewed in time")

    async def _stand(self) -> float:
        """Try to be elected; return the seconds until the next step."""
        identity = self._lease.current
        if identity is None:
            return _LOOK_S
        sent = time.monotonic()
        term = await self._link.run(elect(self._schema, identity.id, self._worker, self._lease_s))
        self._refused = False
        if term is None:
            return _LOOK_S * _RNG.uniform(0.8, 1.1)
        try:
            await self._duty_link.open()
        except Error as error:
            logger.warning("elected, but without a connection for the duties; resigning: %s", error)
            await self._link.run(resign(self._schema, term))
            return _STAND_BACK_S
        self.term, self._valid_until = term, sent + self._lease_s
        self._deposed.clear()
        logger.info("worker %s leads: term %d", self._worker, term.number)
        self._doing = [asyncio.create_task(self._do(duty, term)) for duty in self._duties]
        return self._heartbeat_s * _RNG.uniform(0.8, 1.0)

    async def _lead_on(self, term: Term) -> float:
        """Renew the term, or step down; return the seconds until the next step."""
        identity = self._lease.current
        if identity is None or identity.id != term.worker_id:
            await self._step_down("its own lease is not sure any more")
            await self._link.run(resign(self._schema, term))
            return _LOOK_S
        sent = time.monotonic()
        if not await self._link.run(renew_term(self._schema, term, self._lease_s)):
            await self._step_down("somebody else was elected, or its lease had ended")
            return _LOOK_S
        self._valid_until = sent + self._lease_s
        self._renewed_at = time.monotonic()
        return self._heartbeat_s * _RNG.uniform(0.8, 1.0)

    async def _step_down(self, why: str) -> None:
        term, self.term = self.term, None
        if term is None:
            return
        logger.warning("worker %s leads no more, term %d: %s", self._worker, term.number, why)
        await self._end_duties()

    async def _end_duties(self) -> None:
        doing, self._doing = self._doing, []
        for task in doing:
            task.cancel()
        await asyncio.gather(*doing, return_exceptions=True)
        await self._duty_link.close()

    async def _say_goodbye(self) -> None:
        term, self.term = self.term, None
        await self._end_duties()
        if term is None:
            return
        self.goodbye = asyncio.create_task(self._link.run(resign(self._schema, term)))
        await asyncio.wait([self.goodbye], timeout=_GOODBYE_S)
        if self.goodbye.done() and not self.goodbye.cancelled() and self.goodbye.exception() is None:
            logger.info("worker %s leads no more, term %d: it stops", self._worker, term.number)

    async def _do(self, duty: Duty, term: Term) -> None:
        """Do one duty until cancelled, whatever happens in it."""
        failures, failed_at, was_told = 0, 0.0, False
        while True:
            try:
                pause_s = await duty.run_once(term)
            except Deposed:
                self._deposed.set()
                return
            except Exception as error:  # noqa: BLE001 - logged below; one bad duty must not end the worker
                failures += 1
                failed_at = failed_at if failures > 1 else time.monotonic()
                pause_s = _retry_s(failures)
                # That the database is away is said by others. But where it answers the renewals, and this
                # duty again not, it is the duty: what it asks takes too long.
                is_outage = isinstance(error, DatabaseUnavailable) and self._renewed_at <= failed_at
                was_told = was_told or not is_outage
                level = logging.DEBUG if is_outage else logging.ERROR
                _log_failure(level, duty.name, failures, pause_s, error)
            else:
                if was_told:
                    logger.warning("duty %r succeeds again after %d failures", duty.name, failures)
                failures, was_told = 0, False
            await asyncio.sleep(duty.interval_s * _RNG.uniform(0.9, 1.1) if pause_s is None else pause_s)


def _retry_s(failures: int) -> float:
    """Return how long a duty that failed this many times in a row waits."""
    base = min(_FIRST_RETRY_S * 2.0 ** min(failures - 1, 16), _LONGEST_RETRY_S)
    return base * _RNG.uniform(0.5, 1.0)


def _log_failure(level: int, name: str, failures: int, pause_s: float, error: Exception) -> None:
    # What the server said is enough of its errors; a fault of ours is told with its traceback.
    logger.log(
        level,
        "duty %r failed (%d in a row) and is tried again in %.1f s; the other duties go on. "
        "If it does not succeed soon, `jobqctl doctor` may tell why: %s",
        name,
        failures,
        pause_s,
        error,
        exc_info=None if isinstance(error, Error) else error,
        extra={"duty": name},
    )
