"""jobq: background jobs kept in PostgreSQL.

A job that was committed runs, at least once, whatever dies. See README for the whole picture::

    jobs = jobq.Jobs()

    @jobs.handler("send_email")
    async def send_email(job: jobq.Job, args: EmailArgs) -> None: ...

    async with jobq.AsyncClient(dsn) as client:
        await client.enqueue(send_email, EmailArgs("user@example.com"))
        await jobq.Worker(client, jobs).run()
"""

from __future__ import annotations

__version__ = "0.1.0"

from jobq._backoff import Backoff, ConstantBackoff, ExponentialBackoff, PolynomialBackoff
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
    LeaseLost,
    Permanent,
    Retry,
    SchemaError,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
    Signal,
    Snooze,
    TransactionError,
)
from jobq._jobs import Handler, Jobs
from jobq._jobtype import JobType, NewJob
from jobq._migrate import migrate
from jobq._options import JobOptions, JobTypeOptions
from jobq._types import AttemptError, Enqueued, Job, JobInfo, JobState
from jobq._worker import Worker, WorkerConfig, WorkerReport, WorkerStats

__all__ = [
    "ArgumentsDecodeError",
    "ArgumentsEncodeError",
    "ArgumentsError",
    "AsyncClient",
    "AttemptError",
    "Backoff",
    "Cancel",
    "Client",
    "ClientClosed",
    "ConfigError",
    "ConstantBackoff",
    "DatabaseError",
    "DatabaseUnavailable",
    "DuplicateKind",
    "Enqueued",
    "Error",
    "ExponentialBackoff",
    "Handler",
    "Job",
    "JobConflict",
    "JobInfo",
    "JobNotFound",
    "JobOptions",
    "JobState",
    "JobType",
    "JobTypeOptions",
    "Jobs",
    "LeaseLost",
    "NewJob",
    "Permanent",
    "PolynomialBackoff",
    "Retry",
    "SchemaError",
    "SchemaMissing",
    "SchemaOutdated",
    "SchemaTooNew",
    "Signal",
    "Snooze",
    "TransactionError",
    "Worker",
    "WorkerConfig",
    "WorkerReport",
    "WorkerStats",
    "__version__",
    "migrate",
]
