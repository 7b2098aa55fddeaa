"""Handlers of every mode, at module level, for a process is told where to find them."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import jobq

logger = logging.getLogger("shop.handlers")


def behave(args: dict[str, Any]) -> Any:
    """Do what the arguments say: return, fail, or signal."""
    match args.get("do"):
        case "fail":
            message = "the handler fails"
            raise ValueError(message)
        case "permanent":
            raise jobq.Permanent("never")
        case "snooze":
            raise jobq.Snooze(timedelta(hours=1))
        case "cancel":
            raise jobq.Cancel("not wanted")
        case "retry":
            raise jobq.Retry("later", after=timedelta(hours=2))
        case "log":
            logger.warning("a line of %s", "the handler")
    return {"did": args.get("do")}


jobs = jobq.Jobs()


@jobs.handler("async", store_result=True)
async def on_loop(job: jobq.Job, args: dict[str, Any]) -> Any:
    return behave(args)


@jobs.handler("thread", store_result=True)
def in_thread(job: jobq.Job, args: dict[str, Any]) -> Any:
    return behave(args)


@jobs.handler("process", store_result=True, run_in="process")
def in_process(job: jobq.Job, args: dict[str, Any]) -> Any:
    return behave(args)


@jobs.handler("plain process", run_in="process")
def in_process_plainly(job: jobq.Job, args: dict[str, Any]) -> Any:
    return behave(args)


MODES = ("async", "thread", "process")


def fresh_jobs() -> jobq.Jobs:
    """Return a `Jobs` with these handlers, to which a test may add middleware of its own."""
    mine = jobq.Jobs()
    for kind in ("async", "thread", "process", "plain process"):
        handler = jobs.lookup(kind)
        assert handler is not None
        mine._add({kind: handler})
    return mine
