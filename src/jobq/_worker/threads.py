"""Threads for sync handlers: the worker's own, bounded, and never waited for at exit.

The loop's default executor is shared with whatever else the application runs in it, and
`concurrent.futures` joins its threads when the interpreter ends: one handler that never returns
would keep the process. These are daemon threads, so a process can always end.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

Done = tuple[object, Any, BaseException | None]  # the token it was submitted with, result, exception


class ThreadRunner:
    """Runs calls in threads and reports each end on the event loop.

    Args:
        loop: where ``on_done`` is called.
        on_done: called with (token, result, exception) for each call that ended.
        limit: threads at the most; a call beyond it waits for one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[Any, Any, BaseException | None], None],
        limit: int,
    ) -> None:
        self._loop = loop
        self._on_done = on_done
        self._limit = limit
        self._calls: queue.SimpleQueue[tuple[object, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._ended: deque[Done] = deque()
        self._wake_is_due = False
        self._lock = threading.Lock()
        self._outstanding = 0  # calls that were submitted and have not ended
        self._threads = 0

    def submit(self, token: object, call: Callable[[], Any]) -> None:
        """Run ``call`` in a thread, in a copy of the current context."""
        context = contextvars.copy_context()
        with self._lock:
            self._outstanding += 1
            if self._threads < min(self._outstanding, self._limit):
                self._threads += 1
                threading.Thread(target=self._work, name=f"jobq-handler-{self._threads}", daemon=True).start()
        self._calls.put((token, lambda: context.run(call)))

    @property
    def outstanding(self) -> int:
        """How many calls have not ended."""
        return self._outstanding

    def close(self) -> None:
        """Let idle threads end; busy ones end after their call."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            token, call = item
            try:
                done: Done = (token, call(), None)
            except BaseException as error:  # noqa: BLE001 - a handler may raise anything; all of it is recorded
                done = (token, None, error)
            self._report(done)
            del item, token, call, done

    def _report(self, done: Done) -> None:
        with self._lock:
            self._outstanding -= 1
            self._ended.append(done)
            wake, self._wake_is_due = not self._wake_is_due, True
        if wake:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, deque()
            self._wake_is_due = False
        for token, result, error in ended:
            # Apart, so that a fault with one does not keep the others waiting for ever.
            self._loop.call_soon(self._on_done, token, result, error)
