"""Reads other trainers' recipes as lists of settings: shell scripts, YAML, TOML, and parsed Python."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_dist.config.secrets import HIDDEN, is_secret
from grpo_dist.errors import UserError
from grpo_dist.tools.recipe_import.expressions import Uncomputable, evaluate
from grpo_dist.tools.recipe_import.shell import Command, read_commands, unknown

_HYDRA = re.compile(r"(\+{0,2})([A-Za-z_][\w.@/-]*)=(.*)", re.S)
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.S)
_RANKS = ("nproc_per_node", "num_processes", "NPROC_PER_NODE")  # launchers' names
_CALLS = ("LoraConfig", "get_peft_model", "ModelConfig", "from_pretrained", "load_dataset")
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules"}
_SAMPLING = ("min_p", "top_p", "top_k")  # fields of vLLM's SamplingParams
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//"}
_TYPES = {"int": int, "float": float, "str": str}
_ENVIRONMENT = ("os.environ.get", "os.getenv", "getenv")
_WIDEST = 200  # maximum characters of an unquoted text
_UNRESOLVED: Any = object()  # a dangling reference
_KEY = re.compile(r"[0-9a-f]{40}|(hf|wandb_v\d)_\w{16,}")  # API keys of wandb and the hub
_MOST_BASES = 8  # maximum base files of a recipe
_FILES = ("config_file", "config")  # flags of accelerate, and of a trainer
_MOST_FOLDERS = 5  # maximum folders searched above the script
_FEW = 3  # more flags in quotes are a nested command


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a recipe, with the trainer's name."""

    name: str
    value: Any

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else flow(self.value)
        if isinstance(self.value, str) and (is_secret(self.name) or _KEY.fullmatch(value)):
            value = HIDDEN
        return f"{self.name}={' '.join(value.split())}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe's settings in order, ``text`` to recognise its trainer, and remarks."""

    settings: tuple[Setting, ...]
    text: str
    remarks: tuple[str, ...] = ()


def read_recipe(path: Path) -> Recipe:
    """Read a recipe by its file's format. Raises UserError if it has no settings."""
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
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError, SyntaxError, LookupError) as e:
        raise UserError(f"{path}: not {kind or 'shell'}: {' '.join(str(e).split())[:300]}") from e
    if not recipe.settings:
        raise UserError(
            f"{path}: no settings found; expected a shell script that starts a trainer, its YAML or TOML, or "
            "Python with GRPOConfig(...)"
        )
    return recipe


def _read_shell(text: str, folder: Path | None) -> Recipe:
    """Read the command with the most settings: overrides `key=value`, or flags, and its config file."""
    plain = read_commands(text, folder)
    nested = [word for command in plain for word in command.words if word.count(" --") > _FEW]  # bash -c
    plain += [command for word in nested for command in read_commands(word, folder)]
    commands = [(command, _command_settings(command)) for command in plain]
    commands = [(command, settings) for command, settings in commands if settings]
    if not commands:
        return Recipe((), text)
    _, settings = max(commands, key=lambda one: len(one[1]))
    others = sum(len(one) > len(settings) // 2 for _, one in commands) - 1
    remarks = [f"the script starts {others + 1} trainings; this is the first"] if others else []
    if folder is not None:
        settings = _with_files(settings, folder, remarks)
    return Recipe(tuple(settings), text, tuple(remarks))


def _with_files(settings: Sequence[Setting], folder: Path, remarks: list[str]) -> list[Setting]:
    """Merge the settings of a command's files below its flags. Add a remark for each file that is in none of
    the folders above the script.
    """
    settings_by_name = {setting.name: setting.value for setting in settings}
    names = [str(settings_by_name[name]) for name in _FILES if isinstance(settings_by_name.get(name), str)]
    if isinstance(name := settings_by_name.get("config_name"), str):
        names.append(f"{settings_by_name.get('config_path') or '.'}/{name.removesuffix('.yaml')}.yaml")
    below, roots = dict[str, Any](), (folder, *folder.resolve().parents[:_MOST_FOLDERS])
    for name in names:
        path = next((root / name for root in roots if (root / name).is_file()), None)
        if path is None or path.suffix not in (".yaml", ".yml", ".json", ".toml"):
            remarks.append(f"{name}: not there; what it sets is left out")
            continue
        recipe = read_recipe(path)
        remarks += recipe.remarks
        is_launchers = name == settings_by_name.get("config_file")
        below |= {one.name: one.value for one in recipe.settings if not is_launchers or one.name in _RANKS}
    under = [Setting(name, value) for name, value in below.items() if name not in settings_by_name]
    return [*under, *(one for one in settings if one.name not in (*_FILES, "config_path", "config_name"))]


def _command_settings(command: Command) -> list[Setting]:
    words, start, maybe = command.words, 0, 0
    for at, word in enumerate(words[1:], 1):
        before, is_program = words[at - 1], word.endswith((".py", ".sh"))
        is_value = before.startswith("--") and "=" not in before  # the value of the previous flag
        if (is_program and not is_value) or before in ("-m", "--module", "swift", "trl", "megatron"):
            start = at + 1
        elif is_program and not maybe:
            maybe = at + 1  # uv run --active train.py
    start = start or maybe
    if not start and not any(word.startswith("openrlhf") for word in words):
        return []
    of_launcher = (*_RANKS, "config_file")
    launcher = [
        Setting(one.name, one.value[0] if isinstance(one.value, list) else one.value)  # the program follows
        for one in _flags(words[:start])
        if one.name in of_launcher
    ]
    launcher += [Setting(name, typed(value)) for name, value in command.environment.items() if name in _RANKS]
    words = words[start:]
    overrides = [match for word in words if (match := _HYDRA.fullmatch(word))]
    flags = list(_flags(words))
    if len(overrides) >= len(flags):
        flags = list(_flags(tuple(word for word in words if not _HYDRA.fullmatch(word))))
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
            plain = [typed(value.rstrip(",") if len(values) > 1 else value) for value in values]
            yield Setting(name, True if not plain else plain[0] if len(plain) == 1 else plain)
        name, values = match[1].replace("-", "_"), [] if match[2] is None else [match[2]]


def typed(text: str) -> Any:
    """Parse a command-line value: a number, a boolean, null, a list or mapping, or the text."""
    plain = text.strip()
    if plain.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(plain.lower())
    for number in (int, float) if "_" not in plain else ():  # 0.5_5 are two bounds, not 0.55
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
    """Read a YAML file over its `defaults`; add a remark for each missing file."""
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise yaml.YAMLError("expected a mapping of keys to values")
    plain = OmegaConf.to_container(loaded, resolve=False)
    bases = plain.pop("defaults", []) if isinstance(plain, dict) else []
    names = [bases] if isinstance(bases, str) else bases
    files = [path.parent / name for name in names if isinstance(name, str) and name != "_self_"]
    files = [file if file.suffix else file.with_suffix(".yaml") for file in files]
    missing += [f"{file}: not there; what it sets is left out" for file in files if not file.is_file()]
    below = [_read_yaml(file, missing, depth + 1) for file in files if file.is_file() and depth < _MOST_BASES]
    for key, section in plain.items() if isinstance(plain, dict) else ():
        if isinstance(section, dict) and section.pop("_override_", False):  # NeMo-RL: replaces the base
            for base in below:
                base.pop(key, None)
    return cast(DictConfig, OmegaConf.merge(*below, OmegaConf.create(plain)))


def _resolved(tree: DictConfig) -> dict[str, Any]:
    """Return plain mappings with resolved references to keys, but unresolved environment variables."""

    def plain(node: Any, raw: Any) -> Any:
        if isinstance(raw, dict):
            return {key: plain(_child(node, key), value) for key, value in raw.items()}
        if isinstance(raw, list):
            return [plain(_child(node, at), value) for at, value in enumerate(raw)]
        return raw if node is _UNRESOLVED or "${oc." in str(raw) else node

    def _child(node: Any, key: Any) -> Any:
        try:
            value = node[key] if isinstance(node, DictConfig | ListConfig) else _UNRESOLVED
        except OmegaConfBaseException:
            return _UNRESOLVED
        return OmegaConf.to_container(value, resolve=False) if _is_reference(node, key, value) else value

    def _is_reference(node: Any, key: Any, value: Any) -> bool:
        return isinstance(value, DictConfig | ListConfig) and OmegaConf.is_interpolation(node, key)

    raw = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(raw, dict)
    return {str(key): plain(_child(tree, key), value) for key, value in raw.items()}


def _flatten(tree: Mapping[Any, Any], prefix: str = "", *, indexed: bool = False) -> Iterator[Setting]:
    """Yield the leaves of nested mappings; with ``indexed`` also leaves in lists of mappings."""
    for key, value in tree.items():
        if indexed and isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.", indexed=indexed)
        else:
            yield Setting(f"{prefix}{key}", value)


def _read_python(text: str) -> Recipe:
    """Read the arguments of GRPOConfig(...), GRPOTrainer(...) and similar calls, and the command line in the
    script's docstring.
    """
    tree = ast.parse(text)
    settings = list(_read_shell(ast.get_docstring(tree) or "", None).settings)
    names = _Names(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_read(_called(node))]
    for call in sorted(calls, key=lambda node: node.lineno):
        settings += _arguments(call, names)
    return Recipe(tuple(settings), text)


class _Names:
    """Values of names in a script: constants, arguments with their defaults, and calls."""

    def __init__(self, tree: ast.AST) -> None:
        self.constants = dict[str, Any]()
        self.arguments = dict[str, Any]()  # from argparse and dataclasses: `args.beta`
        self.calls = dict[str, ast.Call]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) == "add_argument":
                self._add_argument(node)
            elif isinstance(node, ast.ClassDef):
                self._add_fields(node)
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in (target for target in targets if isinstance(target, ast.Name)):
                assert isinstance(node, ast.Assign)
                if isinstance(node.value, ast.Call):
                    self.calls[target.id] = node.value
                if not isinstance(value := self.value(node.value), _Code):
                    self.constants[target.id] = value

    def _add_argument(self, call: ast.Call) -> None:
        flags = [flag for argument in call.args if isinstance(flag := self.value(argument), str)]
        values = {keyword.arg: self.value(keyword.value) for keyword in call.keywords}
        for flag in flags:
            if flag.startswith("--") and not isinstance(values.get("default"), _Code | None):
                self.arguments[flag.lstrip("-").replace("-", "_")] = values["default"]

    def _add_fields(self, node: ast.ClassDef) -> None:
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.value:
                value = self.value(item.value)
                if isinstance(item.value, ast.Call) and _called(item.value) == "field":
                    keywords = {keyword.arg: keyword.value for keyword in item.value.keywords}
                    value = self.value(keywords["default"]) if "default" in keywords else None
                if not isinstance(value, _Code | None):
                    self.arguments[item.target.id] = value

    def value(self, node: ast.AST) -> Any:
        """Return the value of a constant expression, else its code."""
        match node:
            case ast.Name(name) if name in self.constants:
                return self.constants[name]
            case ast.Attribute(ast.Name(), name) if name in self.arguments:
                return self.arguments[name]
            case ast.List(items) | ast.Tuple(items):
                return [self.value(item) for item in items]
            case ast.Dict(keys, values) if all(keys):
                pairs = zip(keys, values, strict=True)
                return {str(self.value(key)): self.value(value) for key, value in pairs if key}
            case ast.BinOp(left, op, right):
                one, other = self.value(left), self.value(right)
                if isinstance(one, int | float) and isinstance(other, int | float):
                    with suppress(Uncomputable):
                        return evaluate(f"{one!r} {_SIGNS.get(type(op), '?')} {other!r}", {})
            case ast.JoinedStr(parts):
                inner = (part.value if isinstance(part, ast.FormattedValue) else part for part in parts)
                return "".join(str(self.value(one)) for one in inner)
            case ast.Call(args=[_, default]) if ast.unparse(node.func) in _ENVIRONMENT:
                return self.value(default)
            case ast.Call(ast.Name(name), [inner], []) if name in _TYPES:
                value = self.value(inner)
                with suppress(ValueError, TypeError):
                    return value if isinstance(value, _Code) else _TYPES[name](value)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError):
            return _Code(ast.unparse(node))


def _is_read(name: str) -> bool:
    return name in _CALLS or name.endswith(("GRPOConfig", "GRPOTrainer"))


def _code_of_notebook(text: str) -> str:
    """Return the code cells, without shell and notebook commands."""
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell["source"]).splitlines()]
    return "\n".join("pass" if line.lstrip()[:1] in ("%", "!") else line for line in lines)


class _Code(str):
    """Code whose value is unknown without running it."""


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _arguments(call: ast.Call, names: _Names) -> Iterator[Setting]:
    name = _called(call)
    if name == "load_dataset":
        first = [names.value(argument) for argument in call.args]
        values = dict(zip(("dataset_name", "dataset_config"), first, strict=False))
        splits = [names.value(k.value) for k in call.keywords if k.arg == "split"]
        values |= dict(zip(("dataset_train_split",), splits, strict=False))
    else:
        values = dict[str, Any]()
        for keyword in call.keywords:
            value = names.value(keyword.value)
            if keyword.arg is None:  # **settings
                values |= value if isinstance(value, dict) else {}
            elif keyword.arg == "vllm_sampling_params" and (made := names.calls.get(str(value))):
                sampled = {k.arg: names.value(k.value) for k in made.keywords}
                values |= {key: sampled[key] for key in _SAMPLING if key in sampled}
            else:
                values[keyword.arg] = value
    adapts = name in ("LoraConfig", "get_peft_model")
    for key, value in values.items():
        if key == "model" and isinstance(value, _Code):
            continue  # an object created by another call from its path
        if adapts:
            key = _LORA.get(key, key)
        if isinstance(value, list):
            value = [str(one) if isinstance(one, _Code) else one for one in value]
        if key == "dataset_train_split" and isinstance(value, list):
            value = value[0]
        yield Setting(key, str(value) if isinstance(value, _Code) else value)
    if adapts:
        yield Setting("use_peft", True)


def flow(value: Any) -> str:
    """Return a value as one line of YAML."""
    if isinstance(value, str) and ("\n" in value or len(value) > _WIDEST):
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
