"""The lease: a process's proof of life, renewed from a thread and a connection of its own.

Its own thread, because a handler that blocks the event loop must not look dead; its own connection,
because a slow claim must not delay it. The thread also watches the loop, since nobody on the loop
can: it says which job blocks it, and ends a process whose loop stays blocked for too long.

What the thread knows of time is conservative: a lease is counted from the moment *before* its
renewal was sent, so the local end never comes after the database's. Shortly before that end the
worker stops claiming and stops its handlers, for then somebody else may start them.

An identity that was declared over never comes back. The worker takes a new one and goes on; what
it still runs under the old one can no longer record an outcome (the fence).
"""

from __future__ import annotations

import logging
import random
import secrets
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from jobq._errors import Error
from jobq._operation import Call, Operation
from jobq._postgres import reconnect_delay
from jobq._sessions import TIME_LIMIT_S, SyncSession
from jobq._statements.duties import Registration, end, register, renew
from jobq._statements.outcomes import release
from jobq._worker.exit_codes import EXIT_BLOCKED
from jobq._worker.signals import end_process
from jobq._worker.starting import LOCK_WAIT_S

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from jobq._worker.config import WorkerConfig

logger = logging.getLogger("jobq.worker")

_ID_BITS: Final = 62  # random worker ids: two processes never meet, whatever a failover repeats
_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing
_GOODBYE_S: Final = 1.0  # for ending the lease in order, whatever the database does
_WATCH_S: Final = 0.5  # how often the loop is looked at
_SHORTEST_ANSWER_S: Final = 0.5  # a renewal may take this long, however short the lease is
_AGAIN_S: Final = 0.05  # after a renewal that took so long that the lease is at risk all the same


@dataclass(slots=True, eq=False)
class Identity:
    """One name under which this process claims jobs.

    Attributes:
        id: the worker's id in the database, part of every fence.
        valid_until: local monotonic time to which the lease surely holds.
        server: which server it was registered with; another knows nothing sure of what it has claimed.
        ended: whether it is over in the database.
        is_retired: whether it is to be ended at the next heartbeat.
        known: jobs (id, attempt) claimed under it whose outcome is not recorded yet.
    """

    id: int
    valid_until: float
    server: int | None = None
    ended: bool = False
    is_retired: bool = False
    known: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])


@dataclass(frozen=True, slots=True)
class LoopWatch:
    """What the thread needs to watch the event loop.

    Attributes:
        loop: the loop.
        last_tick: returns the monotonic time at which the loop last showed a sign of life.
        blocking_job: returns a description of the job that runs on the loop right now, and for
            how many seconds it may block; ``None`` for the seconds means without limit.
    """

    loop: asyncio.AbstractEventLoop
    thread_id: int
    last_tick: Callable[[], float]
    blocking_job: Callable[[], tuple[str, float | None]]


class Lease:
    """Holds this process's identities and keeps them alive.

    Args:
        conninfo: where the database is.
        schema: where the queue lives.
        template: what the worker says of itself; the id is drawn anew for each identity.
        config: lease and heartbeat.
        on_registered: called, from any thread, with each new identity's id.
        on_ended: called in the event loop's thread with an identity that was declared over.
    """

    def __init__(
        self,
        conninfo: str,
        schema: str,
        template: Registration,
        config: WorkerConfig,
        on_registered: Callable[[int], None],
        on_ended: Callable[[Identity], None],
    ) -> None:
        self._conninfo = conninfo
        self._schema = schema
        self._template = template
        self._lease_s = config.lease.total_seconds()
        self._heartbeat_s = config.heartbeat.total_seconds()
        self._margin_s = min(self._heartbeat_s, self._lease_s / 6)
        # So that a renewal that hangs leaves time for another one.
        self._answer_limit_s = min(TIME_LIMIT_S, max(_SHORTEST_ANSWER_S, self._lease_s / 3))
        self._exit_when_blocked = config.exit_when_blocked
        self._on_registered = on_registered
        self._on_ended = on_ended
        self._session: SyncSession | None = None
        self._failures = 0
        self._wake = threading.Event()
        self._stopping = False
        self._wanted_new = False
        self._retire: Callable[[], bool] | None = None
        self._warned_at_risk = False
        self._looked_at = 0.0
        self._seen_tick = 0.0
        self._blocked_s = 0.0
        self._warned_blocked = False
        self._thread = threading.Thread(target=self._run, name="jobq-lease", daemon=True)
        self._watch: LoopWatch | None = None
        self.identities: list[Identity] = []
        self.renewals = 0
        self.failure: Exception | None = None
        """A fault of ours that ended the thread: without it the worker must not go on."""

    @property
    def current(self) -> Identity | None:
        """The identity to claim with, ``None`` while there is none that surely holds."""
        if not self.identities or self._wanted_new:
            return None
        newest = self.identities[-1]
        return newest if not newest.ended and self.is_safe(newest) else None

    @property
    def is_renewing(self) -> bool:
        """Whether the last renewal came through."""
        return not self._failures

    def is_safe(self, identity: Identity) -> bool:
        """Whether nobody else may start this identity's jobs for a while yet."""
        return not identity.ended and time.monotonic() < identity.valid_until - self._margin_s

    def start(self, watch: LoopWatch) -> None:
        """Register the first identity and start the thread. Blocks: call it off the loop.

        Raises:
            Error: the database cannot be reached, or refuses.
        """
        self._watch = watch
        try:
            session = self._open()
            self._limit(session, min(LOCK_WAIT_S, self._statement_limit_s))
            self._register(session)
            self._limit(session, self._statement_limit_s)
        except BaseException:
            self._close()
            raise
        self._looked_at = time.monotonic()
        self._thread.start()

    def take_new_identity(self) -> None:
        """Claim under a new identity from now on: what the present one has claimed is not known for sure.

        A claim's reply was lost, or another server took over, which may lack the last claims and outcomes.
        """
        self._wanted_new = True
        self._wake.set()

    def stop(self) -> None:
        """End the thread after it has ended every identity in order. Blocks for a moment."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_GOODBYE_S)

    def linger(self, is_over: Callable[[], bool]) -> None:
        """Go on renewing after the worker has returned, until ``is_over``; then hand back and end.

        For a worker inside somebody else's process, with threads that would not stop.
        """
        self._retire = is_over
        self._wake.set()

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            logger.critical("the lease's thread failed, and with it the worker", exc_info=True)
            self.failure = error
            self._close()

    def _keep(self) -> None:
        next_beat = time.monotonic() + self._heartbeat_s
        while not self._stopping:
            timeout = max(0.0, min(next_beat - time.monotonic(), _WATCH_S))
            self._wake.wait(timeout)
            self._wake.clear()
            self._watch_loop()
            # A wish for a new identity does not outrun the pauses between failed tries.
            if time.monotonic() >= next_beat or (self._wanted_new and not self._failures):
                pause = self._beat()
                next_beat = time.monotonic() + pause
            if self._retire is not None and self._retire():
                for identity in self.identities:
                    identity.known.clear()  # nothing runs any more: all of it goes back
                break
        self._end_in_order()

    def _beat(self) -> float:
        """Renew all identities; return the seconds until the next time."""
        try:
            session = self._open()
            for identity in self.identities:
                self._renew(session, identity)
            # Both: one may have been marked as retired just now, and is ended the next time.
            self.identities = [
                one for one in self.identities if not (one.is_retired and one.ended)
            ] or self.identities
            if self._wanted_new or self.identities[-1].ended:
                self._register(session)
                self._wanted_new = False
        except Error as error:
            self._close()
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the lease could not be renewed, trying again; jobs go on while it holds. If it lasts, "
                    "look after the database and the way there: %s",
                    error,
                )
            self._warn_at_risk()
            return min(reconnect_delay(self._failures, _RNG), self._heartbeat_s)
        if self._failures:
            logger.info("the lease is renewed again after %d failures", self._failures)
        self._failures = 0
        if not self.is_safe(self.identities[-1]):
            self._warn_at_risk()
            return _AGAIN_S
        self._warned_at_risk = False
        # A little earlier each time, so that many workers that started together drift apart.
        return self._heartbeat_s * _RNG.uniform(0.8, 1.0)

    def _warn_at_risk(self) -> None:
        if not self._warned_at_risk and not self.is_safe(self.identities[-1]):
            self._warned_at_risk = True
            logger.error(
                "the lease is about to end or has ended: until it is renewed nothing is claimed, "
                "and handlers are told to stop"
            )

    def _renew(self, session: SyncSession, identity: Identity) -> None:
        if identity.ended:
            return
        if identity.is_retired:
            session.run(end(self._schema, identity.id, "stopped"))
            identity.ended = True
            # A claim that was given up may have come to the server only just before.
            session.run(release(self._schema, identity.id, _ids(identity.known)))
            return
        sent = time.monotonic()
        if session.run(renew(self._schema, identity.id, self._lease_s)):
            identity.valid_until = sent + self._lease_s
            self.renewals += 1
            return
        identity.ended = True
        logger.error(
            "worker %d: its lease was declared over; what it runs is stopped, and it goes on under a new id",
            identity.id,
        )
        self._call_on_loop(self._on_ended, identity)

    def _register(self, session: SyncSession) -> None:
        worker_id = secrets.randbits(_ID_BITS) + 1
        sent = time.monotonic()
        server = session.run(register(self._schema, self._template._replace(id=worker_id), self._lease_s))
        self.identities.append(Identity(worker_id, sent + self._lease_s, server))
        self._on_registered(worker_id)

    def retire(self, identity: Identity) -> None:
        """End an old identity that holds nothing any more, at the next heartbeat."""
        identity.is_retired = True

    def _end_in_order(self) -> None:
        try:
            session = self._open()
            for identity in self.identities:
                if not identity.ended:
                    known = _ids(identity.known)
                    session.run(release(self._schema, identity.id, known, ends=not known))
        except Error as error:
            logger.warning("could not say goodbye to the database; the lease will run out: %s", error)
        self._close()

    def _open(self) -> SyncSession:
        if self._session is None or self._session.closed:
            self._session = SyncSession.open(
                self._conninfo,
                schema=self._schema,
                name=f"jobq lease {self._template.name}",
                plan_settings=True,
                time_limit_s=self._answer_limit_s,
            )
            self._limit(self._session, self._statement_limit_s)
        return self._session

    @property
    def _statement_limit_s(self) -> float:
        """So that the server ends a renewal that waits for a lock before we do: the connection lives."""
        return self._answer_limit_s * 0.8

    def _limit(self, session: SyncSession, seconds: float) -> None:
        if not session.pooled:
            session.run(_limit_statements(seconds))

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _call_on_loop(self, callback: Callable[[Identity], None], identity: Identity) -> None:
        if self._watch is not None and not self._watch.loop.is_closed():
            self._watch.loop.call_soon_threadsafe(callback, identity)

    def _watch_loop(self) -> None:
        """Say which job blocks the event loop; end the process when it has no right to any more."""
        watch = self._watch
        if watch is None or self._retire is not None:
            return
        now, last_tick = time.monotonic(), watch.last_tick()
        looked_at, self._looked_at = self._looked_at, now
        if last_tick != self._seen_tick:
            self._seen_tick, self._blocked_s, self._warned_blocked = last_tick, 0.0, False
            return
        # A process that was stopped as a whole (SIGSTOP, a paused machine) was not blocked by its
        # handler: what counts is the time in which this thread could run and the loop did not.
        self._blocked_s += min(now - looked_at, 2 * _WATCH_S)
        blocked_s = self._blocked_s
        if blocked_s < self._heartbeat_s:
            return
        job, may_block_s = watch.blocking_job()
        if not self._warned_blocked:
            self._warned_blocked = True
            logger.warning(
                "%s blocks the event loop for %.1f s now, and with it every other job of this process. "
                'Make it a plain function, which runs in a thread, or let it run_in="process":\n%s',
                job,
                blocked_s,
                _stack(watch.thread_id),
            )
        if self._exit_when_blocked and may_block_s is not None and blocked_s > may_block_s:
            end_process(
                EXIT_BLOCKED,
                logging.CRITICAL,
                "%s has blocked the event loop for %.1f s, beyond its time limit and grace: "
                "the process ends itself with code %d, and its jobs are rescued",
                job,
                blocked_s,
                EXIT_BLOCKED,
            )


def _limit_statements(seconds: float) -> Operation[None]:
    yield Call("select set_config('statement_timeout', $1::text, false)", (f"{int(seconds * 1000)}ms",))


def _ids(fences: set[tuple[int, int]]) -> Sequence[int]:
    return [job_id for job_id, _ in list(fences)]  # a copy: the loop's thread may change it


def _stack(thread_id: int) -> str:
    # the documented way to see another thread
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
