"""Environments by name.

python | calculator          of this package
my_module:Class              a user's own
verifiers:ENV                an environment of the package verifiers
reasoning_gym:TASK           a data set of the package reasoning-gym
openenv:URL                  a server of the package openenv-core
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from grpo_dist.environments import builtin
from grpo_dist.environments.base import Environment

BUILTIN: dict[str, type[Environment]] = {"python": builtin.Python, "calculator": builtin.Calculator}
# Prefix -> module with the adapter, its class, and the package to install.
_ADAPTERS = {
    "verifiers": ("grpo_dist.environments.verifiers", "VerifiersEnvironment", "verifiers"),
    "reasoning_gym": ("grpo_dist.environments.reasoning_gym", "ReasoningGym", "reasoning-gym"),
    "openenv": ("grpo_dist.environments.openenv", "OpenEnv", "openenv-core"),
}
_EXPECTED = "none, python, calculator, my_module:Class, verifiers:ENV, reasoning_gym:TASK or openenv:URL"


def check_name(name: str) -> None:
    """Raise ValueError for a name that no environment can have."""
    prefix, colon, rest = name.partition(":")
    if name not in BUILTIN and not (colon and prefix and rest):
        raise ValueError(f"environment {name!r} is unknown; expected {_EXPECTED}")


def load_environment(name: str) -> Callable[..., Environment]:
    """Import an environment. Returns its class, or for a package's environment what makes it.

    Raises ValueError for one that is unknown or cannot be imported. Runs user code.
    """
    check_name(name)
    if name in BUILTIN:
        return BUILTIN[name]
    prefix, _, rest = name.partition(":")
    if prefix in _ADAPTERS:
        module, adapter, package = _ADAPTERS[prefix]
        return partial(getattr(_imported(module, f"pip install {package}"), adapter), rest)
    found: Any = getattr(_imported(prefix, "add its directory to environments.code_paths"), rest, None)
    if not isinstance(found, type) or not issubclass(found, Environment):
        what = "no such class" if found is None else f"{found!r}, no subclass of Environment"
        raise ValueError(
            f"environment {name}: module `{prefix}` has {what} `{rest}`; expected a class that derives from "
            "grpo_dist.environments.base.Environment"
        )
    return found


def class_of(maker: Callable[..., Environment]) -> type[Environment]:
    """Return the class that ``maker`` makes an instance of."""
    found: Any = maker.func if isinstance(maker, partial) else maker
    return found


def _imported(module: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything
        raise ValueError(
            f"environment module `{module}` cannot be imported ({type(error).__name__}: {error}); {remedy}"
        ) from error
