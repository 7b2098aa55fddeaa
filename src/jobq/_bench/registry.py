"""Which benches there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jobq._bench import (
    beside,
    bulk,
    cycle,
    drain,
    growth,
    history,
    horizon,
    imports,
    memory,
    notify,
    pickup,
    punctual,
    retention,
    single,
    sizes,
    snooze,
    statements,
    unique,
    worked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from jobq._bench.lab import Lab
    from jobq._bench.result import Result


@dataclass(frozen=True, slots=True)
class Bench:
    """One bench.

    Attributes:
        name: what it is asked for by.
        summary: what it measures, in a line.
        run: yields its results, in the order of their cases.
    """

    name: str
    summary: str
    run: Callable[[Lab], Iterator[Result]]


BENCHES: Final = {
    bench.name: bench
    for bench in (
        Bench("bulk", "enqueue_many in calls of 1,000, beside the payload rows alone", bulk.run),
        Bench("single", "one enqueue at a time, beside a bare INSERT of the payload row", single.run),
        Bench("notify", "an enqueue that wakes nobody, might, or does", notify.run),
        Bench(
            "transaction",
            "an enqueue in a caller's transaction, beside an INSERT",
            notify.run_in_transactions,
        ),
        Bench("drain", "a worker on a full queue, beside the bare loop", drain.run),
        Bench("lanes", "a worker on many queues, or on many priorities, beside one of each", worked.lanes),
        Bench("retries", "jobs that each fail once, beside jobs that do not", worked.retries),
        Bench(
            "duration", "handlers that take their time, beside slots that are never empty", worked.duration
        ),
        Bench("processes", "several worker processes, on one core and on two, beside one", worked.processes),
        Bench("pickup", "from commit to the handler's start, on an idle worker", pickup.run),
        Bench("cycle", "bulk enqueue and drain at the same time", cycle.run),
        Bench("halfload", "pickup while the worker has half of what it can do", cycle.run_at_half_load),
        Bench("payload", "WAL a job by the size of its arguments", sizes.run),
        Bench("history", "a job's cost beside millions of finished and scheduled ones", history.run),
        Bench("length", "a job's cost by how many wait", growth.length),
        Bench("finished", "a job's cost by how many have ended and are kept", growth.finished),
        Bench("connections", "a job's cost by how many claim at once", growth.connections),
        Bench("snooze", "jobs that come back hundreds of times under a pinned horizon", snooze.run),
        Bench("statements", "statements and round trips a job", statements.run),
        Bench("memory", "what a worker holds, idle and after very many jobs", memory.run),
        Bench("import", "import jobq beside import psycopg", imports.run),
        Bench("punctual", "how late scheduled jobs start", punctual.run),
        Bench("retention", "what it costs to remove a finished job, and whether it keeps up", retention.run),
        Bench("horizon", "a job's cost under a pinned vacuum horizon, later beside earlier", horizon.run),
        Bench("neighbours", "drain, bulk enqueue and pickup beside other queues", beside.run),
        Bench("unique", "an enqueue whose keys were used many times, later beside earlier", unique.run),
    )
}
