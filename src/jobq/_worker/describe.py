"""An exception as it is kept in a job's history: bounded, storable, whatever its class does.

It is described on the event loop, where all else waits meanwhile. What has thousands of causes, members
or frames, or a message of megabytes, is therefore told by its own last frames alone: written out, ten
megabytes of lines take three seconds, of which a few thousand characters are kept. Nor are secrets looked
for in more than those: what a cut has left of one is found, too.
"""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Final, cast

from jobq._statements.outcomes import Failure

if TYPE_CHECKING:
    from types import TracebackType

    from jobq._redaction import Secrets

MESSAGE_LIMIT: Final = 10_000  # characters of an error's message that are kept
TRACEBACK_LIMIT: Final = 20_000  # characters of a traceback that are kept, from both of its ends
REASON_LIMIT: Final = 500
_MOST_PARTS: Final = 3_000  # exceptions, frames and hundreds of characters that are written out
_LAST_FRAMES: Final = 100
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")  # noqa: PTH118, PTH120 - as frames name files
_DEMO: Final = os.path.join(_PACKAGE, "demo", "")  # noqa: PTH118 - an application like any other


def describe(error: BaseException, outcome: str, secrets: Secrets) -> Failure:
    """Describe an exception for the job's history, whatever its ``__str__`` does; it quotes no secrets."""
    name = storable(_name_of(type(error)), REASON_LIMIT)
    message = secrets.out_of(storable(text_of(error), MESSAGE_LIMIT))
    lines = "".join(_lines(error, f"{name}: {message}\n"))
    return Failure(outcome, name, message, secrets.out_of(_middle_cut(lines)))


def text_of(value: object) -> str:
    """Return ``str(value)`` as a plain string, whatever its ``__str__`` does."""
    try:
        return str.__str__(str(value))
    except BaseException as broken:  # noqa: BLE001 - the user's __str__ may raise anything at all
        return f"<its __str__ raised {type(broken).__name__}>"


def frames_of(error: BaseException) -> str:
    """Return where an exception was raised, the last frames of it."""
    return storable("".join(_last_frames(error)), TRACEBACK_LIMIT)


def storable(text: str, limit: int) -> str:
    """Cut a text and escape what PostgreSQL's text type cannot hold: NUL and lone surrogates."""
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit} more characters)"
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")


def brief(text: str) -> str:
    """Cut a text to a reason's length, and show that it was cut."""
    return text if len(text) <= REASON_LIMIT else text[: REASON_LIMIT - 1] + "…"


def _name_of(kind: type) -> str:
    try:
        return (
            kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        )
    except BaseException:  # noqa: BLE001 - its metaclass may do anything, too
        return "<an exception without a name>"


def _lines(error: BaseException, summary: str) -> list[str]:
    try:
        if not _is_vast(error):
            return traceback.format_exception(type(error), error, below_own_frames(error.__traceback__))
        why = "its causes, its members and most of its frames are left out: there are thousands"
    except BaseException as broken:  # noqa: BLE001 - it looks into each exception of the chain
        why = f"the rest of it cannot be written: that raised {type(broken).__name__}"
    return [*_last_frames(error), summary, f"({why})\n"]


def _last_frames(error: BaseException) -> list[str]:
    try:
        frames = ahead = below_own_frames(error.__traceback__)
        for _ in range(_LAST_FRAMES):
            ahead = ahead and ahead.tb_next
        while frames is not None and ahead is not None:
            frames, ahead = frames.tb_next, ahead.tb_next
        return traceback.format_tb(frames)
    except BaseException:  # noqa: BLE001 - an exception's attributes are the user's, too
        return []


def _is_vast(error: BaseException) -> bool:
    """Whether an exception, with all that it drags along, has more parts than are written out."""
    parts, seen, waiting = 0, set[int](), [error]
    while waiting and parts <= _MOST_PARTS:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        parts += 1 + sum(len(text) for text in one.args if isinstance(text, str)) // 100
        frames = one.__traceback__
        while frames is not None and parts <= _MOST_PARTS:
            frames, parts = frames.tb_next, parts + 1
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += cast("BaseExceptionGroup[BaseException]", one).exceptions[:_MOST_PARTS]
    return parts > _MOST_PARTS


def below_own_frames(frames: TracebackType | None) -> TracebackType | None:
    """Leave out the outermost frames, which are jobq's own: what a reader wants begins below them.

    Where there are no others, they are what there is to read.
    """
    below = frames
    while below is not None and _is_own(below.tb_frame.f_code.co_filename):
        below = below.tb_next
    return below or frames


def _is_own(filename: str) -> bool:
    return filename.startswith(_PACKAGE) and not filename.startswith(_DEMO)


def _middle_cut(text: str) -> str:
    if len(text) > TRACEBACK_LIMIT:
        half = TRACEBACK_LIMIT // 2
        text = f"{text[:half]}\n… ({len(text) - 2 * half} characters left out) …\n{text[-half:]}"
    return storable(text, len(text))
