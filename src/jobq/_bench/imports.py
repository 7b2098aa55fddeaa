"""Imports: what ``import jobq`` takes, beside ``import psycopg``, each in a process of its own.

Names are loaded when they are first used; ``jobq.Client`` is what an application that enqueues
pays, and has psycopg's import in it. Compiled modules are kept for the bench in a folder of its own: an
installed package has them, and a checkout need not, if its user or its folder lets Python write none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Final

from jobq._bench.cores import pinned
from jobq._bench.result import Cost, Floor, Result, Spread, ratios

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jobq._bench.lab import Lab

FLOOR: Final = Floor("ratio", 1.2, at_least=False)
SCRIPT: Final = "import time; b = time.process_time(); {}; print(time.process_time() - b)"
CASES: Final = {"import jobq": "import jobq", "jobq.Client": "import jobq; jobq.Client"}
YARDSTICK: Final = "import psycopg"


def run(lab: Lab) -> Iterator[Result]:
    """Measure."""
    rounds = lab.pick(full=30, quick=10, tiny=2)
    times_ms: dict[str, list[float]] = {code: [] for code in (*CASES.values(), YARDSTICK)}
    with pinned(lab.cores), tempfile.TemporaryDirectory(prefix="jobq-bench-") as compiled:
        for _ in range(rounds + 1):
            for code, times in times_ms.items():
                times.append(run_ms(code, compiled))
    theirs = times_ms[YARDSTICK][1:]  # the first has compiled what there is, and read the files
    for case, code in CASES.items():
        ours = times_ms[code][1:]
        yield Result(
            bench="import",
            case=case,
            value=Spread.of(ours),
            unit="CPU ms",
            yardstick=Spread.of(theirs),
            yardstick_name=YARDSTICK,
            ratio=ratios(ours, theirs),
            runs=rounds,
            cost=Cost(),
            floor=FLOOR,
            settings=lab.settings(slots=None),
        )


def run_ms(code: str, compiled: str) -> float:
    """Return the CPU time that some code takes in a fresh process; compiled modules are kept in a folder."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(code)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(done.stdout) * 1e3
