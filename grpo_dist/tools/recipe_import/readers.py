"""Recipes of other trainers as lists of settings: shell scripts, YAML, TOML, and Python read as syntax."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_dist.config.secrets import HIDDEN, is_secret
from grpo_dist.errors import UserError
from grpo_dist.tools.recipe_import.shell import Command, read_commands, unknown

_HYDRA = re.compile(r"(\+{0,2})([A-Za-z_][\w.@/-]*)=(.*)", re.S)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.S)
_RANKS = ("nproc_per_node", "num_processes", "NPROC_PER_NODE")  # of launchers
_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig", "ModelConfig", "from_pretrained", "load_dataset")
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
_WIDEST = 200  # characters of a text without quotes
_KEY = re.compile(r"[0-9a-f]{40}|(hf|wandb_v\d)_\w{16,}")  # of wandb and the hub
_MOST_BASES = 8  # files that a recipe builds on


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a recipe, by the trainer's name for it."""

    name: str
    value: Any

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else flow(self.value)
        if isinstance(self.value, str) and (is_secret(self.name) or _KEY.fullmatch(value)):
            value = HIDDEN
        return f"{self.name}={' '.join(value.split())}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a recipe in its order, ``text`` by which its trainer is recognised, and remarks."""

    settings: tuple[Setting, ...]
    text: str
    remarks: tuple[str, ...] = ()


def read_recipe(path: Path) -> Recipe:
    """Read a recipe in the form that its file has. Raises UserError if it has no settings."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    kind = path.suffix.lower()
    try:
        if kind == ".toml":
            recipe = Recipe(tuple(_flatten(tomllib.loads(text), indexed=True)), text)
        elif kind in (".yaml", ".yml", ".json"):
            missing = list[str]()
            recipe = Recipe(tuple(_flatten(_resolved(_read_yaml(path, missing)))), text, tuple(missing))
        elif kind in (".py", ".ipynb"):
            recipe = _read_python(_code_of_notebook(text) if kind == ".ipynb" else text)
        else:
            recipe = _read_shell(text, path.parent)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, SyntaxError, LookupError) as e:
        raise UserError(f"{path}: not {kind or 'shell'}: {' '.join(str(e).split())[:300]}") from e
    if not recipe.settings:
        raise UserError(
            f"{path}: no settings found; expected a shell script that starts a trainer, its YAML or TOML, or "
            "Python with GRPOConfig(...)"
        )
    return recipe


def _read_shell(text: str, folder: Path | None) -> Recipe:
    """Read the command with most settings: overrides `key=value`, or flags."""
    commands = [(command, _command_settings(command)) for command in read_commands(text, folder)]
    commands = [(command, settings) for command, settings in commands if settings]
    if not commands:
        return Recipe((), text)
    _, settings = max(commands, key=lambda one: len(one[1]))
    others = sum(len(one) > len(settings) // 2 for _, one in commands) - 1
    remarks = [f"the script starts {others + 1} trainings; this is the first"] if others else []
    return Recipe(tuple(settings), text, tuple(remarks))


def _command_settings(command: Command) -> list[Setting]:
    words, start = command.words, 0
    for at, word in enumerate(words[1:], 1):
        before = words[at - 1]
        program = word.endswith((".py", ".sh")) and not before.startswith("--")
        if program or before in ("-m", "--module", "swift", "trl"):
            start = at + 1
    if not start and not any(word.startswith("openrlhf") for word in words):
        return []
    launcher = [one for one in _flags(words[:start]) if one.name in _RANKS]
    launcher += [Setting(name, typed(value)) for name, value in command.environment.items() if name in _RANKS]
    words = words[start:]
    overrides = [match for word in words if (match := _HYDRA.fullmatch(word))]
    flags = list(_flags(words))
    if len(overrides) >= len(flags):
        values = [(match[2], typed(match[3])) for match in overrides]
        return [*launcher, *(one for name, value in values for one in _flatten({name: value})), *flags]
    return [*launcher, *flags]


def _flags(words: tuple[str, ...]) -> Iterator[Setting]:
    """Yield the flags of a command line: --flag value, --flag=value, --flag a b, --flag."""
    name, values = "", list[str]()
    for word in (*words, "--end"):
        match = _FLAG.fullmatch(word)
        if match is None:
            values.append(word)
            continue
        if name:
            plain = [typed(value) for value in values]
            yield Setting(name, True if not plain else plain[0] if len(plain) == 1 else plain)
        name, values = match[1].replace("-", "_"), [] if match[2] is None else [match[2]]


def typed(text: str) -> Any:
    """Return a value of a command line: a number, a switch, null, a list or mapping, or the text."""
    plain = text.strip()
    if plain.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(plain.lower())
    for number in (int, float):
        try:
            return number(plain)
        except ValueError:
            pass
    if plain[:1] in ("[", "{") and not unknown(plain):
        try:
            return yaml.safe_load(plain)
        except yaml.YAMLError:
            return text
    return plain[1:-1] if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"" else text


def _read_yaml(path: Path, missing: list[str], depth: int = 0) -> DictConfig:
    """Read a YAML file over those that its `defaults` name; add a remark for each that is not there."""
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise yaml.YAMLError("expected a mapping of keys to values")
    plain = OmegaConf.to_container(loaded, resolve=False)
    bases = plain.pop("defaults", []) if isinstance(plain, dict) else []
    names = [bases] if isinstance(bases, str) else bases
    files = [path.parent / name for name in names if isinstance(name, str) and name != "_self_"]
    missing += [f"{file}: not there; what it sets is left out" for file in files if not file.is_file()]
    below = [_read_yaml(file, missing, depth + 1) for file in files if file.is_file() and depth < _MOST_BASES]
    return cast(DictConfig, OmegaConf.merge(*below, OmegaConf.create(plain)))


def _resolved(tree: DictConfig) -> dict[str, Any]:
    """Return plain mappings with references to other keys replaced, those to the environment as they are."""

    def plain(node: Any, raw: Any) -> Any:
        if isinstance(raw, dict):
            return {key: plain(_child(node, key), value) for key, value in raw.items()}
        if isinstance(raw, list):
            return [plain(_child(node, at), value) for at, value in enumerate(raw)]
        return raw if node is None or "${oc." in str(raw) else node

    def _child(node: Any, key: Any) -> Any:
        try:
            value = node[key] if isinstance(node, DictConfig | ListConfig) else None
        except OmegaConfBaseException:
            return None
        return OmegaConf.to_container(value, resolve=False) if _is_reference(node, key, value) else value

    def _is_reference(node: Any, key: Any, value: Any) -> bool:
        return isinstance(value, DictConfig | ListConfig) and OmegaConf.is_interpolation(node, key)

    raw = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(raw, dict)
    return {str(key): plain(_child(tree, key), value) for key, value in raw.items()}


def _flatten(tree: Mapping[Any, Any], prefix: str = "", *, indexed: bool = False) -> Iterator[Setting]:
    """Yield the leaves of nested mappings; with ``indexed`` also those in lists of mappings."""
    for key, value in tree.items():
        if indexed and isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.", indexed=indexed)
        else:
            yield Setting(f"{prefix}{key}", value)


def _read_python(text: str) -> Recipe:
    """Read the arguments of GRPOConfig(...), GRPOTrainer(...) and the like, and the command line in the
    docstring of the script.
    """
    tree = ast.parse(text)
    settings = list(_read_shell(ast.get_docstring(tree) or "", None).settings)
    constants = dict[str, Any]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value = _literal(node.value, constants)
            if not isinstance(value, _Code):
                constants[node.targets[0].id] = value
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in _CALLS]
    for call in sorted(calls, key=lambda node: node.lineno):
        settings += _arguments(call, constants)
    return Recipe(tuple(settings), text)


def _code_of_notebook(text: str) -> str:
    """Return the code cells, without lines for the shell and the notebook."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    return "\n".join("pass" if line.lstrip()[:1] in ("%", "!") else line for line in lines)


class _Code(str):
    """Code whose value is not known without running it."""


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _arguments(call: ast.Call, constants: Mapping[str, Any]) -> Iterator[Setting]:
    name = _called(call)
    if name == "load_dataset":
        first = [_literal(argument, constants) for argument in call.args]
        names = ("dataset_name", "dataset_config")
        values = dict(zip(names, first, strict=False))
        splits = [_literal(k.value, constants) for k in call.keywords if k.arg == "split"]
        values |= dict(zip(("dataset_train_split",), splits, strict=False))
    else:
        values = {k.arg: _literal(k.value, constants) for k in call.keywords if k.arg}
    for key, value in values.items():
        if name == "LoraConfig":
            key = _LORA.get(str(key), str(key))
        if isinstance(value, list):
            value = [str(one) if isinstance(one, _Code) else one for one in value]
        if key == "dataset_train_split" and isinstance(value, list):
            value = value[0]
        yield Setting(str(key), str(value) if isinstance(value, _Code) else value)
    if name == "LoraConfig":
        yield Setting("use_peft", True)


def _literal(node: ast.AST, constants: Mapping[str, Any]) -> Any:
    """Return the value of an expression of constants, else its code."""
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, constants) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return _Code(ast.unparse(node))


def flow(value: Any) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, str) and ("\n" in value or len(value) > _WIDEST):
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
