"""What to set instead of an unknown key, and what a key is."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel

from grpo_dist.config import Config
from grpo_dist.config.messages import KeyPlace
from grpo_dist.config.peers import hint

_AT_MOST = 3  # keys that are named as one alternative
_PROBLEM = ("question_column", "prompt_column", "query_column", "input_column")  # of other data loaders


def unknown_key(place: KeyPlace, root: type[BaseModel], value: Any) -> str:
    """Return the message about an unknown key at ``place`` under ``root``: what to set instead, where that is
    known. ``value``: what was set.
    """
    where = ".".join(map(str, place.keys))
    if place.union and (reason := _of_another_member(place)):
        return f"`{where}`: {reason}"
    return f"unknown key `{where}`{_suggestion(place, root, value)}"


def _of_another_member(place: KeyPlace) -> str | None:
    """Return why the key does not belong to the chosen member of a tagged union; None if it is misspelt."""
    key, chosen = str(place.keys[-1]), place.section
    assert chosen is not None
    own = [name for name in chosen.model_fields if name != place.union[0].tag]
    others = [name for member in place.union if key in member.model_fields for name in member.names()]
    if not others and (difflib.get_close_matches(key, own, n=1, cutoff=0.5)):
        return None
    takes = f"it takes {', '.join(own)}" if own else "it takes none"
    has = f"; {', '.join(others)} {'has' if len(others) == 1 else 'have'} it" if others else ""
    return f"{place.keys[-2]} {place.label} has no such setting; {takes}{has}"


def _suggestion(place: KeyPlace, root: type[BaseModel], value: Any) -> str:
    """Return what to set instead of an unknown key, after "; "; "" where nothing is known."""
    location, section = place.keys, place.section
    known = _all_keys(root)
    name = str(location[-1])
    if "." in name and _without_indices((*location[:-1], *name.split("."))) in known:
        return f"; a file nests it: {_nested(name)}"
    if location == ("defaults",):
        return "; it names base files in a file; on the command line set the values themselves"
    elsewhere = [path for path in known if path.rsplit(".", 1)[-1] == name]
    # If another section has the same key, only the full path identifies the framework it is from.
    elsewhere_named = hint(".".join(map(str, location)), value, ends=not elsewhere)
    if root is Config and elsewhere_named:
        return f"; {elsewhere_named}"
    if below := [path for path in elsewhere if path.startswith(_without_indices(location[:-1]) + ".")]:
        elsewhere = below
    if len(elsewhere) == 1 or (below and len(below) <= _AT_MOST):
        return f"; did you mean {' or '.join(f'`{path}`' for path in elsewhere)}?"
    if section is None:
        return ""
    fields = list(section.model_fields)
    near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
    if name in _PROBLEM and "problem_column" in fields:  # `answer_column` is spelled more like it
        near = ["problem_column"]
    if near:
        return f"; did you mean `{'.'.join(map(str, (*location[:-1], near[0])))}`?"
    return f"; did you mean `{elsewhere[0]}`?" if elsewhere else f"; known here: {', '.join(fields)}"


def _without_indices(location: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in location if not isinstance(part, int) and not part.isdigit())


def _nested(dotted: str) -> str:
    first, *inner = dotted.split(".")
    opened = "".join(f"{{{part}: " for part in inner)
    return f"`{first}: {opened}...{'}' * len(inner)}`"


def meaning(location: tuple[Any, ...], root: type[BaseModel]) -> str:
    """Return what the key at ``location`` of ``root`` is, in brackets; "" where nothing is said."""
    text = description(location, root)
    return f" ({text})" if text else ""


def description(location: tuple[Any, ...], root: type[BaseModel]) -> str | None:
    """Return what the configuration says of the key at ``location``."""
    sections, name = _sections_at(location[:-1], root), str(location[-1])
    return next((s.model_fields[name].description for s in sections if name in s.model_fields), None)


def _sections_at(location: tuple[Any, ...], root: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the section at a location of the tree, or all that may be there; list indices are ignored."""
    sections = [root]
    for part in location:
        if not isinstance(part, int):
            fields = [s.model_fields[part].annotation for s in sections if part in s.model_fields]
            sections = [inner for annotation in fields for inner in _sections_in(annotation)]
    return sections


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in get_args(annotation) for section in _sections_in(argument)]


def keys_called(name: str) -> list[str]:
    """Return the dotted key ``name``, where lists may have indices, or else the keys that end with it."""
    known = set(_all_keys(Config))
    if ".".join(part for part in name.split(".") if not part.isdigit()) in known:
        return [name]
    return sorted(key for key in known if key.endswith(f".{name}"))


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: dict[str, None] = {}  # members of a tagged union share some
    for name, field in section.model_fields.items():
        keys[prefix + name] = None
        for inner in _sections_in(field.annotation):
            keys |= dict.fromkeys(_all_keys(inner, f"{prefix}{name}."))
    return list(keys)
