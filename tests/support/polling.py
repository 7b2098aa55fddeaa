"""Waiting for something to become true, never longer than needed."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import TYPE_CHECKING, Final, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

INTERVAL_S: Final = 0.01


def eventually(
    predicate: Callable[[], T], timeout_s: float = 10.0, *, what: str = "", interval_s: float = INTERVAL_S
) -> T:
    """Call ``predicate`` until it returns something true; return that.

    Args:
        predicate: what is to become true.
        timeout_s: for how long it is called.
        what: its name in the complaint.
        interval_s: between two calls; longer than usual for one that costs something.

    Raises:
        AssertionError: it did not within the time; with its last value.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(_complaint(predicate, value, timeout_s, what))
        time.sleep(interval_s)
    return value


@overload
async def eventually_async(
    predicate: Callable[[], Awaitable[T]], timeout_s: float = 10.0, *, what: str = ""
) -> T: ...
@overload
async def eventually_async(predicate: Callable[[], T], timeout_s: float = 10.0, *, what: str = "") -> T: ...
async def eventually_async(
    predicate: Callable[[], object], timeout_s: float = 10.0, *, what: str = ""
) -> object:
    """Do as `eventually` does, in an event loop; ``predicate`` may be a coroutine function."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = predicate()
        value: object = await answer if inspect.isawaitable(answer) else answer
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(_complaint(predicate, value, timeout_s, what))
        await asyncio.sleep(INTERVAL_S)


def _complaint(predicate: object, value: object, timeout_s: float, what: str) -> str:
    name = what or getattr(predicate, "__qualname__", repr(predicate))
    return f"not within {timeout_s:g} s: {name} (last value: {value!r})"


def pause(seconds: float) -> None:
    """Sleep, also under libfaketime: that takes the moment of `time.sleep` for one of another clock."""
    threading.Event().wait(seconds)
