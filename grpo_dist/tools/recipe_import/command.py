"""`grpo-dist import`: converts another trainer's recipe to a configuration."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_dist.errors import UserError
from grpo_dist.tools.arguments import add_command, add_inputs

_WIDTH = 100
_NAMED = 4  # settings listed per reason
_SHOWN = 90  # maximum characters of a setting in a comment


def add_import(commands: Any) -> None:
    """Add the command. Imports nothing heavy."""
    text = "convert a recipe of another trainer to a configuration, e.g. of verl, OpenRLHF or TRL"
    sub = add_command(commands, "import", text, _import)
    add_inputs(sub, "its script, YAML, TOML or Python file", "none", metavars=("FILE", "key=value"))
    sub.add_argument(
        "--from", dest="trainer", metavar="TRAINER", help="whose recipe it is; default: recognised"
    )


def _import(path: str, overrides: list[str], *, trainer: str | None) -> None:
    if overrides:
        raise UserError(f"{overrides[0]}: import takes one file and no settings")
    from grpo_dist.tools.recipe_import.readers import read_recipe
    from grpo_dist.tools.recipe_import.translation import translate

    recipe = read_recipe(Path(path))
    translation = translate(recipe, _trainer(recipe, trainer, path))
    print("\n".join(document(translation, Path(path).name)))
    print(summary(translation), file=sys.stderr)


def _trainer(recipe: Any, name: str | None, path: str) -> Any:
    """Return the table of the named trainer, or the best match."""
    from grpo_dist.config.peers import trainers

    tables = trainers()
    plain = {key.replace("_", ""): trainer for key, trainer in tables.items()}
    if name is not None:
        key = "".join(filter(str.isalnum, name.lower()))
        if key not in plain:
            names = ", ".join(trainer.name for trainer in tables.values())
            raise UserError(f"--from {name}: no such trainer; expected one of {names}")
        return plain[key]

    def fit(trainer: Any) -> float:
        words = sum(word in recipe.text for word in trainer.words)
        count = sum(trainer.row(setting.name) is not None for setting in recipe.settings)
        return count / len(recipe.settings) + 0.1 * words

    best = max(reversed([*tables.values()]), key=fit)  # tables that extend another come after it
    if fit(best) < 0.5:
        names = ", ".join(trainer.name for trainer in tables.values())
        raise UserError(f"{path}: not recognised as a recipe of {names}; name the trainer by --from")
    return best


def document(translation: Any, name: str) -> Iterator[str]:
    """Yield the configuration's lines, with every recipe setting in a comment."""
    from grpo_dist.tools.recipe_import.translation import TAGS, plain_path

    trainer = translation.trainer
    yield f"# {name} of {trainer.name} (settings of {trainer.version}), by `grpo-dist import`."
    sections: dict[Any, Any] = {}
    mappings = {path[:end] for e in translation.entries for path in e.values for end in range(1, len(path))}
    section: dict[Any, Any] = sections
    for number, entry in enumerate(translation.entries):
        if entry.kind == "dropped":
            continue
        for at, (path, value) in enumerate(entry.values.items()):
            node = sections
            if path in mappings:  # the name of a union member with settings
                path = (*path, TAGS[plain_path(path)])
            for part in path[:-1]:
                node = node.setdefault(part, {})
            section = sections[path[0]] if len(path) > 1 else sections
            node[path[-1]] = _Leaf(value, "" if at else entry.source)
        if not entry.values:
            section[_Note(number)] = f"{_short(entry.source)}: {entry.remark}"
    yield from _lines(sections, "")


class _Leaf:
    def __init__(self, value: Any, source: str) -> None:
        self.value, self.source = value, source


@dataclass(frozen=True)
class _Note:
    """The position of a comment among a section's keys."""

    number: int


def _lines(node: Mapping[Any, Any], indent: str) -> Iterator[str]:
    """Yield the lines of nested mappings. Keys are names, list positions, and comment positions."""
    from grpo_dist.tools.recipe_import.readers import flow

    for key in sorted(node, key=lambda key: key if isinstance(key, int) else -1):  # a stable sort
        child = node[key]
        if isinstance(key, _Note):
            lines = textwrap.wrap(
                " ".join(child.split()), _WIDTH, break_long_words=False, break_on_hyphens=False
            )
            yield from (f"{indent}# {'  ' * (at > 0)}{line}" for at, line in enumerate(lines))
        elif isinstance(child, _Leaf):
            comment = f"  # {_short(child.source)}" if child.source else ""
            yield f"{indent}{key}: {flow(child.value)}{comment}"
        elif isinstance(key, int):
            first, *rest = _lines(child, f"{indent}  ")
            yield f"{indent}- {first.strip()}"
            yield from rest
        else:
            yield f"{indent}{key}:"
            yield from _lines(child, f"{indent}  ")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def summary(translation: Any) -> str:
    """Summarise the translation, and list settings that are not carried over."""
    trainer, count = translation.trainer, translation.count
    all_settings = count("written", "answered", "lost", "unknown")
    lines = [
        f"{trainer.name} {trainer.version}: {all_settings} settings: {count('written')} written, "
        f"{count('answered')} answered in a comment, {count('lost')} not carried over, {count('unknown')} "
        f"unknown; {count('added')} keys added that {trainer.name} has unwritten",
        *translation.remarks,
    ]
    for kind, title in (("lost", "not carried over"), ("unknown", "unknown")):
        entries = [entry for entry in translation.entries if entry.kind == kind]
        groups: dict[str, list[str]] = {}
        for entry in entries:
            groups.setdefault(entry.remark, []).append(_short(entry.source))
        lines += [f"{title}:"] if entries else []
        for remark, sources in groups.items():
            more = f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else ""
            lines.append(f"  {', '.join(sources[:_NAMED])}{more}: {remark}")
    return "\n".join(lines)
