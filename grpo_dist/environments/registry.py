"""Environments by name.

python | calculator          built in
my_module:Class              user-supplied
verifiers:ENV                an environment of the package verifiers
reasoning_gym:TASK           a data set of the package reasoning-gym
openenv:URL                  a server of the package openenv-core
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_dist.config import DataConfig
from grpo_dist.config.environments import AGENT, check_environment_name
from grpo_dist.environments import builtin
from grpo_dist.environments.base import Environment
from grpo_dist.errors import expanded, raised
from grpo_dist.plugins.user_code import ENVIRONMENT, UserComponent, resolve_target

BUILTIN: dict[str, type[Environment]] = {"python": builtin.Python, "calculator": builtin.Calculator}
# Prefix -> module with the adapter, its class, and the package to install.
ADAPTERS = {
    "verifiers": ("grpo_dist.environments.verifiers", "VerifiersEnvironment", "verifiers"),
    "reasoning_gym": ("grpo_dist.environments.reasoning_gym", "ReasoningGym", "reasoning-gym"),
    "openenv": ("grpo_dist.environments.openenv", "OpenEnv", "openenv-core"),
}
_FOREIGN = {*ADAPTERS, AGENT.rstrip(":")}  # prefixes of external code


def may_run_code(name: str) -> bool:
    """Return whether the environment ``name`` may have the tool `python`. User-supplied classes may, and are
    imported only in separate processes.
    """
    return name != "calculator" and name.partition(":")[0] not in _FOREIGN


def load_environment(name: str) -> type[Environment]:
    """Import an environment and return its class. An adapter's class names it in ``target``.

    Raises ValueError if it is unknown or cannot be imported. Runs user code.
    """
    check_environment_name(name)
    if name in BUILTIN:
        return BUILTIN[name]
    if ":" not in name:
        name = resolve_target(ENVIRONMENT, name)
    prefix, _, rest = name.partition(":")
    if prefix in ADAPTERS:
        module, adapter, package = ADAPTERS[prefix]
        base: type[Environment] = getattr(_import(module, f"pip install {package}"), adapter)
        return type(base.__name__, (base,), {"target": rest})
    attribute: Any = getattr(_import(prefix, "add its directory to code_paths"), rest, None)
    if not isinstance(attribute, type) or not issubclass(attribute, Environment):
        what = "no such class" if attribute is None else f"{attribute!r}, not a subclass of Environment"
        raise ValueError(
            f"environment {name}: module `{prefix}` has {what} `{rest}`; expected a class that derives from "
            "grpo_dist.environments.base.Environment"
        )
    return attribute


def user_environments(data: DataConfig) -> tuple[UserComponent, ...]:
    """Return user-supplied environments, and environments that a package registers by name."""
    classes = [name for name in _names(data) if name.partition(":")[0] not in _FOREIGN]
    return tuple(UserComponent(ENVIRONMENT, name, ENVIRONMENT.key) for name in classes)


def agent_scripts(data: DataConfig, code_paths: Sequence[str]) -> dict[str, Path]:
    """Return the Python files in the commands of external agents, by their names there."""
    parts = [part for name in _names(data) if name.startswith(AGENT) for part in command_parts(name)]
    located = {part: find_part(part, code_paths) for part in parts if part.endswith(".py")}
    return {part: file for part, file in located.items() if file is not None}


def command_parts(name: str) -> list[str]:
    """Split the command of an external agent: program:my_agent.py --fast"""
    return shlex.split(name.removeprefix(AGENT))


def find_part(part: str, code_paths: Sequence[str]) -> Path | None:
    """Return the file of a part of an agent's command, in ``code_paths`` or the working directory; None: it
    is no file.
    """
    paths = (Path(directory, part).resolve() for directory in (*map(expanded, code_paths), Path()))
    return next((path for path in paths if path.is_file()), None)


def _names(data: DataConfig) -> list[str]:
    """Return the names of the environments that are not built in."""
    names = {data.environment_of(source) for source in (*data.train, *data.eval)}
    return sorted(name for name in names if name is not None and name not in BUILTIN)


def _import(module: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"environment module `{module}` cannot be imported ({raised(error)}); {remedy}"
        ) from error
