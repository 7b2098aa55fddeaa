"""Handlers and the object that collects them: what a worker runs.

Nothing is global: an application makes a `Jobs`, its modules declare handlers on it (or on one of
their own, which it includes), and a worker is given it.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeAlias, TypeVar, Unpack, cast, overload

from jobq._errors import ConfigError, DuplicateKind
from jobq._json.arguments import describe_type
from jobq._json.encode import encode
from jobq._kinds.jobtype import JobType, check_aliases
from jobq._kinds.schedule import make_schedule
from jobq._kinds.signature import Mode, RunIn, UnresolvedAnnotation, args_type_of, mode_of, name_of
from jobq._limits import MAX_RESULT_BYTES
from jobq._messages import shown
from jobq._redaction import check_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from jobq._json.arguments import Upgrade
    from jobq._kinds.backoff import Backoff
    from jobq._kinds.middleware import RunMiddleware, WorkerObserver
    from jobq._kinds.options import JobTypeOptions
    from jobq._kinds.schedule import PeriodicOptions, Schedule
    from jobq._types import AttemptError, Job

A = TypeVar("A")
R = TypeVar("R")

OnDiscard: TypeAlias = "Callable[[Job, AttemptError], object]"
"""Told of a job that was discarded, and of its last error; what it returns is awaited if it can be."""

_D = TypeVar("_D", bound=OnDiscard)
_M = TypeVar("_M", bound="RunMiddleware")
_O = TypeVar("_O", bound="WorkerObserver")


class Handler(JobType[A], Generic[A, R]):
    """A function that runs jobs of one kind. It is still callable as it was, and is the kind's `JobType`.

    Made by :meth:`Jobs.handler`.

    Attributes:
        fn: the function itself.
        mode: where it runs: ``async`` (the worker's loop), ``thread`` or ``process``.
        store_result: whether its return value is kept with the finished job.
        on_discard: told of its jobs that are discarded, ``None`` for nobody.
        kind, args_type, aliases, redact, redaction, upgrade, options, policy, backoff, decode: see
            :class:`JobType`.
    """

    def __init__(
        self,
        fn: Callable[[Job, A], R],
        job_type: JobType[A],
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        store_result: bool = False,
        run_in: RunIn | None = None,
        on_discard: OnDiscard | None = None,
    ) -> None:
        super().__init__(
            job_type.kind,
            cast("type[A]", job_type.args_type),
            aliases=(*job_type.aliases, *check_aliases(job_type.kind, aliases)),
            redact=(*job_type.redact, *check_fields(redact)),
            upgrade=upgrade or job_type.upgrade,
            backoff=backoff or job_type.policy,
            **job_type.options,
        )
        self.fn: Final = fn
        self.mode: Final[Mode] = mode_of(fn, run_in)
        self.store_result: Final = store_result
        self.on_discard: Final = on_discard
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, job: Job, args: A) -> R:
        """Call the function itself, as a test does."""
        return self.fn(job, args)

    def check_found_by_name(self) -> None:
        """Make sure that a new process finds this handler where its function's name says, if it runs in one.

        Raises:
            ConfigError: something else stands there, such as the function without its decorator.
        """
        if self.mode != "process":
            return
        found: object = sys.modules.get(self.fn.__module__)
        for part in self.fn.__qualname__.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, Handler):
            raise ConfigError(
                f"{self.kind!r}: a new process looks for its handler at {self.fn.__module__}."
                f"{self.fn.__qualname__}, and finds {type(found).__name__} there; keep what the decorator"
                " returns under the function's own name"
            )

    def encode_result(self, result: object) -> str:
        """Return a return value as the JSON document that is stored.

        Raises:
            ArgumentsEncodeError: it holds what does not come back, or has over 64 KiB.
        """
        return encode(result, max_bytes=MAX_RESULT_BYTES, root="result")


class _Implement(Protocol[A]):
    """A decorator for functions that run jobs of a declared kind."""

    def __call__(self, fn: Callable[[Job, A], R], /) -> Handler[A, R]: ...


class _Declare(Protocol):
    """A decorator for functions whose annotation says what they take."""

    def __call__(self, fn: Callable[[Job, A], R], /) -> Handler[A, R]: ...


class Jobs:
    """The handlers of an application, by kind: a plain object, and no registry behind it."""

    def __init__(self) -> None:
        self._by_kind: dict[str, Handler[Any, Any]] = {}
        self._schedules: dict[str, Schedule] = {}
        self._parts: list[Jobs] = []
        self._on_discard: list[OnDiscard] = []
        self._middleware: list[RunMiddleware] = []
        self._observers: list[WorkerObserver] = []
        self._is_included = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Every kind that can be run here, aliases included, in the order of declaration."""
        return tuple(self._by_kind)

    @property
    def handlers(self) -> tuple[Handler[Any, Any], ...]:
        """Every handler, in the order of declaration."""
        return tuple(dict.fromkeys(self._by_kind.values()))

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Every schedule, in the order of declaration."""
        return tuple(self._schedules.values())

    def lookup(self, kind: str) -> Handler[Any, Any] | None:
        """Return what runs a kind, by its name or an alias; ``None`` for an unknown kind."""
        return self._by_kind.get(kind)

    @overload
    def handler(
        self,
        kind: JobType[A],
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        store_result: bool = False,
        run_in: RunIn | None = None,
        on_discard: OnDiscard | None = None,
    ) -> _Implement[A]: ...
    @overload
    def handler(
        self,
        kind: str,
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        store_result: bool = False,
        run_in: RunIn | None = None,
        on_discard: OnDiscard | None = None,
        **options: Unpack[JobTypeOptions],
    ) -> _Declare: ...
    def handler(
        self,
        kind: JobType[Any] | str,
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        store_result: bool = False,
        run_in: RunIn | None = None,
        on_discard: OnDiscard | None = None,
        **options: Unpack[JobTypeOptions],
    ) -> Callable[[Callable[[Job, Any], Any]], Handler[Any, Any]]:
        """Declare the decorated function as what runs jobs of a kind.

        The function takes ``(job, args)``. Its annotation of ``args`` is the kind's type; without
        one, or with ``dict``, it gets plain JSON values.

        Args:
            kind: the kind's name, or its `JobType`; then that has the options, and the
                annotation, where there is one, is the same type.
            aliases: further kinds that it runs, beside those of the `JobType`.
            redact: further fields that are hidden in output, beside those of the `JobType`.
            upgrade: turns stored arguments, old or already new, into new ones before they are decoded.
            backoff: how long a job waits after a failure, instead of the `JobType`'s policy.
            store_result: whether its return value is kept with the finished job, up to 64 KiB of JSON.
            run_in: ``"thread"`` (what a sync function runs in by itself) or ``"process"``, for sync
                functions at module level that keep the CPU busy. An async function runs on the loop.
            on_discard: told of its jobs that are discarded.
            options: what holds for all jobs of the kind, see :class:`JobTypeOptions`.

        Returns:
            A decorator, which returns a :class:`Handler`.

        Raises:
            ConfigError: something of it cannot work; the message names it.
            DuplicateKind: the kind or an alias is declared here already.
        """
        if callable(cast("object", kind)) and not isinstance(cast("object", kind), JobType):
            raise ConfigError(
                f'handler({shown(kind)}): is it written without ()? Write @jobs.handler("kind")'
            )

        def declare(fn: Callable[[Job, Any], Any]) -> Handler[Any, Any]:
            if not callable(fn):
                raise ConfigError(f"handler({shown(kind)}): decorates a function, not {shown(fn)}")
            handler = Handler[Any, Any](
                fn,
                _job_type(kind, fn, options),
                aliases=aliases,
                redact=redact,
                upgrade=upgrade,
                backoff=backoff,
                store_result=store_result,
                run_in=run_in,
                on_discard=on_discard,
            )
            self._add(dict.fromkeys((handler.kind, *handler.aliases), handler))
            return handler

        return declare

    @overload
    def add_periodic(
        self, name: str, kind: JobType[None], args: None = None, **options: Unpack[PeriodicOptions]
    ) -> None: ...
    @overload
    def add_periodic(
        self, name: str, kind: JobType[A], args: A, **options: Unpack[PeriodicOptions]
    ) -> None: ...
    @overload
    def add_periodic(
        self, name: str, kind: str, args: object = None, **options: Unpack[PeriodicOptions]
    ) -> None: ...
    def add_periodic(
        self,
        name: str,
        kind: JobType[Any] | str,
        args: object = None,
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """Declare a schedule: a job of a kind at every tick of a clock, while workers with it run.

        Args:
            name: what it is known by, in the whole schema, 1 to 128 bytes.
            kind: of its jobs: a handler, a declared kind, or a bare string, the untyped way.
            args: of its jobs.
            options: when it ticks (``every`` or ``cron``), what becomes of ticks that were missed, and
                the options of its jobs, see :class:`jobq.PeriodicOptions`.

        Raises:
            ConfigError: something of it cannot work, or a schedule of that name is declared here
                already; the message names it.
        """
        schedule = make_schedule(name, kind, args, cast("dict[str, object]", options))
        self._add_schedules([schedule])

    def on_discard(self, fn: _D) -> _D:
        """Declare the decorated function as told of every job that is discarded here.

        It is called with the job and its last error, for jobs of included `Jobs` and of unknown
        kinds as well, and for jobs whose workers died with them.
        """
        if not callable(fn):
            raise ConfigError(f"on_discard: decorates a function, not {shown(fn)}")
        self._on_discard.append(fn)
        return fn

    def discard_callbacks(self, kind: str | None) -> tuple[OnDiscard, ...]:
        """Return whom to tell of a discarded job: its handler's, its own `Jobs`', then ours."""
        handler = self._by_kind.get(kind) if kind is not None else None
        own = () if handler is None or handler.on_discard is None else (handler.on_discard,)
        return own + self._jobs_callbacks(kind)

    def _jobs_callbacks(self, kind: str | None) -> tuple[OnDiscard, ...]:
        parts = [part for part in self._parts if kind in part._by_kind]  # noqa: SLF001 - of this class
        below = (callback for part in parts for callback in part._jobs_callbacks(kind))  # noqa: SLF001
        return (*below, *self._on_discard)

    def use(self, middleware: _M) -> _M:
        """Have a middleware stand around every run of what is declared here, now or later.

        What is used first stands outermost, and what an including `Jobs` uses outside of that. It may
        decorate a coroutine function, too.

        Args:
            middleware: see :class:`jobq.RunMiddleware`.

        Returns:
            The same.
        """
        if not callable(middleware):
            raise ConfigError(f"use: takes a run middleware, a coroutine function, not {shown(middleware)}")
        self._middleware.append(middleware)
        return middleware

    def observe(self, observer: _O) -> _O:
        """Tell an observer of what workers with this `Jobs` claim and record.

        Args:
            observer: see :class:`jobq.WorkerObserver`.

        Returns:
            The same.
        """
        for name in ("claimed", "settled"):
            if not callable(getattr(observer, name, None)):
                raise ConfigError(f"observe: {shown(observer)} has no method {name!r}")
        self._observers.append(observer)
        return observer

    def middleware_of(self, kind: str) -> tuple[RunMiddleware, ...]:
        """Return what stands around a kind's runs, the outermost first."""
        parts = [part for part in self._parts if kind in part._by_kind]  # noqa: SLF001 - of this class
        return (*self._middleware, *(one for part in parts for one in part.middleware_of(kind)))

    @property
    def observers(self) -> tuple[WorkerObserver, ...]:
        """Every observer, those of included `Jobs` last."""
        return (*self._observers, *(one for part in self._parts for one in part.observers))

    def include(self, other: Jobs) -> None:
        """Take over all handlers and schedules of another `Jobs`. It takes no further ones after that.

        Raises:
            ConfigError: it is this one, or both declare a schedule of one name.
            DuplicateKind: both declare a kind; then nothing is taken over.
        """
        if not isinstance(cast("object", other), Jobs):
            raise ConfigError(f"include: a Jobs, not {shown(other)}")
        if other is self:
            raise ConfigError("include: a Jobs cannot include itself")
        self._check_schedules(other._schedules)
        self._add(other._by_kind)
        self._add_schedules(other.schedules)
        self._parts.append(other)
        other._is_included = True

    def prepare(self) -> None:
        """Build every decoder, so that arguments that cannot be decoded show at a worker's start.

        Raises:
            ConfigError: a kind's arguments cannot be decoded.
        """
        for handler in self.handlers:
            handler.prepare()

    def _add_schedules(self, schedules: Sequence[Schedule]) -> None:
        added = {schedule.name: schedule for schedule in schedules}
        self._check_not_included(added)
        self._check_schedules(added)
        self._schedules.update(added)

    def _check_schedules(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._schedules:
                raise ConfigError(f"schedule {name!r} is declared already")

    def _check_not_included(self, names: Iterable[str]) -> None:
        if self._is_included:
            raise ConfigError(
                f"{', '.join(names)}: this Jobs was included in another one, which would not see it;"
                " declare first, include afterwards"
            )

    def _add(self, handlers: Mapping[str, Handler[Any, Any]]) -> None:
        self._check_not_included(handlers)
        for kind in handlers:
            known = self._by_kind.get(kind)
            if known is not None:
                raise DuplicateKind(f"kind {kind!r} is run by {name_of(known.fn)} already")
        self._by_kind.update(handlers)

    def __repr__(self) -> str:
        return f"Jobs({', '.join(self._by_kind)})"


def _job_type(kind: JobType[Any] | str, fn: Callable[..., object], options: JobTypeOptions) -> JobType[Any]:
    args_type = _annotated(kind, fn)
    if isinstance(kind, str):
        return JobType(kind, cast("type[Any]", args_type), **options)
    if not isinstance(cast("object", kind), JobType):
        raise ConfigError(f"handler({shown(kind)}): a kind's name or its JobType; is it written without ()?")
    if options:
        raise ConfigError(f"{', '.join(options)}: belongs to {kind!r}, which every enqueue sees")
    if args_type is not Any and args_type not in (kind.args_type, kind.args_type or type(None)):
        raise ConfigError(
            f"{name_of(fn)} takes {describe_type(args_type)} and {kind!r} {describe_type(kind.args_type)}"
        )
    return kind


def _annotated(kind: object, fn: Callable[..., object]) -> object:
    try:
        return args_type_of(fn)
    except UnresolvedAnnotation:
        if isinstance(kind, JobType):  # which says it
            return Any
        raise
