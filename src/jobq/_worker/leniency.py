"""Leniency with leases that look over: they may only look so to somebody who cannot know.

A lease is over when the database's clock says so and its worker could have renewed it. Somebody who has
just come, or to whom the database was away, does not know whether the others could. Nor does
anybody after the clock was stepped forward, for then every lease looks over at once. Each of these
moments therefore counts as a renewal, from which the living have the time for one of their own.

A step is seen by comparing what the database's clock shows with what has passed by the local monotonic
clock. It can only make us wait: what is over, the database decides.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP_US: Final = 1_000_000  # a step that no lease of a few seconds needs to fear, and more than clocks drift
_NEVER_US: Final = 0


class _Sight(NamedTuple):
    """What the database's clock showed, and the local time before which that cannot have been."""

    shown_us: int
    asked_at: float


class Leniency:
    """What a rescuer must tell the database before it calls leases over. Microseconds since the epoch.

    Args:
        now: the local monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._sight: _Sight | None = None
        self._asked_at = 0.0
        self.since_us = _NEVER_US
        """When, by the database's clock, the living began to have time for a renewal."""

    def begin(self) -> None:
        """The living may not have been able to renew until now."""
        self._sight = None

    def ask(self) -> int:
        """Return the latest that the database's clock can show now, if nobody has stepped it forward."""
        self._asked_at = self._now()
        if self._sight is None:
            return _NEVER_US
        return self._sight.shown_us + _us(self._asked_at - self._sight.asked_at) + _STEP_US

    def see(self, shown_us: int) -> bool:
        """Take in what the clock showed; return whether it was stepped forward since the last time.

        That it showed more than was thought possible can also be the answer's slowness, which only costs
        that one sweep.
        """
        before, self._sight = self._sight, _Sight(shown_us, self._asked_at)
        if before is None:
            self.since_us = shown_us
            return False
        passed_us = _us(self._now() - before.asked_at)
        if shown_us <= before.shown_us + passed_us + _STEP_US:
            return False
        self.since_us = shown_us
        return True


def _us(seconds: float) -> int:
    return round(seconds * 1_000_000)
