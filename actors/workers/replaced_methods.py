"""Puts a method of this project in the place of one of an engine's object, if it takes what it took."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, replacement: Callable[..., Any]) -> Any:
    """Have ``owner`` call ``replacement``, a bound method, where its own of that name was called; return its
    own. Raises RuntimeError where the two take other parameters: this is another release of vLLM.
    """
    name = replacement.__name__
    own = getattr(owner, name)
    has, expected = (_parameters(each) for each in (own, replacement))
    if has != expected:
        raise RuntimeError(
            f"rollout: vLLM's {own.__qualname__} takes ({', '.join(map(str, has))}), this project's takes "
            f"({', '.join(map(str, expected))}); install the release of vLLM in pyproject.toml"
        )
    setattr(owner, name, replacement)
    return own


def _parameters(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return names, kinds and defaults; annotations may be written otherwise."""
    own = inspect.signature(method).parameters.values()
    return [each.replace(annotation=inspect.Parameter.empty) for each in own]
