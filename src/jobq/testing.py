"""For the tests of applications that use jobq: run what is due, look at what was enqueued.

Nothing here is a mock. A job goes through the real tables and statements, and its outcome is decided
by the same functions that the worker uses; what is different is that the test itself is the worker, so
that everything happens in one process, in order, and when the test says so::

    async def test_sign_up_sends_a_mail(jobq_async_client):
        await sign_up("a@example.com", jobq_async_client)
        await assert_enqueued(jobq_async_client, send_email, args=EmailArgs("a@example.com"))
        report = await drain(jobq_async_client, jobs)
        assert report.completed

The pytest plugin that comes with jobq has the fixtures: ``jobq_dsn``, ``jobq_client``,
``jobq_async_client`` (a migrated database for each test).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import secrets
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar, Unpack, cast, overload

import msgspec

from jobq._adapters import async_executor, sync_executor
from jobq._claim import Claimed, claim
from jobq._client import AsyncClient, Client
from jobq._duties import Registration, end, promote, register
from jobq._errors import ArgumentsEncodeError, ConfigError
from jobq._marks import LaneMarks
from jobq._operate import get_job
from jobq._operation import Call, Operation, in_schema, run, run_async
from jobq._outcomes import Settlement, complete, settle
from jobq._types import Job
from jobq._worker.decide import hand_back, on_exception, on_timeout, refuse

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from jobq._jobs import Handler, Jobs
    from jobq._jobtype import JobType
    from jobq._options import JobOptions
    from jobq._types import Enqueued, JobInfo

A = TypeVar("A")

__all__ = [
    "AsyncInlineClient",
    "Clock",
    "DrainReport",
    "InlineClient",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "drain_sync",
    "make_job",
]

DEFAULT_LIMIT: Final = 1000  # runs of one drain, so that jobs that enqueue each other come to an end
_LEASE_S: Final = 3600.0  # the test is the worker, and may stand in a debugger
_NOTHING: Final = object()

_QUEUES: Final = "select distinct queue from {schema}.ready order by queue"
_FIND: Final = """
select id, queue, args::text, state, run_at, priority from {schema}.jobs where kind = $1::text order by id
"""
_KINDS: Final = "select kind, queue, args::text from {schema}.jobs order by id limit 20"


class Clock:
    """A clock that a test moves. Given to :func:`drain`, it decides what is due.

    Args:
        now: where it starts; the present by default.
    """

    def __init__(self, now: datetime | None = None) -> None:
        if now is not None and now.tzinfo is None:
            raise ConfigError("Clock(now=…): a datetime with a zone")
        self._offset = timedelta(0) if now is None else now - datetime.now(UTC)

    def now(self) -> datetime:
        """Return its time, which goes on by itself."""
        return datetime.now(UTC) + self._offset

    def advance(self, by: timedelta) -> None:
        """Move it forward."""
        if by < timedelta(0):
            raise ConfigError(f"Clock.advance({by}): forward only")
        self._offset += by


@dataclass(slots=True)
class DrainReport:
    """What a drain did: job ids by outcome, in the order in which they ran.

    Attributes:
        completed, retried, snoozed, discarded, cancelled: ids of jobs, once for each run.
        parked: jobs of a kind that the given `Jobs` does not know.
        errors: what handlers raised, signals included, with the job's id.
        results: return values of the handlers that completed, by job id.
    """

    completed: list[int] = field(default_factory=list)
    retried: list[int] = field(default_factory=list)
    snoozed: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    parked: list[int] = field(default_factory=list)
    errors: list[tuple[int, BaseException]] = field(default_factory=list)
    results: dict[int, object] = field(default_factory=dict)

    def note(self, settlement: Settlement) -> None:
        """Add one job that did not complete."""
        to: str = settlement.reason if settlement.to == "scheduled" and settlement.reason else settlement.to
        lists = {
            "retry": self.retried,
            "snooze": self.snoozed,
            "unknown kind": self.parked,
            "discarded": self.discarded,
            "cancelled": self.cancelled,
        }
        lists[to].append(settlement.job_id)


class _Run(NamedTuple):
    """A handler to run; the drain that waits for it is sent what came of it."""

    handler: Handler[Any, Any]
    job: Job
    args: object


class _Ended(NamedTuple):
    result: object = None
    error: BaseException | None = None
    overran: bool = False


_Steps: TypeAlias = Generator["Operation[Any] | _Run", Any, DrainReport]


async def drain(
    client: AsyncClient,
    jobs: Jobs,
    *,
    queues: Sequence[str] | None = None,
    clock: Clock | None = None,
    limit: int = DEFAULT_LIMIT,
) -> DrainReport:
    """Run everything that is due, one job after the other, until nothing is.

    A job that a handler enqueues is run too. One that is retried, snoozed or scheduled runs when it is
    due by the clock: advance a :class:`Clock` and drain again.

    Args:
        client: an open client.
        jobs: the handlers. Sync ones run right here, in this thread.
        queues: only these; all by default.
        clock: what decides which jobs are due; the database's by default.
        limit: runs after which it is given up.

    Returns:
        What became of the jobs.

    Raises:
        AssertionError: more than ``limit`` runs.
    """
    steps = _drain(client.schema, jobs, queues, clock, limit)
    answer: object = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            return cast("DrainReport", done.value)
        if isinstance(step, _Run):
            answer = await _perform(step)
        else:
            answer = await client._run(step)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


def drain_sync(
    client: Client,
    jobs: Jobs,
    *,
    queues: Sequence[str] | None = None,
    clock: Clock | None = None,
    limit: int = DEFAULT_LIMIT,
) -> DrainReport:
    """Do what :func:`drain` does, with a sync client. Async handlers run in an event loop of their own."""
    steps = _drain(client.schema, jobs, queues, clock, limit)
    answer: object = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as done:
            return cast("DrainReport", done.value)
        if isinstance(step, _Run):
            answer = asyncio.run(_perform(step)) if step.handler.mode == "async" else _call(step)
        else:
            answer = client._run(step)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]


async def _perform(step: _Run) -> _Ended:
    if step.handler.mode != "async":
        return _call(step)
    limit = asyncio.timeout(step.job.timeout_s)
    try:
        async with limit:
            return _Ended(await step.handler.fn(step.job, step.args))
    except TimeoutError as error:
        return _Ended(error=error, overran=limit.expired())
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        return _Ended(error=error)


def _call(step: _Run) -> _Ended:
    try:
        return _Ended(step.handler.fn(step.job, step.args))
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        return _Ended(error=error)


def _drain(schema: str, jobs: Jobs, queues: Sequence[str] | None, clock: Clock | None, limit: int) -> _Steps:
    worker_id = secrets.randbits(62) + 1
    name = f"drain {socket.gethostname()}:{os.getpid()}"
    host = socket.gethostname()
    yield register(schema, Registration(worker_id, name, host, os.getpid(), "test", [], []), _LEASE_S)
    report = DrainReport()
    runs = 0
    try:
        while True:
            yield promote(schema, None, 1000, notify=False, now=clock.now() if clock else None)
            claimed: list[Claimed] = yield _next_job(schema, queues, worker_id)
            if not claimed:
                return report
            runs += 1
            if runs > limit:
                raise AssertionError(
                    f"drain: {limit} runs, and still jobs are due; do they enqueue each other?"
                )
            yield from _run_one(schema, jobs, worker_id, name, claimed[0], report)
    finally:
        yield end(schema, worker_id, "stopped")


def _next_job(schema: str, queues: Sequence[str] | None, worker_id: int) -> Operation[list[Claimed]]:
    if queues is None:
        rows = yield Call(in_schema(_QUEUES, schema))
        queues = [row[0] for row in rows]
    for queue in queues:
        claimed = yield from claim(schema, queue, LaneMarks().ranges(), 1, worker_id)
        if claimed:
            return claimed
    return []


def _run_one(
    schema: str, jobs: Jobs, worker_id: int, name: str, row: Claimed, report: DrainReport
) -> Generator[Operation[Any] | _Run, Any, None]:
    handler = jobs.lookup(row.kind) if row.kind is not None else None
    refused = refuse(row, is_known=handler is not None)
    if handler is None or refused is not None:
        refused = refused or hand_back(row.job_id, row.attempt)
        report.note(refused)
        yield settle(schema, worker_id, name, [refused], notify=False)
        return
    job = job_of(row, worker_id)
    outcome, text = yield from _outcome_of(handler, job, row, report)
    if outcome is None:
        report.completed.append(job.id)
        yield complete(schema, worker_id, [(job.id, job.attempt)], {} if text is None else {job.id: text})
    else:
        report.note(outcome)
        yield settle(schema, worker_id, name, [outcome], notify=False)


def _outcome_of(
    handler: Handler[Any, Any], job: Job, row: Claimed, report: DrainReport
) -> Generator[_Run, _Ended, tuple[Settlement | None, str | None]]:
    """Run a handler; return what it becomes if it did not complete, and its result's JSON if it did."""
    try:
        args = handler.decode(row.args or "null")
        ended = yield _Run(handler, job, args)
        if ended.overran:
            return on_timeout(job, handler.backoff), None
        _raise_error_of(ended)
        text = handler.encode_result(ended.result) if handler.store_result else None
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        report.errors.append((job.id, error))
        return on_exception(job, error, handler.backoff), None
    report.results[job.id] = ended.result
    return None, text


def _raise_error_of(ended: _Ended) -> None:
    if ended.error is not None:
        raise ended.error


def job_of(row: Claimed, worker_id: int) -> Job:
    """Return the job that a handler is given for a claimed row."""
    return Job(
        row.job_id,
        row.kind or "",
        row.queue,
        row.priority,
        row.attempt,
        row.failures,
        row.crashes,
        row.max_attempts or 1,
        row.timeout_s,
        worker_id,
        row.created or 0.0,
        row.meta,
        row.tags,
    )


class AsyncInlineClient(AsyncClient):
    """An `AsyncClient` that runs what it has enqueued before the enqueue returns.

    For tests of code that enqueues and then looks at the effect. The outcomes are recorded as always;
    a handler's exception is not raised here, but retried or discarded.

    Args:
        database, options: see :class:`jobq.AsyncClient`.
        jobs: the handlers.
    """

    def __init__(self, database: Any, *, jobs: Jobs, **options: Any) -> None:
        super().__init__(database, **options)
        self._jobs = jobs

    async def enqueue(
        self, kind: Any, args: Any = None, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = await super().enqueue(kind, args, **options)
        await drain(self, self._jobs)
        return enqueued

    async def enqueue_many(self, jobs: Iterable[Any], *, tx: object | None = None) -> list[Enqueued]:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = await super().enqueue_many(jobs)
        await drain(self, self._jobs)
        return enqueued


class InlineClient(Client):
    """The sync twin of :class:`AsyncInlineClient`."""

    def __init__(self, database: Any, *, jobs: Jobs, **options: Any) -> None:
        super().__init__(database, **options)
        self._jobs = jobs

    def enqueue(
        self, kind: Any, args: Any = None, *, tx: object | None = None, **options: Unpack[JobOptions]
    ) -> Enqueued:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = super().enqueue(kind, args, **options)
        drain_sync(self, self._jobs)
        return enqueued

    def enqueue_many(self, jobs: Iterable[Any], *, tx: object | None = None) -> list[Enqueued]:
        """Enqueue, then run everything that is due."""
        _refuse_tx(tx)
        enqueued = super().enqueue_many(jobs)
        drain_sync(self, self._jobs)
        return enqueued


def _refuse_tx(tx: object) -> None:
    if tx is not None:
        raise ConfigError(
            "inline: a job of an open transaction cannot run before its commit, of which jobq does not "
            "hear; use a plain client, and drain() after the commit"
        )


def make_job(  # noqa: D417 - what a Job has is told there
    kind: JobType[Any] | str = "test",
    *,
    id: int = 1,
    queue: str = "default",
    priority: int = 0,
    attempt: int = 1,
    failures: int | None = None,
    crashes: int = 0,
    max_attempts: int = 25,
    timeout: timedelta | None = timedelta(hours=1),
    worker_id: int = 1,
    created_at: datetime | None = None,
    meta: Mapping[str, object] | None = None,
    tags: Sequence[str] = (),
) -> Job:
    """Return a job to call a handler with: ``await send_email(make_job(), EmailArgs("a@example.com"))``.

    Args:
        kind: a declared kind, a handler or a name.
        id, queue, priority, attempt, crashes, max_attempts, timeout, worker_id: see :class:`jobq.Job`.
        failures: earlier failures; ``attempt - 1`` by default.
        created_at: now by default.
        meta, tags: what travels with the job.
    """
    return Job(
        id,
        kind if isinstance(kind, str) else kind.kind,
        queue,
        priority,
        attempt,
        attempt - 1 if failures is None else failures,
        crashes,
        max_attempts,
        None if timeout is None else timeout.total_seconds(),
        worker_id,
        (created_at or datetime.now(UTC)).timestamp(),
        None if meta is None else msgspec.json.encode(meta).decode(),
        list(tags),
    )


class _Wanted(NamedTuple):
    kind: str
    args: object
    queue: str | None
    times: int | None
    is_part: bool

    def matches(self, row: Sequence[Any]) -> bool:
        if self.queue is not None and row[1] != self.queue:
            return False
        if self.args is _NOTHING:
            return True
        stored: object = msgspec.json.decode(row[2])
        given: object = self.args
        if self.is_part and isinstance(given, dict) and isinstance(stored, dict):
            wanted, found = cast("dict[str, object]", given), cast("dict[str, object]", stored)
            return all(name in found and found[name] == value for name, value in wanted.items())
        return stored == self.args


@overload
def assert_enqueued(
    where: AsyncClient, kind: JobType[Any] | str, *, args: object = ..., queue: str | None = ...,
    count: int | None = ..., schema: str = ...,
) -> Awaitable[list[JobInfo]]: ...  # fmt: skip
@overload
def assert_enqueued(
    where: Client, kind: JobType[Any] | str, *, args: object = ..., queue: str | None = ...,
    count: int | None = ..., schema: str = ...,
) -> list[JobInfo]: ...  # fmt: skip
@overload
def assert_enqueued(
    where: object, kind: JobType[Any] | str, *, args: object = ..., queue: str | None = ...,
    count: int | None = ..., schema: str = ...,
) -> Any: ...  # fmt: skip
def assert_enqueued(
    where: object,
    kind: JobType[Any] | str,
    *,
    args: object = _NOTHING,
    queue: str | None = None,
    count: int | None = None,
    schema: str = "jobq",
) -> Any:
    """Assert that jobs of a kind were enqueued, whatever has become of them since.

    Args:
        where: a client, or a connection of yours, such as the one whose transaction is still open
            (any that ``tx=`` takes). With an async one the call is awaited.
        kind: a declared kind, a handler or a name.
        args: the arguments: a whole value has to be equal, a dict has to be contained.
        queue: the queue that they stand in.
        count: exactly so many; one or more by default.
        schema: the queue's schema, where ``where`` is a connection.

    Returns:
        The jobs that match, the oldest first.

    Raises:
        AssertionError: it is not so; the message lists what was enqueued.
    """
    wanted = _Wanted(_name(kind), _plain(kind, args), queue, count, isinstance(args, Mapping))
    return _ask(where, schema, functools.partial(_assert_found, wanted=wanted))


def assert_not_enqueued(
    where: object,
    kind: JobType[Any] | str,
    *,
    args: object = _NOTHING,
    queue: str | None = None,
    schema: str = "jobq",
) -> Any:
    """Assert that no such job was enqueued; see :func:`assert_enqueued`."""
    return assert_enqueued(where, kind, args=args, queue=queue, count=0, schema=schema)


def _ask(where: object, schema: str, make: Callable[[str], Operation[Any]]) -> Any:
    if isinstance(where, AsyncClient | Client):
        return where._run(make(where.schema))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    if _is_async(where):
        return run_async(make(schema), async_executor(where))
    return run(make(schema), sync_executor(where))


def _is_async(where: object) -> bool:
    method = getattr(where, "execute", None)
    return inspect.iscoroutinefunction(method)


def _assert_found(schema: str, *, wanted: _Wanted) -> Operation[list[JobInfo]]:
    rows = yield Call(in_schema(_FIND, schema), (wanted.kind,))
    found = [row for row in rows if wanted.matches(row)]
    if (len(found) != wanted.times) if wanted.times is not None else not found:
        everything = yield Call(in_schema(_KINDS, schema))
        raise AssertionError(_complaint(wanted, len(found), everything))
    infos: list[JobInfo] = []
    for row in found:
        info = yield from get_job(schema, row[0])
        infos += [info]
    return infos


def _complaint(wanted: _Wanted, found: int, everything: Sequence[Sequence[Any]]) -> str:
    how_many = "at least one job" if wanted.times is None else f"{wanted.times} jobs"
    args = "" if wanted.args is _NOTHING else f" with arguments {wanted.args!r}"
    queue = "" if wanted.queue is None else f" in queue {wanted.queue!r}"
    lines = [f"  {kind} in {name}: {text[:200]}" for kind, name, text in everything]
    listed = "\n".join(lines) or "  nothing at all"
    return f"wanted {how_many} of kind {wanted.kind!r}{args}{queue}, found {found}. Enqueued were:\n{listed}"


def _name(kind: JobType[Any] | str) -> str:
    return kind if isinstance(kind, str) else kind.kind


def _plain(kind: JobType[Any] | str, args: object) -> object:
    """Return arguments as the JSON values that are stored."""
    if args is _NOTHING:
        return args
    if isinstance(args, Mapping) or isinstance(kind, str):
        return msgspec.to_builtins(args)
    try:
        return msgspec.json.decode(kind.encode(args))
    except ArgumentsEncodeError as error:
        raise ConfigError(f"assert_enqueued: args cannot be arguments of {kind.kind!r}: {error}") from error
