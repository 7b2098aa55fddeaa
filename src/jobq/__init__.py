"""jobq: background jobs kept in PostgreSQL.

A job that was committed runs, at least once, whatever dies. See README for the whole picture::

    jobs = jobq.Jobs()

    @jobs.handler("send_email")
    async def send_email(job: jobq.Job, args: EmailArgs) -> None: ...

    async with jobq.AsyncClient(dsn) as client:
        await client.enqueue(send_email, EmailArgs("user@example.com"))
        await jobq.Worker(client, jobs).run()

Each name below is loaded when it is first used, so that importing jobq to declare kinds loads no
database driver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobq._backoff import Backoff, ConstantBackoff, ExponentialBackoff, PolynomialBackoff
    from jobq._bulk import BulkConflict, BulkCount, BulkResult
    from jobq._cancel import Cancellation
    from jobq._client import AsyncClient, Client
    from jobq._errors import (
        ArgumentsDecodeError,
        ArgumentsEncodeError,
        ArgumentsError,
        Cancel,
        ClientClosed,
        ConfigError,
        DatabaseError,
        DatabaseUnavailable,
        DuplicateKind,
        Error,
        JobConflict,
        JobNotFound,
        MiddlewareError,
        PeriodicConflict,
        PeriodicNotFound,
        Permanent,
        ProcessFailure,
        QueueFull,
        Retry,
        SchemaError,
        SchemaMissing,
        SchemaOutdated,
        SchemaTooNew,
        Signal,
        Snooze,
        TransactionError,
        UniqueConflict,
    )
    from jobq._filter import JobFilter, JobPage
    from jobq._jobs import Handler, Jobs
    from jobq._jobtype import JobType, NewJob
    from jobq._logging import JobContextFilter, current_job
    from jobq._middleware import CallNext, EnqueueMiddleware, RunMiddleware, Settled, WorkerObserver
    from jobq._migrate import migrate
    from jobq._operator_log import OperatorAction
    from jobq._options import JobOptions, JobTypeOptions
    from jobq._pauses import Pause
    from jobq._periodic_operate import PeriodicInfo
    from jobq._retention import Retention
    from jobq._schedule import PeriodicOptions
    from jobq._stats import QueueStats, WorkerInfo
    from jobq._types import AttemptError, Enqueued, Job, JobInfo, JobState
    from jobq._unique import Unique
    from jobq._worker import Latency, Worker, WorkerConfig, WorkerHealth, WorkerReport, WorkerStats

__version__ = "0.1.0"

__all__ = [
    "ArgumentsDecodeError",
    "ArgumentsEncodeError",
    "ArgumentsError",
    "AsyncClient",
    "AttemptError",
    "Backoff",
    "BulkConflict",
    "BulkCount",
    "BulkResult",
    "CallNext",
    "Cancel",
    "Cancellation",
    "Client",
    "ClientClosed",
    "ConfigError",
    "ConstantBackoff",
    "DatabaseError",
    "DatabaseUnavailable",
    "DuplicateKind",
    "EnqueueMiddleware",
    "Enqueued",
    "Error",
    "ExponentialBackoff",
    "Handler",
    "Job",
    "JobConflict",
    "JobContextFilter",
    "JobFilter",
    "JobInfo",
    "JobNotFound",
    "JobOptions",
    "JobPage",
    "JobState",
    "JobType",
    "JobTypeOptions",
    "Jobs",
    "Latency",
    "MiddlewareError",
    "NewJob",
    "OperatorAction",
    "Pause",
    "PeriodicConflict",
    "PeriodicInfo",
    "PeriodicNotFound",
    "PeriodicOptions",
    "Permanent",
    "PolynomialBackoff",
    "ProcessFailure",
    "QueueFull",
    "QueueStats",
    "Retention",
    "Retry",
    "RunMiddleware",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Settled",
    "Signal",
    "Snooze",
    "TransactionError",
    "Unique",
    "UniqueConflict",
    "Worker",
    "WorkerConfig",
    "WorkerHealth",
    "WorkerInfo",
    "WorkerObserver",
    "WorkerReport",
    "WorkerStats",
    "__version__",
    "current_job",
    "migrate",
]

_HOMES = {
    "_backoff": ("Backoff", "ConstantBackoff", "ExponentialBackoff", "PolynomialBackoff"),
    "_bulk": ("BulkConflict", "BulkCount", "BulkResult"),
    "_cancel": ("Cancellation",),
    "_client": ("AsyncClient", "Client"),
    "_filter": ("JobFilter", "JobPage"),
    "_jobs": ("Handler", "Jobs"),
    "_jobtype": ("JobType", "NewJob"),
    "_migrate": ("migrate",),
    "_operator_log": ("OperatorAction",),
    "_options": ("JobOptions", "JobTypeOptions"),
    "_pauses": ("Pause",),
    "_periodic_operate": ("PeriodicInfo",),
    "_retention": ("Retention",),
    "_schedule": ("PeriodicOptions",),
    "_stats": ("QueueStats", "WorkerInfo"),
    "_types": ("AttemptError", "Enqueued", "Job", "JobInfo", "JobState"),
    "_unique": ("Unique",),
    "_worker": ("Latency", "Worker", "WorkerConfig", "WorkerHealth", "WorkerReport", "WorkerStats"),
    "_middleware": ("CallNext", "EnqueueMiddleware", "RunMiddleware", "Settled", "WorkerObserver"),
    "_logging": ("JobContextFilter", "current_job"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"jobq.{_HOME_OF.get(name, '_errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
