"""Statements: how many statements and round trips a job takes, counted on the wire.

An enqueue in bulk and alone, and a drain at 200 slots, each beside the bare loop or the bare INSERT.
Counted is everything that the process sends, its duties and its start among it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import bareloop, workload
from jobq._bench.result import Cost, Floor, Result, Spread
from jobq._bench.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.lab import Lab

SLOTS: Final = 200
FLOORS: Final = {"drain": Floor("value", 0.05, at_least=False), "one enqueue": Floor("value", 1.1, False)}  # noqa: FBT003


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=50_000, quick=20_000, tiny=1_000)
    single = lab.pick(full=1_000, quick=300, tiny=50)
    postmaster_pid = lab.meter.postmaster_pid
    with (
        lab.database() as database,
        lab.hands(2) as [worker, bare],
        Wire(database.dsn) as wire,
        jobq.Client(wire.address) as client,
    ):
        client.enqueue(workload.EMAIL, workload.EMAIL_ARGS)  # connects, prepares
        before = wire.read()
        workload.fill(client, 2 * jobs - 1)
        bulk = wire.read().since(before)
        before = wire.read()
        bare.call(bareloop.drain, wire.address, jobs, postmaster_pid)
        loop = wire.read().since(before)
        before = wire.read()
        worker.call(workload.drain, wire.address, jobs, postmaster_pid, SLOTS)
        drain = wire.read().since(before)
        before = wire.read()
        for _ in range(single):
            client.enqueue(workload.EMAIL, workload.EMAIL_ARGS)
        alone = wire.read().since(before)
    for case, counts, of, bare_trips, name in (
        ("drain", drain, jobs, loop.round_trips / jobs, "the bare loop"),
        ("bulk enqueue", bulk, 2 * jobs - 1, 1 / workload.BULK_CALL, "one INSERT a call"),
        ("one enqueue", alone, single, 1.0, "one INSERT"),
    ):
        trips = counts.round_trips / of
        yield Result(
            bench="statements",
            case=case,
            value=Spread.of([trips]),
            unit="round trips/job",
            yardstick=Spread.of([bare_trips]),
            yardstick_name=name,
            ratio=Spread.of([trips / bare_trips]),
            runs=1,
            cost=Cost(),
            floor=FLOORS.get(case),
            settings=lab.settings(slots=SLOTS, jobs=of),
            details={"statements_per_job": counts.statements / of, "prepared": counts.prepared},
        )
