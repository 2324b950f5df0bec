"""The Python tool's program: an interpreter that keeps variables between calls.

The zygote imports this module, so its imports cost episodes nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any

from grpo_dist.environments.sandbox.cells import Cells

# Packages that policy code imports most; they may not be installed.
_USUAL = ("collections", "decimal", "fractions", "itertools", "json", "math", "re", "statistics")
_INSTALLED = ("numpy", "numpy.random", "sympy")

for _name in _USUAL:
    importlib.import_module(_name)
for _name in _INSTALLED:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

if "sympy" in sys.modules:  # imports and caches much at first use
    _x = sys.modules["sympy"].Symbol("x")
    sys.modules["sympy"].integrate(_x**2, _x), sys.modules["sympy"].solve(_x**2 - 2, _x)


class Interpreter:
    """Serves `PythonSandbox`."""

    def __init__(self) -> None:
        self._cells = Cells()

    def handle(self, kind: str, payload: Any) -> str:
        """``run``: run code, return the outcome. ``ready``: do nothing."""
        return self._cells.run(payload) if kind == "run" else "ok"
