"""Payloads: what a job writes to the WAL from enqueue to completion, by the size of its arguments.

The jobs are enqueued in bulk and drained by the bare loop. Beside it stands what the payload rows
alone write. Documents are random, so that compression does not flatter either. The case ``2 kB
beside 100 B`` is the difference: a payload should be written once.
"""

from __future__ import annotations

import random
import string
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import jobq
from jobq._bench import bareloop, payload, workload
from jobq._bench.lab import Window
from jobq._bench.rates import rate_result
from jobq._bench.result import Floor, Result, Spread, ratios
from jobq._postgres import sync_cursor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jobq._bench.lab import Lab

SIZES: Final = {"100 B": 100, "2 kB": 2_000, "50 kB": 50_000}
SMALL: Final = Floor("value", 1_400, at_least=False)
MORE: Final = Floor("value", 2_500, at_least=False)
_ENVELOPE_BYTES: Final = len('{"to": "", "subject": ""}')


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    rounds = lab.pick(full=3, quick=2, tiny=1)
    results = [_measure(lab, name, size, rounds) for name, size in SIZES.items()]
    yield from results
    small, large = results[0], results[1]
    more, bare = large.value.median - small.value.median, large.yardstick.median - small.yardstick.median
    yield replace(
        large,
        case="2 kB beside 100 B",
        value=Spread.of([more]),
        yardstick=Spread.of([bare]),
        ratio=Spread.of([more / bare]),
        floor=MORE,
    )


def _measure(lab: Lab, name: str, size: int, rounds: int) -> Result:
    jobs = lab.pick(full=10_000, quick=2_000, tiny=200)
    ours: list[tuple[int, Window]] = []
    bare: list[tuple[int, Window]] = []
    for number in range(rounds):
        texts = _texts(size, number)
        bare.append((jobs, _insert(lab, jobs, texts)))
        ours.append((jobs, _run(lab, jobs, texts)))
    result = rate_result(
        "payload",
        name,
        ours,
        bare,
        yardstick_name="INSERT of the payload rows",
        floor=None,
        settings=lab.settings(slots=None, args_bytes=size),
    )
    values, yardsticks = [[(window.wal_bytes or 0) / n for n, window in runs] for runs in (ours, bare)]
    return replace(
        result,
        unit="WAL B/job",
        value=Spread.of(values),
        yardstick=Spread.of(yardsticks),
        ratio=ratios(values, yardsticks),
        floor=SMALL if name == "100 B" else None,
        details={**result.details, "jobs_per_s": result.value.median},
    )


def _texts(size: int, seed: int) -> list[workload.EmailArgs]:
    rng = random.Random(seed)
    letters = string.ascii_letters + string.digits
    return [
        workload.EmailArgs("ada@example.com", "".join(rng.choices(letters, k=size - _ENVELOPE_BYTES - 15)))
        for _ in range(50)
    ]


def _run(lab: Lab, jobs: int, texts: Sequence[workload.EmailArgs]) -> Window:
    with lab.database() as database, lab.hands(1) as [hand]:
        with database.connect() as connection:
            connection.execute("checkpoint")  # full pages are written after one: as many for both
        before = lab.meter.read()
        with jobq.Client(database.dsn) as client:
            workload.fill(
                client, jobs, lambda n: jobq.NewJob(workload.EMAIL, texts[n % len(texts)]), call=100
            )
        reply = hand.call(bareloop.drain, database.dsn, jobs, lab.meter.postmaster_pid)
        return Window.between(before, lab.meter.read(), reply.cpu_s)


def _insert(lab: Lab, jobs: int, texts: Sequence[workload.EmailArgs]) -> Window:
    documents = [f'{{"to":"{text.to}","subject":"{text.subject}"}}' for text in texts]
    with lab.database() as database, database.connect() as connection:
        payload.create(connection)
        connection.execute("checkpoint")
        cursor = sync_cursor(connection)
        before = lab.meter.read()
        for begin in range(0, jobs, 100):
            payload.insert_many(cursor, [documents[(begin + n) % len(documents)] for n in range(100)])
        return Window.between(before, lab.meter.read(), 0.0)
