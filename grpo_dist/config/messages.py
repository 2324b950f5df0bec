"""Convert pydantic's validation errors to terms of configuration files.

Pydantic adds the alternatives of a union to the path (``weight_sync.backend.literal['auto']``), reports one
error for each, and names Python types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel

from grpo_dist.config.base import Choice, member_called, members

_SHOULD_BE = "Input should be "
_EXPECTED = {
    "tuple_type": f"{_SHOULD_BE}a list",
    "list_type": f"{_SHOULD_BE}a list",
    "dict_type": f"{_SHOULD_BE}a mapping of keys to values",
    "model_type": f"{_SHOULD_BE}a mapping of keys to values",
    "too_short": f"{_SHOULD_BE}a list of at least {{min_length}}",
    "too_long": f"{_SHOULD_BE}a list of at most {{max_length}}",
}


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """Where an error is.

    Attributes:
        keys: names and positions of lists, as in a file.
        section: whose key the last one is; None: no section's, e.g. an entry of a list.
        union: members of the tagged union that ``section`` is one of; () for any other.
        label: what chose ``section`` among them.
    """

    keys: tuple[Any, ...]
    section: type[BaseModel] | None
    union: tuple[type[Choice], ...] = ()
    label: str = ""


def readable(errors: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> list[dict[str, Any]]:
    """Merge ``errors`` of a pydantic ValidationError of ``root`` into one per key: `place` is its `KeyPlace`,
    `loc` its keys, `msg` names the expected values.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    placed = [(_locate(tuple(error["loc"]), root), error) for error in errors]
    for place, error in placed:
        if error["type"] == "too_short" and any(_is_inside(other.keys, place.keys) for other, _ in placed):
            continue  # pydantic does not count invalid entries
        tag = place.union[0].tag if place.union else None
        if error["type"] == "union_tag_not_found":
            place, error = replace(place, keys=(*place.keys, tag)), {**error, "type": "missing"}
        elif tag is not None and place.keys[-1:] == (tag,) and error["type"] != "missing":
            place = replace(place, keys=place.keys[:-1])  # the bare name is short for the mapping
        elif error["type"] == "union_tag_invalid":
            error = {**error, "input": error["input"][tag]}
        message = _message(error, place)
        if place.keys in merged and error["type"] not in ("missing", "extra_forbidden"):
            before = merged[place.keys]
            before["msg"] = f"{before['msg']}, or {message.removeprefix(_SHOULD_BE)}"
        else:
            merged.setdefault(place.keys, {**error, "loc": place.keys, "place": place, "msg": message})
    return list(merged.values())


def _message(error: Mapping[str, Any], place: KeyPlace) -> str:
    names = [f"'{name}'" for member in place.union for name in member.names()]
    if error["type"] == "union_tag_invalid":
        return f"{_SHOULD_BE}{', '.join(names[:-1])} or {names[-1]}"
    if place.union and not place.label:
        return f"{_SHOULD_BE}one of {', '.join(names)}, or a mapping with `{place.union[0].tag}`"
    message = _EXPECTED.get(error["type"])
    message = message.format(**error.get("ctx", {})) if message else str(error["msg"])
    if place.union and error["type"] == "own_name":  # neither a name of ours nor one of user-supplied code
        return f"{_SHOULD_BE}{', '.join(names)} or {message.removeprefix(_SHOULD_BE)}"
    return message


def _is_inside(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _locate(location: tuple[Any, ...], root: type[BaseModel]) -> KeyPlace:
    """Return the place of ``location``, which has the names of union alternatives that pydantic adds."""
    place, annotation = KeyPlace((), None), cast(Any, root)
    for part in location:
        alternatives = _alternatives(annotation)
        if union := members(annotation):  # `part` is what chose the member
            label = str(part)
            section = member_called(union, label)
            place, annotation = KeyPlace(place.keys, section, union, label), section
            continue
        if isinstance(part, int):
            annotation = next((inner for a in alternatives if (inner := _element(a)) is not None), None)
            place = KeyPlace((*place.keys, part), None)
            continue
        if section := next((a for a in alternatives if _is_section(a)), None):
            if len(alternatives) > 1 and part not in section.model_fields:  # the alternative's tag
                annotation = section
                continue
            field = section.model_fields.get(part)
            annotation = field.annotation if field else None
            same = place.section is section and place.union
            place = KeyPlace((*place.keys, part), section, *((place.union, place.label) if same else ()))
        elif len(alternatives) <= 1:
            place = KeyPlace((*place.keys, part), None)
    union = members(annotation)
    return replace(place, union=union, label="") if union else place


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
