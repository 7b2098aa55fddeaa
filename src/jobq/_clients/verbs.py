"""The operations behind what operators ask, loaded when the first of them is wanted.

Most programs that have a client only enqueue; with all of these, `jobq.Client` took 1.4 times as much to
import as psycopg, which it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobq._statements.bulk import delete_job, move_job, reschedule_job
    from jobq._statements.cancel import cancel_job
    from jobq._statements.filter import list_jobs
    from jobq._statements.operate import get_job, job_errors, retry_job
    from jobq._statements.operator_log import read_log
    from jobq._statements.stats import queue_stats, workers

__all__ = [
    "cancel_job",
    "delete_job",
    "get_job",
    "job_errors",
    "list_jobs",
    "move_job",
    "queue_stats",
    "read_log",
    "reschedule_job",
    "retry_job",
    "workers",
]

_HOMES = {
    "bulk": ("delete_job", "move_job", "reschedule_job"),
    "cancel": ("cancel_job",),
    "filter": ("list_jobs",),
    "operate": ("get_job", "job_errors", "retry_job"),
    "operator_log": ("read_log",),
    "stats": ("queue_stats", "workers"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"jobq._statements.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
