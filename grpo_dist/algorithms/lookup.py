"""Finding a function by the name that the configuration gives it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def named(registry: Mapping[str, T], name: str, what: str) -> T:
    """Return ``registry[name]``. Raises ValueError with the known names for an unknown one."""
    if name in registry:
        return registry[name]
    near = difflib.get_close_matches(name, registry, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ValueError(f"{what} {name!r}: expected one of {', '.join(registry)}{hint}")
