"""Errors that jobq raises, and signals that a handler raises.

Two trees, because they mean opposite things. An *error* says that something is wrong and is
raised by jobq to its caller. A *signal* is how a handler tells jobq what to do with its job;
jobq catches it and nobody else ever sees it::

    Error                          root of all that jobq raises
    ├── ConfigError                a setting, option or declaration that cannot work (also a ValueError)
    │   └── DuplicateKind          a kind or alias declared twice in one Jobs
    ├── ArgumentsError             a job's document was refused
    │   ├── ArgumentsEncodeError   at enqueue: names the path (also a ValueError)
    │   └── ArgumentsDecodeError   at run: the stored document does not fit the declared type
    ├── SchemaError                the database's schema cannot serve this version of jobq
    │   ├── SchemaMissing          there is none: run the migrations
    │   ├── SchemaOutdated         it is older than this code needs: run the migrations
    │   └── SchemaTooNew           it has moved past this code: upgrade jobq
    ├── TransactionError           ``tx=`` got something that is no connection, or one in a failed transaction
    ├── ClientClosed               the client is not open, or was opened in another process (fork)
    ├── JobNotFound                no job has that id
    ├── JobConflict                the job's state or unique key forbids what was asked
    │   └── UniqueConflict         another job holds the unique key
    ├── PeriodicNotFound           no schedule has that name
    ├── PeriodicConflict           live workers declare the schedule, which forbids what was asked
    ├── QueueFull                  an enqueue into a queue that holds as many ready jobs as the client allows
    ├── MiddlewareError            a middleware failed, or does not do what one has to
    ├── ProcessFailure             how a handler in a process failed, as its run's middleware sees it
    ├── DatabaseUnavailable        the server did not answer in time, or the connection broke
    └── DatabaseError              the server refused a statement; ``__cause__`` has the driver's error

    Signal                         root of what a handler raises
    ├── Permanent(reason)          failed for good: discard, do not retry
    ├── Retry(reason, after=…)     failed: retry at a time of my own choice
    ├── Snooze(delay)              not now: run again later, uses no retry
    └── Cancel(reason)             no longer wanted: cancelled
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

from jobq._messages import shown


class Error(Exception):
    """Root of every error that jobq raises to its caller."""


class ConfigError(Error, ValueError):
    """A setting, option or declaration that cannot work; the message names it and what would."""


class DuplicateKind(ConfigError):
    """A kind, or an alias of one, was declared twice in one :class:`jobq.Jobs`."""


class ArgumentsError(Error):
    """Root of what can be wrong with a job's arguments, meta or result."""


class ArgumentsEncodeError(ArgumentsError, ValueError):
    """A document was refused before it reached the database.

    Attributes:
        path: where the culprit stands, such as ``$.customer.name`` or ``$[3]``.
        reason: what is wrong there.
        index: the item's place in an ``enqueue_many`` call, ``None`` for a single enqueue.
    """

    def __init__(self, path: str, reason: str, *, index: int | None = None) -> None:
        where = f"item {index}: " if index is not None else ""
        super().__init__(f"{where}{path}: {reason}")
        self.path = path
        self.reason = reason
        self.index = index

    def at(self, index: int) -> ArgumentsEncodeError:
        """Return the same error for the item at ``index`` of a bulk call."""
        return ArgumentsEncodeError(self.path, self.reason, index=index)


class ArgumentsDecodeError(ArgumentsError):
    """A stored document does not fit the type that its handler declares."""


class SchemaError(Error):
    """Root of what can be wrong between the database's schema and this version of jobq."""


class SchemaMissing(SchemaError):
    """The database holds no jobq schema under that name."""


class SchemaOutdated(SchemaError):
    """The schema is older than this code needs."""


class SchemaTooNew(SchemaError):
    """The schema has moved past what this code can serve."""


class TransactionError(Error):
    """``tx=`` got an object that is no known connection, or one that cannot take a statement."""


class ClientClosed(Error):
    """The client is not open, or was opened in another process."""


class JobNotFound(Error):
    """No job has the given id."""


class JobConflict(Error):
    """The job's state, or another holder of its unique key, forbids what was asked."""


class UniqueConflict(JobConflict):
    """Another job holds the unique key, of a job to be made (which was to raise then) or to be retried.

    Nothing was made or changed.

    Attributes:
        job_id: the job that holds the key; ``None`` when two items of one call have it.
    """

    def __init__(self, message: str, job_id: int | None) -> None:
        super().__init__(message, job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return str(self.args[0])


class PeriodicNotFound(Error):
    """No schedule has the given name."""


class PeriodicConflict(Error):
    """The schedule is declared in the code of live workers: there, not here, it is changed or removed."""


class QueueFull(Error):
    """A queue holds as many ready jobs as its producers may leave there; nothing was enqueued.

    Attributes:
        queue: which.
        count: how many ready jobs it holds: those that were counted, which ends at the limit, and those
            that this client has enqueued since.
        limit: how many the client's ``max_ready`` allows.
        jobs: how many more the call was to enqueue there.
    """

    def __init__(self, queue: str, count: int, limit: int, jobs: int = 1) -> None:
        more = f", {jobs:,} more were to come" if jobs > 1 else ""
        advice = (
            "enqueue fewer jobs at a time"
            if jobs > limit
            else "enqueue again later, run more workers or slots for it"
        )
        super().__init__(
            f"queue {queue!r} holds {count:,} ready jobs or more{more}, and max_ready allows {limit:,}: "
            f"{advice}, or raise the limit"
        )
        self.queue = queue
        self.count = count
        self.limit = limit
        self.jobs = jobs


class MiddlewareError(Error):
    """A middleware failed, or does not do what one has to; the message names it."""


class ProcessFailure(Error):
    """How a handler in a process of its own failed, for the middleware around its run.

    Exceptions do not all survive the way between processes, so this stands for each of them.

    Attributes:
        type: the exception's qualified name.
        message: its text.
        traceback: its traceback over there.
    """

    def __init__(self, type: str, message: str, traceback: str) -> None:
        super().__init__(f"{type}: {message}")
        self.type = type
        self.message = message
        self.traceback = traceback


class DatabaseUnavailable(Error):
    """The server could not be reached, did not answer in time, or the connection broke."""


class DatabaseError(Error):
    """The server refused a statement; ``__cause__`` holds the driver's error."""


class Signal(Exception):
    """Root of what a handler raises to say what becomes of its job."""


def _check_wait(what: str, wait: object) -> None:
    if not isinstance(wait, timedelta):
        raise ConfigError(f"{what}: a timedelta, not {shown(wait)}")
    if wait < timedelta(0):
        raise ConfigError(f"{what}: a wait is 0 or more, not {shown(wait)}")


class Permanent(Signal):
    """Fail for good: the job is discarded now, whatever retries it has left.

    Args:
        reason: kept as the attempt's error message.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Signal):
    """Fail this attempt and choose when the next one starts.

    It uses one of the job's attempts like any failure; on the last one the job is discarded.

    Args:
        reason: kept as the attempt's error message.
        after: how long to wait, 0 or more; ``None`` takes the backoff policy.
    """

    def __init__(self, reason: str = "", *, after: timedelta | None = None) -> None:
        super().__init__(reason)
        if not isinstance(cast("object", reason), str):
            raise ConfigError(f"Retry({shown(reason)}): the first argument is the reason; say Retry(after=…)")
        if after is not None:
            _check_wait("Retry(after=…)", after)
        self.reason = reason
        self.after = after


class Snooze(Signal):
    """Run again later without counting this run as a failure.

    Args:
        delay: how long to wait, 0 or more.
    """

    def __init__(self, delay: timedelta) -> None:
        _check_wait("Snooze(…)", delay)
        super().__init__(f"snoozed for {delay}")
        self.delay = delay


class Cancel(Signal):
    """End the job as cancelled: it is no longer wanted, and nothing failed.

    Args:
        reason: kept with the finished job.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
