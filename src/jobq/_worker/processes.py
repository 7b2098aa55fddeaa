"""Processes for CPU-bound handlers: spawned, reused, and killed with their children on overrun.

Spawned, not forked: a fork copies locks that other threads hold, and sockets that are not its own.
A handler is found in the child by module and name. The child decides what an exception means and
sends back the outcome, since not every exception survives the way between processes.

A job that an operator cancels gets SIGTERM first, which raises `SystemExit` in its handler, so that it
can clean up; what still runs after the worker's `cancel_grace` is killed with its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from jobq._errors import ConfigError
from jobq._logging import set_current_job
from jobq._statements.outcomes import Failure, Settlement
from jobq._types import Job
from jobq._worker import childlogs
from jobq._worker.decide import hand_back, on_exception, on_failure, secrets_of, undecidable
from jobq._worker.outcome import Completion

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from jobq._kinds.jobs import Handler

_PR_SET_PDEATHSIG = 1
_SPAWN = multiprocessing.get_context("spawn")


class ProcessKilled(BaseException):
    """The process was killed by the worker, which knows why."""


class _Terminated(SystemExit):
    """SIGTERM came while a handler ran in this process."""


class _Child:
    """One spawned process and the pipe to it."""

    def __init__(self) -> None:
        self.pipe, far_end = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=_serve, args=(far_end,), name="jobq-handler")
        self.process.start()
        far_end.close()

    def kill(self) -> None:
        """Kill it and whatever it has started."""
        pid = self.process.pid
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its own group, from its first instruction on
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the handler that runs in it to end; its own children are left to it."""
        if self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)

    def answer(self) -> Completion | Settlement:
        """Wait for the outcome of the job that was sent.

        Not by the pipe alone: a process that the handler left behind holds its other end open.

        Raises:
            EOFError: the process has ended without one.
        """
        is_linux = sys.platform == "linux"
        end = os.pidfd_open(self.process.pid or 0) if is_linux else self.process.sentinel
        try:
            while True:
                wait([self.pipe, end])
                if not self.pipe.poll():
                    raise EOFError
                item: Any = self.pipe.recv()
                if not childlogs.handle(item):
                    outcome: Completion | Settlement = item
                    return outcome
        finally:
            if is_linux:
                os.close(end)


class ProcessRunner:
    """Keeps idle children for the next call."""

    def __init__(self) -> None:
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._lock = threading.Lock()
        self._closed = False

    def prepare(self, handler: Handler[Any, Any], job: Job, raw: str | None) -> ProcessCall:
        """Return the call that runs one job; run it in a thread."""
        return ProcessCall(self, handler, job, raw)

    def take(self) -> _Child:
        """Return an idle child, or a new one."""
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.process.is_alive():
                    return child
                self._all.discard(child)
        child = _Child()
        with self._lock:
            self._all.add(child)
        return child

    def give_back(self, child: _Child) -> None:
        """Take back a child whose call has ended."""
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        self.discard(child)

    def discard(self, child: _Child) -> None:
        """Kill a child that is of no use any more."""
        child.kill()
        child.process.join(timeout=1.0)
        child.pipe.close()
        with self._lock:
            self._all.discard(child)

    def close(self) -> None:
        """Kill every child."""
        with self._lock:
            self._closed = True
            children = list(self._all)
        for child in children:
            self.discard(child)


class ProcessCall:
    """One job in a process of its own."""

    def __init__(self, runner: ProcessRunner, handler: Handler[Any, Any], job: Job, raw: str | None) -> None:
        self._runner = runner
        self._handler = handler
        self._job = job
        self._raw = raw
        self._child: _Child | None = None
        self._killed = False
        self._terminated = False
        self._lock = threading.Lock()

    @property
    def is_killed(self) -> bool:
        """Whether :meth:`kill` was called."""
        return self._killed

    def run(self) -> Completion | Settlement:
        """Run the job and return its outcome. Blocks.

        Raises:
            ProcessKilled: :meth:`kill` or :meth:`terminate` was called, and it ended without an outcome.
        """
        child = self._runner.take()
        with self._lock:
            self._child = child
            if self._is_stopped():
                self._runner.discard(child)
                raise ProcessKilled
        fn = self._handler.fn
        try:
            level = logging.getLogger().getEffectiveLevel()
            child.pipe.send((fn.__module__, fn.__qualname__, self._job.fields(), self._raw, level))
            outcome = child.answer()
        except Exception:  # noqa: BLE001 - it has ended, or a signal cut one of its messages in two
            self._runner.discard(child)
            if self._is_stopped():
                raise ProcessKilled from None
            return self._died(child.process.exitcode)
        with self._lock:
            self._child = None
            ends = self._terminated
        # A child that was asked to end does so, now or with its next breath. One that hands its job
        # back was asked by somebody else.
        if ends or (isinstance(outcome, Settlement) and outcome.to == "ready"):
            self._runner.discard(child)
        else:
            self._runner.give_back(child)
        return outcome

    def _is_stopped(self) -> bool:
        return self._killed or self._terminated

    def terminate(self) -> None:
        """Ask the handler to end, or see to it that it never starts."""
        with self._lock:
            self._terminated = True
            if self._child is not None:
                self._child.terminate()

    def kill(self) -> None:
        """Kill the process, now or as soon as it has started."""
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()

    def _died(self, exit_code: int | None) -> Settlement:
        failure = Failure(
            "failed", "jobq.ProcessDied", f"the handler's process died with code {exit_code}", ""
        )
        return on_failure(self._job, failure, self._handler.backoff)


def _serve(pipe: Connection) -> None:
    """Be the child: run one job after another until the worker closes the pipe."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _raise_terminated)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sender = childlogs.Sender(pipe)
    while True:
        try:
            module, name, fields, raw, level = pipe.recv()
        except EOFError:
            return
        handler = _find(module, name)
        childlogs.forward(sender, level)  # after the import, which may have configured logging
        outcome = _run(handler, Job(*fields), raw)
        sender.send(outcome)
        if isinstance(outcome, Settlement) and outcome.to == "ready":
            sender.close()
            return


def _raise_terminated(number: int, frame: object) -> None:
    """Raise in the handler that runs. Between two jobs the worker ends this process in its own way."""
    del frame
    if _State.runs_handler:
        raise _Terminated(128 + number)


class _State:
    """What this process is doing, for its signal handler."""

    runs_handler = False


def _find(module: str, name: str) -> Handler[Any, Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not hasattr(found, "decode"):
        raise ConfigError(f"{module}.{name} is no handler in a new process; is the decorated name reused?")
    handler: Handler[Any, Any] = found
    return handler


def _run(handler: Handler[Any, Any], job: Job, raw: str | None) -> Completion | Settlement:
    set_current_job(job)
    try:
        _State.runs_handler = True
        result = handler.fn(job, handler.decode(raw or "null"))
        _State.runs_handler = False
        text = handler.encode_result(result) if handler.store_result else None
    except _Terminated:
        _State.runs_handler = False
        return hand_back(job.id, job.attempt)
    except BaseException as error:  # noqa: BLE001 - a handler may raise anything; all of it is recorded
        _State.runs_handler = False
        return _decide(handler, job, raw, error)
    return Completion(job.id, job.attempt, text)


def _decide(handler: Handler[Any, Any], job: Job, raw: str | None, error: BaseException) -> Settlement:
    try:
        return on_exception(job, error, handler.backoff, secrets_of(handler, job, raw))
    except BaseException as broken:  # noqa: BLE001 - the user's objects take part in it, and may do anything
        return undecidable(job, broken)
