"""Neighbours: jobq beside other queues, each at its best documented setting, in turns.

All do the same: 60 bytes of arguments, handlers that do nothing, 200 at once, one worker process,
server and worker on the same cores. jobq is asked by the same script as its neighbours
(`neighbours.runner`). After the fill everybody's tables are vacuumed and analyzed. A neighbour
that cannot be installed is named with the reason, in ``not_measured``.

The value is jobq's, the yardstick the neighbour's; ``neighbour_settings`` are what its script says.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from jobq._bench.environments import NEIGHBOURS, Absent, Neighbour, interpreter_of, redis_server
from jobq._bench.lab import BenchError, Window
from jobq._bench.latency import latency_result
from jobq._bench.meter import cpu_between, process_cpu_s
from jobq._bench.rates import rate_result
from jobq._bench.result import Cost, Floor

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from jobq._bench.lab import Lab
    from jobq._bench.result import Result

SCRIPTS: Final = Path(__file__).parent / "neighbours"
OURS: Final = Neighbour("jobq", ())
CALL: Final = 1_000
WARM_UP: Final = 20  # probes that do not count
FLOORS: Final = {"drain": Floor("ratio", 2.5), "bulk": Floor("ratio", 1.5)}
PICKUP_FLOOR: Final = Floor("ratio", 1.0, at_least=False)
_ANSWER_TIMEOUT_S: Final = 200.0
_REDIS_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.05

Runs = dict[str, list[tuple[int, Window]]]


@dataclass(slots=True)
class Measured:
    """What was measured, by contestant's name."""

    drain: Runs = field(default_factory=lambda: defaultdict(list))
    bulk: Runs = field(default_factory=lambda: defaultdict(list))
    pickup_ms: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


def run(lab: Lab, neighbours: Sequence[Neighbour] = NEIGHBOURS) -> Iterator[Result]:
    """Measure."""
    jobs = lab.pick(full=20_000, quick=5_000, tiny=200)
    probes = lab.pick(full=300, quick=60, tiny=5)
    pythons: dict[str, Path] = {}
    absent: dict[str, str] = {}
    contestants = [OURS, *neighbours]
    for one in contestants:
        _unless_absent(one, absent, partial(_find, one, pythons))
    measured = Measured()
    for _ in range(lab.pick(full=3, quick=2, tiny=1)):
        for one in contestants:
            if one.name not in absent:
                _unless_absent(one, absent, partial(_round, lab, one, pythons[one.name], jobs, measured))
    for one in contestants:
        if one.name not in absent:
            _unless_absent(one, absent, partial(_time, lab, one, pythons[one.name], probes, measured))
    present = [one for one in neighbours if one.name not in absent]
    yield from _results(lab, present, measured, absent)


def _find(one: Neighbour, pythons: dict[str, Path]) -> None:
    pythons[one.name] = interpreter_of(one)


def _unless_absent(one: Neighbour, absent: dict[str, str], do: Callable[[], None]) -> None:
    """Do something with a neighbour; one that fails is named, and the others go on."""
    try:
        do()
    except (Absent, BenchError) as error:
        if one is OURS:
            raise
        absent[one.name] = str(error)
        print(f"bench: {one.label} is not measured: {error}", file=sys.stderr)


# -- one contestant ------------------------------------------------------------------------------------


class Hired:
    """A process that runs a neighbour's script. A context manager.

    Args:
        python: its interpreter.
        name: the script's.
        cores: those it may run on, ``None`` for all.
    """

    def __init__(self, python: Path, name: str, cores: Sequence[int] | None) -> None:
        environment = {**os.environ}
        if name != OURS.name:
            environment.pop("PYTHONPATH", None)
        self._asked = ""
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [str(python), str(SCRIPTS / "runner.py"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        if cores is not None:
            os.sched_setaffinity(self._process.pid, cores)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def ask(self, call: str, *args: object) -> None:
        """Ask for something; `answer` waits for it."""
        assert self._process.stdin is not None
        self._asked = call
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the answer says so
            self._process.stdin.write(json.dumps({"call": call, "args": args}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for what was asked.

        Raises:
            BenchError: it raised, ended, or took too long.
        """
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines() or ["nothing"]
            raise BenchError(f"{self._asked}: no answer; the last it said: {said[-1]}")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self._asked}: {answer['error'].strip().splitlines()[-1]}")
        return answer["value"]

    def call(self, call: str, *args: object) -> Any:
        """Ask, and wait for the answer."""
        self.ask(call, *args)
        return self.answer()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a contestant keeps its jobs: its address, and how to settle and to read it."""

    address: str
    settle: Callable[[], None]
    read: Callable[[], tuple[float, float | None, int | None]]


@contextlib.contextmanager
def _place(lab: Lab, one: Neighbour) -> Generator[Place]:
    if one.redis is not None:
        with _redis(lab, one, one.redis) as place:
            yield place
        return
    with lab.database(migrated=False) as database:

        def settle() -> None:
            with database.connect() as connection:
                connection.execute("vacuum analyze")
                connection.execute("checkpoint")

        def read() -> tuple[float, float | None, int | None]:
            reading = lab.meter.read()
            return reading.at_s, reading.server_cpu_s, reading.wal_bytes

        yield Place(database.dsn, settle, read)


@contextlib.contextmanager
def _redis(lab: Lab, one: Neighbour, fsync: str) -> Generator[Place]:
    """Run a Redis of its own, on a Unix socket, pinned as the other servers."""
    program = redis_server(one)
    with tempfile.TemporaryDirectory(prefix="jobq-bench-", dir=lab.folder) as folder:
        socket = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", ""]
        server = subprocess.Popen(
            [str(program), *options, "--appendonly", "yes", "--appendfsync", fsync],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            if lab.cores is not None:
                os.sched_setaffinity(server.pid, lab.cores)
            deadline_s = time.monotonic() + _REDIS_TIMEOUT_S
            while not socket.exists():
                if time.monotonic() > deadline_s or server.poll() is not None:
                    raise Absent(f"{program} does not start")
                time.sleep(_POLL_S)
            yield Place(
                f"unix://{socket}",
                lambda: None,
                lambda: (time.monotonic(), process_cpu_s(server.pid), None),
            )
        finally:
            server.kill()
            server.wait()


def _round(lab: Lab, one: Neighbour, python: Path, jobs: int, measured: Measured) -> None:
    """Enqueue and drain once."""
    call = min(CALL, jobs)
    with _place(lab, one) as place, Hired(python, one.name, lab.cores) as hired:
        hired.call("install", place.address)
        filled = _window(place, hired, "enqueue", jobs, call)
        place.settle()
        drained = _window(place, hired, "drain", jobs + 10)
    measured.bulk[one.name].append((jobs, filled))
    measured.drain[one.name].append((jobs, drained))


def _window(place: Place, hired: Hired, call: str, *args: int) -> Window:
    """Return what a call took by its own clock; what the server spent has its start in it."""
    _, cpu_s, wal_bytes = place.read()
    reply = hired.call(call, place.address, *args)
    _, spent_s, written_bytes = place.read()
    wal = None if wal_bytes is None or written_bytes is None else written_bytes - wal_bytes
    return Window(reply["seconds"], cpu_between(cpu_s, spent_s), reply["cpu_s"], wal)


def _time(lab: Lab, one: Neighbour, python: Path, probes: int, measured: Measured) -> None:
    """Time from just before the enqueue to the handler's start, on a worker that idles."""
    with (
        _place(lab, one) as place,
        Hired(python, one.name, lab.cores) as worker,
        Hired(python, one.name, lab.cores) as producer,
    ):
        producer.call("install", place.address)
        worker.ask("time_starts", place.address, probes + WARM_UP)
        time.sleep(lab.pick(full=3.0, quick=2.0, tiny=1.0))  # a start takes each of them another while
        sent = producer.call("push_probes", place.address, probes + WARM_UP)
        starts = worker.answer()
    latencies_ms = [(starts[number] - at_s) * 1e3 for number, at_s in sent.items()]
    measured.pickup_ms[one.name] = latencies_ms[WARM_UP:]


# -- results ---------------------------------------------------------------------------------------------


def _results(
    lab: Lab, present: Sequence[Neighbour], measured: Measured, absent: dict[str, str]
) -> Iterator[Result]:
    on_postgres = [one for one in present if one.redis is None]
    for what, runs in (("drain", measured.drain), ("bulk", measured.bulk)):
        fastest = _fastest(on_postgres, runs)
        for one in present:
            result = rate_result(
                "neighbours",
                f"{what}, {one.name}",
                runs[OURS.name],
                runs[one.name],
                yardstick_name=one.label,
                floor=FLOORS[what] if one is fastest else None,
                settings=lab.settings(slots=200, call=CALL),
            )
            yield replace(result, details={**result.details, **_about(one, absent)})
    for one in present:
        ours, theirs = measured.pickup_ms[OURS.name], measured.pickup_ms[one.name]
        for percent in (50, 99):
            result = latency_result(
                "neighbours",
                percent,
                ours,
                theirs,
                yardstick_name=one.label,
                floor=PICKUP_FLOOR if one.redis is None else None,
                cost=Cost(),
                settings=lab.settings(slots=200),
            )
            case = f"pickup p{percent}, {one.name}"
            yield replace(result, case=case, details={**result.details, **_about(one, absent)})


def _fastest(candidates: Sequence[Neighbour], runs: Runs) -> Neighbour | None:
    def seconds(one: Neighbour) -> float:
        return min(window.seconds for _, window in runs[one.name])

    return min(candidates, key=seconds, default=None)


def _about(one: Neighbour, absent: dict[str, str]) -> dict[str, object]:
    return {
        "neighbour_settings": settings_of(one.name),
        "durability": one.durability,
        "not_measured": dict(absent),
    }


def settings_of(name: str) -> dict[str, object]:
    """Return what a script says of its settings, without importing it: its library is not here."""
    for node in ast.parse((SCRIPTS / f"{name}_.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SETTINGS":
            settings: dict[str, object] = ast.literal_eval(node.value)
            return settings
    raise BenchError(f"{name}_.py has no SETTINGS")
