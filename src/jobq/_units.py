"""Lengths of time, sizes and numbers of things, as people say them."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float) -> str:
    """Write a length of time in two units at most: ``3.2 s``, ``4 min 10 s``, ``2 d 3 h``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds == float("inf"):
        return "for ever"
    whole = round(seconds)
    for unit, name, below, below_name in _UNITS:
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit:,} {name}" + (f" {rest} {below_name}" if rest else "")
    raise AssertionError(seconds)  # 59.5 and more rounds to a minute


def octets(number: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:,.1f} TB"


def counted(number: int, noun: str) -> str:
    """Write a number of things: ``1 job``, ``2,000 jobs``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
