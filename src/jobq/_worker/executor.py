"""The executor: runs handlers, one task, thread or process a job, and decides what came of each.

On the hot path a job costs one task and a few attribute writes; time limits are watched by one
tick for all instead of a timer each (a timer a job costs more than everything else together).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from jobq._errors import ArgumentsDecodeError, ArgumentsEncodeError
from jobq._logging import fields_of, set_current_job
from jobq._statements.outcomes import Settlement
from jobq._worker.around import Ended, run_around
from jobq._worker.decide import (
    cancelled,
    hand_back,
    on_exception,
    on_timeout,
    put_back,
    undecidable,
)
from jobq._worker.describe import frames_of
from jobq._worker.execution import Execution, StopReason
from jobq._worker.outcome import Completion
from jobq._worker.processes import ProcessKilled, ProcessRunner
from jobq._worker.suspects import Suspects, alone_from
from jobq._worker.threads import ThreadRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jobq._kinds.middleware import RunMiddleware
    from jobq._types import Job
    from jobq._worker.config import WorkerConfig
    from jobq._worker.lease import Lease
    from jobq._worker.lines import Line
    from jobq._worker.started import StartedJobs
    from jobq._worker.stats import Counters

logger = logging.getLogger("jobq.worker")

_AFTER_EXIT_S: Final = 10.0  # by then a process that is about to end has ended
TICK_S: Final = 0.1  # how exact time limits are


class Executor:
    """Runs what the lines hold.

    Args:
        config: grace for cancelled handlers.
        lease: asked whether a job may still be started.
        lines: the worker's queues.
        counters: what it counts.
        on_outcome: called with each execution that ended, and what came of it.
        on_room: called when a line could take more jobs.
    """

    def __init__(
        self,
        config: WorkerConfig,
        lease: Lease,
        lines: Iterable[Line],
        counters: Counters,
        on_outcome: Callable[[Execution, Completion | Settlement], None],
        on_room: Callable[[], None],
    ) -> None:
        self._cancel_grace_s = config.cancel_grace.total_seconds()
        self._grace_s = config.grace.total_seconds()
        self._lease = lease
        self._lines = list(lines)
        self._counters = counters
        self._on_outcome = on_outcome
        self._on_room = on_room
        self._loop = asyncio.get_running_loop()
        slots = sum(line.slots for line in self._lines)
        # As many again, for the slots of threads that would not stop.
        self._threads = ThreadRunner(self._loop, self._thread_ended, slots * 2)
        self._processes = ProcessRunner()
        self.running: set[Execution] = set()
        self.suspects = Suspects()
        self.started: StartedJobs | None = None  # what a supervisor reads should this process die
        self._one_ended = asyncio.Event()
        self.last_tick = time.monotonic()
        self.is_draining = False
        self.paused_kinds: frozenset[str] = frozenset()
        self.middleware: Mapping[str, Sequence[RunMiddleware]] = {}  # of the kinds that have some

    def report_starts(self, started: StartedJobs, crash_limit: int) -> None:
        """Report what starts here to a supervisor, which makes a crash of this process a cheap one."""
        self.started = started
        self.suspects.alone_from = alone_from(crash_limit, supervised=True)

    # Start

    def fill(self, line: Line) -> None:
        """Start held jobs while slots are free."""
        held = line.held
        while held and line.running < line.slots and not self.is_draining and not line.is_paused:
            self._start(held.popleft())

    def _start(self, execution: Execution) -> None:
        handler = execution.handler
        if not self._lease.is_safe(execution.identity):
            self._on_outcome(execution, hand_back(execution.job.id, execution.job.attempt))
            return
        if self.paused_kinds and execution.job.kind in self.paused_kinds:
            self._on_outcome(execution, put_back(execution.job.id, execution.job.attempt))
            return
        if self.started is not None:  # before anything that is the job's own: its arguments may bite
            self.started.add(execution.claimed.job_id, execution.claimed.attempt)
        middleware = self.middleware.get(execution.job.kind)
        try:
            arguments = (
                handler.decode(execution.claimed.args or "null")
                if middleware or handler.mode != "process"
                else None
            )
        except ArgumentsDecodeError as error:
            outcome = on_exception(execution.job, error, handler.backoff, execution.secrets)
            _log_failure(execution.job, outcome)
            self._on_outcome(execution, outcome)
            return
        except BaseException as broken:  # noqa: BLE001 - an upgrade hook's exception may bite when it is described
            outcome = undecidable(execution.job, broken)
            _log_failure(execution.job, outcome)
            self._on_outcome(execution, outcome)
            return
        execution.line.running += 1
        self.running.add(execution)
        timeout_s = execution.claimed.timeout_s
        if timeout_s is not None:
            execution.deadline = time.monotonic() + timeout_s
        if middleware:
            execution.task = self._loop.create_task(self._run_around(execution, arguments, middleware))
        elif handler.mode == "async":
            execution.task = self._loop.create_task(self._run(execution, arguments))
        else:
            self._run_in_thread(execution, arguments)

    async def _run(self, execution: Execution, arguments: Any) -> None:
        execution.started_at = time.monotonic()
        set_current_job(execution.job)
        if execution.stop_reason is not None:  # told before it could begin
            self._ended(execution, None, asyncio.CancelledError())
            return
        try:
            result = await execution.handler.fn(execution.job, arguments)
        except BaseException as error:  # noqa: BLE001 - also SystemExit and the like end this job alone
            self._ended(execution, None, error)
        else:
            self._ended(execution, result, None)

    async def _run_around(
        self, execution: Execution, arguments: Any, middleware: Sequence[RunMiddleware]
    ) -> None:
        execution.started_at = time.monotonic()
        set_current_job(execution.job)
        if execution.stop_reason is not None:  # see _run
            self._ended(execution, None, asyncio.CancelledError())
            return
        try:
            result = await run_around(execution, arguments, middleware, self._threads, self._processes)
        except BaseException as error:  # noqa: BLE001 - see _run
            self._ended(execution, None, error)
        else:
            self._ended(execution, result, None)

    def _run_in_thread(self, execution: Execution, arguments: Any) -> None:
        handler, job = execution.handler, execution.job
        execution.started_at = time.monotonic()
        if handler.mode == "process":
            execution.process = call = self._processes.prepare(handler, job, execution.claimed.args)
            self._threads.submit(execution, call.run)
            return

        def run() -> Any:
            set_current_job(job)  # in the call's own context
            return handler.fn(job, arguments)

        self._threads.submit(execution, run)

    def _thread_ended(self, token: Execution | Ended, result: Any, error: BaseException | None) -> None:
        if isinstance(token, Ended):
            token.set(result, error)  # the middleware around it goes on
        else:
            self._ended(token, result, error)

    # End

    def _ended(self, execution: Execution, result: Any, error: BaseException | None) -> None:
        line = execution.line
        self.running.discard(execution)
        self._one_ended.set()
        if execution.is_stuck:
            line.stuck -= 1
        else:
            line.running -= 1
        line.note_run(time.monotonic() - execution.started_at)
        try:
            outcome = self._decide(execution, result, error)
        except BaseException as broken:  # noqa: BLE001 - the user's objects take part in it, and may do anything
            outcome = undecidable(execution.job, broken)
        if isinstance(outcome, Settlement) and outcome.failure is not None:
            _log_failure(execution.job, outcome)
        self._on_outcome(execution, outcome)
        if line.held:
            self.fill(line)
        if len(line.held) <= line.refill_at:
            self._on_room()

    def _decide(
        self, execution: Execution, result: Any, error: BaseException | None
    ) -> Completion | Settlement:
        outcome = self._decide_by_itself(execution, result, error)
        if execution.stop_reason is StopReason.CANCEL and isinstance(outcome, Settlement):
            return cancelled(outcome, execution.cancel_reason)
        return outcome

    def _decide_by_itself(
        self, execution: Execution, result: Any, error: BaseException | None
    ) -> Completion | Settlement:
        job, handler, stop = execution.job, execution.handler, execution.stop_reason
        if stop is StopReason.TIME_LIMIT:
            # Also when it returned all the same: it was told that its time is over.
            return on_timeout(job, handler.backoff, "" if error is None else frames_of(error))
        if error is None and handler.mode == "process" and isinstance(result, Completion | Settlement):
            return result  # decided over there, where the exception was
        if error is None and stop is not None and job.cancelled.seen:
            # It left because it was told to: taken for an end, the rest of its work would be lost.
            return hand_back(job.id, job.attempt)
        if error is None:
            if not handler.store_result:
                return Completion(job.id, job.attempt)
            try:
                return Completion(job.id, job.attempt, handler.encode_result(result))
            except ArgumentsEncodeError as refused:
                return on_exception(job, refused, handler.backoff, execution.secrets)
        if stop is not None and isinstance(error, asyncio.CancelledError | ProcessKilled):
            return hand_back(job.id, job.attempt)
        return on_exception(job, error, handler.backoff, execution.secrets)

    # Stop

    def stop_starting(self) -> None:
        """Start nothing more; what is held from now on is given back."""
        self.is_draining = True

    def stop(self, execution: Execution, reason: StopReason) -> None:
        """Tell one running handler to stop."""
        if execution.stop_reason is None:
            execution.stop_reason = reason
            execution.stopped_at = time.monotonic()
        execution.job.cancelled.set()
        if execution.task is not None and execution.started_at:
            # Not before its first step: cancelled then, a coroutine never runs, and its end is never noted.
            execution.task.cancel()
        if execution.process is not None:
            if reason is StopReason.CANCEL:
                execution.process.terminate()
            else:
                execution.process.kill()

    def stop_all(self, reason: StopReason) -> None:
        """Tell every running handler to stop."""
        for execution in list(self.running):
            self.stop(execution, reason)

    def job_ids(self) -> list[int]:
        """Return the jobs that are here, running or held."""
        running = [execution.job.id for execution in self.running]
        return running + [execution.job.id for line in self._lines for execution in line.held]

    def cancel(self, reasons: Mapping[int, str | None]) -> None:
        """Cancel the jobs of these ids: what runs is told to stop, what is held never starts."""
        if not reasons:
            return
        for execution in [one for one in self.running if one.job.id in reasons and one.stop_reason is None]:
            job = execution.job
            logger.info("job %d (%s) is told to stop: an operator cancels it", job.id, job.kind)
            execution.cancel_reason = reasons[job.id]
            self.stop(execution, StopReason.CANCEL)
        for execution in self._take_held(lambda one: one.job.id in reasons):
            back = hand_back(execution.job.id, execution.job.attempt)
            self._on_outcome(execution, cancelled(back, reasons[execution.job.id]))

    def pause_kinds(self, kinds: frozenset[str]) -> None:
        """Start no job of these kinds, until told otherwise."""
        if kinds != self.paused_kinds:
            logger.info("paused kinds: %s", ", ".join(sorted(kinds)) or "none any more")
        self.paused_kinds = kinds
        if kinds:
            for execution in self._take_held(lambda one: one.job.kind in kinds):
                self._on_outcome(execution, put_back(execution.job.id, execution.job.attempt))

    def _take_held(self, wanted: Callable[[Execution], bool]) -> list[Execution]:
        """Take those that are wanted from what waits for slots."""
        taken = [execution for line in self._lines for execution in line.held if wanted(execution)]
        for execution in taken:
            execution.line.held.remove(execution)
        return taken

    async def ended(self, until: float, *, but_stuck: bool = False) -> None:
        """Wait until nothing runs any more (stuck handlers apart), or the monotonic time ``until``."""
        while time.monotonic() < until:
            if not any(not (but_stuck and execution.is_stuck) for execution in self.running):
                return
            self._one_ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(TICK_S, max(0.0, until - time.monotonic()))):
                    await self._one_ended.wait()

    async def tick(self) -> None:
        """Watch time limits, leases and handlers that do not stop, until cancelled."""
        due = time.monotonic()
        while True:
            self.last_tick = time.monotonic()
            self._counters.loop.add(max(0.0, self.last_tick - due))
            for execution in list(self.running):
                self._check(execution, self.last_tick)
            for line in self._lines:
                if line.holds_too_long(self.last_tick):
                    self._give_back_held(line)
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)

    def _check(self, execution: Execution, now: float) -> None:
        if execution.stop_reason is None:
            if now > execution.deadline:
                self.stop(execution, StopReason.TIME_LIMIT)
            elif not self._lease.is_safe(execution.identity):
                self.stop(execution, StopReason.LEASE)
        elif not execution.is_stuck and now - execution.stopped_at > self._cancel_grace_s:
            if execution.process is not None and not execution.process.is_killed:
                execution.stopped_at = now
                execution.process.kill()
            else:
                self._leave_behind(execution)

    def _leave_behind(self, execution: Execution) -> None:
        """Give a stuck handler's slot to the next job; its own stays leased until it ends."""
        line, job = execution.line, execution.job
        execution.is_stuck = True
        line.running -= 1
        line.stuck += 1
        self._counters.stuck += 1
        logger.error(
            "job %d (%s) goes on %.1f s after it was told to stop because of %s; "
            "its slot is given to the next job, and it stays leased until it ends. Have its handler look at "
            "job.cancelled, or run in a process",
            job.id,
            job.kind,
            time.monotonic() - execution.stopped_at,
            execution.stop_reason.value if execution.stop_reason else "",
            extra=fields_of(job),
        )
        self.fill(line)
        self._on_room()

    def _give_back_held(self, line: Line) -> None:
        """Let others have the jobs that wait here longer than was thought."""
        line.note_misjudged()
        self.give_back_held(line)

    def give_back_held(self, line: Line) -> None:
        """Hand back every job of a line that has not been started."""
        while line.held:
            execution = line.held.popleft()
            self._on_outcome(execution, hand_back(execution.claimed.job_id, execution.claimed.attempt))

    @property
    def is_clogged(self) -> bool:
        """Whether some line has as many stuck handlers as slots: this process should be replaced."""
        return any(line.stuck >= line.slots for line in self._lines)

    def blocking_job(self) -> tuple[str, float | None]:
        """Describe the job that runs on the loop now, and how long it may block. From any thread."""
        current = asyncio.current_task(self._loop)
        limits: list[float] = []
        for execution in list(self.running):
            job = execution.job
            limit = None if job.timeout_s is None else job.timeout_s + self._grace_s
            if execution.task is not None and execution.task is current:
                return f"job {job.id} ({job.kind})", limit
            limits.append(float("inf") if limit is None else limit)
        # A task or callback that some handler made: nobody knows whose, and all of them wait for it.
        longest = max(limits, default=float("inf"))
        return "code outside any handler", None if longest == float("inf") else longest

    def record_overruns(self) -> None:
        """Record handlers that went on past their time limit, for their process is about to end."""
        for execution in self.running:
            if execution.stop_reason is StopReason.TIME_LIMIT:
                overrun = on_timeout(execution.job, execution.handler.backoff)
                later = overrun._replace(delay_s=max(overrun.delay_s, _AFTER_EXIT_S))
                self._on_outcome(execution, later)

    def has_live_handlers(self) -> bool:
        """Whether some handler still acts. From any thread, also after the loop has closed."""
        if self._threads.outstanding > 0:
            return True
        tasks = [execution.task for execution in list(self.running)]
        return not self._loop.is_closed() and any(task is not None and not task.done() for task in tasks)

    def close(self) -> None:
        """Let idle threads and processes go."""
        self._threads.close()
        self._processes.close()


def _log_failure(job: Job, outcome: Settlement) -> None:
    """Say that an attempt failed: a warning when it is retried, an error with its traceback at the end."""
    failure = outcome.failure
    if failure is None:
        return
    extra = fields_of(job)
    what = f"job {job.id} ({job.kind}) attempt {job.attempt}: {failure.type}: {failure.message[:500]}"
    if outcome.to == "scheduled":
        logger.warning("%s; it is retried in %.1f s", what, outcome.delay_s, extra=extra)
    elif outcome.to == "cancelled":
        logger.info("%s; it was to be cancelled, and is", what, extra=extra)
    else:
        logger.error("%s; it is discarded\n%s", what, failure.traceback, extra=extra)
