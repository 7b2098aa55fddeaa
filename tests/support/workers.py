"""Workers as real processes, whose handlers note what they do.

``python -m tests.support.workers SETTINGS`` runs one worker; `Site` starts such processes from a
test, enqueues for them, and reads their notes. Notes are lines of a file and not rows, for the
handlers must be able to note what happens while the database is away. SIGUSR1 makes a worker
print its statistics.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psycopg

import jobq
from tests.support.polling import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.conftest import SpawnPython
    from tests.support.processes import PythonProcess

ROOT: Final = Path(__file__).parents[2]
_GATE_S: Final = 0.01  # how often a handler looks whether its gate is open

# Short leases and pauses, so that what the defaults do in a minute takes seconds.
BRISK: Final[dict[str, Any]] = {
    "lease": 2.0,
    "heartbeat": 0.4,
    "poll": 0.1,
    "grace": 1.0,
    "promote_interval": 0.05,
    "rescue_interval": 0.3,
}


class Note(NamedTuple):
    """What a handler noted: ``start``, ``end`` or ``stopped``, at which time, in which process."""

    job_id: int
    attempt: int
    event: str
    at: float
    worker_id: int
    pid: int


# -- in the worker's process ---------------------------------------------------------------------


class Notebook:
    """Appends notes to the file: one write a note, so that processes do not mix their lines."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, job: jobq.Job, event: str) -> None:
        line = json.dumps([job.id, job.attempt, event, time.time(), job.worker_id, os.getpid()])
        os.write(self._fd, line.encode() + b"\n")


def make_jobs(settings: dict[str, Any], clients: list[jobq.AsyncClient]) -> jobq.Jobs:  # noqa: C901
    """Return handlers for all that a test may want to happen in a worker."""
    jobs = jobq.Jobs()
    book = Notebook(settings["notes"])
    folder = Path(settings["folder"])
    soon = jobq.ConstantBackoff(timedelta(milliseconds=100))

    async def run(job: jobq.Job, work: Callable[[], Any]) -> None:
        book.note(job, "start")
        try:
            await work()
        except asyncio.CancelledError:
            book.note(job, "stopped")
            raise
        book.note(job, "end")

    @jobs.handler("wait")
    async def wait(job: jobq.Job, args: dict[str, float]) -> None:
        await run(job, lambda: asyncio.sleep(args.get("s", 0.0)))

    @jobs.handler("gate")
    async def gate(job: jobq.Job, args: dict[str, str]) -> None:
        async def pass_through() -> None:
            while not (folder / args["gate"]).exists():  # noqa: ASYNC110 - opened by another process
                await asyncio.sleep(_GATE_S)

        await run(job, pass_through)

    @jobs.handler("block")
    async def block(job: jobq.Job, args: dict[str, float]) -> None:
        async def hold_the_loop() -> None:
            time.sleep(args["s"])  # noqa: ASYNC251 - the fault under test

        await run(job, hold_the_loop)

    @jobs.handler("block_by_task")
    async def block_by_task(job: jobq.Job, args: dict[str, float]) -> None:
        async def hold_the_loop() -> None:
            time.sleep(args["s"])  # noqa: ASYNC251 - the fault under test

        await run(job, lambda: asyncio.create_task(hold_the_loop()))

    @jobs.handler("die")
    async def die(job: jobq.Job, args: dict[str, float]) -> None:
        book.note(job, "start")
        await asyncio.sleep(args.get("s", 0.0))
        os.kill(os.getpid(), signal.SIGKILL)

    @jobs.handler("fail_once", backoff=soon)
    async def fail_once(job: jobq.Job, args: dict[str, float]) -> None:
        book.note(job, "start")
        if job.attempt == 1:
            message = "the first time fails"
            raise RuntimeError(message)
        book.note(job, "end")

    @jobs.handler("snooze_once")
    async def snooze_once(job: jobq.Job, args: dict[str, float]) -> None:
        book.note(job, "start")
        if job.attempt == 1:
            raise jobq.Snooze(timedelta(seconds=args["s"]))
        book.note(job, "end")

    @jobs.handler("hold_pooled")
    async def hold_pooled(job: jobq.Job, args: dict[str, float]) -> None:
        async def query() -> None:
            async with clients[0].pool.connection() as connection:
                await connection.execute("select pg_sleep(%s)", [args["s"]])

        await run(job, query)

    return jobs


async def _work(settings: dict[str, Any]) -> None:
    clients: list[jobq.AsyncClient] = []
    jobs = make_jobs(settings, clients)
    async with jobq.AsyncClient(settings["dsn"], **settings["client"]) as client:
        clients.append(client)
        worker = jobq.Worker(client, jobs, _config(settings["config"]))

        def note_registered(worker_id: int) -> None:
            print(f"REGISTERED {worker_id}", flush=True)  # noqa: T201
            assert worker._parts is not None
            worker._parts.fetcher.rescans = settings["rescans"]

        worker.on_register = note_registered
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: _print("STATS", worker.stats()))
        report = await worker.run()
        _print("REPORT", report)
        _print("STATS", worker.stats())


def _config(values: dict[str, Any]) -> jobq.WorkerConfig:
    plain = {
        "queues",
        "prefetch",
        "crash_limit",
        "completion_batch",
        "pending_outcomes",
        "exit_when_blocked",
        "leads",
    }
    fields: dict[str, Any] = {
        name: value if name in plain else timedelta(seconds=value) for name, value in values.items()
    }
    return jobq.WorkerConfig(**fields)


def _print(title: str, value: Any) -> None:
    print(title, json.dumps(dataclasses.asdict(value)), flush=True)  # noqa: T201


# -- in the test -----------------------------------------------------------------------------------


class WorkerProcess:
    """One worker's process."""

    def __init__(self, process: PythonProcess) -> None:
        self.process = process

    @property
    def output(self) -> str:
        return self.process.output

    @property
    def ids(self) -> list[int]:
        """The identities that it has taken."""
        return [int(line.split()[1]) for line in self.output.splitlines() if line.startswith("REGISTERED ")]

    def stats(self) -> dict[str, Any]:
        """Ask a running worker what it counts."""
        before = self._printed("STATS")
        self.process.signal(signal.SIGUSR1)
        eventually(lambda: len(self._printed("STATS")) > len(before), 5.0, what="statistics")
        return self._printed("STATS")[-1]

    def stop(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Stop it in order; return its report."""
        self.process.terminate()
        code = self.process.wait(timeout_s)
        assert code == 0, f"ended with {code}:\n{self.output}"
        return self._printed("REPORT")[-1]

    def final_stats(self) -> dict[str, Any]:
        """Return what it had counted when it ended."""
        return self._printed("STATS")[-1]

    def pause(self) -> None:
        self.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def _printed(self, title: str) -> list[dict[str, Any]]:
        lines = self.output.splitlines()
        return [json.loads(line.removeprefix(title)) for line in lines if line.startswith(title + " ")]


class Site:
    """One test's database, workers and notes.

    Args:
        spawn: starts processes.
        dsn: the direct address of the database.
        folder: for the notes and the gates.
    """

    def __init__(self, spawn: SpawnPython, dsn: str, folder: Path) -> None:
        self._spawn = spawn
        self.dsn = dsn
        self.folder = folder
        self._notes = folder / "notes"
        self._notes.touch()

    def start(
        self,
        *,
        dsn: str | None = None,
        client: dict[str, Any] | None = None,
        rescans: bool = True,
        wait: bool = True,
        code: Path | None = None,
        **config: Any,
    ) -> WorkerProcess:
        """Start a worker process with brisk settings and return once it works.

        Args:
            dsn: where it connects, if not directly.
            client: more arguments of its client.
            rescans: whether the marks have their backstop.
            wait: whether to wait until it works.
            code: where the process has jobq from, if not from here.
            config: fields of WorkerConfig; times in seconds.
        """
        settings = {
            "dsn": dsn or self.dsn,
            "client": client or {},
            "notes": str(self._notes),
            "folder": str(self.folder),
            "rescans": rescans,
            "config": BRISK | config,
        }
        env = {} if code is None else {"PYTHONPATH": str(code)}
        process = self._spawn("-m", "tests.support.workers", json.dumps(settings), env=env, cwd=ROOT)
        if wait:
            process.wait_for_output("works on")
        return WorkerProcess(process)

    def sql(self, text: str, *params: object) -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own; return its rows, if it has any."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(text.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def enqueue(
        self, kind: str, count: int = 1, *, options: jobq.JobOptions | None = None, **args: Any
    ) -> list[int]:
        """Add jobs in one transaction; return their ids."""
        with jobq.Client(self.dsn, pool_max_size=1) as client:
            if count == 1:
                return [client.enqueue(kind, args, **(options or {})).id]
            made = client.enqueue_many([jobq.NewJob(kind, args, **(options or {}))] * count)
        return [one.id for one in made]

    def open(self, gate: str) -> None:
        """Let the handlers pass that wait at a gate."""
        (self.folder / gate).touch()

    def notes(self, event: str | None = None, job_id: int | None = None) -> list[Note]:
        """Return what the handlers noted so far, the oldest first."""
        lines = self._notes.read_text().splitlines()
        notes = [Note(*json.loads(line)) for line in lines]
        return [n for n in notes if event in {None, n.event} and job_id in {None, n.job_id}]

    def job(self, job_id: int) -> tuple[str, int, int, int]:
        """Return a job's state, attempt, failures and crashes."""
        [row] = self.sql("select state, attempt, failures, crashes from jobq.jobs where id = %s", job_id)
        return row[0], row[1], row[2], row[3]

    def counts(self) -> dict[str, int]:
        """Return how many jobs stand in each state."""
        return dict(self.sql("select state, count(*)::int from jobq.jobs group by state"))

    def await_started(self, job_ids: Sequence[int], times: int = 1, timeout_s: float = 10.0) -> None:
        """Wait until each of these jobs has been started so many times."""

        def started() -> bool:
            starts = [note.job_id for note in self.notes("start")]
            return all(starts.count(job_id) >= times for job_id in job_ids)

        eventually(started, timeout_s, what=f"jobs {list(job_ids)[:5]} start {times} times")

    def await_state(self, job_id: int, state: str, timeout_s: float = 10.0) -> tuple[str, int, int, int]:
        """Wait until a job is in a state; return what `job` does."""
        eventually(lambda: self.job(job_id)[0] == state, timeout_s, what=f"job {job_id} is {state}")
        return self.job(job_id)

    def await_finished(self, count: int, timeout_s: float = 20.0) -> None:
        """Wait until so many jobs have ended."""
        eventually(
            lambda: self.sql("select count(*) from jobq.finished")[0][0] >= count,
            timeout_s,
            what=f"{count} jobs end",
        )

    def backends(self, part: str) -> list[int]:
        """Return the server processes of the workers' connections for one part, such as ``listener``."""
        rows = self.sql(
            "select pid from pg_stat_activity"
            " where datname = current_database() and application_name like %s",
            f"jobq {part}%",
        )
        return [row[0] for row in rows]


def main() -> None:
    """Run the worker that the command line describes."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    threading.current_thread().name = "main"
    asyncio.run(_work(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
