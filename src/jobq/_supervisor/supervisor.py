"""The supervisor: starts worker processes, starts them again when they die, stops them in order.

A process is what PostgreSQL's leases are about, and what ends for certain: a thread that will not stop
ends with its process, and only then can its job be given to somebody else. So workers run under a
supervisor even when there is only one of them, and the supervisor runs no handlers and loads no
application: there is nothing in it that can crash or hang with a job.

It is one loop over three things: signals, the children's sockets, and the clock. The database is left to
a thread (see `aftercare`), for a stop has to end in time when the database is away, too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobq._supervisor.aftercare import Aftercare, Estate
from jobq._supervisor.child import Child
from jobq._worker.exit_codes import AT_ONCE_S, EXIT_BLOCKED, EXIT_CONFIG, EXIT_LINGERING, FAST_EXIT_BASE

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from types import FrameType

logger = logging.getLogger("jobq.supervisor")

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 30.0
LONGEST_PAUSE_AT_WORK_S: Final = 2.0  # what works and dies, dies of a job, and a job's crashes are counted
HEALTHY_AFTER_S: Final = 30.0  # a process that has run for so long starts with a clean slate

# A stop takes the grace and at most 5 s more: 3 in which a worker cancels its handlers and records
# what there is to record, then SIGKILL, one for giving the jobs back, and one for a slow machine.
KILL_AFTER_GRACE_S: Final = 3.0
END_AFTER_GRACE_S: Final = 4.0
EXIT_TIMEOUT_S: Final = 5.0  # for an interpreter's own end, after its worker has ended in order
LAST_REAP_S: Final = 0.3  # for processes that were sent SIGKILL to be gone
FAST_AFTERCARE_S: Final = 1.0  # after a second signal
_LONGEST_AFTERCARE_S: Final = 3.0
_SHORTEST_AFTERCARE_S: Final = 0.5

_LONGEST_WAIT_S: Final = 1.0  # should a SIGCHLD get lost
_RNG: Final = random.Random()  # noqa: S311 - spreads load, guards nothing


def restart_pause(deaths: int, rng: random.Random, longest_s: float = LONGEST_PAUSE_S) -> float:
    """Return the seconds until a process is started again: about 0.1, 0.2, 0.4 … 30, jittered.

    Args:
        deaths: how many times in a row it has ended without having been healthy, 1 or more.
        rng: where the jitter comes from; each wait is 50 to 100 % of its nominal length.
        longest_s: the longest nominal length.
    """
    nominal = min(longest_s, FIRST_PAUSE_S * 2.0 ** min(max(deaths - 1, 0), 16))
    return nominal * rng.uniform(0.5, 1.0)


def describe_end(code: int, ending: int | None) -> str:
    """Say how a process ended, for the log.

    Args:
        code: its exit code; negative for the signal that killed it.
        ending: the code that it had announced to end with, if it had.
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    if ending == EXIT_LINGERING:
        return "ended itself, since handlers would not stop"
    if code == EXIT_BLOCKED:
        return "ended itself, since a handler blocked its event loop for too long"
    if code == EXIT_CONFIG:
        return "was told to run what cannot work, as it says above"
    return f"ended with code {code}" + ("" if ending is not None else " in the middle of its work")


@dataclass(slots=True)
class _Place:
    """One of the processes that there should be, whichever process that is at the moment."""

    number: int
    settings: bytes
    child: Child | None = None
    start_at: float = 0.0
    failed_starts: int = 0  # in a row
    deaths: int = 0  # at work, in a row


class Supervisor:
    """Keeps worker processes running until it is told to stop.

    Args:
        command: what each process runs, see :class:`jobq._supervisor.child.Child`.
        settings: a line of JSON for each process, of which there are as many.
        grace_s: seconds that handlers may go on after the first signal.
        conninfo: where the database is.
        schema: where the queue lives.
        crash_limit: as the workers have it.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: Sequence[bytes],
        *,
        grace_s: float,
        conninfo: str,
        schema: str,
        crash_limit: int,
    ) -> None:
        self._command = list(command)
        self._grace_s = grace_s
        self._aftercare = Aftercare(conninfo, schema, crash_limit)
        self._places = [_Place(number, line) for number, line in enumerate(settings, start=1)]
        self._selector = selectors.DefaultSelector()
        self._has_worked = False  # some child has registered: the application can be loaded
        self._is_stopping = False
        self._kill_at = self._end_at = math.inf
        self._signals: list[int] = []
        self._signalled_at = float("-inf")
        self._handled_signals = 0
        self._exit_code = 0

    def run(self) -> int:
        """Run until a signal; return the exit code. In the main thread only, and once.

        Returns:
            0: it was stopped, and every job is recorded or handed back, those of handlers that would
            not stop included: whoever stopped it need do nothing. 1: the database was away when jobs
            were to be handed back; they come back when their leases end. 2: the application or its
            settings cannot work. 128 plus the signal's number: after a second signal.
        """
        with self._catch_signals():
            try:
                while not self._is_over:
                    self._start_due()
                    self._wait()
                    self._handle_signals()
                    self._reap()
                    self._enforce_ends()
            finally:
                self._end_all()
                self._selector.close()
                left = self._aftercare.close(self._aftercare_s())
        if left:
            logger.error("the database is away: jobs of %d processes come back when their leases end", left)
            return self._exit_code or EXIT_FAILED
        return self._exit_code

    @property
    def _is_over(self) -> bool:
        return self._is_stopping and (not self._children or time.monotonic() > self._end_at)

    @property
    def _children(self) -> list[Child]:
        return [place.child for place in self._places if place.child is not None]

    # Start

    def _start_due(self) -> None:
        now = time.monotonic()
        for place in self._to_start():
            if place.start_at <= now:
                self._start(place)

    def _to_start(self) -> list[_Place]:
        """Return the places that should get a process, now or when their pause is over."""
        if self._is_stopping:
            return []
        # One goes first: what is wrong with the application shows once, not once for each process.
        places = self._places if self._has_worked else self._places[:1]
        return [place for place in places if place.child is None]

    def _start(self, place: _Place) -> None:
        try:
            place.child = Child(self._command, place.settings)
        except OSError as error:
            place.failed_starts += 1
            pause_s = restart_pause(place.failed_starts, _RNG)
            place.start_at = time.monotonic() + pause_s
            logger.warning(
                "worker process %d cannot be started, next try in %.1f s: %s", place.number, pause_s, error
            )
            return
        self._selector.register(place.child, selectors.EVENT_READ, place.child)
        logger.info("worker process %d started (pid %d)", place.number, place.child.pid)

    # Wait

    def _wait(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            source: Child | socket.socket = key.data
            if isinstance(source, Child):
                if not source.read_reports():
                    self._selector.unregister(source)
                self._has_worked = self._has_worked or bool(source.worker_ids)
            else:
                source.recv(4096)

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [now + _LONGEST_WAIT_S, *(place.start_at for place in self._to_start())]
        if any(not child.was_killed for child in self._children):
            times.append(self._kill_at)
        return max(0.0, min(times) - now)

    @contextlib.contextmanager
    def _catch_signals(self) -> Generator[None]:
        """Have signals wake the selector; put everything back at the end."""
        theirs, ours = socket.socketpair()
        with theirs, ours:
            for end in (theirs, ours):
                end.settimeout(0.0)
            self._selector.register(ours, selectors.EVENT_READ, ours)
            before = {
                number: signal.signal(number, self._note_signal)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
            }
            wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(wakeup)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _note_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGCHLD:
            return
        now = time.monotonic()
        if not self._signals or number != self._signals[-1] or now - self._signalled_at >= AT_ONCE_S:
            self._signals.append(number)
            self._signalled_at = now

    # End

    def _handle_signals(self) -> None:
        while self._handled_signals < min(len(self._signals), 2):
            number = self._signals[self._handled_signals]
            self._handled_signals += 1
            name = signal.Signals(number).name
            if self._handled_signals == 1:
                logger.info(
                    "%s: stopping, handlers have %g s to end; a second signal ends them now",
                    name,
                    self._grace_s,
                )
                self._ask_to_stop()
            else:
                logger.warning("%s again: ending now, jobs are handed back", name)
                self._exit_code = FAST_EXIT_BASE + number
                self._kill_all()
                self._end_at = time.monotonic() + LAST_REAP_S

    def _ask_to_stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        grace_ends_at = time.monotonic() + self._grace_s
        self._kill_at, self._end_at = grace_ends_at + KILL_AFTER_GRACE_S, grace_ends_at + END_AFTER_GRACE_S
        for child in self._children:
            child.ask_to_stop()

    def _enforce_ends(self) -> None:
        now = time.monotonic()
        for place in self._places:
            child = place.child
            if child is None or child.was_killed:
                continue
            hangs = child.ending_at is not None and now - child.ending_at > EXIT_TIMEOUT_S
            if hangs or now >= self._kill_at:
                logger.error("worker process %d has not ended in time and is killed", place.number)
                child.kill()

    def _kill_all(self) -> None:
        for child in self._children:
            child.kill()

    def _end_all(self) -> None:
        """Leave no child behind, however this ends."""
        self._kill_all()
        until = time.monotonic() + LAST_REAP_S
        while self._children and time.monotonic() < until:
            self._reap()
            time.sleep(0.01)

    def _reap(self) -> None:
        for place in self._places:
            child = place.child
            if child is None:
                continue
            code = child.poll()
            if code is not None:
                self._bury(place, child, code)

    def _bury(self, place: _Place, child: Child, code: int) -> None:
        place.child = None
        with contextlib.suppress(KeyError):  # it had closed its socket before
            self._selector.unregister(child)
        started = child.started()
        child.close()
        self._has_worked = self._has_worked or bool(child.worker_ids)
        name = f"worker process {place.number} (pid {child.pid})"
        if child.worker_ids:
            # A code alone proves nothing: a handler, too, may call os._exit(0).
            died = child.ending is None and not child.was_killed
            self._aftercare.add(Estate(name, tuple(child.worker_ids), died, started))
        if self._is_stopping:
            # One that was killed here is told of by then; others end in order, or something is wrong.
            level = logging.INFO if child.was_killed or child.ending == 0 else logging.WARNING
            logger.log(level, "%s %s", name, describe_end(code, child.ending))
        elif code == EXIT_CONFIG and not self._has_worked:
            logger.critical("%s %s: giving up", name, describe_end(code, child.ending))
            self._exit_code = EXIT_USAGE
            self._ask_to_stop()
        else:
            self._plan_restart(place, child, f"{name} {describe_end(code, child.ending)}")

    def _plan_restart(self, place: _Place, child: Child, what: str) -> None:
        now = time.monotonic()
        if not child.worker_ids:
            place.failed_starts += 1
            pause_s = restart_pause(place.failed_starts, _RNG)
        else:
            place.failed_starts = 0
            was_healthy = now - child.started_at >= HEALTHY_AFTER_S
            place.deaths = 1 if was_healthy else place.deaths + 1
            pause_s = restart_pause(place.deaths, _RNG, LONGEST_PAUSE_AT_WORK_S)
        place.start_at = now + pause_s
        logger.warning("%s; another one starts in %.1f s", what, pause_s)

    def _aftercare_s(self) -> float:
        if self._exit_code >= FAST_EXIT_BASE:
            return FAST_AFTERCARE_S
        left_s = self._end_at - time.monotonic()
        return min(max(left_s, _SHORTEST_AFTERCARE_S), _LONGEST_AFTERCARE_S)
