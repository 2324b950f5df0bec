"""Explains pydantic's validation errors in terms of configuration files, and suggests keys for unknown ones.

Pydantic adds the alternatives of a union to the path (``weight_sync.backend.literal['auto']``), reports one
error per alternative, and names Python types.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from pydantic import BaseModel

from grpo_dist.config import Config
from grpo_dist.config.base import PLAIN, Choice, member_called, members
from grpo_dist.config.peers import answer, answers, hint, is_section, likely_trainer
from grpo_dist.config.secrets import shown_value

_SHOULD_BE = "Input should be "
_EXPECTED = {
    "tuple_type": f"{_SHOULD_BE}a list",
    "list_type": f"{_SHOULD_BE}a list",
    "dict_type": f"{_SHOULD_BE}a mapping of keys to values",
    "model_type": f"{_SHOULD_BE}a mapping of keys to values",
    "too_short": f"{_SHOULD_BE}a list of at least {{min_length}}",
    "too_long": f"{_SHOULD_BE}a list of at most {{max_length}}",
}
_MOST_LINES = 40  # lines per message
_MOST_PLACES = 3  # keys named as alternatives
_CLOSE = 0.75  # similarity of a misspelt key; below it the resemblance is mostly chance
_PROBLEM = ("question_column", "prompt_column", "query_column", "input_column")  # names in other data loaders


@dataclass(frozen=True, slots=True)
class KeyPlace:
    """The location of an error.

    Attributes:
        keys: names and list indices, as in a file.
        section: the section that has the last key; None: no section, e.g. for an entry of a list.
        union: members of the tagged union that contains ``section``; () outside of a union.
        label: the tag's value that chose ``section``.
        takes_number: whether the value may also be a number.
    """

    keys: tuple[Any, ...]
    section: type[BaseModel] | None
    union: tuple[type[Choice], ...] = ()
    label: str = ""
    takes_number: bool = False


def readable(errors: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> list[dict[str, Any]]:
    """Merge ``errors`` of a pydantic ValidationError of ``root`` into one per key, with its `KeyPlace` as
    `place`, its keys as `loc`, and the expected values in `msg`.
    """
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    placed = [(_locate(tuple(error["loc"]), root), error) for error in errors]
    for place, error in placed:
        inside = (other for other, _ in placed if other.keys[: len(place.keys)] == place.keys != other.keys)
        if error["type"] == "too_short" and any(inside):
            continue  # pydantic does not count invalid entries
        tag = place.union[0].tag if place.union else None
        if error["type"] == "union_tag_not_found":
            place, error = replace(place, keys=(*place.keys, tag)), {**error, "type": "missing"}
        elif tag is not None and place.keys[-1:] == (tag,) and error["type"] != "missing":
            place = replace(place, keys=place.keys[:-1])  # the bare name is short for the mapping
        elif error["type"] == "union_tag_invalid" and len(error["input"]) > 1:  # else the name may be bare
            place = replace(place, keys=(*place.keys, tag), takes_number=False)
        message = _message(error, place)
        if error["type"] == "union_tag_invalid":
            error = {**error, "mapping": error["input"], "input": error["input"][tag]}
        if place.keys in merged and error["type"] not in ("missing", "extra_forbidden"):
            before = merged[place.keys]
            before["msg"] = f"{before['msg']}, or {message.removeprefix(_SHOULD_BE)}"
        else:
            merged.setdefault(place.keys, {**error, "loc": place.keys, "place": place, "msg": message})
    return list(merged.values())


def _message(error: Mapping[str, Any], place: KeyPlace) -> str:
    names = [f"'{name}'" for member in place.union for name in member.names()]
    names = [*(["a number"] if place.takes_number else []), *names]
    if error["type"] == "union_tag_invalid":
        return f"{_SHOULD_BE}{', '.join(names[:-1])} or {names[-1]}"
    if place.union and not place.label:
        return f"{_SHOULD_BE}one of {', '.join(names)}, or a mapping with `{place.union[0].tag}`"
    message = _EXPECTED.get(error["type"])
    message = message.format(**error.get("ctx", {})) if message else str(error["msg"])
    if place.union and error["type"] == "unknown_name":  # neither built in nor a name of user-supplied code
        return f"{_SHOULD_BE}{', '.join(names)} or {message.removeprefix(_SHOULD_BE)}"
    return message


def _locate(location: tuple[Any, ...], root: type[BaseModel]) -> KeyPlace:
    """Return the place of ``location``, in which pydantic includes the names of union alternatives."""
    place, annotation = KeyPlace((), None), cast(Any, root)
    for part in location:
        alternatives = _alternatives(annotation)
        if union := members(annotation):  # `part` is the tag of the member
            label = str(part)
            if label == PLAIN:
                return KeyPlace(place.keys, None)
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
    if not union:
        return place
    plain = [part for part in _alternatives(annotation) if part not in union]
    return replace(place, union=union, label="", takes_number=bool(plain))


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


def explain(errors: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> str:
    """Return one message about ``errors`` of a pydantic ValidationError of ``root``: one line per problem;
    unknown keys with the same answer share a line.
    """
    items = readable(errors, root)
    unknown_keys = [key for item in items if item["type"] == "extra_forbidden" for key in _keys_in(item)]
    trainer = likely_trainer(unknown_keys)
    lines, explained = _name_the_member(items)
    unknown: dict[str, list[str]] = {}
    for item in items:
        where = ".".join(map(str, item["loc"]))
        if item["loc"] in explained:
            continue
        if item["type"] == "extra_forbidden":
            if reason := _find_other_member(item["place"]):
                lines.append(f"`{where}` is {reason}")
                continue
            for key, advice in _advise(item["place"], root, item["input"], trainer):
                unknown.setdefault(advice, []).append(f"`{key}`")
        elif moved := _earlier_keys(item["loc"], item["input"]):
            lines += moved
        elif item["type"] == "missing":
            lines.append(f"`{where}` is missing: {description(item['loc'], root) or 'it has no default'}")
        elif item["type"] == "value_error":
            lines.append(f"`{where}`: {item['ctx']['error']}" if where else str(item["ctx"]["error"]))
        else:
            text, about = item["msg"][:1].lower() + item["msg"][1:], description(item["loc"], root)
            if reason := _why_absent(item["loc"], item["input"]):
                text, about = reason, None
            mapping = item.get("mapping", {})  # its tag chooses no member, so pydantic skipped its keys
            if len(mapping) > 1:
                about = description(item["loc"][:-1], root)
            about = f" ({about})" if about else ""
            lines.append(f"`{where}` = {shown_value(item['loc'], item['input'])}: {text}{about}")
            lines += _earlier_keys(item["loc"][:-1], mapping)
    lines += (f"unknown key{'s' * (len(keys) > 1)} {', '.join(keys)}{why}" for why, keys in unknown.items())
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"and {len(lines) - _MOST_LINES + 1} more"]
    return lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} things to correct:", *lines])


def _why_absent(location: Sequence[Any], value: Any) -> str | None:
    """Return why this project has no counterpart of another trainer's ``value``."""
    words = [str(part) for part in location if part != "name"]
    return answers()["absent"].get(words[-1], {}).get(str(value).lower()) if words else None


def _name_the_member(items: Sequence[Mapping[str, Any]]) -> tuple[list[str], set[tuple[Any, ...]]]:
    """Find mappings with settings of another member of their tagged union that lack a setting which only the
    chosen member needs: their tag is missing.

    Returns a line per mapping with what to write, and the keys that the lines explain.
    """
    mappings: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for item in items:
        if item["place"].section in item["place"].union and item["type"] in ("missing", "extra_forbidden"):
            mappings.setdefault(item["loc"][:-1], []).append(item)
    lines, explained = [], set[tuple[Any, ...]]()
    for location, wrong in mappings.items():
        union, where = wrong[0]["place"].union, ".".join(map(str, location))
        extra = [item["loc"][-1] for item in wrong if item["type"] == "extra_forbidden"]
        extra = [key for key in extra if any(key in member.model_fields for member in union)]
        matches = [m for m in union if extra and m.names() and m.model_fields.keys() >= {*extra}]
        lacks = {item["loc"][-1] for item in wrong if item["type"] == "missing"}
        if len(matches) == 1 and (lacks := lacks - matches[0].model_fields.keys()):
            name, tag = matches[0].names()[0], matches[0].tag
            settings = ", ".join(f"{key}: ..." for key in extra)
            lines.append(
                f"`{where}` has {', '.join(extra)} of {tag} {name}; "
                f"write `{where}: {{{tag}: {name}, {settings}}}`"
            )
            explained |= {(*location, key) for key in (*extra, *lacks)}
    return lines, explained


def _earlier_keys(location: Sequence[Any], value: Any) -> list[str]:
    """Return replacements for keys of earlier versions in a refused mapping."""
    keys = [".".join(map(str, (*location, key))) for key in value] if isinstance(value, Mapping) else []
    return [f"`{key}`: {now}" for key in keys if (now := answer(key))]


def _find_other_member(place: KeyPlace) -> str | None:
    """Return why a key does not belong to the chosen member of a tagged union; None if it is misspelt, or
    outside of a union.
    """
    if not place.union or place.section is None:
        return None
    key, chosen = str(place.keys[-1]), place.section
    settings = [name for name in chosen.model_fields if name != place.union[0].tag]
    others = [name for member in place.union if key in member.model_fields for name in member.names()]
    if not others and (_takes_arguments(chosen) or answer(".".join(map(str, place.keys)))):
        return None
    if not others and difflib.get_close_matches(key, settings, n=1, cutoff=0.5):
        return None
    takes = f"it takes {', '.join(settings)}" if settings else "it takes none"
    has = f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
    what = next(part for part in reversed(place.keys[:-1]) if isinstance(part, str))
    return f"no setting of {what} {place.label}; {takes}{has}"


def _advise(
    place: KeyPlace, root: type[BaseModel], value: Any, trainer: str | None
) -> Iterator[tuple[str, str]]:
    """Yield each unknown key at ``place`` (for another trainer's section, all keys in it) with "; " and its
    replacement, or "" if unknown. ``trainer``: the trainer to which most unknown keys belong.
    """
    where = ".".join(map(str, place.keys))
    if root is Config and isinstance(value, Mapping) and is_section(where):
        for key, leaf in _leaves(value, f"{where}."):
            advice = _why_absent(key.split("."), leaf) or hint(key, trainer=trainer)
            yield key, f"; {advice}" if advice else ""
    else:
        advice = _why_absent(place.keys, value) or _advice(place, root, trainer)
        yield where, f"; {advice}" if advice else ""


def _keys_in(item: Mapping[str, Any]) -> list[str]:
    """Return the dotted name of an unknown key, or of all keys in it if it is a section."""
    where, value = ".".join(map(str, item["loc"])), item["input"]
    inner = _leaves(value, f"{where}.") if isinstance(value, Mapping) else ()
    return [key for key, _ in inner] or [where]


def _advice(place: KeyPlace, root: type[BaseModel], trainer: str | None = None) -> str:
    """Return what to set instead of an unknown key; "" if unknown."""
    *path, name = map(str, place.keys)
    all_keys, fields = _all_keys(root), list(place.section.model_fields) if place.section else []
    if "." in name and _drop_indices((*path, *name.split("."))) in all_keys:
        return f"a file nests it: {_nested(name)}"
    if place.keys == ("defaults",):
        return "it names base files in a file; on the command line set the values themselves"
    elsewhere = [key for key in all_keys if key.rpartition(".")[2] == name]
    takes_arguments = place.section is not None and _takes_arguments(place.section)
    # Only the full path identifies the trainer if another section has the same key, or any name may be an
    # argument.
    by_end = not elsewhere and not takes_arguments
    if name in _PROBLEM and "problem_column" in fields:
        return f"did you mean `{'.'.join((*path, 'problem_column'))}`?"
    inside = place.section is None  # else the enclosing sections are this project's
    key = ".".join((*path, name))
    if root is Config and (of_peer := hint(key, ends=by_end, inside=inside, trainer=trainer)):
        return of_peer
    if near := _near(name, fields):
        return f"did you mean `{'.'.join((*path, near))}`?"
    if takes_arguments:
        return f"an argument of the function is `{'.'.join((*path, 'kwargs', name))}`"
    if path and "_" not in name:  # `url` or `path` means something else in another section
        elsewhere = [key for key in elsewhere if key.split(".")[0] == path[0]]
    below = [key for key in elsewhere if key.startswith(_drop_indices(path) + ".")]
    if (places := below or elsewhere) and len(places) <= _MOST_PLACES:
        return f"did you mean {' or '.join(f'`{key}`' for key in places)}?"
    by_name = {one.rpartition(".")[2]: one for one in all_keys if one.startswith(f"{_drop_indices(path)}.")}
    if path and (near := _near(name, list(by_name))):
        return f"did you mean `{by_name[near]}`?"
    return f"known here: {', '.join(fields)}" if path and fields else ""


def _takes_arguments(section: type[BaseModel]) -> bool:
    """Return whether ``section`` names a function and its arguments."""
    return "kwargs" in section.model_fields and "path" not in section.model_fields


def _near(name: str, fields: Sequence[str]) -> str | None:
    """Return the field that ``name`` misspells or extends: `stop_strings` for `stop`."""
    begins = (field for field in fields if name.startswith(f"{field}_"))
    return next(iter(difflib.get_close_matches(name, fields, n=1, cutoff=_CLOSE)), next(begins, None))


def _drop_indices(location: Sequence[Any]) -> str:
    return ".".join(str(part) for part in location if not isinstance(part, int) and not part.isdigit())


def _nested(dotted: str) -> str:
    first, *inner = dotted.split(".")
    opened = "".join(f"{{{part}: " for part in inner)
    return f"`{first}: {opened}...{'}' * len(inner)}`"


def _leaves(value: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def description(location: Sequence[Any], root: type[BaseModel]) -> str | None:
    """Return the description of the key at ``location``."""
    sections, name = _sections_at(location[:-1], root), str(location[-1])
    return next((s.model_fields[name].description for s in sections if name in s.model_fields), None)


def _sections_at(location: Sequence[Any], root: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the sections that may be at a location of the tree; list indices are ignored."""
    sections = [root]
    for part in location:
        if not isinstance(part, int):
            fields = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
            sections = [inner for annotation in fields for inner in _sections_in(annotation)]
    return sections


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if _is_section(annotation):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def keys_called(name: str) -> list[str]:
    """Return the dotted key ``name``, which may have list indices, else the keys that end with it."""
    all_keys = set(_all_keys(Config))
    if _drop_indices(name.split(".")) in all_keys:
        return [name]
    return sorted(key for key in all_keys if key.endswith(f".{name}"))


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: dict[str, None] = {}  # members of a tagged union share keys
    for name, field in section.model_fields.items():
        if field.exclude:
            continue
        keys[prefix + name] = None
        for inner in _sections_in(field.annotation):
            keys |= dict.fromkeys(_all_keys(inner, f"{prefix}{name}."))
    return list(keys)
