"""What a server spent: CPU of all its processes, WAL bytes, shared-buffer hits.

CPU comes from /proc, so on other systems than Linux it is unknown (``None``). A server's CPU is
that of its postmaster, of the postmaster's living children, and of the children that it has
already buried, which the kernel adds to its ``cutime`` and ``cstime``: a backend or an autovacuum
worker that ended between two readings is counted all the same, and nothing is counted twice.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, LiteralString, Self

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

_PROC: Final = Path("/proc")
_READ_TRIES: Final = 5
_HAS_PROC: Final = sys.platform == "linux"
# Fields of /proc/PID/stat, counted from the one after the command's closing parenthesis.
_PPID, _UTIME, _STIME, _CUTIME, _CSTIME = 1, 11, 12, 13, 14


@dataclass(frozen=True, slots=True)
class Reading:
    """A server's counters at one moment.

    Attributes:
        at_s: the monotonic clock.
        server_cpu_s: CPU seconds of all its processes, ``None`` where /proc does not tell.
        wal_bytes: position in the WAL.
    """

    at_s: float
    server_cpu_s: float | None
    wal_bytes: int


class Meter:
    """Reads one server. A context manager, for it holds a connection.

    Args:
        dsn: of any database of that server, as a superuser.
        postmaster_pid: the server's first process.
    """

    def __init__(self, dsn: str, postmaster_pid: int) -> None:
        self.postmaster_pid: Final = postmaster_pid
        self._connection = psycopg.connect(dsn, autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._connection.close()

    def read(self) -> Reading:
        """Read all counters."""
        wal = self._one("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::int8")
        return Reading(time.monotonic(), server_cpu_s(self.postmaster_pid), wal)

    def buffer_hits(self, database: str) -> int:
        """Return a database's shared-buffer hits, as far as its sessions have reported them.

        A session reports with the first statement that ends a second or more after its last
        report: whoever wants the exact figure lets everything rest that long, and then gives each
        session one more statement.
        """
        return self._one("select blks_hit from pg_stat_database where datname = %s", database)

    def _one(self, sql: LiteralString, *parameters: object) -> int:
        row = self._connection.execute(sql, parameters).fetchone()
        assert row is not None
        return int(row[0])


def server_cpu_s(postmaster_pid: int) -> float | None:
    """Return the CPU seconds that a server's processes have used, ``None`` where /proc is absent."""
    if not _HAS_PROC:
        return None
    total_s = 0.0
    for _ in range(_READ_TRIES):
        buried_s = _cpu_s(_stat(postmaster_pid), _CUTIME, _CSTIME)
        living_s = _cpu_s(_stat(postmaster_pid), _UTIME, _STIME) + sum(_children_cpu_s(postmaster_pid))
        total_s = buried_s + living_s
        if buried_s == _cpu_s(_stat(postmaster_pid), _CUTIME, _CSTIME):
            break  # else one was buried meanwhile, and may be in neither sum or in both
    return total_s


def _children_cpu_s(postmaster_pid: int) -> Iterator[float]:
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            fields = _stat(int(folder.name))
            if fields and int(fields[_PPID]) == postmaster_pid:
                yield _thread_cpu_s(int(folder.name), fields)


def process_cpu_s(pid: int) -> float | None:
    """Return the CPU seconds that a process has used; ``None`` where /proc is absent, 0 once it ended."""
    return _cpu_s(_stat(pid), _UTIME, _STIME) if _HAS_PROC else None


def session_cpu_s(pid: int) -> float | None:
    """Return the CPU seconds that a process of one thread has used, finer than `process_cpu_s`."""
    return _thread_cpu_s(pid, _stat(pid)) if _HAS_PROC else None


def cpu_between(before_s: float | None, after_s: float | None) -> float | None:
    """Return the CPU seconds between two readings, ``None`` when either is unknown."""
    return None if before_s is None or after_s is None else after_s - before_s


def _thread_cpu_s(pid: int, fields: Sequence[str]) -> float:
    """Return what a process of one thread has used: in nanoseconds where the kernel keeps them.

    The ticks of ``stat`` are 10 ms long, which over a dozen processes is much of a short run.
    """
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # not kept here, or it ended just now
        return _cpu_s(fields, _UTIME, _STIME)


def _cpu_s(fields: Sequence[str], *wanted: int) -> float:
    return sum(int(fields[i]) for i in wanted) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _stat(pid: int) -> list[str]:
    """Return the fields after the command's name, none when the process has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended just now
        return []
    return text.rpartition(")")[2].split()


def filesystem_of(path: Path) -> str:
    """Return the type of the file system that a path is on, ``unknown`` where /proc is absent."""
    try:
        mounts = (_PROC / "mounts").read_text().splitlines()
    except OSError:
        return "unknown"
    resolved = path.resolve()
    best, kind = -1, "unknown"
    for line in mounts:
        _, point, of_type, *_ = line.split()
        # mounted later over the same point wins, hence >=
        if resolved.is_relative_to(point) and len(Path(point).parts) >= best:
            best, kind = len(Path(point).parts), of_type
    return kind
