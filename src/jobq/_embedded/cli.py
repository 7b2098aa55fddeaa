"""``python -m jobq.embedded``: a server for development, which stays up until told to stop."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jobq._embedded.cluster import SUPERUSER, Cluster
from jobq._embedded.errors import EmbeddedError, ServerFailed
from jobq._embedded.process import spawn_detached
from jobq._embedded.server import POLL_S, START_TIMEOUT_S, STOP_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jobq.embedded", description=__doc__)
    parser.add_argument("command", choices=["start", "stop", "dsn", "psql"])
    parser.add_argument("--dir", type=Path, default=Path(".db"), help="the folder it keeps (default: .db)")
    parser.add_argument("--dbname", default="postgres", help="the database (default: postgres)")
    chosen = parser.parse_args(arguments)
    try:
        cluster = Cluster(chosen.dir.absolute(), None, {}, None, keep=True)
        match chosen.command:
            case "start":
                start(cluster)
            case "stop":
                stop(cluster)
                cluster.tidy()
            case _:
                _require_running(cluster)
        if chosen.command == "psql":
            psql(cluster, chosen.dbname)
    except EmbeddedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if chosen.command != "stop":
        sys.stdout.write(cluster.dsn(chosen.dbname, SUPERUSER, tcp=False) + "\n")
    return 0


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


def stop(cluster: Cluster) -> None:
    """Stop the folder's server, if one runs, ending all sessions.

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


def psql(cluster: Cluster, dbname: str) -> None:
    """Become psql on the folder's server."""
    program = cluster.binaries.program("psql")
    os.execv(program, [program, cluster.dsn(dbname, SUPERUSER, tcp=False)])  # noqa: S606 - an argument list needs no shell


def _require_running(cluster: Cluster) -> None:
    if cluster.running() is None:
        raise ServerFailed(f"no server runs on {cluster.home}; start one with: python -m jobq.embedded start")
