"""What the queues hold, how far behind they are, and who works on them. `stats_sql` says how it is read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from jobq._errors import ConfigError, DatabaseUnavailable, Error
from jobq._messages import shown
from jobq._operation import Call, Operation, Rows, in_schema
from jobq._statements.stats_sql import (
    BEGIN,
    COUNTS,
    DUE_ROWS,
    HOUR_ROWS,
    KNOWN,
    LANES,
    LANES_TIME_LIMIT_MS,
    LAST_HOUR,
    LAST_HOUR_RATE,
    LIMIT,
    MOST_LANES,
    OTHER_ROWS,
    OTHERS,
    RUNNING,
    SETTINGS,
    UNKNOWN,
    WORKERS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """What one queue holds, and how far behind it is.

    Attributes:
        queue: its name.
        scheduled, ready, running, completed, discarded, cancelled: jobs in each state.
        completed_last_hour, discarded_last_hour: jobs that ended so within the last hour.
        lag_s: for how many seconds the oldest ready job has been ready, 0 when none is. It counts
            from when the job became ready, not from when it was made.
        unknown_kinds: scheduled jobs that wait since no worker that saw them knows their kind.
        workers: live workers that serve the queue.
        paused: whether its jobs are not started; ``paused_until`` says until when, ``None`` for
            until it is resumed, and ``pause_reason`` why.
        estimated: the names of those numbers above that are estimates, since exact ones would have
            to read too much.
    """

    queue: str
    scheduled: int = 0
    ready: int = 0
    running: int = 0
    completed: int = 0
    discarded: int = 0
    cancelled: int = 0
    completed_last_hour: int = 0
    discarded_last_hour: int = 0
    lag_s: float = 0.0
    unknown_kinds: int = 0
    workers: int = 0
    paused: bool = False
    paused_until: datetime | None = None
    pause_reason: str | None = None
    estimated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker as the database knows it.

    Attributes:
        id: its identity, part of every fence; a process that lost its lease goes on under a new one.
        name, host, pid, version: where it runs, and which jobq.
        queues, kinds: what it works on.
        started_at, heartbeat_at, lease_until: by the database's clock; ``heartbeat_age_s`` is the
            time since its last heartbeat in seconds.
        is_live: whether its lease holds.
        ended_at, end_reason: when and how it ended (``stopped``, ``lease ended``, ``died``), ``None``
            while it has not.
        running: jobs that it has claimed and not finished; ``is_running_estimated`` when there are
            too many in all to be counted.
    """

    id: int
    name: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    kinds: tuple[str, ...]
    started_at: datetime
    heartbeat_at: datetime
    heartbeat_age_s: float
    lease_until: datetime
    is_live: bool
    ended_at: datetime | None
    end_reason: str | None
    running: int
    is_running_estimated: bool


def queue_stats(schema: str) -> Operation[list[QueueStats]]:
    """Return the numbers of every queue that has jobs, live workers or a pause, by name."""
    return (yield from _in_snapshot(_queue_stats(schema)))


def workers(schema: str, ended_within: timedelta) -> Operation[list[WorkerInfo]]:
    """Return the live workers, the newest first, and then those that ended a short while ago.

    Raises:
        ConfigError: ``ended_within`` is no length of time.
    """
    if not isinstance(cast("object", ended_within), timedelta) or ended_within < timedelta(0):
        raise ConfigError(f"ended_within={shown(ended_within)}: a timedelta, 0 or longer")
    return (yield from _in_snapshot(_workers(schema, ended_within.total_seconds())))


def _in_snapshot(operation: Operation[T]) -> Operation[T]:
    yield Call(BEGIN)
    try:
        yield Call(SETTINGS)
        result = yield from operation
    except Error as error:
        try:
            yield Call("rollback")
        except Error:
            raise error from None  # the connection is gone, and with it the transaction
        raise
    yield Call("commit")
    return result


class _Tally:
    """Numbers by queue as they come in, and which of them are estimates."""

    def __init__(self) -> None:
        self.numbers: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self.steps: dict[str, int] = {}  # of each table one of so many blocks was read
        self._estimated: set[str] = set()  # for every queue
        self._estimated_in: defaultdict[str, set[str]] = defaultdict(set)

    def read_counts(self, rows: Rows) -> None:
        """Take in what the blocks held."""
        for place, queue, jobs, part, oldest_s, step in rows:
            if queue is None:
                self.steps[place] = step
                continue
            numbers = self.numbers[queue]
            numbers[place] = jobs
            if place == "ready":
                numbers["lag_s"] = max(0.0, oldest_s)
            elif place == "scheduled":
                numbers["unknown_kinds"] = part
            elif place in {"completed", "discarded"}:
                numbers[f"{place}_last_hour"] = part
        for place, fields in _FIELDS_OF.items():
            if not self.is_whole(place):
                self._estimated.update(fields)

    def is_whole(self, place: str) -> bool:
        """Whether a table was read whole."""
        return self.steps[place] == 1

    def total(self, field: str) -> float:
        """Return a number of all queues together."""
        return sum(numbers.get(field, 0) for numbers in self.numbers.values())

    def exact(self, field: str, by_queue: dict[str, float]) -> None:
        """Put exact numbers in the place of a sample's."""
        self._estimated.discard(field)
        self.put(field, by_queue)

    def put(self, field: str, by_queue: dict[str, float]) -> None:
        """Put better estimates in the place of a sample's."""
        for numbers in self.numbers.values():
            numbers.pop(field, None)
        for queue, number in by_queue.items():
            self.numbers[queue][field] = number

    def at_least(self, field: str, by_queue: dict[str, float]) -> None:
        """Correct a sample's numbers by what was seen."""
        for queue, number in by_queue.items():
            self.numbers[queue][field] = max(self.numbers[queue].get(field, 0), number)

    def exact_lags(self, by_queue: dict[str, float], *, all_queues: bool) -> None:
        """Take in the lags that the lanes' heads tell."""
        for queue, lag_s in by_queue.items():
            self.numbers[queue]["lag_s"] = max(0.0, lag_s)
        if all_queues:
            self._estimated.discard("lag_s")
            for queue in self.numbers.keys() - by_queue.keys():
                self.numbers[queue].pop("lag_s", None)  # none of its jobs is ready any more
        elif "lag_s" in self._estimated:
            self._estimated.discard("lag_s")
            for queue in self.numbers.keys() - by_queue.keys():
                self._estimated_in[queue].add("lag_s")

    def stats(self, known: Rows) -> list[QueueStats]:
        """Return the values, for the known queues too."""
        about = {row[0]: row for row in known}
        found: list[QueueStats] = []
        for queue in sorted({*self.numbers, *about}):
            numbers = self.numbers[queue]
            _, serving, paused, until, reason = about.get(queue, (queue, 0, False, None, None))
            counts = {name: round(numbers.get(name, 0)) for name in _COUNTED}
            found.append(
                QueueStats(
                    queue=queue,
                    **counts,
                    lag_s=numbers.get("lag_s", 0.0),
                    workers=serving,
                    paused=paused,
                    paused_until=_moment(until),
                    pause_reason=reason,
                    estimated=tuple(sorted(self._estimated | self._estimated_in[queue])),
                )
            )
        return found


_FIELDS_OF: Final = {
    "ready": ("ready", "lag_s"),
    "scheduled": ("scheduled", "unknown_kinds"),
    "running": ("running",),
    "finished": ("completed", "discarded", "cancelled", "completed_last_hour", "discarded_last_hour"),
}
_COUNTED: Final = tuple(field for fields in _FIELDS_OF.values() for field in fields if field != "lag_s")


def _queue_stats(schema: str) -> Operation[list[QueueStats]]:
    tally = _Tally()
    known = yield Call(in_schema(KNOWN, schema))
    tally.read_counts((yield Call(in_schema(COUNTS, schema), (list(_FIELDS_OF),))))
    if not tally.is_whole("finished"):
        yield from _last_hour(schema, tally)
        yield from _others(schema, tally)
    if not tally.is_whole("scheduled"):
        yield from _unknown_kinds(schema, tally)
    if not tally.is_whole("ready"):
        yield from _lags(schema, tally)
    return tally.stats(known)


def _others(schema: str, tally: _Tally) -> Operation[None]:
    """Count what was discarded or cancelled one by one, if it is few: a sample would hardly see it."""
    rows = yield Call(in_schema(OTHERS, schema))
    for state in ("discarded", "cancelled"):
        by_queue = {queue: jobs for found, queue, jobs, _ in rows if found == state}
        if sum(by_queue.values()) <= OTHER_ROWS:
            tally.exact(state, by_queue)
        else:
            tally.at_least(state, by_queue)
    lately = {queue: jobs for found, queue, _, jobs in rows if found == "discarded"}
    if sum(lately.values()) <= OTHER_ROWS:  # the newest come first, so these are all
        tally.exact("discarded_last_hour", lately)
    else:
        tally.at_least("discarded_last_hour", lately)


def _last_hour(schema: str, tally: _Tally) -> Operation[None]:
    """Count what ended lately one by one if it is little, and improve a sample that saw too little of it."""
    rows = yield Call(in_schema(LAST_HOUR, schema))
    is_exact = sum(row[2] for row in rows) <= HOUR_ROWS
    if not is_exact:
        if tally.total("completed_last_hour") >= HOUR_ROWS * tally.steps["finished"]:
            return
        rows = yield Call(in_schema(LAST_HOUR_RATE, schema))
    for state in ("completed", "discarded"):
        by_queue = {queue: jobs for queue, found, jobs in rows if found == state}
        (tally.exact if is_exact else tally.put)(f"{state}_last_hour", by_queue)


def _unknown_kinds(schema: str, tally: _Tally) -> Operation[None]:
    rows = yield Call(in_schema(UNKNOWN, schema))
    by_queue = {queue: unknown for queue, unknown, _ in rows}
    if sum(row[2] for row in rows) <= DUE_ROWS:
        tally.exact("unknown_kinds", by_queue)
    else:
        tally.at_least("unknown_kinds", by_queue)


def _lags(schema: str, tally: _Tally) -> Operation[None]:
    """Ask the lanes' heads, within a time limit; the sample's answer stands where that is not enough."""
    yield Call("savepoint lanes")
    yield Call(LIMIT, (f"{LANES_TIME_LIMIT_MS}ms",))
    try:
        rows = yield Call(in_schema(LANES, schema))
    except DatabaseUnavailable:
        yield Call("rollback to savepoint lanes")  # raises where it was not the time limit
        return
    seen = max((row[2] for row in rows), default=0)
    tally.exact_lags({row[0]: row[1] for row in rows}, all_queues=seen < MOST_LANES)


def _workers(schema: str, ended_within_s: float) -> Operation[list[WorkerInfo]]:
    rows = yield Call(in_schema(WORKERS, schema), (ended_within_s,))
    counts = yield Call(in_schema(RUNNING, schema), (["running"],))
    running = {row[0]: row[1] for row in counts if row[0] is not None}
    is_whole = all(row[2] for row in counts if row[0] is None)
    return [_worker(row, running.get(row[0], 0), is_whole=is_whole) for row in rows]


def _worker(row: Sequence[Any], running: float, *, is_whole: bool) -> WorkerInfo:
    id_, name, host, pid, version, queues, kinds, started, beat, lease, ended, reason, age_s, live = row
    return WorkerInfo(
        id=id_,
        name=name,
        host=host,
        pid=pid,
        version=version,
        queues=tuple(msgspec.json.decode(queues)),
        kinds=tuple(msgspec.json.decode(kinds)),
        started_at=_time(started),
        heartbeat_at=_time(beat),
        heartbeat_age_s=max(0.0, age_s),
        lease_until=_time(lease),
        is_live=live,
        ended_at=_moment(ended),
        end_reason=reason,
        running=round(running),
        is_running_estimated=not is_whole,
    )


def _moment(epoch: str | None) -> datetime | None:
    return None if epoch is None or epoch == "Infinity" else _time(epoch)


def _time(epoch: str) -> datetime:
    return datetime.fromtimestamp(float(epoch), UTC)
