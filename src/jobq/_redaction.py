"""Redaction: fields of jobs' documents that nobody gets to see who only looks.

A field is named by whoever declares its kind, or by an operator; and some names say by themselves what they
hold. It is hidden wherever it stands in a document, with all that is in it. Errors quote what they are about,
so what hidden fields hold is taken out of texts, too: there it is known by its value alone.

Only output is redacted. What is stored of a job, and what its handler gets, is what was enqueued.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, cast

import msgspec

from jobq._errors import ConfigError
from jobq._messages import shown

HIDDEN: Final = "***"

MAX_FIELD_BYTES: Final = 128
_SHORTEST: Final = 4  # characters of a value that is looked for in texts: shorter ones stand in many a word
_CUT: Final = "…"  # what our messages end a value with that they cut
_LONGEST_PART: Final = 10_000  # characters of a secret that may stand before a cut: no message has more
_MOST_VALUES: Final = 1_000  # of one job, and cuts in a text; where there are more, it is hidden whole

_WORD_ENDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^0-9A-Za-z]+")
_TELLING: Final = re.compile(
    r"(?:^|_)(?:pass(?:word|wd|phrase|code)s?|pwd|secrets?|tokens?|credentials?|cookies?|auth|authorization"
    r"|(?:api|access|private|secret)_?keys?)(?:_|$)"
)


_STRING: Final = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?')  # with its colon, where it is a member's name


class Redaction:
    """The fields that are hidden in the documents of some jobs: declared ones, and those of a telling name.

    Args:
        fields: their names, as `check_fields` returned them. Case and punctuation do not matter:
            ``card_number`` is ``cardNumber`` and ``Card-Number``, too.
    """

    def __init__(self, fields: Iterable[str] = ()) -> None:
        self._fields: Final = frozenset(map(_plain, fields))

    def hides(self, name: str) -> bool:
        """Whether a field of this name is hidden."""
        plain, is_telling = _read(name) if len(name) <= MAX_FIELD_BYTES else _read.__wrapped__(name)
        return is_telling or plain in self._fields

    def document(self, value: object) -> object:
        """Return a document without what is hidden in it; nested too deep, all of it if anything is."""
        try:
            return self._shown(value)
        except RecursionError:
            return self._whole(value)

    def _whole(self, value: object) -> object:
        try:
            return HIDDEN if self._hides_in(msgspec.json.encode(value)) else value
        except RecursionError:
            return HIDDEN

    def _shown(self, value: object) -> object:
        if isinstance(value, dict):
            members = cast("dict[str, object]", value).items()
            return {name: HIDDEN if self.hides(name) else self._shown(member) for name, member in members}
        if isinstance(value, list):
            return [self._shown(member) for member in cast("list[object]", value)]
        if isinstance(value, msgspec.Raw):
            return HIDDEN if self._hides_in(bytes(value)) else value
        return value

    def _hides_in(self, document: bytes) -> bool:
        """Whether a field of a document is hidden, which is nested too deep to be read."""
        return any(
            self.hides(json.loads(name)) for name, colon in _STRING.findall(document.decode()) if colon
        )

    def hidden_in(self, value: object, *, within: bool = False) -> Iterator[object]:
        """Yield the values that are hidden in a document: strings, numbers and the like.

        Raises:
            RecursionError: it is nested deeper than can be looked through.
        """
        if isinstance(value, dict):
            for name, member in cast("dict[str, object]", value).items():
                yield from self.hidden_in(member, within=within or self.hides(name))
        elif isinstance(value, list):
            for member in cast("list[object]", value):
                yield from self.hidden_in(member, within=within)
        elif isinstance(value, msgspec.Raw):
            if within or self._hides_in(bytes(value)):
                raise RecursionError
        elif within:
            yield value


class Secrets:
    """What the hidden fields of one job hold, for texts that may quote it.

    Args:
        redaction: what is hidden.
        documents: returns the job's documents; asked when there is a text.
    """

    def __init__(self, redaction: Redaction, documents: Callable[[], Iterable[object]]) -> None:
        self._redaction = redaction
        self._documents = documents

    def out_of(self, text: str, *, is_cut: bool = False) -> str:
        """Return a text without them, and without a part of one where something was cut.

        Args:
            text: what may quote them.
            is_cut: whether its end is such a place; others are told by their ``…``.
        """
        values = self._values
        if values is None:
            return HIDDEN if text else text
        if not values:
            return text
        parts = self._pattern.sub(HIDDEN, text).split(_CUT)
        if len(parts) > _MOST_VALUES:
            return HIDDEN
        last = parts.pop()
        return _CUT.join([*map(self._without_part, parts), self._without_part(last) if is_cut else last])

    def _without_part(self, text: str) -> str:
        """Return a text without the beginning of a secret at its end."""
        begins: list[int] = []
        for value in self._values or ():
            tail, head = text[-min(len(value), _LONGEST_PART) :], value[:_SHORTEST]
            at = tail.find(head)
            while at >= 0 and not value.startswith(tail[at:]):
                at = tail.find(head, at + 1)
            if at >= 0:
                begins.append(len(tail) - at)
        return f"{text[: -max(begins)]}{HIDDEN}" if begins else text

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._values or ())))

    @functools.cached_property
    def _values(self) -> list[str] | None:
        """All of them, the longest first; ``None``: they are too many, or cannot be told."""
        found: set[str] = set()
        try:
            for document in self._documents():
                for value in self._redaction.hidden_in(document):
                    found.update(form for form in _forms(value) if len(form) >= _SHORTEST)
                    if len(found) > _MOST_VALUES:
                        return None
        except RecursionError:
            return None
        return sorted(found, key=len, reverse=True)


def check_fields(fields: object) -> tuple[str, ...]:
    """Return names of fields as they are kept.

    Raises:
        ConfigError: they are no sequence of names.
    """
    if isinstance(fields, str) or not isinstance(fields, Sequence):
        raise ConfigError(f"redact={shown(fields)}: a sequence of names of fields, such as a list")
    return tuple(dict.fromkeys(check_field(name) for name in cast("Sequence[object]", fields)))


def check_field(name: object) -> str:
    """Return the name of a field.

    Raises:
        ConfigError: it is none of 1 to 128 bytes with a letter or digit in it.
    """
    if not isinstance(name, str) or not _plain(name) or "\0" in name:
        raise ConfigError(f"redact: {shown(name)} is no name of a field")
    if len(name.encode("utf-8", "replace")) > MAX_FIELD_BYTES or not name.isprintable():
        raise ConfigError(f"redact: {shown(name)}: at most {MAX_FIELD_BYTES} bytes that can be printed")
    return str.__str__(name)


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


@functools.lru_cache(maxsize=4096)
def _read(name: str) -> tuple[str, bool]:
    """Return a name as names are compared, and whether it tells by itself what it holds."""
    return _plain(name), _TELLING.search(_WORD_ENDS.sub("_", name).lower()) is not None


def _forms(value: object) -> Iterator[str]:
    """Yield how a value is written: in a text, in JSON, in Python.

    Of several lines, each by itself as well: tracebacks indent them.
    """
    if isinstance(value, str):
        yield value
        yield json.dumps(value)[1:-1]
        yield json.dumps(value, ensure_ascii=False)[1:-1]
        yield repr(value)[1:-1]
        yield ascii(value)[1:-1]
        if len(lines := value.splitlines()) > 1:
            yield from map(str.strip, lines)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


DEFAULT: Final = Redaction()
"""What is hidden of jobs whose kind declares nothing."""
