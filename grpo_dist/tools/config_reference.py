"""Generate ``configs/README.md``, the page of all configuration keys, from the configuration classes.

``python -m grpo_dist.tools.config_reference`` rewrites its generated parts. With ``--check`` its exit code
shows whether they are out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """One row. ``sections``: of the value, if it has keys of its own, which begin with ``inside``. Several
    are the members of a tagged union.
    """

    path: str
    value: str
    default: str
    meaning: str
    sections: tuple[type[BaseModel], ...]
    inside: str


def keys(section: type[BaseModel], prefix: str = "") -> list[Key]:
    """List the keys of a section without its subsections, and without the tag of a member of a tagged union.
    ``N`` in a path is a position in a list.
    """
    tag = section.tag if issubclass(section, Choice) else None
    return [_key(prefix + name, field) for name, field in section.model_fields.items() if name != tag]


def sections(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the prefix and class of every section, outer ones first: ("data.train.N.", DataSourceConfig)."""
    yield prefix, root
    for key in keys(root, prefix):
        for section in key.sections:
            yield from sections(section, key.inside)


def page(root: type[BaseModel], title: str) -> str:
    """Return markdown with a table per section of ``root``; a section used several times has one table."""
    places: dict[type[BaseModel], list[str]] = {}
    for prefix, section in sections(root):
        places.setdefault(section, []).append(prefix)
    places = {section: prefixes for section, prefixes in places.items() if keys(section)}
    headings = {section: _heading(section, prefixes, title) for section, prefixes in places.items()}
    parts = []
    for section, prefixes in places.items():
        # A section that its key says nothing more of has its heading alone.
        own = [key for key in keys(section, prefixes[0]) if key.meaning or key.default != "its defaults"]
        parts.append(f"### {headings[section]}\n\n{_prose(section)}")
        if own:
            head = "| key | value; default | meaning |\n|---|---|---|"
            parts.append("\n".join([head, *(_row(key, headings) for key in own)]))
    return "\n\n".join(parts)


def meaning(key: Key) -> str:
    """Return the description of a key, or else of its section."""
    return key.meaning or (_prose(key.sections[0]) if key.sections else "")


def _key(path: str, field: FieldInfo) -> Key:
    sections = _sections(field.annotation)
    inside = "" if not sections else f"{path}.N." if _has_list(field.annotation) else f"{path}."
    value = _value(field.annotation, field.metadata)
    return Key(path, value, _default(field), field.description or "", sections, inside)


def _row(key: Key, headings: Mapping[type[BaseModel], str]) -> str:
    value = key.value
    for section in key.sections:
        if section not in headings:
            continue
        if issubclass(section, Choice):
            for name in section.names() or (USER_SUPPLIED,):
                word = f"`{name}`" if section.names() else name
                value = value.replace(word, f"[{word}](#{anchor(headings[section])})", 1)
        else:
            value = value.replace("section", f"[section](#{anchor(headings[section])})")
    return f"| `{key.path}` | {_setting(value, key.default)} | {_cell(meaning(key))} |"


def _setting(value: str, default: str) -> str:
    """Describe values and default, without what the default says: "integer > 0", "`8`" -> "> 0; `8`"."""
    if default == "`null`":
        value = value.removesuffix(", `null`")
    elif default != "required":
        value = re.sub("^(`true`, `false`|text|integer|number)(?= |$)", "", value).strip()
    return f"{value}; {default}" if value else default


def _heading(section: type[BaseModel], prefixes: Sequence[str], title: str) -> str:
    places = ", ".join(f"`{prefix[:-1]}`" if prefix else title for prefix in prefixes)
    return (
        f"{places}: {', '.join(section.names() or (USER_SUPPLIED,))}"
        if issubclass(section, Choice)
        else places
    )


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
    return next((found for part in get_args(annotation) if (found := _sections(part))), ())


def _has_list(annotation: Any) -> bool:
    return get_origin(annotation) is tuple or any(_has_list(part) for part in get_args(annotation))


def _value(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe the allowed values: (float, [Ge(0)]) -> "number ≥ 0"."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value(parts[0], [*parts[1:], *metadata])
    if (union := members(annotation)) and (origin is Union or origin is UnionType):
        names = [f"`{name}`" for member in union for name in member.names()]
        optional = ["`null`"] if NoneType in parts else []
        return ", ".join([*optional, *names, *(USER_SUPPLIED for member in union if not member.names())])
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
        return f"`{getattr(value, value.tag)}`"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, tuple):
        value = [v.model_dump(exclude_unset=True) if isinstance(v, BaseModel) else v for v in value]
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    return f"`{_cell(text)}`"


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
