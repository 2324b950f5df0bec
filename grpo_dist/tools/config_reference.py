"""Generates ``configs/README.md``, the page of all configuration keys, from the configuration classes.

``python -m grpo_dist.tools.config_reference`` rewrites its generated parts. ``--check`` exits with 1 if they
are out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_dist.config import Config
from grpo_dist.config.base import USER_SUPPLIED, Choice, members
from grpo_dist.config.presets import table as presets_table
from grpo_dist.runtime.files import refresh
from grpo_dist.tools.recipe.config import PipelineFile

PAGE = Path(__file__).resolve().parents[2] / "configs" / "README.md"
_WORDS: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "`true`, `false`"}
_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


@dataclass(frozen=True, slots=True)
class Key:
    """One row. ``sections``: section classes of the value, whose keys begin with ``inside``. Several are the
    members of a tagged union.
    """

    path: str
    value: str
    default: str
    meaning: str
    sections: tuple[type[BaseModel], ...]
    inside: str


def keys(section: type[BaseModel], prefix: str = "") -> list[Key]:
    """List a section's keys without its subsections, and without a union member's tag. ``N`` in a path is a
    list position.
    """
    tag = section.tag if issubclass(section, Choice) else None
    return [
        _key(prefix + name, field)
        for name, field in section.model_fields.items()
        if name != tag and not field.exclude
    ]


def sections(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the prefix and class of every section, outer ones first: ("data.train.N.", DataSourceConfig)."""
    for inside, block in _blocks((root,), prefix):
        yield from ((inside, section) for section in block)


def page(root: type[BaseModel], title: str) -> str:
    """Return markdown with a table per section and tagged union of ``root``. Sections that occur several
    times have one table, at their shallowest position.
    """
    counts: dict[tuple[type[BaseModel], ...], dict[str, int]] = {}
    for number, (prefix, block) in enumerate(_blocks((root,), "")):
        if any(map(keys, block)):
            counts.setdefault(block, {}).setdefault(prefix, number)
    ordered = {block: sorted(paths, key=lambda prefix: prefix.count(".")) for block, paths in counts.items()}
    places = dict(sorted(ordered.items(), key=lambda item: counts[item[0]][item[1][0]]))
    headings = {
        block: ", ".join(f"`{prefix[:-1]}`" if prefix else title for prefix in prefixes)
        for block, prefixes in places.items()
    }
    parts = []
    for block, prefixes in places.items():
        prefix, section = prefixes[0], block[0]
        parts.append(f"### {headings[block]}")
        if issubclass(section, Choice):
            rows = _union_rows(block, prefix, headings)
        else:
            parts.append(_prose(section))
            # If the key adds no description, the section only has its heading.
            listed = [key for key in keys(section, prefix) if key.meaning or key.default != "its defaults"]
            rows = [_row(key, headings) for key in listed]
        if rows:
            parts.append("\n".join(["| key | value; default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def meaning(key: Key) -> str:
    """Return the description of a key, or else of its section."""
    return key.meaning or (_prose(key.sections[0]) if key.sections else "")


def _blocks(block: tuple[Any, ...], prefix: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the prefix and class of every section, and prefix and members of every tagged union."""
    yield prefix, block
    for section in block:
        for key in keys(section, prefix):
            if key.sections:
                yield from _blocks(key.sections, key.inside)


def _key(path: str, field: FieldInfo) -> Key:
    sections = _sections(field.annotation)
    inside = "" if not sections else f"{path}.N." if _has_list(field.annotation) else f"{path}."
    value = _value(field.annotation, field.metadata)
    return Key(path, value, _default(field), field.description or "", sections, inside)


def _union_rows(block: tuple[Any, ...], prefix: str, headings: Mapping[Any, str]) -> list[str]:
    """Return a row per member with its names, then a row per key with the members that have it."""
    rows = []
    for member in block:
        names = ", ".join(f"`{name}`" for name in member.names()) or USER_SUPPLIED
        rows.append(f"| {names} | | {_cell(_prose(member))} |")
    shared: dict[Key, list[str]] = {}
    for member in block:
        chosen_by = member.names() or (USER_SUPPLIED,)
        label = ", ".join(chosen_by[:3]) + ", ..." * (len(chosen_by) > 3)
        for key in keys(member, prefix):
            shared.setdefault(key, []).append(label)
    for key, labels in shared.items():
        all_have = len(labels) == sum(bool(keys(member)) for member in block)
        text = meaning(key) if all_have else f"{', '.join(labels)}: {meaning(key)}"
        rows.append(_row(replace(key, meaning=text), headings))
    return rows


def _row(key: Key, headings: Mapping[Any, str]) -> str:
    value = key.value
    if key.sections in headings:
        link = f"](#{anchor(headings[key.sections])})"
        one, other = key.sections[0], key.sections[-1]
        if issubclass(one, Choice) and issubclass(other, Choice):
            first, last = _name_cell(one, 0), _name_cell(other, -1)
            start, end = value.index(first), value.rindex(last) + len(last)
            value = f"{value[:start]}[name{link}{value[end:]}"
        else:
            value = value.replace("section", f"[section{link}")
    return f"| `{key.path}` | {_setting(value, key.default)} | {_cell(meaning(key))} |"


def _name_cell(member: Any, position: int) -> str:
    return f"`{member.names()[position]}`" if member.names() else USER_SUPPLIED


def _setting(value: str, default: str) -> str:
    """Describe values and default, without types that it implies: "integer > 0", "`8`" -> "> 0; `8`"."""
    if default == "`null`":
        value = value.removesuffix(", `null`")
    elif default != "required":
        value = re.sub("^(`true`, `false`|text|integer|number)(?= |$)", "", value).strip()
    return f"{value}; {default}" if value else default


def anchor(heading: str) -> str:
    """Return the anchor of a heading: "`data.train.N`, `data.eval.N`" -> datatrainn-dataevaln."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _prose(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _sections(annotation: Any) -> tuple[type[BaseModel], ...]:
    if union := members(annotation):
        return union
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return next((inner for part in get_args(annotation) if (inner := _sections(part))), ())


def _has_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_has_list(part) for part in get_args(annotation))


def _value(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the allowed values: (float, [Ge(0)]) -> "number ≥ 0"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(parts[0], [*parts[1:], *metadata])
    if (union := members(annotation)) and (origin is Union or origin is UnionType):
        names = [f"`{name}`" for member in union for name in member.names()]
        plain = [_value(part, metadata) for part in parts if not _sections(part) and part is not NoneType]
        optional = ["`null`"] if NoneType in parts else []
        others = [USER_SUPPLIED for member in union if not member.names()]
        return ", ".join([*optional, *plain, *names, *others])
    if origin in (Union, UnionType):
        return ", ".join("`null`" if part is NoneType else _value(part, metadata) for part in parts)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in parts)
    if origin is tuple and parts[-1] is Ellipsis:
        return f"list of {_value(parts[0])}{_limits(metadata)}"
    if origin is tuple:
        return f"list of {len(parts)}: {_value(parts[0])}"
    if origin is dict:
        return "mapping"
    if _sections(annotation):
        return "section"
    return f"{_WORDS[annotation]}{_limits(metadata)}"


def _limits(metadata: Sequence[Any]) -> str:
    words = []
    for limit in _flat(metadata):
        words += [f"{sign} {getattr(limit, name)}" for name, sign in _SIGNS.items() if hasattr(limit, name)]
        words += ["not empty"] if hasattr(limit, "min_length") else []
        words += [f"as `{limit.pattern}`"] if getattr(limit, "pattern", None) else []
    return "".join(f" {word}" for word in words)


def _flat(metadata: Sequence[Any]) -> Iterator[Any]:
    for item in metadata:
        yield from _flat(item.metadata) if isinstance(item, FieldInfo) else (item,)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Choice):
        value = getattr(value, value.tag)
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple):
        value = [
            {key: inner for key, inner in v.model_dump().items() if key in v.model_fields_set}
            if isinstance(v, BaseModel)
            else v
            for v in value
        ]
    return f"`{_cell(_yaml(value))}`"


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(arguments: Sequence[str]) -> int:
    """Rewrite the page. With --check, return 1 if it is out of date."""
    configuration = refresh(PAGE, "configuration", page(Config, "The run"), arguments=arguments)
    pipelines = refresh(PAGE, "pipelines", page(PipelineFile, "The pipeline"), arguments=arguments)
    presets = refresh(PAGE, "presets", presets_table(), arguments=arguments)
    return configuration | pipelines | presets


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
