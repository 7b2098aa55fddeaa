"""Wall clocks that are wrong."""

from __future__ import annotations

import time
from typing import Any


def set_clock(wrong: dict[str, Any]) -> None:
    """Put this process's wall clock wrong: by ``offset_s``, or by steps that ``steps_s`` lists in turn.

    The monotonic clock stays, as it does when somebody sets a computer's time.
    """
    true_time, began = time.time, time.monotonic()
    steps: list[float] = wrong.get("steps_s", [0.0])
    every_s: float = wrong.get("every_s", 1.0)
    offset_s: float = wrong.get("offset_s", 0.0)

    def wrong_time() -> float:
        step = steps[int((time.monotonic() - began) / every_s) % len(steps)]
        return true_time() + offset_s + step

    time.time = wrong_time
    time.time_ns = lambda: int(wrong_time() * 1e9)
