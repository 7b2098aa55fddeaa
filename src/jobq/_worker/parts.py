"""The parts of one run, how they hang together, and what they tell each other."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobq import __version__
from jobq._statements.claim import restamp
from jobq._statements.duties import Registration
from jobq._statements.locks import limit_lock_waits, lock_holders
from jobq._statements.periodic_declare import declare, prepare_schedule
from jobq._statements.redaction import declare_redaction
from jobq._worker.cleaner import Cleaner, Trimmer
from jobq._worker.completer import Completer
from jobq._worker.control import Control
from jobq._worker.discards import DiscardNotices
from jobq._worker.duties import Promoter, Rescuer
from jobq._worker.execution import StopReason
from jobq._worker.executor import Executor
from jobq._worker.fetcher import Fetcher
from jobq._worker.leader import Leader
from jobq._worker.lease import Identity, Lease, LoopWatch
from jobq._worker.lines import Line
from jobq._worker.link import Link
from jobq._worker.listener import Listener
from jobq._worker.observers import Observers
from jobq._worker.report import WorkerHealth, WorkerReport, WorkerStats
from jobq._worker.scheduler import Scheduler
from jobq._worker.starting import LOCK_WAIT_S, Patience
from jobq._worker.stats import Counters

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from jobq._clients.client import AsyncClient
    from jobq._kinds.jobs import Jobs
    from jobq._statements.duties import Rescued
    from jobq._statements.outcomes import Settlement
    from jobq._statements.periodic_declare import Prepared
    from jobq._worker.config import WorkerConfig
    from jobq._worker.execution import Execution
    from jobq._worker.leader import Duty
    from jobq._worker.outcome import Completion, Outcome

logger = logging.getLogger("jobq.worker")

# With what a link and the lease grant a silent server, they add up to less than grace + 5 s.
_LAST_WORDS_S: Final = 1.5  # for recording outcomes at the very end, whatever the database does
_LAST_NOTICES_S: Final = 0.2  # for callbacks to hear of the last discards
_CLAIM_ANSWER_S: Final = 0.5  # for a claim that is under way, before the link itself gives it up
_ALIVE_HEARTBEATS: Final = 2.0  # a loop that stands still for so many is not alive
CANCEL_S: Final = 1.5  # for cancelled handlers to end, side by side with the claim


class Links(NamedTuple):
    """The connections of one worker, but for the lease's, which is its thread's."""

    claims: Link
    outcomes: Link
    duties: Link
    leading: Link
    listening: Link

    @classmethod
    def of(cls, client: AsyncClient, name: str, limit_s: float) -> Links:
        """Return links that are not open yet; each operation on them has ``limit_s`` seconds."""

        def link(what: str, conninfo: str = client.conninfo) -> Link:
            return Link(conninfo, client.schema, f"jobq {what} {name}", limit_s)

        listening = link("listener", client.listen_dsn or client.conninfo)
        return cls(link("claims"), link("outcomes"), link("duties"), link("leader"), listening)


def _schedules_of(client: AsyncClient, jobs: Jobs) -> list[Prepared]:
    """Return the declared schedules with the client's default options, as all that it enqueues."""
    defaults, limit = client._defaults, client._args_limit  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return [prepare_schedule(schedule, defaults, limit) for schedule in jobs.schedules]


def _redacted_of(jobs: Jobs) -> dict[str, Sequence[str]]:
    """Return the fields that each kind declares as hidden."""
    handlers = ((kind, jobs.lookup(kind)) for kind in jobs.kinds)
    return {kind: handler.redact for kind, handler in handlers if handler is not None and handler.redact}


def _registration(name: str, jobs: Jobs, config: WorkerConfig) -> Registration:
    """Return what this process says of itself; its id is chosen when it registers."""
    schedules = [schedule.name for schedule in jobs.schedules]
    host, pid, queues, kinds = socket.gethostname(), os.getpid(), list(config.queues), list(jobs.kinds)
    return Registration(0, name, host, pid, __version__, queues, kinds, schedules)


class Parts:
    """The parts of one run and how they hang together."""

    def __init__(
        self, client: AsyncClient, jobs: Jobs, config: WorkerConfig, on_register: Callable[[int], None]
    ) -> None:
        schema, notify = client.schema, client.notify
        self._schema = schema
        self._schedules = _schedules_of(client, jobs)
        self._redacted = _redacted_of(jobs)
        self.name = f"{socket.gethostname()}:{os.getpid()}"
        self.config = config
        self.counters = Counters()
        self.lines = [Line(queue, slots, config) for queue, slots in config.queues.items()]
        self._links = Links.of(client, self.name, config.answer_limit_s)
        registration = _registration(self.name, jobs, config)
        self.lease = Lease(client.conninfo, schema, registration, config, on_register, self._lease_ended)
        self.executor = Executor(config, self.lease, self.lines, self.counters, self._outcome, self._room)
        around = {kind: jobs.middleware_of(kind) for kind in jobs.kinds}
        self.executor.middleware = {kind: middleware for kind, middleware in around.items() if middleware}
        self.completer = Completer(
            self._links.outcomes,
            schema,
            self.name,
            config,
            self.counters,
            self._recorded,
            self._discarded,
            self._room,
            notify=notify,
        )
        self._control = Control(self._links.duties, schema, self.lines, self.executor, self._news)
        self.listener = Listener(
            self._links.listening, self._links.duties, schema, self._news, self._control.note_alert
        )
        self.fetcher = Fetcher(
            self._links.claims,
            schema,
            jobs,
            self.lines,
            self.lease,
            self.executor,
            self.completer,
            self.listener,
            self.counters,
        )
        self.fetcher.observers = self.completer.observers = Observers(jobs.observers)
        self._promoter = Promoter(
            self._links.duties, schema, config, self.counters, self._news, notify=notify
        )
        self._rescuer = Rescuer(
            self._links.duties, schema, config, self.counters, self.lease, self._rescued_discards
        )
        self._leader = self._make_leader(notify=notify)
        self._notices = DiscardNotices(self._links.duties, schema, jobs)
        self._claiming: list[asyncio.Task[None]] = []
        self._serving: list[asyncio.Task[None]] = []
        self.is_clogged = False
        self._is_started = False

    def _make_leader(self, *, notify: bool) -> Leader:
        leading, schema = self._links.leading, self._schema
        duties: list[Duty] = [
            Scheduler(leading, schema, notify=notify),
            Cleaner(leading, schema, self.counters),
            Trimmer(leading, schema),
        ]
        return Leader(self._links.duties, leading, schema, self.config, self.lease, self.name, duties)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """The tasks that must not end by themselves."""
        return [*self._claiming, *self._serving]

    async def start(self, stop: asyncio.Event) -> None:
        """Take a lease and set everything going, as soon as the database lets it.

        Raises:
            StartAbandonedError: ``stop`` was set meanwhile.
            Error: the database refuses.
        """
        loop = asyncio.get_running_loop()
        watch = LoopWatch(
            loop, threading.get_ident(), lambda: self.executor.last_tick, self.executor.blocking_job
        )
        patience = Patience(stop, lambda: self._links.duties.run(lock_holders(self._schema)))
        try:
            await patience.through(lambda: self._take_lease(watch), can_be_cancelled=False)
            await patience.through(self._prepare)
        except BaseException:
            self.executor.close()
            await asyncio.to_thread(self.lease.stop)
            await self._links.claims.close()
            await self._links.duties.close()
            raise
        self._serving = [_task(self.completer.run()), _task(self.executor.tick()), _task(self._notices.run())]
        self._serving.append(_task(self._control.run()))
        self._claiming = [
            _task(part.run()) for part in (self.fetcher, self.listener, self._promoter, self._rescuer)
        ]
        self._is_started = True
        if self.config.leads:
            self._claiming.append(_task(self._leader.run()))

    async def _take_lease(self, watch: LoopWatch) -> None:
        await asyncio.to_thread(self.lease.start, watch)

    async def _prepare(self) -> None:
        """Do what comes before the first claim; all of it may be done again."""
        await self._links.claims.open()
        if not self._links.claims.pooled:
            await self._links.claims.run(limit_lock_waits(LOCK_WAIT_S))
        await self._restamp()
        await self._declare()
        if not self._links.claims.pooled:
            await self._links.claims.run(limit_lock_waits(0))
        await self._control.run_once()  # what is paused is not started by a worker that comes new

    async def _restamp(self) -> None:
        for line in self.lines:
            count = await self._links.claims.run(restamp(self._schema, line.queue))
            if count:
                logger.warning(
                    "%d jobs of %r came from another cluster, by a restore perhaps, and were stamped anew: "
                    "nothing is left to do",
                    count,
                    line.queue,
                    extra={"queue": line.queue},
                )

    async def _declare(self) -> None:
        """Write what the code declares. Only once: a later identity has the code of this start."""
        await self._links.claims.run(declare_redaction(self._schema, self._redacted))
        worker_id = self.lease.identities[0].id
        for name in await self._links.claims.run(declare(self._schema, worker_id, self._schedules)):
            logger.warning(
                "schedule %r was added by a client, and is declared in the code now, which counts: "
                "have nobody add it any more",
                name,
                extra={"schedule": name},
            )

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

    async def stop_now(self) -> None:
        """Stop without a grace: cancel the handlers and give back what was not started."""
        await self.stop_claiming()
        self.executor.stop_all(StopReason.SHUTDOWN)
        await self.executor.ended(time.monotonic() + CANCEL_S)

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
        told = _task(self._notices.told())
        await asyncio.wait([told], timeout=_LAST_NOTICES_S)
        goodbye = self._leader.goodbye
        ending = (flush, told, *self.tasks, *([goodbye] if goodbye else []))
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
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
            self.counters.completed, self.counters.outcomes["handed back"], left, unrecorded, self.is_clogged
        )

    def stats(self) -> WorkerStats:
        """Return what the parts are doing and have done."""
        counters = self.counters
        outcomes = counters.outcomes
        return WorkerStats(
            slots=sum(line.slots for line in self.lines),
            busy=sum(line.running for line in self.lines),
            prefetched=sum(len(line.held) for line in self.lines),
            stuck=sum(line.stuck for line in self.lines),
            claimed=counters.claimed,
            completed=outcomes["completed"],
            retried=outcomes["retried"],
            snoozed=outcomes["snoozed"],
            discarded=outcomes["discarded"],
            cancelled=outcomes["cancelled"],
            parked=outcomes["parked"],
            handed_back=outcomes["handed back"],
            lost_leases=counters.lost_leases,
            uncertain=counters.uncertain,
            unrecorded=self.completer.pending,
            promoted=counters.promoted,
            rescued=counters.rescued,
            removed=counters.removed,
            renewals=self.lease.renewals,
            fetch=counters.fetch.latency(),
            completion=counters.completion.latency(),
            loop_lag=counters.loop.latency(),
            listening=self.listener.hears,
            is_leader=self._leader.term is not None,
            term=self._leader.term.number if self._leader.term else None,
        )

    def health(self) -> WorkerHealth:
        """Return whether the loop lives and jobs are claimed. From any thread."""
        if not self._is_started:
            return WorkerHealth(alive=True, ready=False, problems=("it is starting",))
        problems: list[str] = []
        blocked_s = time.monotonic() - self.executor.last_tick
        alive = blocked_s < _ALIVE_HEARTBEATS * self.config.heartbeat.total_seconds()
        if not alive:
            problems.append(f"its event loop has been blocked for {blocked_s:.0f} s")
        if self.lease.current is None:
            problems.append("its lease is not fresh")
        if self.counters.is_database_away or not self.lease.is_renewing:
            problems.append("the database is away")
        if self.is_clogged or self.executor.is_clogged:
            problems.append("handlers that do not stop hold its slots")
        return WorkerHealth(alive, ready=not problems, problems=tuple(problems))

    # What the parts tell each other

    def _outcome(self, execution: Execution, outcome: Completion | Settlement) -> None:
        if execution.claimed.crashes and self.executor.suspects.discard(execution):
            self.fetcher.note_news(None)  # for other suspects may have been left alone
        self.completer.add(execution.identity.id, outcome)

    def _recorded(self, worker_id: int, outcomes: Sequence[Outcome]) -> None:
        fences = [(outcome.job_id, outcome.attempt) for outcome in outcomes]
        for identity in self.lease.identities:
            if identity.id == worker_id:
                identity.known.difference_update(fences)
        if self.executor.started is not None:
            self.executor.started.discard(fences)

    def _room(self) -> None:
        self.fetcher.note_room()

    def _news(self, queue: str | None) -> None:
        self.fetcher.note_news(queue)

    def _lease_ended(self, identity: Identity) -> None:
        for execution in list(self.executor.running):
            if execution.identity is identity:
                self.executor.stop(execution, StopReason.LEASE)

    def _discarded(self, settlements: Sequence[Settlement]) -> None:
        self._notices.tell([settlement.job_id for settlement in settlements])

    def _rescued_discards(self, rescued: Sequence[Rescued]) -> None:
        self._notices.tell([job.job_id for job in rescued])


def _task(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(coroutine)
