"""Suspects: jobs with which a worker has died before, and what may run beside them.

When a worker dies, each job that it had begun is charged a crash, for one of them may have killed it. At
the crash limit a job is discarded, so the innocent must not be there for every crash that a guilty
one causes. Up to a number of crashes suspects still run side by side, which is fast; from it on, one at a
time in a process, and beside no other suspect: what dies then is charged to the one that did it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from jobq._worker.execution import Execution

_ALONE_FROM: Final = 2


class Admission(NamedTuple):
    """Which suspects a claim may take.

    Attributes:
        below: jobs with fewer crashes than this, any number of them.
        one_above: whether one with as many or more may come instead.
    """

    below: int
    one_above: bool


def alone_from(crash_limit: int, *, supervised: bool) -> int:
    """Return from how many crashes on a job runs beside no other suspect.

    Under a supervisor a crash costs a second, and a job may meet two that are not its own. Without one
    it costs a lease, and the whole application that the worker is a part of: there the first is enough.

    Args:
        crash_limit: at which jobs are discarded.
        supervised: whether a supervisor takes care of what this process leaves.
    """
    return max(1, min(_ALONE_FROM, crash_limit - 1)) if supervised else 1


class Suspects:
    """The suspects in this process.

    Attributes:
        alone_from: from how many crashes on a job runs beside no other suspect.
    """

    def __init__(self) -> None:
        self.alone_from = 1
        self._here: set[Execution] = set()

    def admission(self, *, has_slot: bool) -> Admission:
        """Decide which suspects the next claim may take: none that would have to wait here.

        Args:
            has_slot: whether a slot is free for what it takes.
        """
        if not has_slot or any(one.claimed.crashes >= self.alone_from for one in self._here):
            return Admission(1, one_above=False)
        return Admission(self.alone_from, one_above=not self._here)

    def add(self, execution: Execution) -> None:
        """Take note of one that was claimed."""
        self._here.add(execution)

    def discard(self, execution: Execution) -> bool:
        """Take note that one has an outcome; return whether it was among them."""
        if execution not in self._here:
            return False
        self._here.remove(execution)
        return True
