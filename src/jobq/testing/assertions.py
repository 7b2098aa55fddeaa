"""What was enqueued, and what was not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, cast, overload

from jobq._clients.adapters import async_executor, sync_executor
from jobq._clients.client import AsyncClient, Client
from jobq._documents import read_document
from jobq._errors import ArgumentsEncodeError, ConfigError
from jobq._json.encode import encode
from jobq._kinds.jobtype import JobType
from jobq._kinds.options import check_kind
from jobq._messages import shown
from jobq._operation import Call, Operation, in_schema, run, run_async
from jobq._statements.operate import get_job

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from jobq._types import JobInfo

_NOTHING: Final = object()
_Answer: TypeAlias = "list[JobInfo] | str"

_FIND: Final = """
select id, queue, args::text from {schema}.jobs where kind::text = $1::text order by id
"""
_KINDS: Final = "select kind, queue, args::text from {schema}.jobs order by id limit 20"


class _Wanted(NamedTuple):
    kind: str
    args: object
    queue: str | None
    times: int | None
    is_part: bool

    def matches(self, row: Sequence[Any]) -> bool:
        if self.queue is not None and row[1] != self.queue:
            return False
        if self.args is _NOTHING:
            return True
        stored = read_document(row[2])
        given: object = self.args
        if self.is_part and isinstance(given, dict) and isinstance(stored, dict):
            wanted, found = cast("dict[str, object]", given), cast("dict[str, object]", stored)
            return all(name in found and found[name] == value for name, value in wanted.items())
        return stored == self.args


@overload
def assert_enqueued(
    where: AsyncClient, kind: JobType[Any] | str, *, args: object = ..., queue: str | None = ...,
    count: int | None = ..., schema: str = ...,
) -> Awaitable[list[JobInfo]]: ...  # fmt: skip
@overload
def assert_enqueued(
    where: Client, kind: JobType[Any] | str, *, args: object = ..., queue: str | None = ...,
    count: int | None = ..., schema: str = ...,
) -> list[JobInfo]: ...  # fmt: skip
@overload
def assert_enqueued(
    where: object, kind: JobType[Any] | str, *, args: object = ..., queue: str | None = ...,
    count: int | None = ..., schema: str = ...,
) -> Any: ...  # fmt: skip
def assert_enqueued(
    where: object,
    kind: JobType[Any] | str,
    *,
    args: object = _NOTHING,
    queue: str | None = None,
    count: int | None = None,
    schema: str = "jobq",
) -> Any:
    """Assert that jobs of a kind were enqueued, whatever has become of them since.

    Args:
        where: a client, or a connection of yours, such as the one whose transaction is still open
            (any that ``tx=`` takes). With an async one the call is awaited.
        kind: a declared kind, a handler or a name.
        args: the arguments: a whole value has to be equal, a dict has to be contained.
        queue: the queue that they stand in.
        count: exactly so many; one or more by default.
        schema: the queue's schema, where ``where`` is a connection.

    Returns:
        The jobs that match, the oldest first.

    Raises:
        AssertionError: it is not so; the message lists what was enqueued.
        ConfigError: no job can be what is asked for.
    """
    __tracebackhide__ = True  # a failure is shown where the test asserts
    if count is not None and (not isinstance(cast("object", count), int) or count < 0):
        raise ConfigError(f"assert_enqueued: count={shown(count)}: a number of jobs, or None")
    if where is None:
        raise ConfigError("assert_enqueued: where=None: a client, or a connection that tx= takes")
    wanted = _Wanted(_name(kind), _plain(kind, args), queue, count, _is_part(args))
    return _ask(where, schema, functools.partial(_find, wanted=wanted))


def assert_not_enqueued(
    where: object,
    kind: JobType[Any] | str,
    *,
    args: object = _NOTHING,
    queue: str | None = None,
    schema: str = "jobq",
) -> Any:
    """Assert that no such job was enqueued; see :func:`assert_enqueued`."""
    __tracebackhide__ = True
    return assert_enqueued(where, kind, args=args, queue=queue, count=0, schema=schema)


def _ask(where: object, schema: str, make: Callable[[str], Operation[_Answer]]) -> Any:
    __tracebackhide__ = True
    if isinstance(where, AsyncClient):
        return _judge_async(where._run(make(where.schema)))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    if isinstance(where, Client):
        return _judge(where._run(make(where.schema)))  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    if _is_async(where):
        return _judge_async(run_async(make(schema), async_executor(where)))
    return _judge(run(make(schema), sync_executor(where)))


def _judge(answer: _Answer) -> list[JobInfo]:
    """Raise a complaint here and not within the operation, whose frames are no use to a reader."""
    __tracebackhide__ = True
    if isinstance(answer, str):
        raise AssertionError(answer)  # noqa: TRY004 - what an assertion raises
    return answer


async def _judge_async(asking: Awaitable[_Answer]) -> list[JobInfo]:
    __tracebackhide__ = True
    return _judge(await asking)


def _is_async(where: object) -> bool:
    method = getattr(where, "execute", None)
    return inspect.iscoroutinefunction(method)


def _find(schema: str, *, wanted: _Wanted) -> Operation[_Answer]:
    """Return the jobs that match, or the complaint that they are not as they should be."""
    rows = yield Call(in_schema(_FIND, schema), (wanted.kind,))
    found = [row for row in rows if wanted.matches(row)]
    if (len(found) != wanted.times) if wanted.times is not None else not found:
        everything = yield Call(in_schema(_KINDS, schema))
        return _complaint(wanted, len(found), everything)
    infos: list[JobInfo] = []
    for row in found:
        info = yield from get_job(schema, row[0])
        infos += [info]
    return infos


def _complaint(wanted: _Wanted, found: int, everything: Sequence[Sequence[Any]]) -> str:
    how_many = "at least one job" if wanted.times is None else f"{wanted.times} jobs"
    args = "" if wanted.args is _NOTHING else f" with arguments {encode(wanted.args)}"
    queue = "" if wanted.queue is None else f" in queue {wanted.queue!r}"
    lines = [f"  {kind} in {name}: {text[:200]}" for kind, name, text in everything]
    listed = "\n".join(lines) or "  nothing at all"
    return f"wanted {how_many} of kind {wanted.kind!r}{args}{queue}, found {found}. Enqueued were:\n{listed}"


def _name(kind: JobType[Any] | str) -> str:
    return kind.kind if isinstance(kind, JobType) else check_kind(kind)


def _is_part(args: object) -> bool:
    return isinstance(args, Mapping)


def _plain(kind: JobType[Any] | str, args: object) -> object:
    """Return arguments as the JSON values that are stored."""
    if args is _NOTHING:
        return args
    try:
        text = encode(args) if _is_part(args) or isinstance(kind, str) else kind.encode(args)
        return read_document(text)
    except ArgumentsEncodeError as error:
        raise ConfigError(f"assert_enqueued: args cannot be arguments of {_name(kind)!r}: {error}") from error
