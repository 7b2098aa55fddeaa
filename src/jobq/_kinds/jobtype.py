"""Kinds of job, and jobs to be: what a program that only enqueues needs to know."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, Unpack, cast, overload

from jobq._documents import read_document
from jobq._errors import ArgumentsEncodeError, ConfigError, DuplicateKind
from jobq._json.arguments import ArgumentsDecoder, Upgrade, check_arguments, describe_type
from jobq._json.encode import encode
from jobq._json.flat import flat_writer
from jobq._kinds.options import (
    DEFAULTS,
    JobOptions,
    JobTypeOptions,
    ResolvedOptions,
    check_kind,
    declared_changes,
    resolve,
)
from jobq._kinds.unique import Unique
from jobq._limits import MAX_ARGUMENTS_BYTES
from jobq._messages import shown
from jobq._redaction import DEFAULT, Redaction, check_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from types import UnionType

    from jobq._kinds.backoff import Backoff

# Invariant on purpose: a kind that takes EmailArgs accepts neither more nor less than that, or
# `enqueue(send_email, OtherArgs(1))` would pass as a kind of both.
A = TypeVar("A")


class JobType(Generic[A]):
    """A kind of job and the type of its arguments: declared once, known to editors everywhere.

    Args:
        kind: what the database keeps, 1 to 128 bytes of UTF-8 without control characters.
        args_type: a dataclass, TypedDict, ``dict``, msgspec or pydantic model …; ``None`` for a
            kind without arguments.
        aliases: further kinds that the same handler runs, so that a kind can be renamed.
        redact: names of fields, at any depth of arguments, meta and result, that are hidden in output.
            Handlers get them all the same. Names such as ``password`` and ``api_token`` need not be given.
        upgrade: turns stored arguments, old or already new, into new ones before they are decoded.
        backoff: how long a job waits after a failure; the default policy where it is not given.
        options: what holds for all jobs of the kind, see :class:`JobTypeOptions`.

    Raises:
        ConfigError: something of it cannot work; the message names it.

    Attributes:
        kind, args_type, aliases, redact, upgrade, options: as they were given.
        redaction: what is hidden of its jobs, fields of telling names included.
        policy: the backoff as it was given, ``None`` where it was not.
        decode: turns a stored document into the arguments; raises ``ArgumentsDecodeError``.
    """

    @overload
    def __init__(
        self: JobType[None],
        kind: str,
        args_type: None,
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        **options: Unpack[JobTypeOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        kind: str,
        args_type: type[A],
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        **options: Unpack[JobTypeOptions],
    ) -> None: ...
    @overload  # no checker can yet tell the type that `Created | Deleted` stands for
    def __init__(
        self: JobType[Any],
        kind: str,
        args_type: UnionType,
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        **options: Unpack[JobTypeOptions],
    ) -> None: ...
    def __init__(
        self,
        kind: str,
        args_type: object,
        *,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        upgrade: Upgrade | None = None,
        backoff: Backoff | None = None,
        **options: Unpack[JobTypeOptions],
    ) -> None:
        self.kind: Final = check_kind(kind)
        self.args_type: Final = args_type
        self.aliases: Final = check_aliases(self.kind, aliases)
        self.redact: Final = check_fields(redact)
        self.redaction: Final = Redaction(self.redact)
        self.upgrade: Final = _check_callable("upgrade", upgrade)
        self.policy: Final = _check_callable("backoff", backoff)
        self.options: Final = options
        self._decoder: Final = ArgumentsDecoder[A](self.kind, args_type, upgrade, self.redaction)
        self.decode: Final[Callable[[bytes | str], A]] = self._decoder.decode
        self._flat: Final = flat_writer(args_type)
        self._changes: Final = declared_changes(options)
        unique = options.get("unique")
        if isinstance(unique, Unique):
            unique.check_type(self.kind, args_type)
        self._resolved: tuple[ResolvedOptions, ResolvedOptions] = (
            DEFAULTS,
            DEFAULTS._replace(**self._changes),
        )

    @functools.cached_property
    def backoff(self) -> Callable[[int], timedelta]:
        """From the number of failures to the wait; always answers with one that can be stored."""
        # a program that only enqueues asks for none, and would load it at each start
        from jobq._kinds.backoff import DEFAULT_BACKOFF, guarded  # noqa: PLC0415

        return guarded(self.policy or DEFAULT_BACKOFF)

    def encode(self, args: A, max_bytes: int = MAX_ARGUMENTS_BYTES) -> str:
        """Return the arguments as one JSON document.

        Args:
            args: the arguments; a subclass of the declared type will do.
            max_bytes: the most that the document may have, in bytes of UTF-8.

        Raises:
            ArgumentsEncodeError: they, or a member of them, are of another type than declared, or hold
                what does not come back.
        """
        if self._flat is not None and (text := self._flat.one(args, max_bytes)) is not None:
            return text
        if cast("object", type(args)) is not self.args_type:
            check_arguments(self.kind, self.args_type, args)
        text = encode(args, max_bytes=max_bytes)
        self._decoder.check(text)
        return text

    def encode_many(self, args: Sequence[A], max_bytes: int) -> list[str] | None:
        """Return what `encode` does for each; ``None`` when they have to be looked at one by one."""
        return None if self._flat is None else self._flat.many(args, max_bytes)

    def resolved(self, defaults: ResolvedOptions) -> ResolvedOptions:
        """Return the options of a job whose enqueue gives none, with a client's defaults."""
        known, resolved = self._resolved
        if known is not defaults:
            resolved = defaults._replace(**self._changes)
            self._resolved = (defaults, resolved)  # one pair, so that threads cannot mix two
        return resolved

    def prepare(self) -> None:
        """Build the decoder now, so that a type that cannot be decoded shows at start.

        Raises:
            ConfigError: it cannot be decoded.
        """
        self._decoder.prepare()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind!r}, {describe_type(self.args_type)})"


_SAME: Final = object()  # "as it is", where None is a value


class NewJob:
    """One job to be made: the item of ``enqueue_many``. Read-only.

    Its arguments are checked against its kind where it is made. It has no type parameter, for a
    checker would take ``Any`` for it from the list that it stands in, and check nothing.

    Args:
        kind: its kind; a bare string is the untyped way.
        args: its arguments.
        options: see :class:`JobOptions`.

    Attributes:
        kind, args, options: as they were given.
    """

    __slots__ = ("args", "kind", "options")

    @overload
    def __init__(self, kind: JobType[A], args: A, **options: Unpack[JobOptions]) -> None: ...
    @overload
    def __init__(self, kind: str, args: object, **options: Unpack[JobOptions]) -> None: ...
    def __init__(self, kind: JobType[Any] | str, args: object, **options: Unpack[JobOptions]) -> None:
        self.kind: Final = kind
        self.args: Final = args
        self.options: Final = options

    def replace(self, *, args: object = _SAME, **options: Unpack[JobOptions]) -> NewJob:
        """Return another new job with other arguments, or with options in the place of its own.

        Args:
            args: its arguments; the same by default.
            options: those that change; an option that is given replaces the whole of it.
        """
        given: Any = {**self.options, **options}
        kind: Any = self.kind
        return NewJob(kind, self.args if args is _SAME else args, **given)

    def __repr__(self) -> str:
        name = self.kind.kind if isinstance(self.kind, JobType) else self.kind
        redaction = _redaction_of(self.kind)
        options = "".join(
            f", {option}={_shown(redaction, value) if option == 'meta' else shown(value)}"
            for option, value in self.options.items()
        )
        return f"NewJob({shown(name)}, {_shown(redaction, self.args)}{options})"


class JobRow(NamedTuple):
    """One job, ready to be stored.

    Attributes:
        kind: its name.
        args: the encoded JSON document, without a bare line break.
        options: every one of them.
    """

    kind: str
    args: str
    options: ResolvedOptions


class JobColumns(NamedTuple):
    """Many jobs, ready to be stored.

    Attributes:
        kinds, args, options: what `JobRow` has, of each.
    """

    kinds: Sequence[str]
    args: Sequence[str]
    options: Sequence[ResolvedOptions]

    @classmethod
    def of(cls, rows: Sequence[JobRow]) -> JobColumns:
        """Return the columns of some rows."""
        return cls._make(zip(*rows, strict=True)) if rows else cls((), (), ())

    @property
    def various_options(self) -> Sequence[ResolvedOptions]:
        """The options of each, and once where all have the same: mostly one object, which is soon seen."""
        first = self.options[:1]
        return first if first and self.options.count(first[0]) == len(self.options) else self.options


def prepare(
    kind: JobType[Any] | str,
    args: object,
    options: Mapping[str, object],
    defaults: ResolvedOptions,
    max_bytes: int = MAX_ARGUMENTS_BYTES,
) -> JobRow:
    """Return a job as it is stored.

    Args:
        kind: a declared kind, or a bare string.
        args: its arguments.
        options: those that the call gave.
        defaults: what holds where neither the call nor the kind says otherwise.
        max_bytes: the most that the arguments may have, in bytes of UTF-8.

    Raises:
        ConfigError: the kind or an option cannot be what it is.
        ArgumentsEncodeError: the arguments or ``meta`` cannot be stored.
    """
    args_type: object = Any
    if isinstance(kind, JobType):
        name, text, resolved = kind.kind, kind.encode(args, max_bytes), kind.resolved(defaults)
        args_type = kind.args_type
    else:
        name, text, resolved = check_kind(kind), encode(args, max_bytes=max_bytes), defaults
    if options:
        resolved = resolve(options, resolved)
    if resolved.unique is not None:
        key, readable = resolved.unique.compute(name, text, resolved.queue, args_type, _redaction_of(kind))
        resolved = resolved._replace(unique_key=key, unique_name=readable)
    return JobRow(name, text, resolved)


def prepare_many(
    jobs: Sequence[NewJob], defaults: ResolvedOptions, max_bytes: int = MAX_ARGUMENTS_BYTES
) -> JobColumns:
    """Return what `prepare` does for each of many jobs; errors name the item that they are about."""
    alike = _prepare_alike(jobs, defaults, max_bytes)
    if alike is not None:
        return alike
    rows: list[JobRow] = []
    for job in jobs:
        if not isinstance(cast("object", job), NewJob):
            raise ConfigError(f"item {len(rows)}: a NewJob, not an object of {type(job).__qualname__}")
        try:
            rows.append(prepare(job.kind, job.args, job.options, defaults, max_bytes))
        except ArgumentsEncodeError as error:
            raise error.at(len(rows)) from error
        except ConfigError as error:
            raise ConfigError(f"item {len(rows)}: {error}") from error
    return JobColumns.of(rows)


def _prepare_alike(jobs: Sequence[NewJob], defaults: ResolvedOptions, max_bytes: int) -> JobColumns | None:
    """Prepare what bulk calls mostly are: one kind, flat arguments, no options. ``None`` for all others.

    It takes 0.5 µs a job; one by one it takes 1.9.
    """
    kind = jobs[0].kind if jobs and type(jobs[0]) is NewJob else None
    if not isinstance(kind, JobType) or not all(
        type(job) is NewJob and job.kind is kind and not job.options for job in jobs
    ):
        return None
    options = kind.resolved(defaults)
    if options.unique is not None:
        return None  # a key for each
    texts = kind.encode_many([job.args for job in jobs], max_bytes)
    return None if texts is None else JobColumns([kind.kind] * len(jobs), texts, [options] * len(jobs))


def check_aliases(kind: str, aliases: Sequence[str]) -> tuple[str, ...]:
    """Return aliases as they are kept.

    Raises:
        ConfigError: they are no sequence of names.
        DuplicateKind: they repeat one another, or the kind.
    """
    if isinstance(aliases, str) or not isinstance(cast("object", aliases), Iterable):
        raise ConfigError(f"aliases={shown(aliases)}: a sequence of kinds, such as a list")
    checked = tuple(check_kind(alias) for alias in aliases)
    if len({kind, *checked}) <= len(checked):
        raise DuplicateKind(f"aliases={list(checked)}: the kind {kind!r} and its aliases repeat one another")
    return checked


def _redaction_of(kind: JobType[Any] | str) -> Redaction:
    return kind.redaction if isinstance(kind, JobType) else DEFAULT


def _shown(redaction: Redaction, document: object) -> str:
    """Return a document as a message shows it; of one that cannot be stored, what it is."""
    try:
        return shown(redaction.document(read_document(encode(document))))
    except Exception:  # noqa: BLE001 - an object of the user's own
        return f"<{type(document).__name__}>"


_C = TypeVar("_C")


def _check_callable(name: str, value: _C) -> _C:
    if value is not None and not callable(value):
        raise ConfigError(f"{name}={shown(value)}: a callable, or None for none")
    return value
