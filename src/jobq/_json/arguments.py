"""Decoding: a stored document to the type that its handler declares.

The document may be older or newer than the code that reads it, so members that the type does not
know are skipped, and an upgrade hook may first turn an old document into a new one. Whatever goes
wrong here is that one job's failure and is reported as such, with the place in the document.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import msgspec

from jobq._documents import read_document
from jobq._errors import ArgumentsDecodeError, ArgumentsEncodeError, ConfigError
from jobq._json.encode import encode
from jobq._json.plain import is_pydantic_model
from jobq._messages import told
from jobq._redaction import DEFAULT, Redaction, Secrets

A = TypeVar("A")

Upgrade: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]

_Decode: TypeAlias = Callable[[bytes | str], Any]

_MAX_TOLD: Final = 2_000  # characters of an error
_MAX_READ: Final = 20_000  # characters of one that are looked through for secrets
_MAX_ERRORS_TOLD: Final = 5  # of one document: pydantic finds all of them

_AT: Final = re.compile(r"(?s)(.*) - at `(\$.*)`")
_BARE: Final[tuple[object, ...]] = (dict, list, tuple, str, int, float, bool)
_UNTYPED: tuple[object, ...] = (Any, object, inspect.Parameter.empty)


class ArgumentsDecoder(Generic[A]):
    """Decodes the arguments of one kind.

    Args:
        kind: named in errors.
        args_type: a dataclass, TypedDict, msgspec or pydantic model, anything that msgspec
            decodes; ``None`` for a kind without arguments; ``Any`` for plain JSON values.
        upgrade: turns stored arguments, old or already new, into new ones before they are decoded.
        redaction: what no error quotes.
    """

    def __init__(
        self,
        kind: str,
        args_type: object,
        upgrade: Upgrade | None = None,
        redaction: Redaction = DEFAULT,
    ) -> None:
        self._kind = kind
        self._args_type = args_type
        self._upgrade = upgrade
        self._redaction = redaction
        self._decode: _Decode | None = None
        self._check: _Decode | None = None
        self._is_check_built = False

    def decode(self, raw: bytes | str) -> A:
        """Decode one document.

        Raises:
            ArgumentsDecodeError: it does not fit the type, or the upgrade hook failed.
        """
        try:
            decoded: A = (self._decode or self._build())(raw)
        except Exception as error:  # noqa: BLE001 - raised again, the cause with it unless it quotes a secret
            told, cause = self._told(raw, error)
            raise ArgumentsDecodeError(f"arguments of kind {self._kind!r}: {told}") from cause
        return decoded

    def check(self, text: str) -> None:
        """Refuse a new document that does not fit the type: every worker would.

        It costs a fifth of the encoding. The upgrade hook has no part in it. Left out are pydantic's
        models, which have checked themselves, and a type that can only be resolved where it is run.

        Raises:
            ArgumentsEncodeError: it does not fit; names the path.
        """
        if not self._is_check_built:
            self._check, self._is_check_built = _checker_of(self._args_type), True
        if self._check is None:
            return
        try:
            self._check(text)
        except Exception as error:  # noqa: BLE001 - as above
            told, cause = self._told(text, error)
            at = _AT.fullmatch(told)
            path, reason = (at[2], at[1]) if at else ("$", told)
            raise ArgumentsEncodeError(path, f"{reason}, by the type of kind {self._kind!r}") from cause

    def _told(self, raw: bytes | str, error: Exception) -> tuple[str, Exception | None]:
        """Say what is wrong with a document, and what to show as the cause: nothing that quotes a secret."""
        said = _describe(error)
        text = raw if isinstance(raw, str) else raw.decode("utf-8", "replace")
        told = Secrets(self._redaction, lambda: _documents(text)).out_of(_cut(said, _MAX_READ))
        cause = error if told == said and not _quotes_cut_input(error) else None
        return _cut(told, _MAX_TOLD), cause

    def prepare(self) -> None:
        """Build the decoder now, so that a type that cannot be decoded shows at start.

        Raises:
            ConfigError: it cannot.
        """
        if self._decode is None:
            self._build()

    def _build(self) -> _Decode:
        try:
            decode = _decoder_of(self._args_type)
        except Exception as error:
            raise ConfigError(
                f"kind {self._kind!r}: arguments of type {describe_type(self._args_type)}"
                f" cannot be decoded: {error}"
            ) from error
        if self._upgrade is not None:
            decode = _with_upgrade(self._upgrade, decode)
        self._decode = decode
        return decode


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


def _quotes_cut_input(error: BaseException | None) -> bool:
    """Whether an error, or one that its traceback shows, is pydantic's: it quotes its input's two ends."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if _is_pydantics(error):
            return True
        seen.add(id(error))
        error = error.__context__ if not error.__suppress_context__ else error.__cause__
    return False


def _is_pydantics(error: BaseException) -> bool:
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pydantic_core._pydantic_core", "ValidationError")


def _documents(text: str) -> Iterator[object]:
    with contextlib.suppress(ValueError):  # no JSON, so that nobody can tell what of it is what
        yield read_document(text)


def check_arguments(kind: str, args_type: object, args: object) -> None:
    """Refuse arguments of another type than the kind declares, as far as a look at them tells.

    Raises:
        ArgumentsEncodeError: they are of another type.
    """
    expected = _instance_type(args_type)
    if expected is not None and not isinstance(args, expected):
        given = "None" if args is None else describe_type(type(args))
        raise ArgumentsEncodeError("$", f"kind {kind!r} takes {describe_type(args_type)}, not {given}")


def describe_type(args_type: object) -> str:
    """Name a type as a message should."""
    if args_type in (None, type(None)):
        return "None"
    if isinstance(args_type, type) and typing.get_origin(args_type) is None:
        return args_type.__qualname__
    return str(args_type)


def _instance_type(args_type: object) -> type | tuple[type, ...] | None:
    """Return what an instance is checked against; ``None`` where only decoding can tell."""
    if args_type in _UNTYPED:
        return None
    if args_type is None:
        return type(None)
    if typing.is_typeddict(args_type):
        return dict
    if args_type is float:  # an int is a float to type checkers, and comes back as one
        return (float, int)
    origin = typing.get_origin(args_type)
    if origin in (dict, list, tuple):
        return cast("type", origin)
    if isinstance(args_type, type) and not getattr(args_type, "_is_protocol", False):
        return args_type
    return None


def _decoder_of(args_type: object) -> _Decode:
    if args_type in (None, type(None)):
        return _decode_nothing
    if args_type in _UNTYPED:
        return msgspec.json.Decoder().decode
    if is_pydantic_model(args_type):
        return cast("_Decode", cast("Any", args_type).model_validate_json)
    if hasattr(args_type, "__pydantic_validator__"):  # a pydantic dataclass
        return cast("_Decode", cast("Any", args_type).__pydantic_validator__.validate_json)
    decoder = msgspec.json.Decoder(cast("type[Any]", args_type), dec_hook=_decode_foreign)
    _write_names(args_type)
    return decoder.decode


def _write_names(args_type: object) -> None:
    """Write each member's name once: msgspec (0.23) finds one that is not ASCII only then.

    Until then it skips that member of a dataclass or TypedDict as if the type did not know it.
    """
    waiting: list[object] = [msgspec.inspect.type_info(args_type)]
    seen: dict[int, object] = {}
    while waiting:
        info = waiting.pop()
        if isinstance(info, tuple):
            waiting += cast("tuple[object, ...]", info)
        elif isinstance(info, msgspec.inspect.Field | msgspec.inspect.Type) and id(info) not in seen:
            seen[id(info)] = info
            if isinstance(info, msgspec.inspect.Field):
                msgspec.json.encode(info.name)
            waiting += [getattr(info, name) for name in info.__struct_fields__]


def _checker_of(args_type: object) -> _Decode | None:
    """Return what decodes only to see whether it can; ``None`` where a look at the class has told all."""
    if args_type in (None, type(None), *_UNTYPED, *_BARE) or hasattr(args_type, "__pydantic_validator__"):
        return None
    try:
        return _decoder_of(args_type)
    except Exception:  # noqa: BLE001 - a worker says so at its start; here it may never be needed
        return None


def _decode_nothing(raw: bytes | str) -> None:
    # `{}` is what the SQL function stores by default; a newer version's arguments are skipped
    # like any member that is not known.
    document = msgspec.json.decode(raw)
    if document is not None and not isinstance(document, dict):
        raise msgspec.ValidationError(f"Expected `null`, got `{type(document).__name__}`")


def _decode_foreign(cls: type, value: object) -> object:
    """Decode a model of pydantic that stands within a type that msgspec decodes."""
    if is_pydantic_model(cls):
        return _validate(cls, json.dumps(value))
    raise msgspec.ValidationError(f"`{cls.__module__}.{cls.__qualname__}` has no JSON form here")


def _validate(model: type, text: str) -> object:
    try:
        validated: object = cast("Any", model).model_validate_json(text)
    except Exception as error:
        if not _is_pydantics(error):
            raise
        said = _describe(error)
    else:
        return validated
    raise ValueError(f"{model.__name__}: {said}")  # out here, so that it does not drag pydantic's own along


def _with_upgrade(upgrade: Upgrade, decode: _Decode) -> _Decode:
    def upgrade_and_decode(raw: bytes | str) -> Any:
        document: object = msgspec.json.decode(raw)
        if document is None:  # a kind that used to take none
            document = {}
        if not isinstance(document, dict):
            return decode(raw)
        return decode(encode(upgrade(cast("dict[str, Any]", document))))

    return upgrade_and_decode


def _describe(error: Exception) -> str:
    """Put an error of any decoder into one line."""
    if isinstance(error, msgspec.MsgspecError | ConfigError | ArgumentsEncodeError):
        return str(error)
    if _is_pydantics(error):
        found: list[dict[str, Any]] = cast("Any", error).errors(include_url=False, include_input=False)
        first = "; ".join(f"{each['msg']} - at `{_path(each['loc'])}`" for each in found[:_MAX_ERRORS_TOLD])
        more = len(found) - _MAX_ERRORS_TOLD
        return f"{first}; and {more} more" if more > 0 else first
    return told(error, limit=None)  # cut later: nobody finds a secret that is cut


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
