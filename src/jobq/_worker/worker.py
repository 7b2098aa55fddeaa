"""A worker: its parts started, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from jobq._errors import ConfigError
from jobq._kinds.jobs import Jobs
from jobq._limits import MAX_WAIT
from jobq._messages import shown
from jobq._worker.config import WorkerConfig
from jobq._worker.execution import StopReason
from jobq._worker.exit_codes import FAST_EXIT_BASE
from jobq._worker.http import WorkerHttp
from jobq._worker.parts import CANCEL_S, Parts
from jobq._worker.report import WorkerHealth, WorkerReport, WorkerStats
from jobq._worker.signals import SecondSignal, SignalCount, end_process
from jobq._worker.starting import StartAbandonedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from wsgiref.types import WSGIApplication

    from jobq._clients.client import AsyncClient
    from jobq._worker.started import StartedJobs

logger = logging.getLogger("jobq.worker")


class Worker:
    """Runs jobs until it is stopped.

    Args:
        client: an open :class:`jobq.AsyncClient`; the worker makes five connections of its own
            beside the client's pool (claims, outcomes, duties, lease, notifications), and while it
            leads a sixth.
        jobs: the handlers.
        config: see :class:`WorkerConfig`.

    Raises:
        ConfigError: what was given cannot work.

    Attributes:
        on_register: called with each worker id that this process takes, from any thread.
        ends_process: whether the process ends as soon as :meth:`run` has returned, handlers that
            would not stop included. Those that overran their time limit are then recorded as such.
        started: where a supervisor sees which jobs this process has begun; ``None`` without one.
    """

    def __init__(self, client: AsyncClient, jobs: Jobs, config: WorkerConfig | None = None) -> None:
        _check_client(client)
        if not isinstance(cast("object", jobs), Jobs):
            raise ConfigError(f"Worker: jobs={shown(jobs)}: a jobq.Jobs")
        if not isinstance(cast("object", config), WorkerConfig | None):
            raise ConfigError(f"Worker: config={shown(config)}: a jobq.WorkerConfig, or None")
        jobs.prepare()
        for handler in jobs.handlers:
            handler.check_found_by_name()
        self._client = client
        self._jobs = jobs
        self._config = config or WorkerConfig()
        self._stop = asyncio.Event()
        self._stop_grace_s = self._config.grace.total_seconds()
        self._stop_asked_at: float | None = None
        self._ended = asyncio.Event()
        self._is_running = False
        self._parts: Parts | None = None
        self._signals = SignalCount()
        self.on_register: Callable[[int], None] | None = None
        self.ends_process = False
        self.started: StartedJobs | None = None

    async def run(self, *, handle_signals: bool = True) -> WorkerReport:
        """Run until :meth:`stop` is called or the process is told to end, then stop in order.

        Args:
            handle_signals: whether SIGTERM and SIGINT stop it. A second signal ends the process
                at once with code 128 plus the signal's number, also when a handler blocks the event
                loop; its leases run out.

        Returns:
            How it ended.

        Raises:
            Error: it could not start: no database, no schema, or one it cannot serve.
        """
        if self._is_running:
            raise ConfigError("Worker.run: this worker is running already")
        self._is_running = True
        restore = self._handle_signals() if handle_signals else []
        second = SecondSignal([number for number, _ in restore], _end_at_once) if restore else None
        try:
            if self._stop.is_set():
                return WorkerReport(0, 0, (), 0, clogged=False)
            await self._client.check_schema()
            self._parts = Parts(self._client, self._jobs, self._config, self._note_registered)
            if self.started is not None:
                self._parts.executor.report_starts(self.started, self._config.crash_limit)
            return await self._run(self._parts)
        finally:
            self._is_running = False
            self._ended.set()
            if second is not None:
                second.close()
            for number, handler in restore:
                asyncio.get_running_loop().remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    async def stop(self, *, grace: timedelta | None = None) -> None:
        """Stop claiming, let running handlers finish within the grace, and wait for the end of `run`.

        Safe at any time, also before `run` has begun: then `run` returns at once.

        Args:
            grace: instead of the configured one; counted from the first call.

        Raises:
            ConfigError: the grace is no timedelta of 0 to 100 years.
        """
        if grace is not None:
            if not isinstance(cast("object", grace), timedelta) or not timedelta(0) <= grace <= MAX_WAIT:
                raise ConfigError(f"Worker.stop: grace={shown(grace)}: a timedelta from 0 to 100 years")
            self._stop_grace_s = grace.total_seconds()
        self._request_stop()
        if self._is_running:
            await self._ended.wait()

    def stats(self) -> WorkerStats:
        """Return what the worker is doing and has done."""
        return WorkerStats() if self._parts is None else self._parts.stats()

    def health(self) -> WorkerHealth:
        """Return whether the worker lives, and whether it takes jobs. From any thread, at no cost."""
        parts = self._parts
        if parts is None or not self._is_running:
            return WorkerHealth(alive=True, ready=False, problems=("it is not running",))
        health = parts.health()
        if self._stop.is_set():
            return WorkerHealth(health.alive, ready=False, problems=(*health.problems, "it stops"))
        return health

    def serve_http(
        self,
        port: int,
        *,
        host: str = "0.0.0.0",  # noqa: S104 - probes come from outside of a container
        metrics: WSGIApplication | None = None,
    ) -> WorkerHttp:
        """Serve this worker's ``/livez``, ``/readyz`` and ``/metrics``, from threads of their own.

        ``/livez`` fails when the event loop stands still for two heartbeats; the database plays no part
        in it. ``/readyz`` fails while the worker takes no jobs: see :meth:`health`.

        Args:
            port: to listen on, 0 for one that is free.
            host: the address to listen on; all of them by default.
            metrics: a WSGI application that answers ``/metrics``; see ``jobq.integrations.prometheus``.

        Returns:
            The server, with its ``port``; to be closed, or entered by ``with``.

        Raises:
            ConfigError: nothing can listen there.
        """
        return WorkerHttp(self.health, host, port, metrics)

    def _request_stop(self) -> None:
        if self._stop_asked_at is None:
            self._stop_asked_at = time.monotonic()
        self._stop.set()

    def _note_registered(self, worker_id: int) -> None:
        if self.on_register is not None:
            self.on_register(worker_id)

    async def _run(self, parts: Parts) -> WorkerReport:
        try:
            await parts.start(self._stop)
        except StartAbandonedError:
            return WorkerReport(0, 0, (), 0, clogged=False)
        logger.info("worker %s works on %s", parts.name, dict(self._config.queues))
        try:
            await self._until_stop(parts)
            logger.info("worker %s stops: %d handlers run", parts.name, len(parts.executor.running))
            # Side by side: a database that does not answer must not use up the handlers' time.
            await asyncio.gather(parts.stop_claiming(), self._drain(parts))
        except BaseException:
            # Our task was cancelled, or a part has failed: nobody would watch the handlers any more.
            await parts.stop_now()
            raise
        finally:
            report = await parts.finish(ends_process=self.ends_process)
        logger.info("worker %s has stopped: %s", parts.name, report)
        return report

    async def _until_stop(self, parts: Parts) -> None:
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
                        "handlers that do not stop hold as many slots again as a queue has: the worker "
                        "stops. Have them look at job.cancelled, or run in processes"
                    )
                    self._request_stop()
        finally:
            stop.cancel()

    async def _drain(self, parts: Parts) -> None:
        """Let handlers finish within the grace, then cancel them and let them end."""
        executor = parts.executor
        asked_at = self._stop_asked_at or time.monotonic()
        await executor.ended(asked_at + self._stop_grace_s, but_stuck=True)
        executor.stop_all(StopReason.SHUTDOWN)
        cancel_s = min(self._config.cancel_grace.total_seconds(), CANCEL_S)
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
        count = self._signals.note()
        if count == 1:
            logger.info("signal %d: the worker stops in order; a second one ends it at once", number)
            self._request_stop()
        elif count > 1:  # where somebody has taken the bytes from `SecondSignal`
            _end_at_once(number)


def _end_at_once(number: int) -> None:
    end_process(
        FAST_EXIT_BASE + number,
        logging.WARNING,
        "second signal: the process ends now; its jobs are taken back when its lease ends",
    )


def _check_client(client: object) -> None:
    name = type(client).__name__
    if name == "Client":
        raise ConfigError("Worker: the worker is asyncio; pass a jobq.AsyncClient instead of jobq.Client")
    if not hasattr(client, "check_schema"):
        raise ConfigError(f"Worker: client must be a jobq.AsyncClient, not {name}")
