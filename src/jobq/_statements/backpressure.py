"""Back-pressure: a client that leaves no more ready jobs in a queue than its producers should.

It is soft on purpose. A queue is counted at most once a second by each client, and never for more
than 2 % of the time; in between, the last answer stands. So producers go past the limit by what they
enqueue within that time, one call in bulk goes past it whole, and a queue that was full is refused
until it is counted again. An exact limit would need a row that every enqueue updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from jobq._errors import ConfigError, QueueFull
from jobq._kinds.options import changes
from jobq._operation import Call, Operation, in_schema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobq._kinds.options import ResolvedOptions

T = TypeVar("T")

_INTERVAL_S: Final = 1.0  # between two counts of a queue, at least…
_COST_FACTOR: Final = 50.0  # …and so many times what the last one took
_MOST_QUEUES: Final = 10_000  # that are remembered; names may come from data
MAX_LIMIT: Final = 1_000_000  # counting to it takes about a tenth of a second

_COUNT: Final = """
select count(*) from (select from {schema}.ready where queue = $1::text limit $2::int8) r
"""


class Backpressure:
    """The limits of one client and what it last counted.

    Args:
        schema: where the queue lives.
        limits: the most ready jobs of any queue, or of each that is named.

    Raises:
        ConfigError: names the limit that cannot be.
    """

    def __init__(self, schema: str, limits: int | Mapping[str, int]) -> None:
        self._schema = schema
        self._for_all: int | None = None
        self._limits: dict[str, int] = {}
        if isinstance(limits, Mapping):
            for queue, limit in limits.items():
                self._limits[changes({"queue": queue})["queue"]] = _checked(f"max_ready[{queue!r}]", limit)
        else:
            self._for_all = _checked("max_ready", limits)
        self._next_count_at: dict[str, float] = {}
        self._counts: dict[str, int] = {}

    def guarded(self, jobs: Iterable[ResolvedOptions], operation: Operation[T]) -> Operation[T]:
        """Return an enqueue that is refused while a queue of its jobs is full.

        Args:
            jobs: what is to be enqueued; those that are not ready at once count for nothing.
            operation: enqueues them.

        Raises:
            QueueFull: by the operation, which has sent nothing then but the count.
        """
        now = datetime.now(UTC)
        queues = {job.queue for job in jobs if not _waits(job, now)}
        limited = {queue: limit for queue in sorted(queues) if (limit := self._limit(queue)) is not None}
        return self._guarded(limited, operation) if limited else operation

    def _limit(self, queue: str) -> int | None:
        return self._for_all if self._for_all is not None else self._limits.get(queue)

    def _guarded(self, limited: Mapping[str, int], operation: Operation[T]) -> Operation[T]:
        for queue, limit in limited.items():
            if time.monotonic() >= self._next_count_at.get(queue, 0.0):
                yield from self._count(queue, limit)
            count = self._counts.get(queue, 0)
            if count >= limit:
                operation.close()
                raise QueueFull(queue, count, limit)
        return (yield from operation)

    def _count(self, queue: str, limit: int) -> Operation[None]:
        started = time.monotonic()
        if len(self._counts) >= _MOST_QUEUES:
            self._counts.clear()
            self._next_count_at.clear()
        rows = yield Call(in_schema(_COUNT, self._schema), (queue, limit), replan=True)
        now = time.monotonic()
        self._counts[queue] = rows[0][0]
        self._next_count_at[queue] = now + max(_INTERVAL_S, (now - started) * _COST_FACTOR)


def _waits(job: ResolvedOptions, now: datetime) -> bool:
    return job.delay_s is not None or (job.run_at is not None and job.run_at > now)


def _checked(name: str, limit: Any) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"{name}={cast('object', limit)!r}: ready jobs, 1 to {MAX_LIMIT:,}")
    return limit
