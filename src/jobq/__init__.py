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
    from jobq._clients.client import AsyncClient, Client
    from jobq._clients.migrate import migrate
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
    from jobq._kinds.backoff import Backoff, ConstantBackoff, ExponentialBackoff, PolynomialBackoff
    from jobq._kinds.jobs import Handler, Jobs
    from jobq._kinds.jobtype import JobType, NewJob
    from jobq._kinds.middleware import CallNext, EnqueueMiddleware, RunMiddleware, Settled, WorkerObserver
    from jobq._kinds.options import JobOptions, JobTypeOptions
    from jobq._kinds.schedule import PeriodicOptions
    from jobq._kinds.unique import Unique
    from jobq._logging import JobContextFilter, current_job
    from jobq._statements.bulk import BulkConflict, BulkCount, BulkResult
    from jobq._statements.cancel import Cancellation
    from jobq._statements.filter import JobFilter, JobPage
    from jobq._statements.operator_log import OperatorAction
    from jobq._statements.pauses import Pause
    from jobq._statements.periodic_operate import PeriodicInfo
    from jobq._statements.redaction import RedactedField, Redactions
    from jobq._statements.retention import Retention
    from jobq._statements.stats import QueueStats, WorkerInfo
    from jobq._types import AttemptError, Enqueued, Job, JobInfo, JobState
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
    "RedactedField",
    "Redactions",
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
    "_kinds.backoff": ("Backoff", "ConstantBackoff", "ExponentialBackoff", "PolynomialBackoff"),
    "_statements.bulk": ("BulkConflict", "BulkCount", "BulkResult"),
    "_statements.cancel": ("Cancellation",),
    "_clients.client": ("AsyncClient", "Client"),
    "_statements.filter": ("JobFilter", "JobPage"),
    "_kinds.jobs": ("Handler", "Jobs"),
    "_kinds.jobtype": ("JobType", "NewJob"),
    "_clients.migrate": ("migrate",),
    "_statements.operator_log": ("OperatorAction",),
    "_kinds.options": ("JobOptions", "JobTypeOptions"),
    "_statements.pauses": ("Pause",),
    "_statements.periodic_operate": ("PeriodicInfo",),
    "_statements.redaction": ("RedactedField", "Redactions"),
    "_statements.retention": ("Retention",),
    "_kinds.schedule": ("PeriodicOptions",),
    "_statements.stats": ("QueueStats", "WorkerInfo"),
    "_types": ("AttemptError", "Enqueued", "Job", "JobInfo", "JobState"),
    "_kinds.unique": ("Unique",),
    "_worker": ("Latency", "Worker", "WorkerConfig", "WorkerHealth", "WorkerReport", "WorkerStats"),
    "_kinds.middleware": ("CallNext", "EnqueueMiddleware", "RunMiddleware", "Settled", "WorkerObserver"),
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
