"""What a user writes and both type checkers must accept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypedDict, assert_type

from jobq import (
    AsyncClient,
    AttemptError,
    Client,
    Enqueued,
    Handler,
    Job,
    JobInfo,
    Jobs,
    JobType,
    NewJob,
    Worker,
    WorkerConfig,
    WorkerReport,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine


@dataclass(frozen=True)
class EmailArgs:
    to: str


@dataclass(frozen=True)
class LongEmailArgs(EmailArgs):
    body: str = ""


class ReportArgs(TypedDict):
    month: int


SEND_EMAIL = JobType("send_email", EmailArgs, queue="mail", timeout=None, tags=["a"])
REPORT = JobType("report", ReportArgs)
TICK = JobType("tick", None)
PLAIN = JobType("plain", dict[str, Any])
EITHER = JobType("either", EmailArgs | None)

jobs = Jobs()


@jobs.handler("send", max_attempts=10, timeout=timedelta(minutes=2))
async def send(job: Job, args: EmailArgs) -> str:
    return args.to


@jobs.handler(SEND_EMAIL, store_result=True)
def send_sync(job: Job, args: EmailArgs) -> int:
    return len(args.to)


@jobs.handler("plain", run_in="thread", backoff=lambda failures: timedelta(seconds=failures))
def plain(job: Job, args: dict[str, Any]) -> None: ...


@jobs.handler("tick")
async def tick(job: Job, args: None) -> None: ...


@jobs.on_discard
async def discarded(job: Job, error: AttemptError) -> None: ...


async def use(client: AsyncClient, connection: object, job: Job) -> None:
    await client.enqueue(send, EmailArgs("a"))
    await client.enqueue(send, LongEmailArgs("a"))
    await client.enqueue(send, EmailArgs("a"), priority=3, delay=timedelta(1), unique="x", tx=connection)
    await client.enqueue(SEND_EMAIL, EmailArgs("a"), run_at=datetime.now(UTC), meta={"trace": [1]})
    await client.enqueue(REPORT, ReportArgs(month=1))
    await client.enqueue(TICK, None)
    await client.enqueue(tick, None)
    await client.enqueue(TICK)
    await client.enqueue(tick, priority=1, tx=connection)
    await client.enqueue("untyped")
    await client.enqueue("untyped", priority=1)
    await client.enqueue(PLAIN, {"a": [1]})
    await client.enqueue(plain, {"a": [1]})
    await client.enqueue(EITHER, None)
    await client.enqueue("send_email", {"to": "a"}, expires_at=None, timeout=None)
    await client.enqueue("send_email", EmailArgs("a"))
    await client.enqueue_many([NewJob(send, EmailArgs("a")), NewJob("other", [1], queue="x")])
    await client.enqueue_many(
        NewJob(REPORT, ReportArgs(month=month), unique=f"{month}") for month in range(12)
    )

    assert_type(await client.enqueue(send, EmailArgs("a")), Enqueued)
    assert_type(await client.enqueue_many([]), list[Enqueued])
    assert_type(await client.get(1), JobInfo)
    assert_type(await send(job, EmailArgs("a")), str)
    assert_type(send_sync(job, EmailArgs("a")), int)
    assert_type(send_sync, Handler[EmailArgs, int])
    kind: JobType[EmailArgs] = send
    assert_type(kind.decode(b"{}"), EmailArgs)
    item: NewJob = NewJob(send, EmailArgs("a"))
    assert_type(item.args, object)


def returns_what_it_did(job: Job, args: EmailArgs) -> Coroutine[Any, Any, None]:
    return tick(job, None)


def use_sync(client: Client, connection: object) -> None:
    client.enqueue(send, EmailArgs("a"), tx=connection, max_attempts=3)
    client.enqueue(TICK)
    client.enqueue("send_email", {"to": "a"}, expires_at=None, timeout=None)
    client.enqueue_many(NewJob(REPORT, ReportArgs(month=month)) for month in range(12))
    client.cancel(1, reason="no longer wanted")
    client.retry(1)
    assert_type(client.enqueue(send, EmailArgs("a")), Enqueued)
    assert_type(client.errors(1), list[AttemptError])


async def run() -> None:
    async with AsyncClient("", schema="mine", queue="mail", max_attempts=3, timeout=None) as client:
        assert_type(client, AsyncClient)
        assert_type(await client.migrate(), list[str])
        assert_type(await Worker(client, jobs, WorkerConfig(queues={"default": 20})).run(), WorkerReport)
    with Client("", pool_max_size=3, notify=False, args_limit_bytes=1000) as sync_client:
        assert_type(sync_client, Client)
