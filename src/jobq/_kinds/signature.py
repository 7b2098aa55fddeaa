"""What a handler function says of itself: how it runs, and the type of its arguments."""

from __future__ import annotations

import functools
import inspect
import typing
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from jobq._errors import ConfigError
from jobq._messages import shown

if TYPE_CHECKING:
    from collections.abc import Callable

Mode: TypeAlias = Literal["async", "thread", "process"]

RunIn: TypeAlias = Literal["thread", "process"]


class UnresolvedAnnotation(ConfigError):
    """A handler's annotation names a type that is not there at run time."""


def mode_of(fn: Any, run_in: RunIn | None) -> Mode:
    """Decide where a function runs: async on the worker's loop, others in a thread if not said otherwise.

    Raises:
        ConfigError: it cannot run there.
    """
    name = name_of(fn)
    if inspect.isroutine(fn) or isinstance(fn, functools.partial):
        call: Any = cast("Any", fn)
    else:
        call = type(fn).__call__
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise ConfigError(f"{name}: a generator cannot be a handler; a handler is called once and returns")
    if run_in not in (None, "thread", "process"):
        raise ConfigError(
            f"run_in={shown(run_in)}: 'thread' or 'process', or None for what suits the function"
        )
    if inspect.iscoroutinefunction(call):
        if run_in is not None:
            raise ConfigError(f"run_in={shown(run_in)}: {name} is async and runs on the worker's loop")
        return "async"
    if run_in == "process":
        _check_importable(cast("object", fn))
    return run_in or "thread"


def args_type_of(fn: Callable[..., object]) -> object:
    """Return the type that a handler's second parameter is annotated with, ``Any`` for none.

    Raises:
        ConfigError: the function does not take (job, args), or the annotation does not resolve.
    """
    name = name_of(fn)
    try:
        signature = inspect.signature(fn)
        signature.bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{name}: a handler takes two positional arguments, (job, args): {error}"
        ) from error
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    if len(positional) < 2 or positional[1].annotation is inspect.Parameter.empty:
        return Any
    return _resolve(fn, positional[1])


def name_of(fn: object) -> str:
    """Name a function as messages should."""
    qualname = getattr(fn, "__qualname__", None)
    return f"{getattr(fn, '__module__', '')}.{qualname}" if qualname else repr(fn)


def _resolve(fn: Callable[..., object], parameter: inspect.Parameter) -> object:
    # Only this parameter: `job: Job` may well be imported for type checkers alone.
    def only() -> None: ...

    only.__annotations__ = {"args": parameter.annotation}
    try:
        return typing.get_type_hints(only, _globals_of(fn), include_extras=True)["args"]
    except Exception as error:
        raise UnresolvedAnnotation(
            f"{name_of(fn)}: the annotation {parameter.annotation!r} of {parameter.name!r} does not resolve"
            f" ({error}); define the type at module level, outside `if TYPE_CHECKING`, or pass it:"
            f' @jobs.handler(JobType("kind", TheType))'
        ) from error


def _globals_of(fn: object) -> dict[str, Any]:
    while isinstance(fn, functools.partial):
        fn = fn.func
    if not hasattr(fn, "__globals__") and not inspect.ismethod(fn):
        fn = getattr(type(fn), "__call__", fn)  # noqa: B004 - an object with __call__
    fn = inspect.unwrap(cast("Any", fn))
    if inspect.ismethod(fn):
        fn = fn.__func__
    found: dict[str, Any] = getattr(fn, "__globals__", {})
    return found


def _check_importable(fn: object) -> None:
    qualname = getattr(fn, "__qualname__", None)
    if not inspect.isfunction(fn) or qualname is None or "<" in qualname:
        raise ConfigError(
            f"{name_of(fn)}: run_in='process' finds its handler by module and name, so it must be a function"
            " defined with `def` at module level (no lambda, local function, method or partial)"
        )
