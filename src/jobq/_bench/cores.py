"""Which cores run what, and before whom: pinning, and priority on a machine that others use too."""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence


class Pin(enum.StrEnum):
    """Which cores the server and everything measured share."""

    ONE = "one"
    TWO = "two"
    NONE = "none"


class CannotPin(Exception):
    """There are fewer cores than asked for, or this system or user may not do that."""


def cores_of(pin: Pin) -> list[int] | None:
    """Return the cores that a pin means here, ``None`` for all.

    Raises:
        CannotPin: there are not as many, or this system cannot pin.
    """
    if pin is Pin.NONE:
        return None
    if sys.platform != "linux":
        raise CannotPin(f"pin={pin}: only Linux pins processes to cores; use none")
    wanted = 1 if pin is Pin.ONE else 2
    cores = sorted(os.sched_getaffinity(0))[:wanted]
    if len(cores) < wanted:
        raise CannotPin(f"pin={pin}: this process may use {len(cores)} core(s)")
    return cores


def others_than(cores: Sequence[int] | None) -> list[int] | None:
    """Return the cores that are left for the bench itself, ``None`` when it has to share."""
    if cores is None:
        return None
    return sorted(os.sched_getaffinity(0) - set(cores)) or None


@contextlib.contextmanager
def pinned(cores: Sequence[int] | None) -> Generator[None]:
    """Keep this process, and those that it starts meanwhile, to some cores."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def repin(pid: int, cores: Sequence[int]) -> None:
    """Move a process and its children to other cores; those that it starts from now on go with it."""
    os.sched_setaffinity(pid, cores)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if int(parent) == pid:
                    os.sched_setaffinity(int(folder.name), cores)


@contextlib.contextmanager
def preferred(pids: Sequence[int], niceness: int) -> Generator[None]:
    """Give processes, and those that they start from now on, another priority for a while.

    Linux weighs whole sessions against each other where its autogroups are on, and niceness only
    within one: so both are set.

    Raises:
        CannotPin: this user may not.
    """
    if niceness == 0:
        yield
        return
    before = [(pid, os.getpriority(os.PRIO_PROCESS, pid)) for pid in pids]
    try:
        for pid in pids:
            _set_niceness(pid, niceness)
        yield
    except PermissionError as error:
        raise CannotPin(f"nice={niceness}: {error.strerror}") from error
    finally:
        for pid, niceness_before in before:
            with contextlib.suppress(OSError):  # it has ended, or was never changed
                _set_niceness(pid, niceness_before)


def _set_niceness(pid: int, niceness: int) -> None:
    os.setpriority(os.PRIO_PROCESS, pid, niceness)
    autogroup = Path(f"/proc/{pid}/autogroup")
    if not autogroup.exists():
        return
    try:
        autogroup.write_text(str(niceness))
    except OSError as error:
        # A session that began while autogroups were off has none of its own: niceness alone counts there.
        if error.errno != errno.EINVAL:
            raise
