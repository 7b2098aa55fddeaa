"""A worker: the parts put together, started, and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jobq import __version__
from jobq._claim import restamp
from jobq._duties import Registration
from jobq._errors import ConfigError
from jobq._worker.completer import Completer
from jobq._worker.config import WorkerConfig
from jobq._worker.discards import DiscardNotices
from jobq._worker.duties import Promoter, Rescuer
from jobq._worker.execution import StopReason
from jobq._worker.executor import Executor
from jobq._worker.exit_codes import FAST_EXIT_BASE
from jobq._worker.fetcher import Fetcher
from jobq._worker.lease import Identity, Lease, LoopWatch
from jobq._worker.lines import Line
from jobq._worker.link import Link
from jobq._worker.listener import Listener
from jobq._worker.stats import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from datetime import timedelta

    from jobq._client import AsyncClient
    from jobq._duties import Rescued
    from jobq._jobs import Jobs
    from jobq._outcomes import Settlement
    from jobq._worker.execution import Execution
    from jobq._worker.outcome import Completion, Outcome

logger = logging.getLogger("jobq.worker")

# With what a link and the lease grant a silent server, they add up to less than grace + 5 s.
_LAST_WORDS_S: Final = 1.5  # for recording outcomes at the very end, whatever the database does
_CLAIM_ANSWER_S: Final = 0.5  # for a claim that is under way, before the link itself gives it up
_CANCEL_S: Final = 1.5  # for cancelled handlers to end, side by side with the claim


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """How a worker's run ended.

    Attributes:
        completed: jobs that it completed.
        handed_back: jobs that it gave back at the end, no retry used.
        left_running: ids of jobs whose handlers would not stop. In an embedded worker they stay
            leased until their threads end; `jobqctl worker` ends the process and hands them back.
        unrecorded: outcomes that could not be recorded before the end; their leases run out.
        clogged: the worker stopped by itself, because handlers that do not stop held as many
            slots again as some queue has; start it anew.
    """

    completed: int
    handed_back: int
    left_running: tuple[int, ...]
    unrecorded: int
    clogged: bool


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """What a worker is doing and has done.

    Attributes:
        running, held, stuck: jobs in this process: being run, waiting for a slot, and left behind.
        claimed, completed, lost_leases, promoted, rescued: totals.
        settled: totals of other outcomes, by where the job went and why.
        unrecorded: outcomes that wait to be recorded.
        uncertain: outcomes sent twice because a reply was lost, of which nobody can say more.
        renewals: heartbeats so far.
        listening: whether notifications arrive.
    """

    running: int
    held: int
    stuck: int
    claimed: int
    completed: int
    settled: dict[str, int]
    lost_leases: int
    promoted: int
    rescued: int
    unrecorded: int
    uncertain: int
    renewals: int
    listening: bool


class Worker:
    """Runs jobs until it is stopped.

    Args:
        client: an open :class:`jobq.AsyncClient`; the worker makes five connections of its own
            beside the client's pool (claims, outcomes, duties, lease, notifications).
        jobs: the handlers.
        config: see :class:`WorkerConfig`.

    Raises:
        ConfigError: what was given cannot work.

    Attributes:
        on_register: called with each worker id that this process takes, from any thread.
        ends_process: whether the process ends as soon as :meth:`run` has returned, handlers that
            would not stop included. Those that overran their time limit are then recorded as such.
    """

    def __init__(self, client: AsyncClient, jobs: Jobs, config: WorkerConfig | None = None) -> None:
        _check_client(client)
        jobs.prepare()
        self._client = client
        self._jobs = jobs
        self._config = config or WorkerConfig()
        self._stop = asyncio.Event()
        self._stop_grace_s = self._config.grace.total_seconds()
        self._stop_asked_at: float | None = None
        self._ended = asyncio.Event()
        self._is_running = False
        self._parts: _Parts | None = None
        self._signals = 0
        self.on_register: Callable[[int], None] | None = None
        self.ends_process = False

    async def run(self, *, handle_signals: bool = True) -> WorkerReport:
        """Run until :meth:`stop` is called or the process is told to end, then stop in order.

        Args:
            handle_signals: whether SIGTERM and SIGINT stop it. A second signal ends the process
                at once with code 128 plus the signal's number; its leases run out.

        Returns:
            How it ended.

        Raises:
            Error: it could not start: no database, no schema, or one it cannot serve.
        """
        if self._is_running:
            raise ConfigError("Worker.run: this worker is running already")
        self._is_running = True
        restore = self._handle_signals() if handle_signals else []
        try:
            if self._stop.is_set():
                return WorkerReport(0, 0, (), 0, clogged=False)
            await self._client.check_schema()
            self._parts = _Parts(self._client, self._jobs, self._config, self._note_registered)
            return await self._run(self._parts)
        finally:
            self._is_running = False
            self._ended.set()
            for number, handler in restore:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    async def stop(self, *, grace: timedelta | None = None) -> None:
        """Stop claiming, let running handlers finish within the grace, and wait for the end of `run`.

        Safe at any time, also before `run` has begun: then `run` returns at once.

        Args:
            grace: instead of the configured one; counted from the first call.
        """
        if grace is not None:
            self._stop_grace_s = grace.total_seconds()
        self._request_stop()
        if self._is_running:
            await self._ended.wait()

    def stats(self) -> WorkerStats:
        """Return what the worker is doing and has done."""
        parts = self._parts
        if parts is None:
            return WorkerStats(0, 0, 0, 0, 0, {}, 0, 0, 0, 0, 0, 0, listening=False)
        counters = parts.counters
        return WorkerStats(
            running=len(parts.executor.running),
            held=sum(len(line.held) for line in parts.lines),
            stuck=sum(line.stuck for line in parts.lines),
            claimed=counters.claimed,
            completed=counters.completed,
            settled=dict(counters.settled),
            lost_leases=counters.lost_leases,
            promoted=counters.promoted,
            rescued=counters.rescued,
            unrecorded=parts.completer.pending,
            uncertain=counters.uncertain,
            renewals=parts.lease.renewals,
            listening=parts.listener.hears,
        )

    def _request_stop(self) -> None:
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
        self._stop.set()

    def _note_registered(self, worker_id: int) -> None:
        if self.on_register is not None:
            self.on_register(worker_id)

    async def _run(self, parts: _Parts) -> WorkerReport:
        await parts.start()
        logger.info("worker %s works on %s", parts.name, dict(self._config.queues))
        try:
            await self._until_stop(parts)
            logger.info("worker %s stops: %d handlers run", parts.name, len(parts.executor.running))
            # Side by side: a database that does not answer must not use up the handlers' time.
            await asyncio.gather(parts.stop_claiming(), self._drain(parts))
        finally:
            report = await parts.finish(ends_process=self.ends_process)
        logger.info("worker %s has stopped: %s", parts.name, report)
        return report

    async def _until_stop(self, parts: _Parts) -> None:
        """Wait for a stop, the end of some part (a fault of ours: it is raised), or too many stuck."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            while not stop.done():
                await asyncio.wait([stop, *parts.tasks], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                for task in parts.tasks:
                    if task.done():
                        task.result()
                if parts.lease.failure is not None:
                    raise parts.lease.failure
                if parts.executor.is_clogged and not parts.is_clogged:
                    parts.is_clogged = True
                    logger.critical(
                        "handlers that do not stop hold as many slots again as a queue has: the worker stops"
                    )
                    self._request_stop()
        finally:
            stop.cancel()

    async def _drain(self, parts: _Parts) -> None:
        """Let handlers finish within the grace, then cancel them and let them end."""
        executor = parts.executor
        asked_at = self._stop_asked_at or time.monotonic()
        await executor.ended(asked_at + self._stop_grace_s, but_stuck=True)
        executor.stop_all(StopReason.SHUTDOWN)
        cancel_s = min(self._config.cancel_grace.total_seconds(), _CANCEL_S)
        await executor.ended(time.monotonic() + cancel_s)

    def _handle_signals(self) -> list[tuple[int, Any]]:
        """Take over SIGTERM and SIGINT; return what to put back."""
        restore: list[tuple[int, Any]] = []
        if threading.current_thread() is not threading.main_thread():
            logger.warning("a worker off the main thread gets no signals: stop it with Worker.stop()")
            return restore
        for number in (signal.SIGTERM, signal.SIGINT):
            previous = signal.getsignal(number)
            try:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
            except (NotImplementedError, RuntimeError, ValueError):
                logger.warning("this event loop handles no signals: stop the worker with Worker.stop()")
                return restore
            restore.append((number, previous))
        return restore

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.info("signal %d: the worker stops in order; a second one ends it at once", number)
            self._request_stop()
            return
        logger.warning("second signal: the process ends now; its jobs are taken back when its lease ends")
        logging.shutdown()
        os._exit(FAST_EXIT_BASE + number)


class _Parts:
    """The parts of one run and how they hang together."""

    def __init__(
        self, client: AsyncClient, jobs: Jobs, config: WorkerConfig, on_register: Callable[[int], None]
    ) -> None:
        schema, conninfo, notify = client.schema, client.conninfo, client.notify
        self._schema = schema
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.config = config
        self.counters = Counters()
        self.lines = [Line(queue, slots, config) for queue, slots in config.queues.items()]
        limit_s = config.answer_limit_s
        self._claims = Link(conninfo, schema, f"jobq claims {self.name}", limit_s)
        self._outcomes = Link(conninfo, schema, f"jobq outcomes {self.name}", limit_s)
        self._duties = Link(conninfo, schema, f"jobq duties {self.name}", limit_s)
        listening = Link(client.listen_dsn or conninfo, schema, f"jobq listener {self.name}", limit_s)
        registration = Registration(
            0,
            self.name,
            socket.gethostname(),
            os.getpid(),
            __version__,
            list(config.queues),
            list(jobs.kinds),
        )
        self.lease = Lease(conninfo, schema, registration, config, on_register, self._lease_ended)
        self.executor = Executor(config, self.lease, self.lines, self.counters, self._outcome, self._room)
        self.completer = Completer(
            self._outcomes,
            schema,
            self.name,
            config,
            self.counters,
            self._recorded,
            self._discarded,
            notify=notify,
        )
        self.listener = Listener(listening, self._duties, schema, self._news)
        self.fetcher = Fetcher(
            self._claims,
            schema,
            jobs,
            self.lines,
            self.lease,
            self.executor,
            self.completer,
            self.listener,
            self.counters,
        )
        self._promoter = Promoter(self._duties, schema, config, self.counters, self._news, notify=notify)
        self._rescuer = Rescuer(
            self._duties, schema, config, self.counters, self.lease, self._rescued_discards
        )
        self._notices = DiscardNotices(self._duties, schema, jobs)
        self._links = (self._claims, self._outcomes, self._duties, listening)
        self._claiming: list[asyncio.Task[None]] = []
        self._serving: list[asyncio.Task[None]] = []
        self.is_clogged = False

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that must not end by themselves."""
        return [*self._claiming, *self._serving]

    async def start(self) -> None:
        """Take a lease and set everything going."""
        loop = asyncio.get_running_loop()
        watch = LoopWatch(
            loop, threading.get_ident(), lambda: self.executor.last_tick, self.executor.blocking_job
        )
        await asyncio.to_thread(self.lease.start, watch)
        try:
            await self._restamp()
        except BaseException:
            self.executor.close()
            await asyncio.to_thread(self.lease.stop)
            await self._claims.close()
            raise
        self._serving = [_task(self.completer.run()), _task(self.executor.tick())]
        self._claiming = [
            _task(part.run()) for part in (self.fetcher, self.listener, self._promoter, self._rescuer)
        ]

    async def _restamp(self) -> None:
        for line in self.lines:
            count = await self._claims.run(restamp(self._schema, line.queue))
            if count:
                logger.warning("%d jobs of %r came from another cluster: stamped anew", count, line.queue)

    async def stop_claiming(self) -> None:
        """Claim nothing more, and give back what was claimed and not started."""
        self.executor.stop_starting()
        fetching, *others = self._claiming
        for task in others:
            task.cancel()
        self.fetcher.is_stopping = True
        self.fetcher.note_room()
        # A claim that is under way gets a moment to answer; what it takes goes back at once.
        await asyncio.wait([fetching], timeout=_CLAIM_ANSWER_S)
        fetching.cancel()
        await asyncio.gather(*self._claiming, return_exceptions=True)
        self._claiming = []
        for line in self.lines:
            self.executor.give_back_held(line)

    async def finish(self, *, ends_process: bool) -> WorkerReport:
        """Record what can be recorded, say goodbye, close everything."""
        left = tuple(execution.job.id for execution in self.executor.running)
        if ends_process:
            self.executor.record_overruns()
        self.executor.close()
        flush = _task(self.completer.flushed())
        await asyncio.wait([flush], timeout=_LAST_WORDS_S)
        if not flush.done():
            for link in self._links:
                link.give_up()  # nobody waits for its answers any longer
        for task in (flush, *self.tasks):
            task.cancel()
        await asyncio.gather(flush, *self.tasks, return_exceptions=True)
        unrecorded = self.completer.pending
        if left and not ends_process:
            logger.error(
                "handlers of jobs %s would not stop; their jobs stay leased until they end", list(left)
            )
            self.lease.linger(lambda: not self.executor.has_live_handlers())
        else:
            await asyncio.to_thread(self.lease.stop)
        await asyncio.gather(*(link.close() for link in self._links), return_exceptions=True)
        return WorkerReport(
            self.counters.completed, self.counters.settled["ready"], left, unrecorded, self.is_clogged
        )

    # What the parts tell each other

    def _outcome(self, execution: Execution, outcome: Completion | Settlement) -> None:
        if execution is self.executor.suspect:
            self.executor.suspect = None
            self.fetcher.note_news(None)  # for other suspects may have been left alone
        self.completer.add(execution.identity.id, outcome)

    def _recorded(self, worker_id: int, outcomes: Sequence[Outcome]) -> None:
        for identity in self.lease.identities:
            if identity.id == worker_id:
                identity.known.difference_update((o.job_id, o.attempt) for o in outcomes)

    def _room(self) -> None:
        self.fetcher.note_room()

    def _news(self, queue: str | None) -> None:
        self.fetcher.note_news(queue)

    def _lease_ended(self, identity: Identity) -> None:
        for execution in list(self.executor.running):
            if execution.identity is identity:
                self.executor.stop(execution, StopReason.LEASE)

    async def _discarded(self, settlements: Sequence[Settlement]) -> None:
        await self._notices.tell([settlement.job_id for settlement in settlements])

    async def _rescued_discards(self, rescued: Sequence[Rescued]) -> None:
        await self._notices.tell([job.job_id for job in rescued])


def _task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(coroutine)


def _check_client(client: object) -> None:
    name = type(client).__name__
    if name == "Client":
        raise ConfigError("Worker: the worker is asyncio; pass a jobq.AsyncClient instead of jobq.Client")
    if not hasattr(client, "check_schema"):
        raise ConfigError(f"Worker: client must be a jobq.AsyncClient, not {name}")
