"""What must be red in both type checkers: every line that ends with `# red`, and no other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypedDict

from jobq import AsyncClient, Client, Jobs, JobType, NewJob, Worker
from tests.typing.good_enqueue import REPORT, TICK, EmailArgs, LongEmailArgs, plain, send, send_sync

if TYPE_CHECKING:
    from jobq import Job


@dataclass(frozen=True)
class OtherArgs:
    to: str


class WrongReportArgs(TypedDict):
    month: str


jobs = Jobs()
SEND_LONG = JobType("send_long", LongEmailArgs)
wrong_report: WrongReportArgs = {"month": "January"}


async def arguments(client: AsyncClient) -> None:
    await client.enqueue(send, OtherArgs("a"))  # red
    await client.enqueue(send, {"to": "a"})  # red
    await client.enqueue(send, None)  # red
    await client.enqueue(send)  # red
    await client.enqueue(SEND_LONG, EmailArgs("a"))  # red
    await client.enqueue(REPORT, {"month": "January"})  # red
    await client.enqueue(REPORT, wrong_report)  # red
    await client.enqueue(TICK, {})  # red
    await client.enqueue(plain, EmailArgs("a"))  # red
    await client.enqueue(arguments, EmailArgs("a"))  # red
    NewJob(send, OtherArgs("a"))  # red
    NewJob(send, {"to": "a"})  # red
    NewJob(REPORT, {"month": "January"})  # red
    await client.enqueue_many([NewJob(send, EmailArgs("a")), NewJob(send, OtherArgs("a"))])  # red
    await client.enqueue_many([(send, EmailArgs("a"))])  # red


async def options(client: AsyncClient) -> None:
    await client.enqueue(send, EmailArgs("a"), priority="high")  # red
    await client.enqueue(send, EmailArgs("a"), prority=1)  # red
    await client.enqueue(send, EmailArgs("a"), delay=5)  # red
    await client.enqueue(send, EmailArgs("a"), None)  # red
    await client.enqueue("send_email", {"to": "a"}, timeout=60)  # red
    NewJob(send, EmailArgs("a"), delay=5)  # red
    NewJob("send_email", {}, tx=None)  # red
    JobType("k", EmailArgs, run_at=datetime.now(UTC))  # red
    JobType("k", EmailArgs, retries=3)  # red
    JobType("k", EmailArgs("a"))  # red


def sync_client(client: Client, job: Job) -> None:
    client.enqueue(send, OtherArgs("a"))  # red
    client.enqueue(send, {"to": "a"})  # red
    client.enqueue(send)  # red
    client.enqueue(TICK, {})  # red
    client.enqueue(send, EmailArgs("a"), priority="high")  # red
    client.enqueue("send_email", {"to": "a"}, prority=1)  # red
    client.enqueue_many([(send, EmailArgs("a"))])  # red
    client.cancel("1")  # red
    Client("", run_at=datetime.now(UTC))  # red
    Client("", retries=3)  # red
    AsyncClient(client.pool)  # red
    Worker(client, jobs)  # red


def variance(job: Job) -> None:
    wider: JobType[EmailArgs] = SEND_LONG  # red
    narrower: JobType[LongEmailArgs] = send  # red
    anything: JobType[object] = send  # red
    send_sync(job, OtherArgs("a"))  # red
    send(job, {"to": "a"})  # red
    assert wider is narrower is anything


def takes_other(job: Job, args: OtherArgs) -> None: ...


def returns_no_wait(failures: int) -> int:
    return failures


def takes_one(job: Job) -> None: ...


def declarations() -> None:
    jobs.handler(SEND_LONG)(takes_other)  # red
    jobs.handler("k")(takes_one)  # red
    jobs.handler("k", run_in="fiber")  # red
    jobs.handler("k", run_at=datetime.now(UTC))  # red
    jobs.handler(SEND_LONG, queue="x")  # red
    jobs.handler("k", backoff=timedelta(1))  # red
    jobs.handler("k", backoff=returns_no_wait)  # red
    jobs.handler("k", on_discard=takes_one)  # red
    jobs.on_discard(takes_one)  # red
    jobs.on_discard(takes_other)  # red
