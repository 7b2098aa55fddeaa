"""The test as the worker: run what is due, here and now, through the real storage."""

from __future__ import annotations

import asyncio
import contextvars
import os
import secrets
import socket
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast

from jobq._clients.client import AsyncClient, Client
from jobq._errors import Cancel, ConfigError, Snooze
from jobq._kinds.jobs import Jobs
from jobq._kinds.middleware import through
from jobq._logging import set_current_job
from jobq._marks import LaneMarks
from jobq._messages import shown
from jobq._operation import Call, Operation, in_schema
from jobq._statements.claim import Claimed, claim
from jobq._statements.duties import Registration, end, promote, register
from jobq._statements.outcomes import Settlement, complete, settle
from jobq._types import Job
from jobq._worker.decide import hand_back, on_exception, on_timeout, refuse, secrets_of
from jobq.testing.clock import Clock

if TYPE_CHECKING:
    from jobq._kinds.jobs import Handler
    from jobq._kinds.middleware import RunMiddleware

DEFAULT_LIMIT: Final = 1000  # runs of one drain, so that jobs that enqueue each other come to an end
_LEASE_S: Final = 3600.0  # the test is the worker, and may stand in a debugger
_PROMOTE_BATCH: Final = 1000

_QUEUES: Final = "select distinct queue from {schema}.ready order by queue"


@dataclass(slots=True)
class DrainReport:
    """What a drain did: job ids by outcome, in the order in which they ran.

    Attributes:
        completed, retried, snoozed, discarded, cancelled: ids of jobs, once for each run.
        parked: jobs of a kind that the given `Jobs` does not know.
        errors: what handlers raised, signals included, and the `TimeoutError` of those whose time was
            over, with the job's id.
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

    def raise_errors(self) -> None:
        """Raise what a handler raised, as it was raised, where there is such a thing: the first of it.

        `Snooze` and `Cancel` are no errors. A handler whose job was only retried has failed, too.

        Raises:
            Exception: the first error; a note says of which job, and how many more there are.
        """
        __tracebackhide__ = True
        failed = [(job_id, error) for job_id, error in self.errors if not isinstance(error, Snooze | Cancel)]
        if not failed:
            return
        (job_id, error), more = failed[0], len(failed) - 1
        error.add_note(f"raised by the handler of job {job_id}" + (f"; {more} more have failed" * (more > 0)))
        raise error


class _Run(NamedTuple):
    """A handler to run; the drain that waits for it is sent what came of it."""

    handler: Handler[Any, Any]
    job: Job
    args: object
    middleware: Sequence[RunMiddleware]

    @property
    def needs_loop(self) -> bool:
        return self.handler.mode == "async" or bool(self.middleware)


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
    due by the clock: advance a :class:`Clock` and drain again. What a handler raises is reported and not
    raised; ``report.raise_errors()`` does that.

    Args:
        client: an open client.
        jobs: the handlers. Sync ones run right here, in this thread.
        queues: only these; all by default.
        clock: what decides which jobs are due, and from when on a retry or a snooze waits; the database's
            by default, which also is what a ``delay`` counts from when a job is enqueued.
        limit: runs after which it is given up.

    Returns:
        What became of the jobs.

    Raises:
        AssertionError: more than ``limit`` runs.
        ConfigError: an argument is of a wrong type.
    """
    _check(client, AsyncClient, jobs, queues, clock, limit)
    steps = _drain(client.schema, jobs, queues, clock, limit)
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, _Run):
                    answer: object = await _perform(step)
                else:
                    answer = await client._run(step)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            except BaseException as error:  # noqa: BLE001 - pytest.fail() in a handler, an interrupt: it signs off
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        return cast("DrainReport", done.value)


def drain_sync(
    client: Client,
    jobs: Jobs,
    *,
    queues: Sequence[str] | None = None,
    clock: Clock | None = None,
    limit: int = DEFAULT_LIMIT,
) -> DrainReport:
    """Do what :func:`drain` does, with a sync client. Async handlers run in an event loop of their own."""
    _check(client, Client, jobs, queues, clock, limit)
    steps = _drain(client.schema, jobs, queues, clock, limit)
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, _Run):
                    answer: object = asyncio.run(_perform(step)) if step.needs_loop else _call(step)
                else:
                    answer = client._run(step)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
            except BaseException as error:  # noqa: BLE001 - as above
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as done:
        return cast("DrainReport", done.value)


def _check(client: object, colour: type, jobs: object, queues: object, clock: object, limit: object) -> None:
    if not isinstance(client, colour):
        other = "drain_sync" if colour is AsyncClient else "drain"
        raise ConfigError(f"client: a jobq.{colour.__name__}; with the other sort of client, call {other}()")
    if not isinstance(jobs, Jobs):
        raise ConfigError(f"jobs={shown(jobs)}: a jobq.Jobs")
    if isinstance(queues, str) or not isinstance(queues, Sequence | None):
        raise ConfigError(f"queues={shown(queues)}: a sequence of names, such as a list")
    if not isinstance(clock, Clock | None):
        raise ConfigError(f"clock={shown(clock)}: a jobq.testing.Clock")
    if not isinstance(limit, int) or limit < 1:
        raise ConfigError(f"limit={shown(limit)}: a number of runs, 1 or more")


async def _perform(step: _Run) -> _Ended:
    if not step.needs_loop:
        return _call(step)
    limit = asyncio.timeout(step.job.timeout_s if step.handler.mode == "async" else None)
    set_current_job(step.job)
    try:
        async with limit:
            return _Ended(await through(step.middleware, step.job, step.args, lambda: _handle(step)))
    except TimeoutError as error:
        return _Ended(error=error, overran=limit.expired())
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        return _Ended(error=error)


async def _handle(step: _Run) -> object:
    """Be what the middleware stands around."""
    result = step.handler.fn(step.job, step.args)
    return await result if step.handler.mode == "async" else result


def _call(step: _Run) -> _Ended:
    context = contextvars.copy_context()
    context.run(set_current_job, step.job)
    try:
        return _Ended(context.run(step.handler.fn, step.job, step.args))
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
            yield promote(schema, None, _PROMOTE_BATCH, notify=False, now=clock.now() if clock else None)
            claimed: list[Claimed] = yield _next_job(schema, queues, worker_id)
            if not claimed:
                return report
            runs += 1
            if runs > limit:
                raise AssertionError(
                    f"drain: {limit} runs, and still jobs are due; do they enqueue each other?"
                )
            outcome = yield from _run_one(schema, jobs, worker_id, claimed[0], report)
            if outcome is not None:
                report.note(outcome)
                yield settle(schema, worker_id, name, [_by_clock(outcome, clock)], notify=False)
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
    schema: str, jobs: Jobs, worker_id: int, row: Claimed, report: DrainReport
) -> Generator[Operation[Any] | _Run, Any, Settlement | None]:
    """Run one job; return what it becomes where it did not complete."""
    handler = jobs.lookup(row.kind) if row.kind is not None else None
    refused = refuse(row, is_known=handler is not None)
    if handler is None or refused is not None:
        return refused or hand_back(row.job_id, row.attempt)
    job = job_of(row, worker_id)
    outcome, text = yield from _outcome_of(handler, jobs.middleware_of(job.kind), job, row, report)
    if outcome is None:
        report.completed.append(job.id)
        yield complete(schema, worker_id, [(job.id, job.attempt)], {} if text is None else {job.id: text})
    return outcome


def _by_clock(outcome: Settlement, clock: Clock | None) -> Settlement:
    """Return an outcome whose wait, which the database counts from its own time, ends by the test's clock."""
    if clock is None or outcome.to != "scheduled":
        return outcome
    ahead_s = (clock.now() - datetime.now(UTC)).total_seconds()
    return outcome._replace(delay_s=outcome.delay_s + ahead_s)


def _outcome_of(
    handler: Handler[Any, Any],
    middleware: Sequence[RunMiddleware],
    job: Job,
    row: Claimed,
    report: DrainReport,
) -> Generator[_Run, _Ended, tuple[Settlement | None, str | None]]:
    """Run a handler; return what it becomes if it did not complete, and its result's JSON if it did."""
    try:
        args = handler.decode(row.args or "null")
        ended = yield _Run(handler, job, args, middleware)
        if ended.overran and ended.error is not None:
            report.errors.append((job.id, ended.error))
            return on_timeout(job, handler.backoff), None
        _raise_error_of(ended)
        text = handler.encode_result(ended.result) if handler.store_result else None
    except Exception as error:  # noqa: BLE001 - whatever a handler raises is an outcome
        report.errors.append((job.id, error))
        return on_exception(job, error, handler.backoff, secrets_of(handler, job, row.args)), None
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
