"""What handlers of the worst kind do, by name."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK_S: Final = 1.0
_LEAKED_THREADS: Final = 20
_MEMORY_BYTES: Final = 256 << 20  # more than this and the kernel says no


class NobodyExpectsThis(BaseException):
    """An exception that `except Exception` lets through."""


def _block() -> None:
    time.sleep(_BLOCK_S)


def _leak_threads() -> None:
    for _ in range(_LEAKED_THREADS):
        threading.Thread(target=time.sleep, args=[3600.0], daemon=True).start()


def _eat_memory() -> None:
    """Take memory until there is no more, and be killed for it as the kernel would."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, hard))
    hoard: list[bytearray] = []
    try:
        while True:
            hoard.append(bytearray(16 << 20))
    except MemoryError:
        os.kill(os.getpid(), signal.SIGKILL)


def _fork() -> None:
    """Leave a child behind that has all our sockets, and ends by itself without a word."""
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)


def _close_files() -> None:
    """Close every socket of this process, the database's too, as a careless daemonise does."""
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # it was the listing's own
            if str(link.readlink()).startswith("socket:"):
                os.close(int(link.name))


def _exit() -> None:
    os._exit(3)


def _raise() -> None:
    raise NobodyExpectsThis


def _leave() -> None:
    raise SystemExit(0)


MISDEEDS: Final[dict[str, Callable[[], None]]] = {
    "block": _block,
    "leak threads": _leak_threads,
    "eat memory": _eat_memory,
    "fork": _fork,
    "close files": _close_files,
    "exit": _exit,
    "raise": _raise,
    "leave": _leave,
}
NEVER_END: Final = "never end"


async def misbehave(name: str) -> None:
    """Do one of `MISDEEDS`, or wait for ever, whatever one is told."""
    if name != NEVER_END:
        MISDEEDS[name]()
        return
    while True:
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:  # it ignores what it is told
            continue
