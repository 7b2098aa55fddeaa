"""Applications that grow: what whoever watches for growth must see, or he proves nothing."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg

if TYPE_CHECKING:
    import jobq

_KEPT_BYTES: Final = 100_000
_CONNECT_EVERY_S: Final = 1.0  # less would use up the server's connections before anybody has looked

_hoard: list[object] = []


async def keep_memory(_job: jobq.Job, _args: Any, call_next: jobq.CallNext) -> Any:
    """Keep 100 kB a run."""
    _hoard.append(b"x" * _KEPT_BYTES)
    return await call_next()


class _Connecting:
    """Opens a connection now and then, and closes none."""

    def __init__(self) -> None:
        self._next_at = 0.0

    async def __call__(self, _job: jobq.Job, _args: Any, call_next: jobq.CallNext) -> Any:
        if time.monotonic() > self._next_at:
            self._next_at = time.monotonic() + _CONNECT_EVERY_S
            _hoard.append(psycopg.connect(os.environ["JOBQ_CHAOS_LEAK_DSN"]))
        return await call_next()


LEAKS: Final[dict[str, jobq.RunMiddleware]] = {"memory": keep_memory, "connections": _Connecting()}
