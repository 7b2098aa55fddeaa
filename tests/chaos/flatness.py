"""Whether what was measured under load stayed as it was: its medians, by fifths of the time.

The first fifth is for warming up. The last one is held against the second, and medians are compared, so
that neither a checkpoint nor a neighbour on the machine decides.
"""

from __future__ import annotations

import itertools
import math
import operator
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.chaos import vitals
from tests.chaos.ledger import percentile_s
from tests.chaos.vitals import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.chaos.vitals import Sample

FIFTHS: Final = 5
EARLY: Final = 1
LAST: Final = 4
_SHOWN: Final = 0.1  # of all tables together: what is smaller is left out of the table that people read
P50: Final = "pickup p50"
P99: Final = "pickup p99"


@dataclass(frozen=True, slots=True)
class Limit:
    """What the end may be, beside what it was early.

    Attributes:
        factor: so many times as much,
        slack: and so much more,
        most: but no more than so much more in all.
        both_ways: whether it may not have become less by as much either.
    """

    factor: float = 1.0
    slack: float = 0.0
    most: float = math.inf
    both_ways: bool = False

    def ceiling(self, early: float) -> float:
        """Return the most that the end may be."""
        return min(early * self.factor + self.slack, early + self.most)

    def allows(self, early: float, last: float) -> bool:
        """Whether that is flat."""
        room = self.ceiling(early) - early
        return last <= early + room and (not self.both_ways or last >= early - room)


_MEMORY: Final = Limit(factor=1.1, most=10.0)
_COUNT: Final = Limit(slack=2.0, both_ways=True)
# Tables breathe: between two rounds of autovacuum dead rows gather, and a heap hardly ever shrinks again.
_TABLE: Final = Limit(factor=1.5, slack=0.25)

LIMITS: Final = {
    vitals.MEMORY: _MEMORY,
    vitals.SHARED_OUT: _MEMORY,
    vitals.BACKENDS: Limit(factor=1.25),  # each fills its caches at its own time
    vitals.FILES: _COUNT,
    vitals.THREADS: Limit(
        slack=20.0
    ),  # a pool of threads grows up to the slots, when they first are all full
    vitals.CONNECTIONS: _COUNT,
    vitals.HEAP: _TABLE,
    vitals.INDEXES: _TABLE,
    vitals.DEAD: Limit(factor=2.0, slack=1_000.0),
    vitals.WAITING: Limit(factor=2.0, slack=100.0),
    P99: Limit(factor=2.0, slack=25.0),
}
_UNITS: Final = {
    vitals.MEMORY: "MB",
    vitals.SHARED_OUT: "MB",
    vitals.BACKENDS: "MB",
    vitals.HEAP: "MB",
    vitals.INDEXES: "MB",
    vitals.WAL: "MB/s",
    vitals.MADE: "/s",
    vitals.DONE: "/s",
    P50: "ms",
    P99: "ms",
}
_RATES: Final = {vitals.WAL, vitals.MADE, vitals.DONE}
_SIZES: Final = {vitals.HEAP, vitals.INDEXES}
_BY_SORT: Final = {vitals.MEMORY, vitals.SHARED_OUT}  # workers, producers and supervisors are told apart


@dataclass(frozen=True, slots=True)
class Row:
    """One thing, in each fifth of the time."""

    key: Key
    fifths: tuple[float, ...]

    @property
    def limit(self) -> Limit | None:
        """What its end may be, where that is limited."""
        return LIMITS.get(self.key.what)

    @property
    def is_flat(self) -> bool:
        """Whether it stayed as it was, as far as that is asked of it."""
        return self.limit is None or self.limit.allows(self.fifths[EARLY], self.fifths[LAST])

    @property
    def use(self) -> float:
        """How much of what it may be it is at the end: 1 is all."""
        return (
            0.0 if self.limit is None else self.fifths[LAST] / (self.limit.ceiling(self.fifths[EARLY]) or 1)
        )

    def __str__(self) -> str:
        told = " → ".join(map(_shown, self.fifths))
        return f"{self.key.what} of {self.key.whose}: {told} {_UNITS.get(self.key.what, '')}".rstrip()


def fifths_of(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Return the samples of each fifth, which begins with the last one of the fifth before."""
    bounds = [number * (len(samples) - 1) // FIFTHS for number in range(FIFTHS + 1)]
    return [samples[begin : end + 1] for begin, end in itertools.pairwise(bounds)]


def rows_of(samples: Sequence[Sample]) -> list[Row]:
    """Return all that was measured, by fifths."""
    fifths = fifths_of(samples)
    rows = [Row(key, tuple(_of_fifth(key, fifth) for fifth in fifths)) for key in samples[-1].values]
    for name, percent in ((P50, 50), (P99, 99)):
        rows.append(Row(Key(name, "jobs"), tuple(pickup_ms(fifth, percent) for fifth in fifths)))
    return rows


def _of_fifth(key: Key, fifth: Sequence[Sample]) -> float:
    if key.what not in _RATES:
        return statistics.median(sample.values[key] for sample in fifth)
    first, last = fifth[0], fifth[-1]
    return (last.values[key] - first.values[key]) / (last.at_s - first.at_s)


def pickup_ms(samples: Sequence[Sample], percent: float) -> float:
    """Return what so many percent of the pickups between the first and the last sample took at most."""
    between = map(operator.sub, samples[-1].pickups, samples[0].pickups)
    return percentile_s(list(between), percent) * 1e3


def pickup_by_minute(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """Return p50 and p99 of each minute's pickups in ms, after the first fifth; in short runs of less."""
    warm = samples[(len(samples) - 1) // FIFTHS :]
    length_s = min(60.0, (samples[-1].at_s - samples[0].at_s) / 20)
    minutes = itertools.groupby(warm, lambda sample: int((sample.at_s - warm[0].at_s) / length_s))
    begins = [next(minute) for _, minute in minutes]
    return [(pickup_ms(pair, 50), pickup_ms(pair, 99)) for pair in itertools.pairwise(begins)]


def not_flat(rows: Iterable[Row]) -> list[Row]:
    """Return what did not stay as it was."""
    return [row for row in rows if not row.is_flat]


def table(rows: Sequence[Row]) -> str:
    """Return a table for people: of like things the one that came nearest to its limit."""
    head = ["| | | 1st fifth | 2nd | 3rd | 4th | last | may be |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    return "\n".join([*head, *map(_line, _worth_showing(rows))])


def _worth_showing(rows: Sequence[Row]) -> Iterator[Row]:
    totals = {row.key.what: max(row.fifths) for row in rows if row.key.whose == vitals.ALL_TABLES}
    shown: set[tuple[str, str]] = set()
    for row in rows:
        if row.key.what in _SIZES:
            if max(row.fifths) >= _SHOWN * totals.get(row.key.what, 0.0) or not row.is_flat:
                yield row
        elif _sort_of(row) not in shown:
            shown.add(_sort_of(row))
            alike = [one for one in rows if _sort_of(one) == _sort_of(row)]
            yield max(alike, key=lambda one: (one.use, one.fifths[LAST]))


def _sort_of(row: Row) -> tuple[str, str]:
    return row.key.what, row.key.whose.rstrip(" 0123456789") if row.key.what in _BY_SORT else ""


def _line(row: Row) -> str:
    unit = _UNITS.get(row.key.what)
    name = row.key.what + (f", {unit}" if unit else "")
    values = " | ".join(map(_shown, row.fifths))
    may_be = "–" if row.limit is None else _shown(row.limit.ceiling(row.fifths[EARLY]))
    return f"| {name} | {row.key.whose} | {values} | {may_be}{'' if row.is_flat else ' **not flat**'} |"


def _shown(value: float) -> str:
    digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"
