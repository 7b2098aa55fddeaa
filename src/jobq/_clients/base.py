"""What the two clients have in common: their settings, and the making of rows.

Nothing here waits for anything, so it stands once for both colours.
"""

from __future__ import annotations

import functools
import json
import os
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar, Unpack, cast

import psycopg.conninfo

from jobq._errors import ClientClosed, ConfigError, MiddlewareError
from jobq._kinds.jobtype import JobRow, JobType, NewJob, prepare, prepare_many
from jobq._kinds.options import DEFAULTS, resolve
from jobq._limits import MAX_ARGUMENTS_BYTES
from jobq._messages import shown
from jobq._operation import Operation, atomic
from jobq._postgres import connection_string
from jobq._statements.enqueue import Template, enqueue_atomically, enqueue_many, enqueue_one
from jobq._statements.schema import validate_schema_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    from jobq._kinds.middleware import EnqueueMiddleware
    from jobq._kinds.options import JobOptions, JobTypeOptions, ResolvedOptions
    from jobq._statements.backpressure import Backpressure
    from jobq._types import Enqueued

P = TypeVar("P", bound="AsyncConnectionPool[Any] | ConnectionPool[Any]")
O = TypeVar("O")  # noqa: E741 - the pool of one's own
C = TypeVar("C")
T = TypeVar("T")
_F = TypeVar("_F", bound="Callable[..., object]")
_M = TypeVar("_M", bound="EnqueueMiddleware")

# A call is one message to the server, and each column of it one text or array: all end at 1 GiB. This many
# characters stay below it whatever they are (4 bytes of UTF-8, or a backslash before each).
MAX_CALL_CHARACTERS: Final = 250_000_000
MAX_CALL_JOBS: Final = 1_000_000

_MAX_CURSORS: Final = 100
_MAX_TEMPLATES: Final = 1_000  # kinds: a program declares dozens, but nothing hinders it

# What a pool passes to `connect` beside the connection string's own parameters.
_NO_CONNINFO: Final = frozenset(
    {"autocommit", "row_factory", "cursor_factory", "context", "prepare_threshold"}
)


class AsyncRun(Protocol):
    """How a namespace of the async client runs an operation."""

    def __call__(self, operation: Operation[T], /) -> Awaitable[T]: ...


class SyncRun(Protocol):
    """How a namespace of the sync client runs an operation."""

    def __call__(self, operation: Operation[T], /) -> T: ...


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checked_dsn(dsn: str) -> str:
    dsn = str.__str__(dsn)
    connection_string(dsn, name="jobq")  # a mistake shows now
    return dsn


def _iterable(jobs: object) -> Iterator[NewJob]:
    try:
        return iter(cast("Iterable[NewJob]", jobs))
    except TypeError:
        raise ConfigError(f"enqueue_many: an iterable of NewJob, not {shown(jobs)}") from None


def documented_by(other: object) -> Callable[[_F], _F]:
    """Take over a docstring, so that what both clients say stands once."""

    def document(function: _F) -> _F:
        function.__doc__ = other.__doc__
        return function

    return document


def _backpressure(schema: str, max_ready: int | Mapping[str, int]) -> Backpressure:
    from jobq._statements.backpressure import Backpressure  # noqa: PLC0415 - few clients have a limit

    return Backpressure(schema, max_ready)


class ClientBase(Generic[P, O, C]):
    """What both clients are made with.

    A client is made anywhere and opened in the process that uses it. After a fork the child has
    to open one of its own. Enqueues with ``tx=`` use no connection of the client's, so for them
    it need not be open.

    Args:
        database: a connection string, or a psycopg pool of the client's own colour, which stays
            yours to open and close.
        schema: the schema that holds the queue, 1 to 63 bytes.
        pool_min_size, pool_max_size: connections that the client's own pool keeps, and makes.
        args_limit_bytes: the most that one job's arguments may have, in bytes of UTF-8 JSON.
        notify: whether enqueues wake waiting workers; without, they find jobs by polling.
        listen_dsn: a direct connection string for a worker's listener, where ``database`` goes
            through a transaction pooler.
        max_ready: the most ready jobs that this client's enqueues may leave in any queue, or in each
            queue that a mapping names, 1 to 1,000,000; what would go beyond raises
            :class:`jobq.QueueFull`. It is soft: each queue is counted about once a second, and until then
            that answer stands, with what this client has enqueued since. Jobs that are due later are
            neither counted nor refused.
        defaults: options that hold for every job where neither the call nor the kind says
            otherwise; see :class:`jobq.JobTypeOptions`.

    Raises:
        ConfigError: something of it cannot work; the message names it.

    Attributes:
        schema, notify, listen_dsn: as they were given.
    """

    _pool_class: ClassVar[type[Any]]

    def __init__(
        self,
        database: str | P,
        *,
        schema: str = "jobq",
        pool_min_size: int = 1,
        pool_max_size: int = 10,
        args_limit_bytes: int = MAX_ARGUMENTS_BYTES,
        notify: bool = True,
        listen_dsn: str | None = None,
        max_ready: int | Mapping[str, int] | None = None,
        **defaults: Unpack[JobTypeOptions],
    ) -> None:
        if not (_is_whole(args_limit_bytes) and 1 <= args_limit_bytes <= MAX_CALL_CHARACTERS):
            raise ConfigError(f"args_limit_bytes={shown(args_limit_bytes)}: 1 to {MAX_CALL_CHARACTERS:,}")
        whole = _is_whole(pool_min_size) and _is_whole(pool_max_size)
        if not whole or not 0 <= pool_min_size <= pool_max_size or pool_max_size < 1:
            raise ConfigError(
                f"pool_min_size={shown(pool_min_size)}, pool_max_size={shown(pool_max_size)}:"
                " 0 ≤ min ≤ max, and 1 ≤ max"
            )
        if not isinstance(cast("object", notify), bool):
            raise ConfigError(f"notify={shown(notify)}: True or False")
        if not isinstance(cast("object", listen_dsn), str | None):
            raise ConfigError(f"listen_dsn={shown(listen_dsn)}: a connection string, or None")
        if not isinstance(database, str | self._pool_class):
            raise ConfigError(
                f"{type(self).__name__} takes a connection string or a {self._pool_class.__name__}, "
                f"not {type(database).__module__}.{type(database).__qualname__}"
            )
        self.schema: Final = validate_schema_name(schema)
        self.notify: Final = notify
        self.listen_dsn: Final = None if listen_dsn is None else _checked_dsn(listen_dsn)
        self._database: Final = _checked_dsn(database) if isinstance(database, str) else database
        self._given: Final[P | None] = None if isinstance(database, str) else database
        self._sizes: Final = (pool_min_size, pool_max_size)
        self._args_limit: Final = args_limit_bytes
        self._defaults: Final[ResolvedOptions] = resolve(defaults, DEFAULTS)
        self._backpressure = None if max_ready is None else _backpressure(self.schema, max_ready)
        self._middleware: tuple[EnqueueMiddleware, ...] = ()
        self._own: O | None = None
        # One cursor a connection of a pool that was given, by the connection's identity. A cursor
        # remembers how to send and read what it has sent and read before, which saves half a call.
        self._cursors: Final[dict[int, tuple[object, C]]] = {}
        self._opened_by: int | None = None
        self._templates: Final[dict[JobType[Any], Template]] = {}

    @functools.cached_property
    def conninfo(self) -> str:
        """The connection string, for connections of one's own.

        Raises:
            ConfigError: the client was given a pool that computes its connection string.
        """
        if isinstance(self._database, str):
            return self._database
        pool: Any = self._database
        conninfo, kwargs = pool.conninfo, pool.kwargs
        if not isinstance(conninfo, str) or not isinstance(kwargs, dict | None):
            raise ConfigError(
                "a pool that computes its connection string serves no worker: give the client the string"
            )
        given = cast("dict[str, Any]", kwargs or {})
        parts = {name: value for name, value in given.items() if name not in _NO_CONNINFO}
        return psycopg.conninfo.make_conninfo(conninfo, **parts)

    def _check_open(self) -> None:
        if self._opened_by != os.getpid():
            raise self._not_open()

    def _not_open(self) -> ClientClosed:
        name = type(self).__name__
        if self._opened_by is None:
            block = "async with" if name.startswith("Async") else "with"
            return ClientClosed(f"the {name} is not open: use it in an `{block}` block, or call open()")
        return ClientClosed(
            f"this {name} was opened by process {self._opened_by}, and this is process {os.getpid()}: after "
            "a fork, open a client of its own in the child; connections cannot be shared"
        )

    def _cursor_of(self, connection: object, make: Callable[[Any], C]) -> C:
        """Return a connection's cursor; as many are kept as there can be connections, which come and go."""
        known = self._cursors.get(id(connection))
        if known is not None and known[0] is connection:
            return known[1]
        if len(self._cursors) >= _MAX_CURSORS:
            self._cursors.clear()
        cursor = make(connection)
        self._cursors[id(connection)] = (connection, cursor)
        return cursor

    def use(self, middleware: _M) -> _M:
        """Have a middleware see, and change, every job that this client enqueues from now on.

        What is used first is asked first. It may decorate a function, too. Jobs of schedules and of the
        SQL function are not enqueued by a client, and do not pass through it.

        Args:
            middleware: see :class:`jobq.EnqueueMiddleware`.

        Returns:
            The same.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(middleware):
            raise ConfigError(f"use: takes an enqueue middleware, a function, not {shown(middleware)}")
        self._middleware = (*self._middleware, middleware)
        return middleware

    def _changed(self, job: NewJob, *, item: int | None = None) -> NewJob:
        """Return a new job as the middleware wants it, which sees the queue and meta that it would have."""
        from jobq._kinds.middleware import change  # noqa: PLC0415 - few clients have one

        if not isinstance(cast("object", job), NewJob):
            return job  # refused later, by its place
        if "meta" not in job.options and (meta := self._meta_of(job.kind)):
            job = job.replace(meta=meta)
        if "queue" not in job.options:
            queue = job.kind.options.get("queue") if isinstance(job.kind, JobType) else None
            job = job.replace(queue=queue or self._defaults.queue)
        try:
            return change(self._middleware, job)
        except MiddlewareError as error:
            if item is None:
                raise
            raise MiddlewareError(f"item {item}: {error}") from error.__cause__

    def _meta_of(self, kind: JobType[Any] | str) -> Mapping[str, object] | None:
        if isinstance(kind, JobType) and "meta" in kind.options:
            return kind.options["meta"]
        text = self._defaults.meta
        return None if text is None else cast("dict[str, object]", json.loads(text))

    def _enqueue(
        self, kind: JobType[Any] | str, args: object, options: JobOptions, *, own: bool
    ) -> Operation[Enqueued]:
        """Check everything and return the operation; ``own``: in a transaction of its own, if need be."""
        if isinstance(kind, JobType) and not (options or self._middleware or self._backpressure):
            template = self._templates.get(kind) or self._template(kind)
            if template is not None:
                return template.enqueue(kind.encode(args, self._args_limit))
        if self._middleware:
            job = self._changed(NewJob(cast("str", kind), args, **options))
            kind, args, options = job.kind, job.args, job.options
        given = cast("dict[str, object]", options)
        row = prepare(kind, args, given, self._defaults, self._args_limit)
        operation = enqueue_one(self.schema, row, notify=self.notify)
        if own and row.options.unique_key is not None:
            # Several statements may follow with a unique key: together, and each with its own snapshot.
            operation = atomic(operation)
        if self._backpressure is None:
            return operation
        return self._backpressure.guarded([row.options], operation)

    def _template(self, kind: JobType[Any]) -> Template | None:
        """Return what makes a kind's jobs that are enqueued without options, unless each is different."""
        options = kind.resolved(self._defaults)
        if options.delay_s is not None or options.unique is not None or options.unique_key is not None:
            return None
        if len(self._templates) >= _MAX_TEMPLATES:
            self._templates.clear()
        template = Template(self.schema, JobRow(kind.kind, "", options), notify=self.notify)
        self._templates[kind] = template
        return template

    def _enqueue_many(self, jobs: Iterable[NewJob], *, own: bool) -> Operation[list[Enqueued]]:
        first = list(islice(_iterable(jobs), MAX_CALL_JOBS + 1))
        if len(first) > MAX_CALL_JOBS:
            raise ConfigError(
                f"enqueue_many: more than {MAX_CALL_JOBS:,} jobs in one call; make several calls, in one "
                "transaction if they belong together"
            )
        if self._middleware:
            first = [self._changed(job, item=item) for item, job in enumerate(first)]
        columns = prepare_many(first, self._defaults, self._args_limit)
        options = columns.various_options
        beside = sum(
            len(one.meta or "") + len(one.tags or "") + len(one.unique_name or "") for one in options
        )
        size = sum(map(len, columns.args)) + beside * (len(first) if len(options) == 1 else 1)
        if size > MAX_CALL_CHARACTERS:
            raise ConfigError(
                f"enqueue_many: {size:,} characters of arguments, meta, tags and keys in one call, at most "
                f"{MAX_CALL_CHARACTERS:,}: make several calls, in one transaction if they belong together"
            )
        unique = any(one.unique_key is not None for one in options)
        make = enqueue_atomically if own and unique else enqueue_many
        operation = make(self.schema, columns, notify=self.notify)
        if self._backpressure is None:
            return operation
        return self._backpressure.guarded(columns.options, operation)
