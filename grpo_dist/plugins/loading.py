"""Imports a piece into this process: the driver, or a rank of the policy.

The module that a name begins with is searched in `code_paths` first, as a reward's is in its own process.
Modules that it imports later, inside functions, are found in `code_paths` after installed packages.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

from grpo_dist.errors import expanded
from grpo_dist.plugins.kinds import Kind
from grpo_dist.plugins.names import target_of

_LOCK = RLock()
_HUNG_S = 60.0
_held_until = [0.0]  # when the import that holds the lock counts as hung, by time.monotonic()
_OWN: set[str] = set()  # files of top-level modules that were imported from code paths


def load(kind: Kind, name: str, code_paths: Sequence[str] = ()) -> Any:
    """Return the function or class that ``name`` means; it is imported once in a process.

    Raises ValueError for a name that is unknown, or a module that cannot be imported. Runs user code.
    """
    directories = tuple(str(expanded(path).absolute()) for path in code_paths)
    with _alone():
        return _loaded(kind, name, directories)


@contextmanager
def _alone() -> Iterator[None]:
    """Import one module at a time, as each changes `sys.path`. One that has not returned for `_HUNG_S` holds
    up no other.
    """
    held = _LOCK.acquire(timeout=max(0.0, _held_until[0] - time.monotonic()))
    if held:
        _held_until[0] = time.monotonic() + _HUNG_S
    try:
        yield
    finally:
        if held:
            _LOCK.release()


@lru_cache(maxsize=128)
def _loaded(kind: Kind, name: str, directories: tuple[str, ...]) -> Any:
    module_name, _, attribute = target_of(kind, name).partition(":")
    try:
        module = _imported(module_name, directories)
    except Exception as error:  # a user's module may raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{kind.title} {name}: module `{module_name}` cannot be imported ({reason}); expected "
            f"`module:name` in a directory of `code_paths` ({', '.join(directories) or 'empty'}) or an "
            "installed package"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        near = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        what = f"`{attribute}` is no function or class" if found is not None else f"has no `{attribute}`"
        raise ValueError(f"{kind.title} {name}: module `{module_name}` {what}{hint}")
    return found


def _imported(name: str, directories: tuple[str, ...]) -> ModuleType:
    top = name.partition(".")[0]
    spec = PathFinder.find_spec(top, list(directories)) if directories else None
    if spec is None:
        return importlib.import_module(name)
    file = spec.origin or ""
    known = sys.modules.get(top)
    before = getattr(known, "__file__", None) or ""
    if known is not None and Path(before).resolve() != Path(file).resolve():
        if before not in _OWN:
            raise ImportError(f"{file} has the name of a module in use, {before}; rename yours")
        for loaded in [m for m in sys.modules if m == top or m.startswith(f"{top}.")]:
            del sys.modules[loaded]
    _OWN.add(file)
    importlib.invalidate_caches()
    sys.path[:0] = directories
    try:
        return importlib.import_module(name)
    finally:
        for directory in directories:  # its first place; another import may have changed the list
            with suppress(ValueError):
                sys.path.remove(directory)
        sys.path += [directory for directory in directories if directory not in sys.path]
