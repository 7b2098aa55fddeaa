"""``python -m jobq.embedded``: a server for development, which stays up until told to stop.

Exit codes: 0 fine; 1 failed; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psycopg

from jobq._embedded.cluster import SUPERUSER, Cluster
from jobq._embedded.databases import Databases
from jobq._embedded.errors import EmbeddedError, ServerFailed
from jobq._embedded.process import spawn_detached
from jobq._embedded.server import POLL_S, START_TIMEOUT_S, STOP_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALWAYS_THERE: Final = "postgres"
_NAME_FILE: Final = "dbname"  # in the server's folder
_MAX_NAME_BYTES: Final = 63  # PostgreSQL cuts what is longer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jobq.embedded", description=__doc__)
    parser.add_argument("command", choices=["start", "stop", "dsn", "psql"])
    parser.add_argument("--dir", type=_folder, default=Path(".db"), help="the folder it keeps (default: .db)")
    parser.add_argument(
        "--dbname",
        type=_database_name,
        help="the database, which start makes when it is not there (default: the one of the last start"
        " with --dbname, else postgres)",
    )
    chosen = parser.parse_args(arguments)
    try:
        cluster = Cluster(chosen.dir.absolute(), None, {}, None, keep=True)
        dbname = chosen.dbname or _remembered(cluster)
        match chosen.command:
            case "start":
                start(cluster)
                make_database(cluster, dbname)
                _remember(cluster, dbname)
            case "stop":
                if not stop(cluster):
                    sys.stderr.write(f"no server runs on {cluster.home}\n")
                cluster.tidy()
            case _:
                _require_running(cluster)
                _require_database(cluster, dbname)
        if chosen.command == "psql":
            psql(cluster, dbname)
    except (EmbeddedError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if chosen.command != "stop":
        sys.stdout.write(cluster.dsn(dbname, SUPERUSER, tcp=False) + "\n")
    return 0


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder, such as .db")
    return Path(text)


def _database_name(text: str) -> str:
    if not text.isprintable() or not 1 <= len(text.encode()) <= _MAX_NAME_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: a name of 1 to {_MAX_NAME_BYTES} bytes, to be printed")
    return text


def _remembered(cluster: Cluster) -> str:
    """Return the database that the last start was told to make."""
    try:
        return (cluster.home / _NAME_FILE).read_text() or _ALWAYS_THERE
    except (FileNotFoundError, UnicodeDecodeError):
        return _ALWAYS_THERE


def _remember(cluster: Cluster, dbname: str) -> None:
    if dbname != _remembered(cluster):
        (cluster.home / _NAME_FILE).write_text(dbname)


def make_database(cluster: Cluster, dbname: str) -> None:
    """Make a database, unless it is there.

    Raises:
        ServerFailed: the server would not make it.
    """
    if _has_database(cluster, dbname):
        return
    try:
        with Databases(_admin_dsn(cluster)) as databases:
            databases.create(dbname)
    except psycopg.errors.DuplicateDatabase:
        return  # somebody was faster
    except psycopg.Error as error:
        raise ServerFailed(f"the database {dbname!r} could not be made: {error}") from error


def _require_database(cluster: Cluster, dbname: str) -> None:
    if not _has_database(cluster, dbname):
        raise ServerFailed(
            f"there is no database {dbname!r}; make it with: python -m jobq.embedded start --dbname …"
        )


def _has_database(cluster: Cluster, dbname: str) -> bool:
    if dbname == _ALWAYS_THERE:
        return True
    try:
        with psycopg.connect(_admin_dsn(cluster), autocommit=True) as connection:
            found = connection.execute("select from pg_database where datname = %s", [dbname])
            return found.fetchone() is not None
    except psycopg.Error as error:
        raise ServerFailed(f"the server does not answer: {error}") from error


def _admin_dsn(cluster: Cluster) -> str:
    return cluster.dsn(_ALWAYS_THERE, SUPERUSER, tcp=False)


def start(cluster: Cluster) -> None:
    """Start a server that outlives this process, unless one runs already.

    Raises:
        ServerFailed: it did not start; with the end of its log.
    """
    if cluster.running() is not None:
        return
    cluster.prepare()
    with cluster.open_log() as log:
        log_start = log.tell()
        spawn_detached(cluster.identity, cluster.command, log)
    deadline = time.monotonic() + START_TIMEOUT_S
    while (said := cluster.running()) is None or not said.ready:
        told = cluster.log_tail(log_start)
        # Not by "FATAL": clients that reconnect meanwhile are told that as well.
        if time.monotonic() > deadline or "database system is shut down" in told:
            raise ServerFailed(f"the server did not start:\n{told}")
        time.sleep(POLL_S)


def stop(cluster: Cluster) -> bool:
    """Stop the folder's server, if one runs, ending all sessions; return whether one did.

    Raises:
        ServerFailed: it did not end in time.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    running = cluster.running()
    if running is not None:
        os.kill(running.pid, signal.SIGINT)
    while running is not None and running.alive:
        if time.monotonic() > deadline:
            raise ServerFailed(f"process {running.pid} did not stop within {STOP_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return running is not None


def psql(cluster: Cluster, dbname: str) -> None:
    """Become psql on the folder's server."""
    program = cluster.binaries.program("psql")
    os.execv(program, [program, cluster.dsn(dbname, SUPERUSER, tcp=False)])  # noqa: S606 - an argument list needs no shell


def _require_running(cluster: Cluster) -> None:
    if cluster.running() is None:
        raise ServerFailed(f"no server runs on {cluster.home}; start one with: python -m jobq.embedded start")
