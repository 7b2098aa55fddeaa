"""Redaction: fields of jobs' documents that nobody gets to see who only looks.

A field is named by whoever declares its kind, or by an operator; and some names say by themselves what they
hold. It is hidden wherever it stands in a document, with all that is in it. Errors quote what they are about,
so what hidden fields hold is taken out of texts, too: there it is known by its value alone, or by the part of
it that a cut has left.

Only output is redacted. What is stored of a job, and what its handler gets, is what was enqueued.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, cast

import msgspec

from jobq._errors import ConfigError
from jobq._messages import shown

HIDDEN: Final = "***"

MAX_FIELD_BYTES: Final = 128
_SHORTEST: Final = 4  # characters of a value that is looked for in texts: shorter ones stand in many a word
_LONG_NAME: Final = 32  # characters from which a name in a hidden object is rather a token…
_ODD_NAME: Final = 8  # …and from which one that is not made of letters alone is
_PART: Final = 64  # characters by which a longer part of a secret is known at a cut
_MOST_VALUES: Final = 1_000  # of one job; where there are more, its texts are hidden whole

# How we cut, a traceback between two lines, and how others do: reprlib, pydantic, textwrap.
_CUT: Final = re.compile(r"\n?(?: \[)?(?:…|\.{3,})\]?\n?")
# After an acronym, too: `APIToken`. OAuth is one word.
_WORD_ENDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])(?!(?<=O)Auth)|[^0-9A-Za-z]+")
_TELLING: Final = re.compile(
    r"(?:^|_)(?:[a-z0-9]*(?:pass(?:word|wd|phrase|code)|secret)s?|pwd|(?:api|access|auth|bearer|csrf|id|refresh|session|xsrf)?tokens?"
    r"|credentials?|cookies?|auth(?:orization)?(?!\d)|(?:api|access|private|secret)_?keys?)\d*(?:_|$)"
)
_WORDS: Final = re.compile(r"[A-Za-z_-]+")


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
        """Yield the values that are hidden in a document: strings, numbers and the like, names in them, too.

        Raises:
            RecursionError: it is nested deeper than can be looked through.
        """
        if isinstance(value, dict):
            for name, member in cast("dict[str, object]", value).items():
                if within and self._is_value(name):
                    yield name
                yield from self.hidden_in(member, within=within or self.hides(name))
        elif isinstance(value, list):
            for member in cast("list[object]", value):
                yield from self.hidden_in(member, within=within)
        elif isinstance(value, msgspec.Raw):
            if within or self._hides_in(bytes(value)):
                raise RecursionError
        elif within:
            yield value

    def _is_value(self, name: str) -> bool:
        """Whether a name in a hidden object is data, such as a token: words like `type` are in most texts."""
        shortest = _LONG_NAME if _WORDS.fullmatch(name) else _ODD_NAME
        return len(name) >= shortest and not self.hides(name)


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
        """Return a text without them, and without what is left of one beside a place where something was cut.

        It never gets longer. Each of up to 1,000 values is looked for in all of the text: cut that first to
        what is kept of it, or this holds up an event loop.

        Args:
            text: what may quote them.
            is_cut: whether its end is such a place; others are told by their ``…`` or ``...``.
        """
        values = self._values
        if values is None:
            return HIDDEN if text else text
        if not values:
            return text
        # the pattern has no beginning to be found by: 100 µs for a traceback
        found = _CUT.finditer(text) if "…" in text or "..." in text else ()
        cuts = [one.span() for one in found] + [(len(text), len(text))] * is_cut
        spans = [*_occurrences(text, values), *(self._parts(text, cuts) if cuts else ())]
        return _hide(text, spans)

    def _parts(self, text: str, cuts: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield where a part of a secret ends at a cut, and where one begins after it: the same, mirrored."""
        length = len(text)
        yield from self._beginnings.before(text, [start for start, _ in cuts])
        mirrored = self._ends.before(text[::-1], [length - end for _, end in reversed(cuts)])
        yield from ((length - end, length - start) for start, end in mirrored)

    @functools.cached_property
    def _beginnings(self) -> _Beginnings:
        return _Beginnings(self._values or ())

    @functools.cached_property
    def _ends(self) -> _Beginnings:
        return _Beginnings([value[::-1] for value in self._values or ()])

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


class _Beginnings:
    """How secrets begin, for texts that were cut in the middle of one.

    The work is bounded by the text's length alone, however many they are and however long their common
    beginning is: a longer part is known by its first characters, and then hidden up to the cut.
    """

    def __init__(self, values: Sequence[str]) -> None:
        self._short = {value[:length] for value in values for length in range(_SHORTEST, _PART)}
        self._longest: dict[str, int] = {}  # by its first characters, the length of a long one
        self._dotted: set[str] = set()  # and of those that have what looks like a cut in themselves
        for value in values:
            if len(value) > _PART:
                head = value[:_PART]
                self._longest[head] = max(len(value), self._longest.get(head, 0))
                if _CUT.search(value):
                    self._dotted.add(head)

    def before(self, text: str, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield from where to where a text has parts that end at a cut; the cuts are in ascending order."""
        for cut in cuts:
            for start in range(max(cut - _PART + 1, 0), cut - _SHORTEST + 1):
                if text[start:cut] in self._short:
                    yield start, cut
                    break
        for start in range(cuts[-1] - _PART + 1 if self._longest else 0):
            head = text[start : start + _PART]
            if length := self._longest.get(head):
                first, last = bisect_left(cuts, start + _PART), bisect_right(cuts, start + length) - 1
                if first <= last:
                    yield start, cuts[last if head in self._dotted else first]


def _occurrences(text: str, values: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield from where to where a text has one of some values."""
    for value in values:
        start = text.find(value)
        while start >= 0:
            end = start + len(value)
            yield start, end
            start = text.find(value, end)


def _hide(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Return a text without what stands there; spans that overlap are hidden as one."""
    shown: list[str] = []
    hidden_to = 0
    for start, end in sorted(spans):
        if start >= hidden_to:
            shown += text[hidden_to:start], HIDDEN
        hidden_to = max(hidden_to, end)
    return "".join([*shown, text[hidden_to:]])


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
