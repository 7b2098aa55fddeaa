"""A data folder and what is needed to run a server on it; whether one runs is not its business."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
from typing import IO, TYPE_CHECKING, Final, cast
from urllib.parse import quote

from jobq._embedded.binaries import find_binaries
from jobq._embedded.errors import EmbeddedError, ServerFailed
from jobq._embedded.folder import give_to, make_private, socket_folder
from jobq._embedded.pidfile import PidFile, read_pid_file
from jobq._embedded.process import choose_identity, run_program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUPERUSER: Final = "jobq"
"""The role that owns an embedded server."""

MIN_MAJOR: Final = 14

_DEFAULT_PORT: Final = 5432  # without TCP it is only a part of the socket's name
_LAST_PORT: Final = 65_535
_CONF: Final = "jobq.conf"
_LOG_MAX_BYTES: Final = 10 << 20
_LOG_TAIL_BYTES: Final = 4 << 10


class Cluster:
    """One server's folder: its binaries, settings, addresses and log.

    Args:
        home: the folder that holds everything.
        bin_dir: see `find_binaries`.
        settings: PostgreSQL's own.
        port: for TCP on 127.0.0.1; ``None`` for none, 0 for a free one.
        keep: whether the data outlives the computer's next crash (it is made with fsync).
    """

    def __init__(
        self, home: Path, bin_dir: Path | None, settings: Mapping[str, str], port: int | None, *, keep: bool
    ) -> None:
        if os.name != "posix":
            raise EmbeddedError("an embedded server needs Linux or macOS; use a PostgreSQL server of yours")
        _check(home, settings, port)
        self.home: Final = home
        self.data: Final = home / "data"
        self.binaries: Final = find_binaries(bin_dir, major=_major_of(self.data))
        if self.binaries.major < MIN_MAJOR:
            raise EmbeddedError(f"PostgreSQL {self.binaries.major} is too old: {MIN_MAJOR} is the least")
        self.identity: Final = choose_identity(self.binaries)
        self._settings: Final = dict(settings)
        self._keep = keep
        self._tcp = port is not None
        self._any_port = port == 0
        self._port = port or (free_port() if self._any_port else _DEFAULT_PORT)
        self._socket_dir: Final = socket_folder(home)

    @property
    def command(self) -> list[str]:
        """The server's command line."""
        return [self.binaries.program("postgres"), "-D", str(self.data)]

    def prepare(self) -> None:
        """Make what is missing, and write the settings of the next start.

        Raises:
            ServerFailed: initdb failed, or a server runs on this folder already.
        """
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EmbeddedError(f"the folder {self.home} cannot be made: {error.strerror}") from error
        running = self.running()
        if running is not None:
            raise ServerFailed(f"a server (process {running.pid}) already runs on {self.home}")
        make_private(self._socket_dir)
        if not self.data.exists():
            self._initdb()
        self._write_settings()
        self._hand_over()

    def tidy(self) -> None:
        """Remove what a stopped server leaves outside its folder."""
        if self.home not in self._socket_dir.parents:
            with contextlib.suppress(OSError):  # it was never made, or holds something of somebody else's
                self._socket_dir.rmdir()

    def running(self) -> PidFile | None:
        """Return what the server that runs on this folder says of itself, if one does."""
        found = read_pid_file(self.data)
        return found if found is not None and found.alive else None

    def take_another_port(self) -> bool:
        """Choose another free port; False when the caller insisted on the one that is taken."""
        if self._any_port:
            self._port = free_port()
        return self._any_port

    def dsn(self, dbname: str, user: str, *, tcp: bool) -> str:
        """Return the address of a database."""
        name = quote(dbname, safe="")
        if tcp:
            if not self._tcp:
                raise EmbeddedError("this server has no TCP port: give it one with EmbeddedPostgres(port=0)")
            password = quote(self._password().read_text().strip(), safe="")
            return f"postgresql://{quote(user, safe='')}:{password}@127.0.0.1:{self._port}/{name}"
        # libpq and asyncpg take a socket's folder as the parameter `host`
        host = quote(str(self._socket_dir), safe="/")
        return f"postgresql://{quote(user, safe='')}@/{name}?host={host}&port={self._port}"

    def open_log(self) -> IO[bytes]:
        """Open the server's log for appending; a log that has grown large starts anew."""
        path = self.home / "server.log"
        too_large = path.exists() and path.stat().st_size > _LOG_MAX_BYTES
        return path.open("wb" if too_large else "ab")

    def log_tail(self, start: int = 0) -> str:
        """Return the last lines of the log, from no earlier than byte ``start``."""
        with (self.home / "server.log").open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(start, end - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip()

    def _initdb(self) -> None:
        # made beside its place and moved there whole: an interrupted initdb leaves no half cluster
        unfinished = self.home / f"data.{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        password = self._password()
        with open(password, "w", opener=_private) as file:
            file.write(secrets.token_urlsafe(24))
        self._hand_over()
        options = [] if self._keep else ["--no-sync"]
        run_program(
            self.identity,
            [
                self.binaries.program("initdb"),
                f"--pgdata={unfinished}",
                f"--username={SUPERUSER}",
                f"--pwfile={password}",
                "--auth-local=trust",  # the socket's folder is private
                "--auth-host=scram-sha-256",  # the port is not
                "--encoding=UTF8",
                "--locale=C",  # the one that every system has
                "--no-instructions",
                *options,
            ],
        )
        with (unfinished / "postgresql.conf").open("a") as conf:
            conf.write(f"\ninclude_if_exists '{_CONF}'\n")
        unfinished.rename(self.data)

    def _write_settings(self) -> None:
        # in a file, not on the command line, so that ALTER SYSTEM can still override them
        settings = {
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self._port),
            "unix_socket_directories": f'"{self._socket_dir}"',
        } | self._settings
        lines = [f"{name} = '{value.replace(chr(39), chr(39) * 2)}'\n" for name, value in settings.items()]
        (self.data / _CONF).write_text("".join(lines))

    def _hand_over(self) -> None:
        if self.identity.owner is not None:
            give_to(self.identity.owner, self.home, self._socket_dir)

    def _password(self) -> Path:
        return self.home / "password"


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _major_of(data: Path) -> int | None:
    """Return the release that made a data folder, ``None`` when there is none."""
    try:
        return int((data / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EmbeddedError(f"the folder {data.parent} cannot be used: {error.strerror}") from error
    except ValueError:
        raise EmbeddedError(f"{data / 'PG_VERSION'} names no release of PostgreSQL") from None


def _check(home: Path, settings: Mapping[str, str], port: int | None) -> None:
    if not str(home).isprintable():  # PostgreSQL keeps the path in files of lines
        raise EmbeddedError(f"{str(home)!r}: a folder's path without control characters, in valid Unicode")
    for name, value in settings.items():
        if not isinstance(cast("object", value), str) or not f"{name}{value}".isprintable():
            raise EmbeddedError(
                f"settings[{name!r}]={value!r}: a string of one line, as postgresql.conf has it"
            )
    whole = isinstance(cast("object", port), int) and not isinstance(port, bool)
    if port is not None and not (whole and 0 <= port <= _LAST_PORT):
        raise EmbeddedError(f"port={port!r}: 1 to {_LAST_PORT}, 0 for a free one, None for none")
