"""What handlers may raise and return, by name, and a handler of each sort that does it."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import jobq
from tests.support.odd_objects import UNSTORABLE, OddError, OddText, Unshowable, Untyped, ring

if TYPE_CHECKING:
    from collections.abc import Callable

Ending: TypeAlias = Literal["returned", "failed", "permanent", "snoozed", "cancelled"]

_MANY: Final = 20_000


class Deed(NamedTuple):
    """One thing that a handler does.

    Attributes:
        do: raises or returns it; takes a text.
        ending: what has to become of its job.
        type: the kept error's type, where it is always the same.
        keeps_text: whether the kept message is just that text.
    """

    do: Callable[[str], object]
    ending: Ending
    type: str = ""
    keeps_text: bool = False


# -- exceptions ------------------------------------------------------------------------------------


class SaysOddly(Exception):
    def __str__(self) -> str:
        return OddText("said oddly")


class SaysNothing(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]  # noqa: PLE0307 - the mistake under test


class SaysItself(Exception):
    def __str__(self) -> str:
        return str(self)


class OddNames(type):
    def __getattribute__(cls, name: str) -> object:
        if name in {"__qualname__", "__module__"}:
            raise OddError
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=OddNames):
    pass


class NeedsMore(Exception):
    """It cannot be made again from what pickle keeps, and holds what cannot be pickled."""

    def __init__(self, *, needed: str) -> None:
        super().__init__(needed)
        self.lock = threading.Lock()


class Undescribed(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise OddError

    @property
    def args(self) -> tuple[object, ...]:  # type: ignore[override]
        raise OddError


class Own(BaseException):
    pass


class OddDelay(dt.timedelta):
    def total_seconds(self) -> float:
        return float("nan")

    def __lt__(self, other: object) -> bool:
        return False


SHARED: Final = RuntimeError("the same object each time")


def throw(error: BaseException) -> None:
    raise error


def chain(length: int, link: str) -> BaseException:
    error: BaseException = ValueError("the first")
    for n in range(length):
        following = ValueError(n)
        setattr(following, link, error)
        error = following
    return error


def own_cause() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def nested(depth: int) -> BaseException:
    error: Exception = ValueError("the innermost")
    for _ in range(depth):
        members: list[Exception] = [error]
        error = ExceptionGroup("group", members)
    return error


def tree(depth: int) -> Exception:
    branches = [tree(depth - 1) for _ in range(5 if depth else 0)]
    return ExceptionGroup("branch", branches) if branches else ValueError("leaf")


def annotated(note: Any) -> BaseException:
    error = ValueError("with notes")
    error.__notes__ = note
    return error


def recurse(text: str) -> object:
    return [recurse(text)]


def read_missing(_: str) -> object:
    return Untyped().missing  # type: ignore[attr-defined]


def cut_reason(signal: Any, reason: object) -> BaseException:
    signal.reason = reason
    error: BaseException = signal
    return error


def retry_after(after: object) -> BaseException:
    signal = jobq.Retry("later")
    signal.after = after  # type: ignore[assignment]
    return signal


def snooze(delay: object) -> BaseException:
    signal = jobq.Snooze(dt.timedelta(hours=1))
    signal.delay = delay  # type: ignore[assignment]
    return signal


def raises(make: Callable[[str], BaseException], type: str = "", *, keeps_text: bool = False) -> Deed:
    return Deed(lambda text: throw(make(text)), "failed", type, keeps_text)


RAISED: Final[dict[str, Deed]] = {
    "a text": raises(ValueError, "ValueError", keeps_text=True),
    "ten megabytes": raises(lambda text: ValueError(text + "x" * 10**7), "ValueError"),
    "ten megabytes of lines": raises(lambda text: ValueError(f"{text}\n" * (10**7 // (len(text) + 1)))),
    "ten megabytes of surrogates": raises(lambda _: ValueError("\ud800" * 10**7)),
    "no text": raises(lambda _: OddError(), "tests.support.odd_objects.OddError"),
    "a text with odd methods": raises(lambda _: SaysOddly()),
    "text that is none": raises(lambda _: SaysNothing()),
    "text without end": raises(lambda _: SaysItself()),
    "arguments that cannot be shown": raises(lambda _: ValueError(Unshowable(), Untyped())),
    "a class without a name": raises(lambda _: Nameless()),
    "an exception that cannot be pickled": raises(lambda text: NeedsMore(needed=text), keeps_text=True),
    "one that cannot be looked at": raises(lambda _: Undescribed()),
    "causes without end": raises(lambda _: chain(_MANY, "__cause__"), "ValueError"),
    "contexts without end": raises(lambda _: chain(_MANY, "__context__"), "ValueError"),
    "some causes": raises(lambda _: chain(10, "__cause__"), "ValueError"),
    "its own cause": raises(lambda _: own_cause(), "ValueError"),
    "a group": raises(lambda text: ExceptionGroup(text, [ValueError(text), OddError()]), "ExceptionGroup"),
    "a group with signals": raises(lambda _: ExceptionGroup("g", [jobq.Permanent("no"), jobq.Cancel("c")])),
    "a wide group": raises(lambda _: ExceptionGroup("wide", [ValueError(n) for n in range(_MANY)])),
    "a deep group": raises(lambda _: nested(_MANY)),
    "a tree of groups": raises(lambda _: tree(6)),
    "notes": raises(lambda text: annotated([text, "x" * 10**6])),
    "notes that are none": raises(lambda _: annotated(Unshowable())),
    "a shared exception": raises(lambda _: SHARED, "RuntimeError"),
    "no more stack": Deed(recurse, "failed", "RecursionError"),
    "no attribute": Deed(read_missing, "failed"),
    "a syntax error": Deed(lambda _: compile("(\0", "odd", "exec"), "failed"),
    "KeyboardInterrupt": raises(KeyboardInterrupt, "KeyboardInterrupt"),
    "SystemExit": raises(SystemExit, "SystemExit"),
    "GeneratorExit": raises(GeneratorExit, "GeneratorExit"),
    "StopIteration": raises(StopIteration),  # which a coroutine turns into another
    "StopAsyncIteration": raises(StopAsyncIteration, "StopAsyncIteration"),
    "CancelledError": raises(asyncio.CancelledError),
    "MemoryError": raises(MemoryError, "MemoryError"),
    "a BaseException": raises(Own, "tests.support.deeds.Own", keeps_text=True),
    "jobq's own error": raises(jobq.DatabaseUnavailable, keeps_text=True),
    "Permanent": Deed(lambda text: throw(jobq.Permanent(text)), "permanent", keeps_text=True),
    "Permanent of no text": Deed(lambda _: throw(jobq.Permanent(Unshowable())), "permanent"),  # type: ignore[arg-type]
    "Retry": raises(jobq.Retry, "jobq._errors.Retry", keeps_text=True),
    "Retry after nothing that is": raises(lambda _: retry_after("soon"), "jobq._errors.Retry"),
    "Snooze": Deed(lambda _: throw(jobq.Snooze(dt.timedelta(hours=1))), "snoozed"),
    "Snooze for ever": Deed(lambda _: throw(snooze(dt.timedelta.max)), "snoozed"),
    "Snooze of an odd length": Deed(lambda _: throw(snooze(OddDelay(hours=1))), "snoozed"),
    "Snooze of no time": raises(lambda _: snooze(None), "jobq.Undecidable"),
    "Cancel": Deed(lambda text: throw(jobq.Cancel(text)), "cancelled"),
    "Cancel for no reason": Deed(lambda _: throw(cut_reason(jobq.Cancel(), Unshowable())), "cancelled"),
    "Cancel for an odd reason": Deed(
        lambda text: throw(cut_reason(jobq.Cancel(), OddText(text))), "cancelled"
    ),
}

# -- results ---------------------------------------------------------------------------------------


class Loud:
    """It objects to whatever is done to it."""

    def __eq__(self, other: object) -> bool:
        raise OddError

    def __bool__(self) -> bool:
        raise OddError

    def __len__(self) -> int:
        raise OddError

    def __iter__(self) -> Any:
        raise OddError

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Computed:
    n: int = 1

    @property
    def half(self) -> float:
        raise OddError


def deep(depth: int) -> list[object]:
    found: list[object] = []
    for _ in range(depth):
        found = [found]
    return found


def returns(make: Callable[[str], object]) -> Deed:
    return Deed(make, "returned")


RETURNED: Final[dict[str, Deed]] = {
    "the text": returns(lambda text: text),
    "the text, by a class of its own": returns(OddText),
    "texts": returns(lambda text: {text: [text, {text: text}]}),
    "nothing": returns(lambda _: None),
    "numbers": returns(lambda _: [0, -0.0, 1e300, 5e-324, 2**64, True]),
    "not a number": returns(lambda _: {"a": [float("nan")]}),
    "infinity": returns(lambda _: -float("inf")),
    "a decimal that is none": returns(lambda _: decimal.Decimal("sNaN")),
    "a generator": returns(lambda text: (char for char in text)),
    "a list that holds itself": returns(lambda _: ring()),
    "a deep list": returns(lambda _: deep(_MANY)),
    "ten megabytes": returns(lambda _: "x" * 10**7),
    "a dataclass": returns(lambda _: Computed()),
    "an exception": returns(ValueError),
    "an exception class": returns(lambda _: jobq.Permanent),
    "no type": returns(lambda _: Untyped()),
    "what objects to everything": returns(lambda _: Loud()),
    "a mapping of anything": returns(lambda _: {Loud: 1, Unshowable(): 2}),
    "bytes": returns(lambda text: text.encode("utf-8", "surrogatepass")),
    "a naive time": returns(lambda _: dt.datetime(2030, 1, 1)),  # noqa: DTZ001 - the mistake under test
    "a lock": returns(lambda _: threading.Lock()),
    **{f"object {n}": returns(lambda _, found=found: found) for n, found in enumerate(UNSTORABLE)},  # type: ignore[misc]
}
DEEDS: Final[dict[str, Deed]] = RAISED | RETURNED

# -- the handlers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What to do: a deed by its name with a text, by code points, for no document holds all of them."""

    do: str
    text: tuple[int, ...] = ()


def perform(args: Work) -> object:
    return DEEDS[args.do].do("".join(map(chr, args.text))) if args.do else None


jobs = jobq.Jobs()


@jobs.handler("kept async", max_attempts=1, store_result=True)
async def kept_async(job: jobq.Job, args: Work) -> object:
    return perform(args)


@jobs.handler("kept thread", max_attempts=1, store_result=True)
def kept_thread(job: jobq.Job, args: Work) -> object:
    return perform(args)


@jobs.handler("kept process", max_attempts=1, store_result=True, run_in="process")
def kept_process(job: jobq.Job, args: Work) -> object:
    return perform(args)


@jobs.handler("dropped async", max_attempts=1)
async def dropped_async(job: jobq.Job, args: Work) -> object:
    return perform(args)


@jobs.handler("dropped thread", max_attempts=1)
def dropped_thread(job: jobq.Job, args: Work) -> object:
    return perform(args)


@jobs.handler("dropped process", max_attempts=1, run_in="process")
def dropped_process(job: jobq.Job, args: Work) -> object:
    return perform(args)


KEPT: Final = (kept_async, kept_thread, kept_process)
HANDLERS: Final = (*KEPT, dropped_async, dropped_thread, dropped_process)
