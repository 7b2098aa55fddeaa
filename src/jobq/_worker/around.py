"""A run with middleware around it: one coroutine on the loop, wherever the handler itself runs."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from jobq._errors import Cancel, Permanent, ProcessFailure, Snooze
from jobq._kinds.middleware import through
from jobq._statements.outcomes import Settlement
from jobq._worker.processes import ProcessKilled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jobq._kinds.middleware import RunMiddleware
    from jobq._worker.execution import Execution
    from jobq._worker.outcome import Completion
    from jobq._worker.processes import ProcessRunner
    from jobq._worker.threads import ThreadRunner


class Ended:
    """The end of a call in a thread, to be awaited."""

    def __init__(self) -> None:
        self._future: asyncio.Future[tuple[Any, BaseException | None]]
        self._future = asyncio.get_running_loop().create_future()

    def set(self, result: Any, error: BaseException | None) -> None:
        """Note it. On the loop."""
        self._future.set_result((result, error))

    async def wait(self) -> Any:
        """Return or raise what the call did.

        A thread cannot be cancelled, so neither can this: its handler was told by ``job.cancelled``, or
        with its process, and until it has ended it acts, and its job is running.
        """
        while not self._future.done():
            try:
                await asyncio.shield(self._future)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
        result, error = self._future.result()
        if error is not None:
            raise error
        return result


async def run_around(
    execution: Execution,
    arguments: Any,
    middleware: Sequence[RunMiddleware],
    threads: ThreadRunner,
    processes: ProcessRunner,
) -> Any:
    """Run a job through its middleware.

    Returns:
        What the outermost middleware returned; or, where the handler ran in a process and the
        middleware left it at that, the outcome that was decided over there.

    Raises:
        BaseException: what left the outermost middleware.
    """
    inner = _Innermost(execution, arguments, threads, processes)
    try:
        result = await through(middleware, execution.job, arguments, inner.run)
    except BaseException as error:
        if inner.outcome is not None and error is inner.stand_in:
            return inner.outcome
        raise
    return inner.outcome if inner.outcome is not None and result is inner.value else result


class _Innermost:
    """What the middleware stands around.

    Attributes:
        outcome: what a process decided, ``None`` while there is nothing of the kind.
        value, stand_in: what the middleware got in its place, returned or raised.
    """

    def __init__(
        self, execution: Execution, arguments: Any, threads: ThreadRunner, processes: ProcessRunner
    ) -> None:
        self._execution = execution
        self._arguments = arguments
        self._threads = threads
        self._processes = processes
        self.outcome: Completion | Settlement | None = None
        self.value: Any = None
        self.stand_in: BaseException | None = None

    async def run(self) -> Any:
        handler, job = self._execution.handler, self._execution.job
        if handler.mode == "async":
            return await handler.fn(job, self._arguments)
        if handler.mode == "thread":
            return await self._in_thread(lambda: handler.fn(job, self._arguments))
        return await self._in_process()

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        ended = Ended()
        self._threads.submit(ended, call)
        return await ended.wait()

    async def _in_process(self) -> Any:
        execution = self._execution
        execution.process = call = self._processes.prepare(
            execution.handler, execution.job, execution.claimed.args
        )
        self.outcome = outcome = await self._in_thread(call.run)
        if isinstance(outcome, Settlement):
            self.stand_in = _stand_in(outcome)
            raise self.stand_in
        if outcome.result is not None:
            self.value = msgspec.json.decode(outcome.result)
        return self.value


def _stand_in(outcome: Settlement) -> BaseException:
    """Return what the middleware sees of an exception that stayed in another process."""
    failure = outcome.failure
    if failure is not None:
        if failure.outcome == "permanent":
            return Permanent(failure.message)
        return ProcessFailure(failure.type, failure.message, failure.traceback)
    if outcome.to == "scheduled":
        return Snooze(timedelta(seconds=outcome.delay_s))
    if outcome.to == "cancelled":
        return Cancel(outcome.reason or "")
    return ProcessKilled()  # it was asked to end, and its job goes back
