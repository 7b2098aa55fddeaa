"""Back-pressure: a client that leaves no more ready jobs in a queue than its producers should.

It is soft on purpose. A queue is counted at most once a second by each client; in between, the last
answer and what the client has enqueued since stand for it. So a client by itself keeps to the limit, and
several go past it by what the others enqueue within a second. A call that does not fit whole is refused
whole. Where only the client's own jobs fill the queue, they may have been done by now, or not been made,
for their keys were held: then it is counted sooner. It is never counted for more than 2 % of the time. An
exact limit would need a row that every enqueue updates.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jobq._errors import ConfigError, QueueFull
from jobq._kinds.options import changes
from jobq._messages import shown
from jobq._operation import Call, Operation, in_schema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jobq._kinds.options import ResolvedOptions

T = TypeVar("T")

_INTERVAL_S: Final = 1.0  # between two counts of a queue, unless the client's own jobs fill it…
_COST_FACTOR: Final = 50.0  # …and at least so many times what the last one took
_MOST_QUEUES: Final = 10_000  # that are remembered; names may come from data
MAX_LIMIT: Final = 1_000_000  # counting to it takes about a tenth of a second

_COUNT: Final = """
select count(*) from (select from {schema}.ready where queue::text = $1::text limit $2::int8) r
"""


@dataclass(slots=True)
class _Queue:
    """What a client knows of one queue.

    Attributes:
        count: ready jobs, as they were last counted.
        enqueued: the client's own jobs, all that there ever were; ``counted_from``: as many as there
            had been before the count.
        under_way: those whose call has not returned.
        next_count_at: when the count is too old.
        may_count_at: when counting again costs too little to matter.
    """

    count: int = 0
    enqueued: int = 0
    counted_from: int = 0
    under_way: int = 0
    next_count_at: float = 0.0
    may_count_at: float = 0.0

    @property
    def ready(self) -> int:
        return self.count + self.enqueued - self.counted_from + self.under_way


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
            for queue, limit in dict(limits).items():
                self._limits[changes({"queue": queue})["queue"]] = _checked(
                    f"max_ready[{shown(queue)}]", limit
                )
        else:
            self._for_all = _checked("max_ready", limits)
        self._queues: dict[str, _Queue] = {}

    def guarded(self, jobs: Iterable[ResolvedOptions], operation: Operation[T]) -> Operation[T]:
        """Return an enqueue that is refused while a queue of its jobs is full.

        Args:
            jobs: what is to be enqueued; those that are not ready at once count for nothing.
            operation: enqueues them.

        Raises:
            QueueFull: by the operation, which has sent nothing then but the count.
        """
        now = datetime.now(UTC)
        more = Counter(job.queue for job in jobs if not _waits(job, now))
        limited = {queue: limit for queue in sorted(more) if (limit := self._limit(queue)) is not None}
        return self._guarded(limited, more, operation) if limited else operation

    def _limit(self, queue: str) -> int | None:
        return self._for_all if self._for_all is not None else self._limits.get(queue)

    def _guarded(
        self, limited: Mapping[str, int], more: Mapping[str, int], operation: Operation[T]
    ) -> Operation[T]:
        for name, limit in limited.items():
            queue = self._known(name)
            if time.monotonic() >= queue.next_count_at:
                yield from self._count(name, limit)
            own_fill_it = queue.ready + more[name] > limit >= queue.count + more[name]
            if own_fill_it and time.monotonic() >= queue.may_count_at:
                yield from self._count(name, limit)
            if queue.ready + more[name] > limit:
                operation.close()
                raise QueueFull(name, queue.ready, limit, more[name])
        return (yield from self._noted([(self._known(name), more[name]) for name in limited], operation))

    def _noted(self, queues: list[tuple[_Queue, int]], operation: Operation[T]) -> Operation[T]:
        """Run an enqueue, and count its jobs from now on; those of one that fails no longer."""
        for queue, jobs in queues:
            queue.under_way += jobs
        try:
            result = yield from operation
        finally:
            for queue, jobs in queues:
                queue.under_way -= jobs
        for queue, jobs in queues:
            queue.enqueued += jobs
        return result

    def _known(self, name: str) -> _Queue:
        queue = self._queues.get(name)
        if queue is None:
            if len(self._queues) >= _MOST_QUEUES:
                self._queues.clear()
            queue = self._queues[name] = _Queue()
        return queue

    def _count(self, name: str, limit: int) -> Operation[None]:
        queue = self._known(name)
        started, before = time.monotonic(), queue.enqueued
        rows = yield Call(in_schema(_COUNT, self._schema), (name, limit), replan=True)
        now = time.monotonic()
        queue.count = rows[0][0]
        queue.counted_from = before  # what came meanwhile may not have been counted
        queue.may_count_at = now + (now - started) * _COST_FACTOR
        queue.next_count_at = max(now + _INTERVAL_S, queue.may_count_at)


def _waits(job: ResolvedOptions, now: datetime) -> bool:
    return job.delay_s is not None or (job.run_at is not None and job.run_at > now)


def _checked(name: str, limit: Any) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"{name}={shown(limit)}: ready jobs, 1 to {MAX_LIMIT:,}")
    return limit
