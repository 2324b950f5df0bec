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
    has, expected = (tuple(inspect.signature(each).parameters) for each in (own, replacement))
    if has != expected:
        raise RuntimeError(
            f"rollout: vLLM's {own.__qualname__} takes ({', '.join(has)}), this project's takes "
            f"({', '.join(expected)}); install the release of vLLM in pyproject.toml"
        )
    setattr(owner, name, replacement)
    return own
