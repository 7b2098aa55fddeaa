"""The processes that are measured, each pinned, each told what to run by the bench.

A hand is started once (importing takes longer than many a run) and then given functions to call.
They must be importable by name, and so must their arguments and results be picklable. What a hand
wants to keep between two calls, a connection for instance, it keeps in its own module.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from typing import TYPE_CHECKING, Any, Final, Generic, ParamSpec, Self, TypeVar

from jobq._bench.meter import process_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from types import TracebackType

P = ParamSpec("P")
T = TypeVar("T")

_END_TIMEOUT_S: Final = 5.0
CALL_TIMEOUT_S: Final = 300.0

# `spawn`: a fork would inherit the bench's connections
_context: Final = multiprocessing.get_context("spawn")

# How far this process has got with what it was told to do; the bench reads it while it works.
progress: Any = RawValue("q", 0)  # ctypes gives these no usable static type


class HandFailed(Exception):
    """A measured process raised, or ended, or took too long."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """What a call returned, and what it took: seconds, and CPU seconds of all its threads."""

    value: T
    seconds: float
    cpu_s: float


class Hand:
    """One process. A context manager.

    Args:
        cores: those it may run on, ``None`` for all.
    """

    def __init__(self, cores: Sequence[int] | None) -> None:
        self._progress: Any = _context.RawValue("q", 0)
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, cores, self._progress), daemon=True)
        self._process.start()
        theirs.close()
        self._busy = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        pid = self._process.pid
        assert pid is not None
        return pid

    def cpu_s(self) -> float | None:
        """Return the CPU seconds that it has used, ``None`` where /proc is absent."""
        return process_cpu_s(self.pid)

    @property
    def progress(self) -> int:
        """How far it says it has got."""
        return int(self._progress.value)

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have it call a function; `result` waits for the answer."""
        assert not self._busy, "a hand does one thing at a time"
        self._progress.value = 0
        self._pipe.send((function, args, kwargs))
        self._busy = True

    def result(self, timeout_s: float = CALL_TIMEOUT_S) -> Reply[Any]:
        """Wait for what `start` asked.

        Raises:
            HandFailed: it raised (with its traceback), died, or took longer than ``timeout_s``.
        """
        if not self._pipe.poll(timeout_s):
            raise HandFailed(f"no answer within {timeout_s:g} s")
        self._busy = False
        try:
            reply = self._pipe.recv()
        except EOFError:
            raise HandFailed(f"the process ended with code {self._process.exitcode}") from None
        if isinstance(reply, Reply):
            return reply  # pyright: ignore[reportUnknownVariableType]
        raise HandFailed(str(reply))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Reply[T]:
        """Have it call a function, and wait for the answer."""
        self.start(function, *args, **kwargs)
        return self.result()

    @property
    def busy(self) -> bool:
        """Whether it still works on what `start` asked, so that no answer waits."""
        return self._busy and not self._pipe.poll()

    def close(self) -> None:
        """End the process: at once if it is at work, for then something went wrong."""
        if self._busy:
            self._process.terminate()
        self._pipe.close()  # an idle hand ends when nobody can speak to it any more
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def call_all(
    hands: Sequence[Hand], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> list[Reply[T]]:
    """Have all hands call the same function at the same time, and wait for all answers."""
    for hand in hands:
        hand.start(function, *args, **kwargs)
    return [hand.result() for hand in hands]


@contextlib.contextmanager
def hired(count: int, cores: Sequence[int] | None) -> Generator[list[Hand]]:
    """Start some hands, and end them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Hand(cores)) for _ in range(count)]


def _serve(pipe: multiprocessing.connection.Connection, cores: Sequence[int] | None, shared: Any) -> None:
    global progress  # noqa: PLW0603 - this process's own, set once before anything runs
    progress = shared
    if cores is not None:
        os.sched_setaffinity(0, cores)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(function, args, kwargs))


def _answer(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply[T] | str:
    began_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        value = function(*args, **kwargs)
    except Exception:  # noqa: BLE001 - handed over whole; the bench raises it
        return traceback.format_exc()
    return Reply(value, time.perf_counter() - began_s, time.process_time() - cpu_s)
