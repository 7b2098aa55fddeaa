"""What somebody else wrote, with all that a terminal could obey as escapes."""

from __future__ import annotations

import unicodedata
from typing import Final

# Cc: control; Cf: format, among them those that turn the direction; Cs: lone surrogates; Zl, Zp: line ends.
_ESCAPED: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# …but these join emoji and letters of many scripts, and do nothing else.
_KEPT: Final = frozenset({"\u200c", "\u200d"})


def safe(text: str, *, keep_lines: bool = False) -> str:
    """Return a text with all that a terminal could obey written as escapes.

    Args:
        text: what somebody else wrote.
        keep_lines: leave newlines and tabs as they are, for text that is shown as a block.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_safe_character(char, keep_lines=keep_lines) for char in text)


def _safe_character(char: str, *, keep_lines: bool) -> str:
    if keep_lines and char in "\n\t":
        return char
    if unicodedata.category(char) in _ESCAPED and char not in _KEPT:
        return char.encode("unicode_escape", "surrogatepass").decode()
    return char
