"""What several messages say in the same way."""

from __future__ import annotations

import re
import shlex
from typing import Final

DEFAULT_SCHEMA: Final = "jobq"

_MAX_SHOWN: Final = 80  # characters of a value that a message shows
_LITERAL: Final = re.compile(r"'|\$\w*\$")
_MAX_TOLD: Final = 500  # characters of another error that a message tells


def shown(value: object) -> str:
    """Return a value as a message shows it: cut where it is long, whatever its ``__repr__`` does."""
    try:
        # of a string's subclass, the characters that it has, whatever its own methods say
        text = str.__str__(repr(str.__str__(value)[:_MAX_SHOWN] if isinstance(value, str) else value))
    except Exception:  # noqa: BLE001 - an object of the user's own, or an integer too long to show
        return f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def shown_query(query: str, limit: int) -> str:
    """Return a query of somebody's as a message shows it: on one line, cut, not beyond its first literal.

    That may be a password, and where it ends depends on the server's settings.
    """
    text = " ".join(query.split())
    literal = _LITERAL.search(text)
    end = min(limit, len(text) if literal is None else literal.start())
    return text if end >= len(text) else f"{text[:end]}…"


def told(error: BaseException, limit: int | None = _MAX_TOLD) -> str:
    """Return an error that is told within another's message: its class and its text, whatever that does.

    Args:
        error: what is told.
        limit: characters of it, ``None`` for all: a secret that is cut is not found any more.
    """
    try:
        text = str.__str__(str(error))
    except Exception:  # noqa: BLE001 - an exception of the user's own
        text = ""
    text = text if limit is None or len(text) <= limit else f"{text[:limit]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def migrate_advice(schema: str | None) -> str:
    """Return what to run where the schema lacks something.

    Args:
        schema: its name; ``None`` where nobody knows.
    """
    if schema is None:
        return "run `jobqctl migrate` (with --schema, where it is not jobq), or `client.migrate()` at start"
    option = "" if schema == DEFAULT_SCHEMA else f" --schema {shlex.quote(schema)}"
    return f"run `jobqctl migrate{option}`, or `client.migrate()` at start"
