"""Log lines of handlers in processes, on their way to the worker's own log.

A spawned process has no log configuration but what its modules make on import. Where they make none,
its records go through the pipe to the worker, and are handled there as if they had come up there: with
its handlers, its formats, its levels. One thread over there writes to the pipe, since whatever else
writes could be torn in the middle by the signal that asks a handler to end.
"""

from __future__ import annotations

import logging
import logging.handlers
import pickle
import queue
import threading
from typing import TYPE_CHECKING, Any, Final

from jobq._logging import JobContextFilter

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_MOST_WAITING: Final = 10_000  # records; beyond, the newest are dropped: a handler must not wait for a log


class Sender:
    """What writes to the worker, in the process. What is sent first arrives first.

    There is no thread until something is logged: a handler may fork.

    Args:
        pipe: to the worker.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._items: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, outcome: object) -> None:
        """Send an outcome, after the records before it."""
        item = pickle.dumps(outcome)
        with self._lock:
            if self._thread is None:
                self._pipe.send_bytes(item)
                return
        self._items.put(item)

    def send_record(self, fields: dict[str, Any]) -> None:
        """Send a log record's fields, from any thread; a handler does not wait for it."""
        if self._items.qsize() >= _MOST_WAITING:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="jobq-sender", daemon=True)
                self._thread.start()
        self._items.put(pickle.dumps(_Record(fields)))

    def close(self) -> None:
        """Send what waits, and end."""
        if self._thread is not None:
            self._items.put(None)
            self._thread.join()

    def _write(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._pipe.send_bytes(item)
            except OSError:
                return  # the worker is gone, and we are going


class PipeHandler(logging.handlers.QueueHandler):
    """Sends records to the worker; what is no plain value goes as text.

    Args:
        sender: what sends.
    """

    def __init__(self, sender: Sender) -> None:
        super().__init__(queue.SimpleQueue())
        self._sender = sender
        self.addFilter(JobContextFilter())

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send one record, whose message has been made already."""
        self._sender.send_record(
            {name: value if type(value) in _PLAIN else str(value) for name, value in vars(record).items()}
        )


class _Record:
    """A log record on its way."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields


def forward(sender: Sender, level: int) -> None:
    """In the process: send what is logged to the worker, unless the application configured logging here.

    Args:
        sender: what sends.
        level: of the root logger, where the application set none of its own.
    """
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(PipeHandler(sender))
        root.setLevel(level)


def handle(item: object) -> bool:
    """In the worker: log what came through the pipe; return whether it was a log record."""
    if not isinstance(item, _Record):
        return False
    record = logging.makeLogRecord(item.fields)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
    return True
