"""Convert pydantic's validation errors to terms of configuration files.

Pydantic adds the alternatives of a union to the path (``weight_sync.backend.literal['auto']``), reports one
error for each, and names Python types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

_SHOULD_BE = "Input should be "
_EXPECTED = {
    "tuple_type": f"{_SHOULD_BE}a list",
    "list_type": f"{_SHOULD_BE}a list",
    "dict_type": f"{_SHOULD_BE}a mapping of keys to values",
    "model_type": f"{_SHOULD_BE}a mapping of keys to values",
    "too_short": f"{_SHOULD_BE}a list of at least {{min_length}}",
    "too_long": f"{_SHOULD_BE}a list of at most {{max_length}}",
}


def readable(errors: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> list[dict[str, Any]]:
    """Merge ``errors`` of a pydantic ValidationError of ``root`` into one per key: `loc` has only keys and
    positions, `msg` names the expected values.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    own = [(_keys(tuple(error["loc"]), root), error) for error in errors]
    for location, error in own:
        if error["type"] == "too_short" and any(_is_inside(other, location) for other, _ in own):
            continue  # pydantic does not count invalid entries
        expected = _EXPECTED.get(error["type"])
        message = expected.format(**error.get("ctx", {})) if expected else error["msg"]
        if location in found and error["type"] not in ("missing", "extra_forbidden"):
            before = found[location]
            before["msg"] = f"{before['msg']}, or {message.removeprefix(_SHOULD_BE)}"
        else:
            found.setdefault(location, {**error, "loc": location, "msg": message})
    return list(found.values())


def _is_inside(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _keys(location: tuple[Any, ...], root: Any) -> tuple[Any, ...]:
    """Return ``location`` without the names of union alternatives, which pydantic adds."""
    kept: list[Any] = []
    annotation: Any = root
    for part in location:
        alternatives = _alternatives(annotation)
        if isinstance(part, int):
            annotation = next((inner for a in alternatives if (inner := _element(a)) is not None), None)
        elif model := next((a for a in alternatives if _is_section(a)), None):
            if len(alternatives) > 1 and part not in model.model_fields:  # the alternative's tag
                annotation = model
                continue
            field = model.model_fields.get(part)
            annotation = field.annotation if field else None
        elif len(alternatives) > 1:
            continue
        kept.append(part)
    return tuple(kept)


def _alternatives(annotation: Any) -> list[Any]:
    """Return the members of a union except None: A and B of ``A | B | None``."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for a in get_args(annotation) for inner in _alternatives(a) if inner is not NoneType]
    return [annotation]


def _element(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) in (tuple, list) else None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
