"""A child for supervisor tests: ``fakechild.py FOLDER FD TABLE``. It has no worker, only its manners.

Its settings, from the supervisor, are ``{"dsn": ..., "acts": [...]}``; the n-th process to start plays
the n-th act, and later ones the last. An act's words:

    claim N     claim N jobs of the queue "default" as a worker that is registered and reported
    begin N     note that it has begun the first N of those that it claimed; 0: more than the table holds
    exit N      end with code N, without a word          end N      announce code N, and end with it
    linger N    wait for "stop", then announce code N, and end with it
    spawn       start a process of its own, and print its number
    die         by SIGKILL                               ignore     ignore everything, for ever
    await       wait for "stop" or the supervisor's end, write which to FOLDER/heard, end in order
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from jobq._sessions import SyncSession
from jobq._statements.duties import Registration, register
from jobq._worker.started import ENTRIES, StartedJobs

FOLDER, LINK = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
FILE = LINK.makefile("rb")
STARTED = StartedJobs(int(sys.argv[3]))
CLAIMED: list[int] = []


def tell(**report: int) -> None:
    LINK.sendall(json.dumps(report).encode() + b"\n")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def claim(dsn: str, jobs: int) -> None:
    session = SyncSession.open(dsn, schema="jobq", name="fake child")
    worker_id = secrets.randbits(40)
    me = Registration(worker_id, "fake", "here", os.getpid(), "0", [], [])
    session.run(register("jobq", me, 60.0))
    tell(worker_id=worker_id)
    rows = session.connection.execute(
        "with x as (delete from jobq.ready"
        " where job_id in (select job_id from jobq.ready order by job_id limit %s) returning *)"
        " insert into jobq.running (job_id, worker_id, queue, priority, attempt, failures, crashes)"
        " select job_id, %s, queue, priority, attempt + 1, failures, crashes from x returning job_id",
        [jobs, worker_id],
    )
    CLAIMED.extend(sorted(job_id for (job_id,) in rows))
    session.close()


def act(word: str, number: int, settings: dict[str, Any]) -> None:  # noqa: C901
    if word == "claim":
        claim(settings["dsn"], number)
    elif word == "begin":
        for job_id in CLAIMED[:number] if number else range(1, ENTRIES + 2):
            STARTED.add(job_id, 1)
    elif word == "exit":
        os._exit(number)
    elif word == "end":
        tell(ending=number)
        os._exit(number)
    elif word == "linger":
        say("waiting")
        FILE.readline()
        tell(ending=number)
        os._exit(number)
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "spawn":
        helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        say(f"spawned {helper.pid}")
    elif word == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("ignoring")
        while True:
            time.sleep(60)
    elif word == "await":
        say("waiting")
        heard = FILE.readline().decode().strip() or "end of the supervisor"
        (FOLDER / "heard").write_text(heard)
        try:
            tell(ending=0)
        except BrokenPipeError:
            os._exit(0)


def main() -> NoReturn:
    settings = json.loads(FILE.readline())
    with (FOLDER / "starts").open("a") as starts:
        starts.write(f"{time.monotonic()} {os.getpid()}\n")
    acts = settings["acts"]
    mine = acts[min(len((FOLDER / "starts").read_text().splitlines()), len(acts)) - 1]
    for step in mine.split(", "):
        word, _, number = step.partition(" ")
        act(word, int(number or 0), settings)
    os._exit(0)


main()
