"""Interpreters with packages that this installation may lack or exclude, and servers that run in them."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tests.support.patience import HANG_S
from tests.support.ports import free_port

_OWN = ROOT / ".venv-packages/bin/python"
_READY = ROOT / ".venv-packages/.ready"  # made once everything is installed


def interpreter_with(package: str) -> str:
    """Return an interpreter with ``package``: that of the variable PYTHON_WITH_<PACKAGE>, the one that
    `make test` sets up (launch/environment_packages.sh), or this one.

    Skips the test where there is none.
    """
    variable = f"PYTHON_WITH_{package.upper()}"
    if named := os.environ.get(variable) or (str(_OWN) if _READY.exists() else ""):
        subprocess.run([named, "-c", f"import {package}, numpy, pydantic, omegaconf"], check=True)
        return named
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    pytest.skip(
        f"{package} is not installed; run `make .venv-packages/.ready`, or name an interpreter in {variable}"
    )


@contextmanager
def server_of(code: str, python: str, directory: Path) -> Iterator[str]:
    """Run ``code``, which serves HTTP at the port of its first argument; give the address."""
    (directory / "server.py").write_text(code)
    port = free_port()
    process = subprocess.Popen([python, str(directory / "server.py"), str(port)])
    try:
        end = time.monotonic() + HANG_S
        while process.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        assert process.poll() is None, "the server has ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
