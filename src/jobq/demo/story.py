"""The story: orders come in, workers deliver, one of them is killed, and all is counted at the end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import psycopg

import jobq
from jobq.demo import shop
from jobq.demo.mailserver import MailServer
from jobq.demo.place import Place, find_place
from jobq.demo.screen import Screen
from jobq.demo.tally import Bookkeeper
from jobq.demo.worker import LEASE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from jobq.demo.shop import Order

TIME_LIMIT_S: Final = 150.0
_LOOK_S: Final = 0.1
_STOP_S: Final = 12.0
_LAST_ORDER_S: Final = 5.0  # for the order that is being placed when the shop closes


class DemoFailed(jobq.Error):
    """The demonstration could not be brought to its end."""


def run(dsn: str | None, *, limit: int | None = None, lose: int = 0) -> bool:
    """Run the demonstration, and print it.

    Args:
        dsn: the user's database; ``None`` starts an embedded server.
        limit: only so many of the orders.
        lose: delete so many jobs behind the queue's back, to see that it is noticed.

    Returns:
        Whether every order has its outcome.

    Raises:
        DemoFailed: a worker does not start, or the end does not come.
        DatabaseUnavailable: the user's database cannot be reached.
    """
    orders = shop.read_orders(Path(str(resources.files("jobq.demo") / "orders.csv")))[:limit]
    screen = Screen(len(orders))
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(find_place(dsn))
        screen.say(f"Database: {place.description}.")
        server = stack.enter_context(MailServer())
        screen.say(f"Mail server: 127.0.0.1:{server.port}. Some addresses are busy, some do not exist.")
        client = stack.enter_context(jobq.Client(place.dsn, schema=place.schema))
        client.migrate()
        connection = stack.enter_context(psycopg.connect(place.dsn, autocommit=True))
        connection.execute(shop.CREATE_ORDERS)
        bookkeeper = Bookkeeper(connection, place.schema, server)
        crew = stack.enter_context(Crew(place, server.port))
        started = time.monotonic()
        story = _Story(orders, client, bookkeeper, crew, screen, lose)
        with screen:
            story.tell()
        tally = bookkeeper.tally(orders)
        screen.result(tally, time.monotonic() - started)
    screen.say(place.farewell)
    return tally.lost == 0


class _Story:
    """What happens, in order."""

    def __init__(
        self,
        orders: list[Order],
        client: jobq.Client,
        bookkeeper: Bookkeeper,
        crew: Crew,
        screen: Screen,
        lose: int,
    ) -> None:
        self._orders = orders
        self._client = client
        self._bookkeeper = bookkeeper
        self._crew = crew
        self._screen = screen
        self._lose = lose
        self._stored = 0
        self._is_closed = threading.Event()  # no more orders are taken
        self._failure: BaseException | None = None

    def tell(self) -> None:
        """Tell it to its end."""
        self._screen.say(f"Two worker processes: {self._crew.start()} and {self._crew.start()}.")
        shopping = threading.Thread(target=self._place_orders, daemon=True)
        shopping.start()
        try:
            self._watch(shopping)
        finally:
            self._is_closed.set()
            shopping.join(_LAST_ORDER_S)

    def _watch(self, shopping: threading.Thread) -> None:
        """Show the progress, and see to it that something happens, until every e-mail has its outcome."""
        deadline = time.monotonic() + TIME_LIMIT_S
        accident_is_due = True
        while True:
            time.sleep(_LOOK_S)
            live, total = self._bookkeeper.live()
            self._screen.show(stored=self._stored, done=total - live)
            if self._failure is not None:
                raise DemoFailed(f"an order could not be placed: {self._failure}") from self._failure
            self._crew.check()
            if accident_is_due and total - live >= len(self._orders) // 2:
                accident_is_due = not self._accident()
            if self._lose:
                self._sabotage()
            if not shopping.is_alive() and live == 0:
                return
            if time.monotonic() > deadline:
                raise DemoFailed(
                    f"{live} e-mails have no outcome after {TIME_LIMIT_S:g} s\n{self._crew.log()}"
                )

    def _place_orders(self) -> None:
        try:
            for order in self._orders:
                if self._is_closed.is_set():
                    return
                shop.place_order(self._client, order)
                self._stored += 1
        except Exception as error:  # noqa: BLE001 - told by the main thread
            self._failure = error

    def _accident(self) -> bool:
        """Kill a worker in the middle of its work; return whether that could be done."""
        victim = self._crew.oldest
        if not self._bookkeeper.held_by(victim):
            return False
        self._crew.kill(victim)
        successor = self._crew.start()
        self._screen.say(
            f"kill -9 {victim}: this worker dies in the middle of its work, and worker {successor} starts."
            " The e-mails that it held come back when its lease ends,"
            f" {LEASE.total_seconds():g} s after its last heartbeat (30 s by default)."
        )
        return True

    def _sabotage(self) -> None:
        deleted = self._bookkeeper.delete(self._lose)
        self._lose -= deleted
        if deleted:
            self._screen.say(f"Sabotage: {deleted} jobs are deleted behind the queue's back.")


class Crew:
    """The worker processes.

    Args:
        place: the database.
        smtp_port: where the mail server listens.
    """

    def __init__(self, place: Place, smtp_port: int) -> None:
        self._environment: Mapping[str, str] = {
            **os.environ,
            "DATABASE_URL": place.dsn,
            "JOBQ_SCHEMA": place.schema,
            "SMTP_HOST": "127.0.0.1",
            "SMTP_PORT": str(smtp_port),
        }
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.send_signal(signal.SIGTERM)
        until = time.monotonic() + _STOP_S
        for worker in self._workers.values():
            try:
                worker.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            self._close_input(worker)
        self._log.close()

    @property
    def oldest(self) -> int:
        """The process id of the worker that was started first."""
        return next(iter(self._workers))

    def start(self) -> int:
        """Start one more worker process; return its process id."""
        worker = subprocess.Popen(
            [sys.executable, "-m", "jobq.demo.worker"],
            stdin=subprocess.PIPE,  # its end tells the worker that we are gone
            stdout=self._log,
            stderr=self._log,
            env=self._environment,
            process_group=0,
        )
        self._workers[worker.pid] = worker
        return worker.pid

    def kill(self, pid: int) -> None:
        """Kill a worker as an accident would: no goodbye."""
        worker = self._workers.pop(pid)
        worker.kill()
        worker.wait()
        self._close_input(worker)

    def check(self) -> None:
        """Make sure that every worker runs.

        Raises:
            DemoFailed: one has ended; with what it said.
        """
        for pid, worker in self._workers.items():
            code = worker.poll()
            if code is not None:
                raise DemoFailed(f"worker {pid} ended with code {code}:\n{self.log()}")

    def log(self) -> str:
        """Return the last of what the workers have said."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(0, size - 4000)
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace")

    def _close_input(self, worker: subprocess.Popen[bytes]) -> None:
        if worker.stdin is not None:
            worker.stdin.close()
