"""What a bench returns: one figure beside its yardstick, with what it cost and how it was set up."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """Several runs of one measurement: their median, and how far they lay apart."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Cost:
    """What one job cost. ``None``: could not be measured here, or does not apply.

    Attributes:
        server_cpu_us: CPU microseconds of all the server's processes.
        client_cpu_us: CPU microseconds of the measured process (or processes), all threads.
        wal_bytes: write-ahead log.
    """

    server_cpu_us: float | None = None
    client_cpu_us: float | None = None
    wal_bytes: float | None = None

    @property
    def cpu_us(self) -> float | None:
        """CPU on both sides together."""
        if self.server_cpu_us is None or self.client_cpu_us is None:
            return None
        return self.server_cpu_us + self.client_cpu_us

    @classmethod
    def median(cls, costs: Sequence[Cost]) -> Cost:
        """Return the medians of several runs, each of the three by itself."""
        return cls(
            _median([cost.server_cpu_us for cost in costs]),
            _median([cost.client_cpu_us for cost in costs]),
            _median([cost.wal_bytes for cost in costs]),
        )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True, slots=True)
class Floor:
    """What a figure should reach.

    Attributes:
        of: whether it is about the value or its ratio to the yardstick.
        limit: the figure.
        at_least: whether more is better.
    """

    of: Literal["value", "ratio"]
    limit: float
    at_least: bool = True

    def __str__(self) -> str:
        """As a person writes it, such as ``ratio ≥ 0.5``."""
        return f"{self.of} {'≥' if self.at_least else '≤'} {self.limit:,g}"


@dataclass(frozen=True, slots=True)
class Result:
    """One figure.

    Attributes:
        bench: the name it was asked for by; ``case`` tells its results apart.
        value: median over the runs, in ``unit``.
        yardstick: what ``yardstick_name`` made in the same runs, in the same unit.
        ratio: median over the runs of value to yardstick, each pair from one round.
        floor: what it should reach, where something was promised.
        cost, yardstick_cost: a job.
        cpu_ratio: what the ratio would be if CPU time alone decided, whoever else uses the cores.
        settings: everything that the figure depends on.
        details: what else there is to know, by name, units last.
    """

    bench: str
    case: str
    value: Spread
    unit: str
    yardstick: Spread
    yardstick_name: str
    ratio: Spread
    runs: int
    cost: Cost
    settings: Mapping[str, object]
    yardstick_cost: Cost = Cost()
    cpu_ratio: float | None = None
    floor: Floor | None = None
    details: Mapping[str, object] = field(default_factory=dict[str, object])

    @property
    def reached(self) -> bool | None:
        """Whether the floor was reached; ``None`` without one."""
        if self.floor is None:
            return None
        figure = self.value.median if self.floor.of == "value" else self.ratio.median
        return figure >= self.floor.limit if self.floor.at_least else figure <= self.floor.limit

    def as_json(self) -> str:
        """Return one line of JSON."""
        document = {
            "bench": self.bench,
            "case": self.case,
            "value": self.value.median,
            "unit": self.unit,
            "yardstick": self.yardstick.median,
            "yardstick_name": self.yardstick_name,
            "ratio": self.ratio.median,
            "cpu_ratio": self.cpu_ratio,
            "floor": str(self.floor) if self.floor else None,
            "reached": self.reached,
            **asdict(self.cost),
            **{f"yardstick_{name}": figure for name, figure in asdict(self.yardstick_cost).items()},
            "runs": self.runs,
            "value_spread": [self.value.least, self.value.most],
            "yardstick_spread": [self.yardstick.least, self.yardstick.most],
            "ratio_spread": [self.ratio.least, self.ratio.most],
            "details": dict(self.details),
            "settings": dict(self.settings),
        }
        return json.dumps(_rounded(document), ensure_ascii=False)


def ratios(values: Sequence[float], yardsticks: Sequence[float]) -> Spread:
    """Return the spread of value to yardstick, pair by pair."""
    return Spread.of([value / yardstick for value, yardstick in zip(values, yardsticks, strict=True)])


def _rounded(value: Any) -> Any:
    """Round floats to four significant digits or more: nothing here is known better."""
    if isinstance(value, float):
        return round(value, 1) if abs(value) >= 1000 else float(f"{value:.4g}")
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value)
        return {key: _rounded(item) for key, item in items.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
