"""The jobs that the benches enqueue, and the workers that run them, for a hand to run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, LiteralString, Self, TypeVar

import jobq
from jobq._bench import hands
from jobq._bench.meter import cpu_between
from jobq._bench.meter import server_cpu_s as read_server_cpu_s
from jobq._bench.payload import KIND

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping

    import psycopg

T = TypeVar("T")

BULK_CALL: Final = 1_000  # jobs in one call of enqueue_many
DEFAULT_SLOTS: Final = jobq.WorkerConfig().queues["default"]
WORKER_IS_THERE: Final = "select from jobq.worker where ended_at is null"
_LAST_JOBS: Final = 500  # of a drain: when these are recorded, all are
_POLL_S: Final = 0.002
_TIMEOUT_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class EmailArgs:
    """About 60 bytes as JSON."""

    to: str
    subject: str


@dataclass(frozen=True, slots=True)
class ProbeArgs:
    """Arguments of a job whose start is timed: which one it is."""

    number: int


EMAIL: Final = jobq.JobType(KIND, EmailArgs)
PROBE: Final = jobq.JobType("probe", ProbeArgs)
EMAIL_ARGS: Final = EmailArgs("user12345@example.com", "hello hello hello 12")


@dataclass(frozen=True, slots=True)
class DrainReply:
    """What a drain took: seconds, and the CPU seconds of the server and of the hand."""

    seconds: float
    server_cpu_s: float | None
    client_cpu_s: float

    @classmethod
    def since(
        cls, server_cpu_s: float | None, client_cpu_s: float, seconds: float, postmaster_pid: int
    ) -> Self:
        """Return it, from the counters at its beginning."""
        server_s = cpu_between(server_cpu_s, read_server_cpu_s(postmaster_pid))
        return cls(seconds, server_s, time.process_time() - client_cpu_s)


def new_email(number: int) -> jobq.NewJob:  # noqa: ARG001 - what `fill` asks for
    """Return the job that most benches enqueue."""
    return jobq.NewJob(EMAIL, EMAIL_ARGS)


def fill(
    client: jobq.Client,
    jobs: int,
    make: Callable[[int], jobq.NewJob] = new_email,
    *,
    call: int = BULK_CALL,
) -> None:
    """Enqueue so many jobs, in bulk.

    Args:
        client: with what.
        jobs: how many.
        make: returns the job of each number.
        call: how many in one call.
    """
    for begin in range(0, jobs, call):
        client.enqueue_many([make(number) for number in range(begin, min(begin + call, jobs))])


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop where that is installed, else on asyncio's own loop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop  # noqa: PLC0415 - optional

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


@contextlib.asynccontextmanager
async def working(
    dsn: str, jobs: jobq.Jobs, queues: int | Mapping[str, int]
) -> AsyncGenerator[jobq.AsyncClient]:
    """Run a worker with its defaults while the block runs; then stop it and wait for its end."""
    slots = {"default": queues} if isinstance(queues, int) else queues
    async with jobq.AsyncClient(dsn) as client:
        worker = jobq.Worker(client, jobs, jobq.WorkerConfig(queues=slots))
        running = asyncio.create_task(worker.run(handle_signals=False))
        try:
            yield client
        finally:
            await worker.stop()
            await running


def drain(dsn: str, jobs: int, postmaster_pid: int, slots: int) -> DrainReply:
    """Work off so many jobs, which are there already, with a worker. For a hand.

    Measured from the first handler's start (a worker's own start is not what is asked) until the
    last outcome stands in the database.
    """
    return run_async(_drain(dsn, jobs, postmaster_pid, slots))


async def _drain(dsn: str, total: int, postmaster_pid: int, slots: int) -> DrainReply:
    registry = jobq.Jobs()
    last: deque[int] = deque(maxlen=_LAST_JOBS)
    all_ran = asyncio.Event()
    seen = 0
    start: tuple[float | None, float, float] = (None, 0.0, 0.0)

    @registry.handler(EMAIL)
    async def send(job: jobq.Job, args: EmailArgs) -> None:  # noqa: ARG001 - what a handler must be
        nonlocal seen, start
        if not seen:
            start = read_server_cpu_s(postmaster_pid), time.process_time(), time.perf_counter()
        seen += 1
        last.append(job.id)
        if seen >= total:
            all_ran.set()

    async with asyncio.timeout(_TIMEOUT_S), working(dsn, registry, slots) as client:
        async with client.pool.connection() as watch:
            await all_ran.wait()
            # what it waits for happens in the database
            while await _unrecorded(watch, list(last)):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        seconds = time.perf_counter() - start[2]
        return DrainReply.since(start[0], start[1], seconds, postmaster_pid)


async def _unrecorded(connection: Any, ids: list[int]) -> int:
    """Return how many of these jobs have no outcome yet: by key, since a count would cost the run."""
    cursor = await connection.execute("select count(*) from jobq.finished where job_id = any(%s)", [ids])
    row = await cursor.fetchone()
    await connection.commit()
    return len(ids) - int(row[0])


def follow(dsn: str, jobs: int, slots: int) -> None:
    """Run so many jobs as they come, reporting progress. For a hand."""

    async def main() -> None:
        registry = jobq.Jobs()
        progress = hands.progress
        all_ran = asyncio.Event()

        @registry.handler(EMAIL)
        async def send(job: jobq.Job, args: EmailArgs) -> None:  # noqa: ARG001
            progress.value += 1
            if progress.value >= jobs:
                all_ran.set()

        async with asyncio.timeout(_TIMEOUT_S), working(dsn, registry, slots):
            await all_ran.wait()

    run_async(main())


@dataclass(frozen=True, slots=True)
class Start:
    """When a probe's handler started, by the monotonic clock and by the system's."""

    number: int
    monotonic_s: float
    system_s: float


def time_starts(dsn: str, probes: int) -> list[Start]:
    """Run so many probes as they come; return their starts in order. For a hand."""
    return run_async(_time_starts(dsn, probes))


async def _time_starts(dsn: str, probes: int) -> list[Start]:
    registry = jobq.Jobs()
    starts: list[Start] = []
    all_ran = asyncio.Event()

    @registry.handler(PROBE)
    async def probe(job: jobq.Job, args: ProbeArgs) -> None:  # noqa: ARG001
        starts.append(Start(args.number, time.monotonic(), time.time()))
        if len(starts) >= probes:
            all_ran.set()

    @registry.handler(EMAIL)
    async def send(job: jobq.Job, args: EmailArgs) -> None:
        """Be there for jobs that come beside the probes."""

    async with asyncio.timeout(_TIMEOUT_S), working(dsn, registry, DEFAULT_SLOTS):
        await all_ran.wait()
    return starts


def await_one_row(connection: psycopg.Connection[Any], sql: LiteralString, timeout_s: float) -> None:
    """Poll until a query returns a row.

    Raises:
        TimeoutError: it did not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while connection.execute(sql).fetchone() is None:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no row within {timeout_s:g} s from: {sql}")
        time.sleep(_POLL_S)
