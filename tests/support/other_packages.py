"""Interpreters with packages that this installation may lack or exclude."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


def interpreter_with(package: str) -> str:
    """Return an interpreter with ``package``: this one, or that of the variable PYTHON_WITH_<PACKAGE>.

    Skips the test where there is none.
    """
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    variable = f"PYTHON_WITH_{package.upper()}"
    if not (named := os.environ.get(variable)):
        pytest.skip(f"{package} is not installed; install its extra, or name an interpreter in {variable}")
    subprocess.run([named, "-c", f"import {package}, numpy, pydantic, omegaconf"], check=True)
    return named
