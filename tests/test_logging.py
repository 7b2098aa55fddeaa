"""Log lines say which job they are about: jobq's own, and those of handlers wherever they run."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import jobq
from jobq._logging import set_current_job
from jobq.cli.logs import make_handler
from jobq.testing import make_job
from tests.support.inprocess import working
from tests.support.observed import MODES, fresh_jobs
from tests.support.polling import eventually_async

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import SpawnPython

ROOT: Final = Path(__file__).parents[1]
FIELDS: Final = ("job_id", "kind", "queue", "attempt", "worker")


class Keeper(logging.Handler):
    """Keeps what is logged, with the filter that an application would attach."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.addFilter(jobq.JobContextFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, name: str) -> list[logging.LogRecord]:
        return [record for record in self.records if record.name == name]


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    logging.getLogger().addHandler(keeper)
    yield keeper
    logging.getLogger().removeHandler(keeper)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: getattr(record, name, None) for name in FIELDS}


async def test_the_lines_of_an_on_discard_carry_the_discarded_job(dsn: str, keeper: Keeper) -> None:
    jobs = jobq.Jobs()
    own = logging.getLogger("shop.discards")

    @jobs.on_discard
    def sync(job: jobq.Job, error: jobq.AttemptError) -> None:
        own.warning("sync")

    @jobs.on_discard
    async def not_sync(job: jobq.Job, error: jobq.AttemptError) -> None:
        own.warning("async")

    @jobs.handler("k")
    async def k(job: jobq.Job, args: dict[str, Any]) -> None:
        raise jobq.Permanent("no")

    async with working(dsn, jobs) as bench:
        ids = [(await bench.client.enqueue(k, {})).id for _ in range(2)]
        await eventually_async(lambda: len(keeper.of("shop.discards")) == 4)
    lines = keeper.of("shop.discards")
    assert sorted((fields(line)["job_id"], line.getMessage()) for line in lines) == sorted(
        (job_id, name) for job_id in ids for name in ("sync", "async")
    )
    assert {(fields(line)["kind"], fields(line)["attempt"]) for line in lines} == {("k", 1)}
    assert jobq.current_job() is None


@pytest.mark.parametrize("with_middleware", [False, True], ids=["bare", "with middleware"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_handlers_own_lines_carry_its_job(
    dsn: str, keeper: Keeper, mode: str, *, with_middleware: bool
) -> None:
    jobs = fresh_jobs()
    if with_middleware:

        @jobs.use
        async def note(job: jobq.Job, args: Any, call_next: jobq.CallNext) -> Any:
            return await call_next()

    async with working(dsn, jobs) as bench:
        ids = [(await bench.client.enqueue(mode, {"do": "log"})).id for _ in range(2)]
        for job_id in ids:
            await bench.ended(job_id)
        [(worker,)] = [row.values() for row in bench.rows("select id from jobq.worker")]
    lines = keeper.of("shop.handlers")
    assert [line.getMessage() for line in lines] == ["a line of the handler"] * 2
    assert sorted(fields(line)["job_id"] for line in lines) == ids
    for line in lines:
        assert fields(line) | {"job_id": 0} == {
            "job_id": 0, "kind": mode, "queue": "default", "attempt": 1, "worker": worker
        }  # fmt: skip
    assert jobq.current_job() is None


async def test_jobqs_own_lines_about_a_job_name_it(dsn: str, keeper: Keeper) -> None:
    async with working(dsn, fresh_jobs()) as bench:
        failed = (await bench.client.enqueue("async", {"do": "fail"})).id
        discarded = (await bench.client.enqueue("async", {"do": "permanent"})).id
        await bench.waits(failed, "retry")
        await bench.ended(discarded)
    about = {
        record.__dict__["job_id"]: record for record in keeper.of("jobq.worker") if hasattr(record, "job_id")
    }
    assert {job_id: record.levelname for job_id, record in about.items()} == {
        failed: "WARNING",
        discarded: "ERROR",
    }
    assert all(None not in fields(record).values() for record in about.values())


async def test_a_worker_that_is_well_warns_of_nothing(dsn: str, keeper: Keeper) -> None:
    async with working(dsn, fresh_jobs()) as bench:
        for mode in MODES:
            await bench.ended((await bench.client.enqueue(mode, {})).id)
        await bench.stop()
    assert [record.getMessage() for record in keeper.records if record.levelno >= logging.WARNING] == []


def test_a_record_that_names_a_job_keeps_it() -> None:
    token = set_current_job(make_job("k", id=7))
    try:
        job = jobq.current_job()
        assert job is not None
        assert job.id == 7
        mine = logging.makeLogRecord({"msg": "m"})
        other = logging.makeLogRecord({"msg": "m", "job_id": 8})
        assert all(jobq.JobContextFilter().filter(record) for record in (mine, other))
    finally:
        token.var.reset(token)
    assert (fields(mine)["job_id"], fields(other)) == (7, {**dict.fromkeys(FIELDS), "job_id": 8})
    outside = logging.makeLogRecord({"msg": "m"})
    assert jobq.JobContextFilter().filter(outside)
    assert not hasattr(outside, "job_id")


def test_every_logger_stands_in_one_tree() -> None:
    names = {
        name
        for path in (ROOT / "src/jobq").rglob("*.py")
        if "neighbours" not in path.parts  # scripts that run where jobq is not installed
        for name in re.findall(r'getLogger\("([^"]+)"\)', path.read_text())
    }
    assert names
    assert {name.partition(".")[0] for name in names} == {"jobq"}


# -- jobqctl worker ----------------------------------------------------------------------------------


def run_one(spawn: SpawnPython, dsn: str, kind: str, *options: str) -> list[str]:
    """Run `jobqctl worker` until a job that logs has ended; return what it printed."""
    with jobq.Client(dsn) as client:
        made = client.enqueue(kind, {"do": "log"})
        process = spawn(
            "-m", "jobq.cli", "worker", "tests.support.observed:jobs", *options,
            env={"DATABASE_URL": dsn}, cwd=ROOT,
        )  # fmt: skip
        process.wait_for_output("a line of the handler")
        process.terminate()
        assert process.wait() == 0
        assert client.get(made.id).state is jobq.JobState.COMPLETED
    return process.output.splitlines()


@pytest.mark.parametrize("mode", ["async", "process"])
def test_jobqctl_worker_logs_json(spawn_python: SpawnPython, dsn: str, mode: str) -> None:
    lines = [json.loads(line) for line in run_one(spawn_python, dsn, mode, "--log-format", "json")]
    assert all({"timestamp", "level", "logger", "message", "process"} <= line.keys() for line in lines)
    [line] = [line for line in lines if line["logger"] == "shop.handlers"]
    assert line["message"] == "a line of the handler"
    assert line["level"] == "WARNING"
    assert (line["kind"], line["queue"], line["attempt"]) == (mode, "default", 1)
    assert isinstance(line["job_id"], int)
    assert isinstance(line["worker"], str)
    assert line["worker"].isdecimal()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00", line["timestamp"])


def test_jobqctl_worker_logs_text_with_the_job(spawn_python: SpawnPython, dsn: str) -> None:
    lines = run_one(spawn_python, dsn, "thread")
    [line] = [line for line in lines if "a line of the handler" in line]
    assert re.search(
        r"WARNING shop\.handlers\[\d+\] a line of the handler \[job \d+ thread attempt 1\]$", line
    )


def test_text_logs_let_no_message_forge_a_line_or_steer_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = ValueError("a\n2026-01-01 00:00:00,000 ERROR jobq.worker[1] forged \x1b[2J\r\u202e")
    record = logging.makeLogRecord(
        {"name": "jobq.x", "msg": "it %s", "args": (error,), "exc_info": (ValueError, error, None)}
    )
    make_handler("text").handle(record)
    first, *others = capsys.readouterr().err.splitlines()
    assert first.endswith("it a")
    assert others[0] == r"    2026-01-01 00:00:00,000 ERROR jobq.worker[1] forged \x1b[2J\r\u202e"
    assert others[1:] == ["    ValueError: a", others[0]]


def test_json_logs_an_exception_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    handler = make_handler("json")
    error = ValueError("a\nb")
    record = logging.makeLogRecord(
        {"name": "jobq.x", "msg": "it %s", "args": ("failed",), "exc_info": (ValueError, error, None)}
    )
    handler.handle(record)
    [line] = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert found["message"] == "it failed"
    assert "ValueError" in found["exception"]
