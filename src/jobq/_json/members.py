"""Which members the JSON document of a declared type has, as far as the type alone tells."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import msgspec

from jobq._json.plain import is_pydantic_model

if TYPE_CHECKING:
    from collections.abc import Mapping

_NONE: Final[frozenset[str]] = frozenset()
_SCALARS: Final = (str, int, float, list, tuple, set, frozenset, type(None))


def member_names(args_type: object) -> frozenset[str] | None:
    """Return the names that an object of a type is written with.

    Returns:
        The names; none for what is written as something else than a JSON object; ``None`` where only
        the object itself can tell, as with ``dict``. Of a union, the names that all of it have.
    """
    if args_type is None:
        return _NONE
    origin = typing.get_origin(args_type)
    if origin is Annotated:
        return member_names(typing.get_args(args_type)[0])
    if origin in (typing.Union, types.UnionType):
        return _names_in_all(typing.get_args(args_type))
    cls: object = args_type if origin is None else origin
    if typing.is_typeddict(cls):
        declared = cast("Any", cls)
        return frozenset(declared.__required_keys__ | declared.__optional_keys__)
    if not isinstance(cls, type):
        return None  # Any, a type variable
    return _names_of_class(cls)


def _names_in_all(parts: tuple[object, ...]) -> frozenset[str] | None:
    names: frozenset[str] | None = None
    for part in parts:
        if part is type(None):
            continue
        found = member_names(part)
        if found is not None:
            names = found if names is None else names & found
    return names


def _names_of_class(cls: type) -> frozenset[str] | None:
    if dataclasses.is_dataclass(cls):
        return frozenset(field.name for field in dataclasses.fields(cls))
    if issubclass(cls, msgspec.Struct):
        return _names_of_struct(cls)
    if is_pydantic_model(cast("object", cls)):
        return _names_of_model(cast("Any", cls))
    return _NONE if issubclass(cls, _SCALARS) else None


def _names_of_struct(cls: type[msgspec.Struct]) -> frozenset[str]:
    config = cls.__struct_config__
    if config.array_like:
        return _NONE
    tag = {config.tag_field} if config.tag is not None and config.tag_field else set[str]()
    return frozenset({*cls.__struct_encode_fields__, *tag})


def _names_of_model(model: Any) -> frozenset[str] | None:
    fields: Mapping[str, Any] = model.model_fields
    if model.model_config.get("extra") == "allow" or getattr(model, "__pydantic_root_model__", False):
        return None
    return frozenset(field.serialization_alias or field.alias or name for name, field in fields.items())
