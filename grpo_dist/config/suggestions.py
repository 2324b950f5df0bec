"""What to set instead of an unknown key, and what a key is."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from pydantic import BaseModel

from grpo_dist.config import Config
from grpo_dist.config.peers import hint

_AT_MOST = 3  # keys that are named as one alternative
_PROBLEM = ("question_column", "prompt_column", "query_column", "input_column")  # of other data loaders


def suggestion(location: tuple[Any, ...], root: type[BaseModel], value: Any) -> str:
    """Return what to set instead of the unknown key at ``location``, after "; "; "" where nothing is known.

    ``location``: names of sections, indices of lists, and the key, under ``root``. ``value``: what was set.
    """
    known = _all_keys(root)
    name, section = str(location[-1]), _section(location[:-1], root)
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
    section = _section(location[:-1], root)
    if section is None or location[-1] not in section.model_fields:
        return None
    return section.model_fields[str(location[-1])].description


def _section(location: tuple[Any, ...], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the section class at a location of the tree; list indices are ignored."""
    section = root
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(str(part))
        inner = _model_class(field.annotation) if field else None
        if inner is None:
            return None
        section = inner
    return section


def _model_class(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_class(arg))), None)


def keys_called(name: str) -> list[str]:
    """Return the dotted key ``name``, where lists may have indices, or else the keys that end with it."""
    known = set(_all_keys(Config))
    if ".".join(part for part in name.split(".") if not part.isdigit()) in known:
        return [name]
    return sorted(key for key in known if key.endswith(f".{name}"))


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = _model_class(field.annotation)
        if inner is not None:
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys
