"""``python -m jobq.cli.process FD TABLE``: one worker process, started by a supervisor.

FD is its end of the supervisor's socket, TABLE the memory in which it notes what it has begun (see
`jobq._supervisor.child`): the settings come from there, then the word
``stop``; and when it ends, the supervisor is dead and nobody would restart or stop this process, so it
stops by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from jobq._clients.client import AsyncClient
from jobq._errors import ConfigError, Error
from jobq._supervisor.child import Report
from jobq._worker import Worker
from jobq._worker.exit_codes import EXIT_CONFIG, EXIT_LINGERING, FAST_EXIT_BASE
from jobq._worker.started import StartedJobs
from jobq.cli.application import ApplicationError, load_jobs
from jobq.cli.settings import ProcessSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from jobq._kinds.jobs import Jobs

EXIT_FAILED: Final = 1
_ORPHAN_EXIT_S: Final = 4.0  # beyond the grace: nobody else is there to end a process that hangs

logger = logging.getLogger("jobq.worker")


class SupervisorLink:
    """This end of the supervisor's socket.

    Args:
        descriptor: the inherited file descriptor.
        table: that of the table of started jobs.
    """

    def __init__(self, descriptor: int, table: int) -> None:
        for inherited in (descriptor, table):
            os.set_inheritable(inherited, False)  # noqa: FBT003 - not for what handlers start
        self.started = StartedJobs(table)
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def settings(self) -> ProcessSettings:
        """Read the settings, which are the first line."""
        return ProcessSettings.from_line(self._file.readline())

    def note_worker(self, worker_id: int) -> None:
        """Report a worker id, from any thread."""
        self._send(Report(worker_id=worker_id))

    def note_ending(self, code: int) -> None:
        """Report that the process ends in order now."""
        self._send(Report(ending=code))

    def watch(self, on_stop: Callable[[], None], grace_s: float) -> None:
        """Call ``on_stop``, from a thread, when the supervisor says so or is dead."""
        thread = threading.Thread(
            target=self._watch, args=(on_stop, grace_s), name="jobq-supervisor-link", daemon=True
        )
        thread.start()

    def _watch(self, on_stop: Callable[[], None], grace_s: float) -> None:
        try:
            line = self._file.readline()
        except ConnectionError:
            line = b""
        on_stop()
        if not line:
            logger.warning("the supervisor is gone: this worker stops, too")
        else:
            with contextlib.suppress(ConnectionError):
                self._file.readline()  # returns when the supervisor is dead, which it may be before us
        time.sleep(grace_s + _ORPHAN_EXIT_S)
        logger.critical("not stopped in time, and nobody is there to end this process: it ends itself")
        leave_at_once(EXIT_LINGERING)

    def _send(self, report: Report) -> None:
        with self._lock, contextlib.suppress(ConnectionError):  # it is dead, which _watch notices
            self._socket.sendall(msgspec.json.encode(report) + b"\n")


def leave_at_once(code: int) -> NoReturn:
    """End the process here and now, threads and all."""
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """Run the worker process."""
    # Until the loop has handlers of its own: whoever interrupts the start does not mean the application,
    # which may raise KeyboardInterrupt itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    link = SupervisorLink(int(sys.argv[1]), int(sys.argv[2]))
    settings = link.settings()
    settings.configure_logging()
    code = run(link, settings)
    if code:
        link.note_ending(code)
    sys.exit(code)


def run(link: SupervisorLink, settings: ProcessSettings) -> int:
    """Load the application and run its worker; return the exit code."""
    try:
        jobs = load_jobs(settings.application)
    except (ConfigError, ApplicationError) as error:
        logger.critical("%s", error)
        return EXIT_CONFIG
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_work(link, settings, jobs))
    except ConfigError as error:
        logger.critical("%s", error)
        return EXIT_CONFIG
    except Error as error:
        logger.critical("the worker could not start: %s", error)
        return EXIT_FAILED


def handle_signals(loop: asyncio.AbstractEventLoop, link: SupervisorLink, stop: Callable[[], None]) -> None:
    """Stop at the first SIGTERM or SIGINT; at the second end at once, and say that it is meant.

    The worker's own second signal says nothing, so that its jobs would be taken for suspects.
    """
    seen: list[int] = []

    def on_signal(number: int) -> None:
        seen.append(number)
        if len(seen) == 1:
            stop()
            return
        link.note_ending(FAST_EXIT_BASE + number)
        leave_at_once(FAST_EXIT_BASE + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


async def _work(link: SupervisorLink, settings: ProcessSettings, jobs: Jobs) -> int:
    loop = asyncio.get_running_loop()
    async with AsyncClient(settings.dsn, schema=settings.schema) as client:
        worker = Worker(client, jobs, settings.worker_config())
        worker.on_register = link.note_worker
        worker.ends_process = True
        worker.started = link.started
        stops: list[asyncio.Task[None]] = []

        def stop() -> None:
            stops.append(loop.create_task(worker.stop()))

        def stop_from_thread() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has stopped
                loop.call_soon_threadsafe(stop)

        handle_signals(loop, link, stop)
        link.watch(stop_from_thread, settings.grace_s)
        serve_http(worker, settings)
        try:
            report = await worker.run(handle_signals=False)
        except ConfigError:
            raise  # before anything has started
        # From here on not by returning: the loop's own end would wait for tasks that ignore their
        # cancellation.
        except Error as error:
            logger.critical("the worker failed: %s", error)
            leave_at_once(EXIT_FAILED)
        except Exception:
            logger.exception("the worker failed")
            leave_at_once(EXIT_FAILED)
        if report.left_running:
            link.note_ending(EXIT_LINGERING)
            leave_at_once(EXIT_LINGERING)
    # Before the loop closes: that can wait for ever for what a handler left behind, and only of a
    # process that has announced its end does the supervisor know that it must not.
    link.note_ending(0)
    return 0


def serve_http(worker: Worker, settings: ProcessSettings) -> None:
    """Serve probes and metrics where the settings say so, until the process ends.

    Raises:
        ConfigError: nothing can listen there.
    """
    if settings.http_port is None:
        return
    metrics = None
    if importlib.util.find_spec("prometheus_client") is not None:
        from jobq.integrations.prometheus import metrics_app  # noqa: PLC0415 - where it is installed

        metrics = metrics_app(worker, settings.dsn, schema=settings.schema)
    worker.serve_http(settings.http_port, host=settings.http_host, metrics=metrics)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, where it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop  # noqa: PLC0415 - detected, never required

    return uvloop.new_event_loop


if __name__ == "__main__":
    main()
