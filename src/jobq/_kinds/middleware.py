"""Middleware: what an application puts around every run, and before every enqueue.

A run's middleware is a coroutine function, whatever its handler is, and stands around it like the
layers of an onion: what was declared first is outermost. An enqueue's is a plain function from the new
job to the new job, so that one serves both clients, single calls and bulk.

An observer is told, after the fact, what a worker does for many jobs at once: it claimed them, and it
recorded what became of them. It changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec

from jobq._errors import Error, MiddlewareError, Signal
from jobq._kinds.jobtype import NewJob
from jobq._kinds.options import changes
from jobq._kinds.signature import name_of
from jobq._messages import told

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence

    from jobq._types import Job

Outcome: TypeAlias = Literal[
    "completed", "retried", "snoozed", "discarded", "cancelled", "parked", "handed back"
]


class CallNext(Protocol):
    """Runs what is further in than a middleware, the handler at last."""

    def __call__(self) -> Awaitable[Any]:
        """Return or raise what that did. To be called once at the most."""
        ...


class RunMiddleware(Protocol):
    """Stands around every run of a handler; see :meth:`jobq.Jobs.use`.

    It runs on the worker's event loop, also around handlers in threads and processes, and its time is
    part of the job's time limit. Context variables that it sets are seen by handlers on the loop and
    in threads.
    """

    async def __call__(self, job: Job, args: Any, call_next: CallNext, /) -> Any:
        """Run the job, usually by ``return await call_next()``.

        Args:
            job: the attempt.
            args: its arguments, decoded.
            call_next: runs what is further in. Without it the handler does not run, and the job
                completes all the same.

        Returns:
            What the handler returned, or something else in its place; it is stored where the handler
            has ``store_result``. Of a handler in a process it is what is stored, else ``None``.

        Raises:
            BaseException: as a handler would. Signals and exceptions of what is further in come out
                of ``call_next``; let them pass, or decide otherwise. A failure in another process
                comes as :class:`jobq.ProcessFailure`.
        """
        ...


class EnqueueMiddleware(Protocol):
    """Changes each new job before it is checked and sent; see :meth:`jobq.AsyncClient.use`.

    It must not wait for anything: both clients call it, in the middle of an enqueue.
    """

    def __call__(self, job: NewJob, /) -> NewJob:
        """Return the job to enqueue: the given one, or one made with :meth:`NewJob.replace`.

        Args:
            job: what was asked for; its options hold the ``queue`` and the ``meta`` that it will have,
                wherever they were set.

        Raises:
            Exception: nothing is enqueued, and the caller gets a :class:`jobq.MiddlewareError` from it; so
                does one that sets an option that cannot be. Errors of jobq's own pass as they are.
        """
        ...


class Settled(msgspec.Struct, frozen=True, gc=False):
    """What was recorded of one attempt.

    Attributes:
        job_id, attempt: which.
        outcome: ``completed``, ``retried``, ``snoozed``, ``discarded``, ``cancelled``, ``parked`` (of
            a kind that the worker does not know, paused, or a suspect), or ``handed back``.
    """

    job_id: int
    attempt: int
    outcome: Outcome


class WorkerObserver(Protocol):
    """Is told what a worker does for many jobs at once; see :meth:`jobq.Jobs.observe`.

    It is called on the worker's event loop and must return at once. What it raises is logged, once.
    """

    def claimed(self, queue: str, jobs: Sequence[Job], took_s: float, /) -> None:
        """Hear of jobs that were claimed and will be run here.

        Args:
            queue: theirs.
            jobs: one or more.
            took_s: seconds that the claim took.
        """
        ...

    def settled(self, outcomes: Sequence[Settled], took_s: float, /) -> None:
        """Hear of outcomes that were recorded.

        Args:
            outcomes: one or more.
            took_s: seconds that recording them took.
        """
        ...


def through(middleware: Sequence[RunMiddleware], job: Job, args: Any, innermost: CallNext) -> Awaitable[Any]:
    """Run a job through its middleware, the first outermost, down to ``innermost``."""
    call = innermost
    for one in reversed(middleware):
        call = _Layer(one, job, args, call).run
    return call()


class _Layer:
    """One middleware around what is further in, for one run."""

    __slots__ = ("_args", "_inner", "_inner_error", "_job", "_middleware", "_was_called")

    def __init__(self, middleware: RunMiddleware, job: Job, args: Any, inner: CallNext) -> None:
        self._middleware = middleware
        self._job = job
        self._args = args
        self._inner = inner
        self._inner_error: BaseException | None = None
        self._was_called = False

    async def run(self) -> Any:
        try:
            return await self._middleware(self._job, self._args, self._call_next)
        except Exception as error:
            if error is not self._inner_error and not isinstance(error, Signal):
                # In the job's history, for whoever looks for the fault in the handler.
                error.add_note(f"raised in the run middleware {describe(self._middleware)}")
            raise

    async def _call_next(self) -> Any:
        if self._was_called:
            raise MiddlewareError(
                f"the run middleware {describe(self._middleware)} called call_next a second time"
            )
        self._was_called = True
        try:
            return await self._inner()
        except BaseException as error:
            self._inner_error = error
            raise


def change(middleware: Sequence[EnqueueMiddleware], job: NewJob) -> NewJob:
    """Return a new job as its middleware wants it, the first one asked first.

    Raises:
        MiddlewareError: one of them raised, returned no new job, or set an option that cannot be.
        Error: what one of them raised, if it is one of jobq's.
    """
    for one in middleware:
        try:
            changed: Any = one(job)
        except Error:
            raise
        except Exception as error:
            raise MiddlewareError(f"the enqueue middleware {describe(one)} raised {told(error)}") from error
        if not isinstance(changed, NewJob):
            raise MiddlewareError(
                f"the enqueue middleware {describe(one)} returned an object of "
                f"{type(changed).__qualname__}, not a NewJob"
            )
        _check_changes(one, job.options, changed.options)
        job = changed
    return job


def _check_changes(
    middleware: EnqueueMiddleware, before: Mapping[str, object], after: Mapping[str, object]
) -> None:
    """Check the options that a middleware set, here, where it is known which one it was."""
    try:
        changes({name: value for name, value in after.items() if before.get(name, before) is not value})
    except Error as error:
        raise MiddlewareError(f"the enqueue middleware {describe(middleware)} set {error}") from error


def describe(middleware: object) -> str:
    """Return what a middleware is called in messages: its function's name, or its class's."""
    if hasattr(middleware, "__qualname__"):
        return name_of(middleware)
    return f"{type(middleware).__module__}.{type(middleware).__qualname__}"
