"""A scratch server, pinned with what is measured on it, and fresh databases in it."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg

import jobq
from jobq._bench.cores import Pin, cores_of, others_than, pinned, preferred, repin
from jobq._bench.hands import Hand, hired
from jobq._bench.meter import Meter, Reading, cpu_between, filesystem_of
from jobq._bench.result import Cost
from jobq.embedded import Databases, EmbeddedPostgres

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

T = TypeVar("T")

# What differs from PostgreSQL's own defaults, and why: memory so that the figures are not those of
# a cold cache, WAL so that no checkpoint falls into one run and not into its yardstick's.
SERVER_SETTINGS: Final[Mapping[str, str]] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "30min",
}
_STATED: Final = (*SERVER_SETTINGS, "full_page_writes", "wal_level", "autovacuum", "server_version")
_TEMPLATE: Final = "bench_template"
_IN_MEMORY: Final = {"tmpfs", "ramfs"}


class Size(enum.StrEnum):
    """How much of it to run: all, under 30 s a bench, or just enough to see that it works."""

    FULL = "full"
    QUICK = "quick"
    TINY = "tiny"


class BenchError(Exception):
    """A bench cannot run here, or what it ran did not do its work."""


@dataclass(frozen=True, slots=True)
class Window:
    """What happened between two readings of the server.

    Attributes:
        seconds: how long it was.
        server_cpu_s, wal_bytes: what the server spent in it.
        client_cpu_s: what the measured processes spent in it.
    """

    seconds: float
    server_cpu_s: float | None
    client_cpu_s: float | None
    wal_bytes: int | None

    @classmethod
    def between(cls, before: Reading, after: Reading, client_cpu_s: float | None = None) -> Window:
        """Return the window between two readings."""
        server_cpu_s = cpu_between(before.server_cpu_s, after.server_cpu_s)
        seconds = after.at_s - before.at_s
        return cls(seconds, server_cpu_s, client_cpu_s, after.wal_bytes - before.wal_bytes)

    def cost(self, jobs: int) -> Cost:
        """Return what each of so many jobs cost."""
        return Cost(
            None if self.server_cpu_s is None else self.server_cpu_s / jobs * 1e6,
            None if self.client_cpu_s is None else self.client_cpu_s / jobs * 1e6,
            None if self.wal_bytes is None else self.wal_bytes / jobs,
        )

    def busy_share(self) -> float | None:
        """Return CPU time used to time passed; on one core, what lacks to 1 was waited or others'."""
        if self.server_cpu_s is None or self.client_cpu_s is None:
            return None
        return (self.server_cpu_s + self.client_cpu_s) / self.seconds


@dataclass(frozen=True, slots=True)
class Database:
    """A fresh, migrated database."""

    name: str
    dsn: str

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Open a connection in autocommit; the caller closes it."""
        return psycopg.connect(self.dsn, autocommit=True)


class Lab:
    """Everything a bench needs; made by `open_lab`.

    Attributes:
        cores: those that the server and the hands share, ``None`` for all.
        size: how much to run.
        meter: reads the server.
    """

    def __init__(
        self,
        server: EmbeddedPostgres,
        meter: Meter,
        cores: list[int] | None,
        size: Size,
        placement: Mapping[str, object],
    ) -> None:
        self.cores = cores
        self.size: Final = size
        self.meter: Final = meter
        self._server = server
        self._databases = Databases(server.dsn())
        self._databases.create(_TEMPLATE)
        jobq.migrate(server.dsn(_TEMPLATE))
        self._stated = {**self._read_settings(), **placement}

    def close(self) -> None:
        """Let go of the server."""
        self._databases.close()

    def pick(self, *, full: T, quick: T, tiny: T) -> T:
        """Return what fits the size asked for."""
        return {Size.FULL: full, Size.QUICK: quick, Size.TINY: tiny}[self.size]

    @contextlib.contextmanager
    def database(self, *, migrated: bool = True) -> Generator[Database]:
        """Make a database, and drop it with whoever is still connected."""
        name = self._databases.create(template=_TEMPLATE if migrated else None)
        try:
            yield Database(name, self._server.dsn(name))
        finally:
            self._databases.drop(name)

    @contextlib.contextmanager
    def hands(self, count: int) -> Generator[list[Hand]]:
        """Start processes to measure, pinned with the server."""
        with hired(count, self.cores) as hands:
            yield hands

    @property
    def folder(self) -> Path:
        """Where the server's data are, and other servers' may be."""
        return self._server.data_dir.parent

    @contextlib.contextmanager
    def on_two_cores(self) -> Generator[None]:
        """Let the server, and hands that start meanwhile, use two cores instead of one.

        Raises:
            BenchError: the lab is not on one core, or there is no second one.
        """
        if self.cores is None or len(self.cores) != 1:
            raise BenchError("this lab has more than one core already")
        # the bench itself has moved to what was left
        two = sorted({*self.cores, *os.sched_getaffinity(0)})[:2]
        if len(two) < 2:
            raise BenchError("there is no second core")
        one, self.cores = self.cores, two
        repin(self.meter.postmaster_pid, two)
        try:
            yield
        finally:
            self.cores = one
            repin(self.meter.postmaster_pid, one)

    def settings(self, **more: object) -> dict[str, object]:
        """Return everything that a figure depends on, with what a bench adds."""
        return {**self._stated, **more}

    def _read_settings(self) -> dict[str, object]:
        with psycopg.connect(self._server.dsn()) as connection:
            rows = connection.execute(
                "select name, current_setting(name) from pg_settings where name = any(%s)", [list(_STATED)]
            ).fetchall()
        stated: dict[str, object] = dict(sorted(rows))
        for name in ("fsync", "synchronous_commit"):
            if stated[name] != "on":
                raise BenchError(f"{name} is {stated[name]}: no figure without it counts")
        return stated | {
            "jobq": jobq.__version__,
            "python": platform.python_version(),
            "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
            "event_loop": "uvloop" if has_uvloop() else "asyncio",
            "cores": len(self.cores) if self.cores else os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),  # of the minute before: who else was there
            "transport": "unix socket",
            "filesystem": filesystem_of(self._server.data_dir),
            "size": str(self.size),
        }


def has_uvloop() -> bool:
    """Whether uvloop is installed; then workers are measured on it."""
    return importlib.util.find_spec("uvloop") is not None


@contextlib.contextmanager
def open_lab(pin: Pin, size: Size, bin_dir: Path | None = None, niceness: int = 0) -> Generator[Lab]:
    """Start a server for a bench, pinned; stop and remove it at the end.

    Args:
        pin: which cores.
        size: how much to run.
        bin_dir: PostgreSQL's programs; ``None`` for those that `EmbeddedPostgres` finds.
        niceness: priority of the server and of what is measured, below 0 to go before others.

    Raises:
        CannotPin: there are not enough cores, or this user may not have that priority.
        jobq.embedded.EmbeddedError: no server can be run here.
    """
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder_on_disk())
        server = EmbeddedPostgres(folder, bin_dir, SERVER_SETTINGS)
        stack.callback(server.close)
        cores = cores_of(pin)
        with pinned(cores), preferred([os.getpid()], niceness):
            server.start()  # all its processes descend from the one that inherits both
        assert server.pid is not None
        stack.enter_context(pinned(others_than(cores)))  # the bench itself stays out of the way
        stack.enter_context(preferred([os.getpid(), server.pid], niceness))
        meter = stack.enter_context(Meter(server.dsn(), server.pid))
        lab = Lab(server, meter, cores, size, {"pin": str(pin), "nice": niceness})
        stack.callback(lab.close)
        yield lab


@contextlib.contextmanager
def _folder_on_disk() -> Generator[Path | None]:
    """Yield where fsync means something; ``None`` when that is so of the server's own choice."""
    elsewhere = Path("/var/tmp")
    if filesystem_of(Path(tempfile.gettempdir())) not in _IN_MEMORY or not elsewhere.is_dir():
        yield None  # a temporary folder that is swept away even when this process is killed
        return
    folder = Path(tempfile.mkdtemp(prefix="jobq-bench-", dir=elsewhere))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
