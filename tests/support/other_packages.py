"""Interpreters with packages that this installation may lack, and servers that run in them."""

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
from textwrap import indent

import pytest

from tests.support.documents import ROOT
from tests.support.patience import HANG_S
from tests.support.processes import free_port

_OWN = ROOT / ".venv-packages/bin/python"
_READY = ROOT / ".venv-packages/.ready"  # made once everything is installed


def interpreter_with(package: str) -> str:
    """Return an interpreter with ``package``: the variable PYTHON_WITH_<PACKAGE>, the one that `make test`
    sets up (launch/environment_packages.sh), or this one. Skips the test if there is none.
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
    """Run ``code``, which serves HTTP at the port in its first argument; yield the address."""
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


def taskset(reward: str, *, metric: str, short: int) -> str:
    """Return the module of a `verifiers` taskset Sums: "1+1=", "2+2=", ...

    ``reward``: an expression of `reply` and `answer`, reported as ``metric``. A reply below ``short``
    characters adds a reward of 1 with weight 0.5.
    """
    return f"""
import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: str


class Sum(vf.Task[Data]):
    @vf.reward
    async def {metric}(self, trace: vf.Trace) -> float:
        reply, answer = trace.last_reply, self.data.answer
        return float({reward})

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < {short})


class Config(vf.TasksetConfig):
    last: int = 4
    left_out: list[int] = []


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(1, self.config.last):
            if i in self.config.left_out:
                continue
            data = Data(prompt=f"{{i}}+{{i}}=", system_prompt="Add.", answer=str(2 * i))
            yield Sum(data, self.config.task)
"""


def game_server(asked: str, step: str, *, sessions: int) -> str:
    """Return a server of `openenv` for a game about the last digit of the seed, `self.number`.

    ``asked``: its first message, with {seed}. ``step``: statements that return the answer to `said` in turn
    `self.count`. ``sessions``: maximum at a time.
    """
    return f"""
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Said(Action):
    message: str


class Told(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self.number, self.count = 0, 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number, self.count = (seed or 0) % 10, 0
        return Told(text={asked!r}.format(seed=seed), done=False, reward=None)

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        said = action.message
{indent(step.strip(), " " * 8)}

    @property
    def state(self):
        return State(episode_id="e", step_count=self.count)


app = create_fastapi_app(Game, Said, Told, max_concurrent_envs={sessions})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
"""
