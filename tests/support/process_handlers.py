"""Handlers that run in processes: found there by module and name, so they stand in a module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import jobq

jobs = jobq.Jobs()


@dataclass(frozen=True)
class Work:
    what: str
    path: str = ""


class Unpicklable(Exception):
    def __init__(self, *, needed: str) -> None:
        super().__init__(needed)
        self.handle = sys.stderr  # no file can be pickled


@jobs.handler(
    "in_process", run_in="process", store_result=True, max_attempts=1, timeout=timedelta(seconds=60)
)
def in_process(job: jobq.Job, args: Work) -> object:  # noqa: C901, PLR0912 - a list of misdeeds
    match args.what:
        case "pid":
            return os.getpid()
        case "raise":
            raise ValueError("from over there")
        case "unpicklable":
            raise Unpicklable(needed="x")
        case "permanent":
            raise jobq.Permanent("over")
        case "snooze":
            raise jobq.Snooze(timedelta(hours=1))
        case "retry":
            raise jobq.Retry("busy", after=timedelta(hours=1))
        case "cancel":
            raise jobq.Cancel("unwanted")
        case "exit":
            os._exit(7)
        case "daemon":
            if os.fork() == 0:
                os.setsid()
                Path(args.path).write_text(str(os.getpid()))
                time.sleep(30)
                os._exit(0)
            while not Path(args.path).exists():
                time.sleep(0.01)
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "system-exit":
            raise SystemExit(3)
        case "never":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(args.path).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        case "clean-up":
            Path(args.path).write_text("running")
            try:
                time.sleep(600)
            finally:
                Path(args.path).write_text("cleaned")
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(args.path).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        case _:
            raise AssertionError(args.what)
    return None


@jobs.handler("quotes", run_in="process")
def quotes(job: jobq.Job, args: dict[str, str]) -> None:
    raise ValueError(f"cannot log in with {args['password']}")
