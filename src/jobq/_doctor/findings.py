"""What a check says: how bad, what it is, what to do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._operation import Operation


class Level(enum.StrEnum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"  # it could not be looked at


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check found.

    Attributes:
        check: the check's name.
        level: how much it matters; a problem makes `jobqctl doctor` fail.
        message: what is, with its figures.
        remedy: what to do about it; empty when there is nothing to do.
    """

    check: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """Where the checks look, and what they cannot see from inside the database.

    Attributes:
        schema: the schema that holds the queue.
        clock_s: this machine's clock, seconds since the epoch.
        pooled: whether a transaction pooler stands between.
    """

    schema: str
    clock_s: Callable[[], float]
    pooled: bool


Check: TypeAlias = "Callable[[Context], Operation[list[Finding]]]"
