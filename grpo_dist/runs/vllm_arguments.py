"""Asks vLLM, in a separate process, whether it accepts `rollout.engine`, and which tool parsers it has."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from actors.workers.engine_settings import EngineSpec, fitting_arguments
from grpo_dist.config import Config, EnvironmentsConfig
from grpo_dist.config.engine_arguments import engine_problems
from grpo_dist.environments.tools import is_known
from grpo_dist.runtime.hardware import DeviceType, device_type

_CHECK_S = 600.0  # importing vLLM takes seconds, on a busy machine a minute


def vllm_problems(config: Config, device: DeviceType, model_dir: Path | None) -> Iterator[str]:
    """Yield a message for everything that vLLM refuses of `rollout.engine`.

    vLLM checks names and values of arguments. With ``model_dir``, and engines on the same kind of device as
    this machine has, it checks the whole configuration of the engine. With an empty `rollout.engine` there is
    nothing to check: all arguments are this project's.
    """
    own, refused = config.rollout.engine, engine_problems(config.rollout, config.algorithm, device)
    if not own or any(refused):  # the run is refused before an engine gets them
        return
    whole: Mapping[str, Any] | None = None
    if model_dir is not None and device == device_type():
        whole = fitting_arguments(EngineSpec.from_config(config, model_dir))
    try:
        yield from _answer("actors.workers.engine_check", "rollout.engine", {"own": own, "whole": whole})
    except ValueError as error:
        yield str(error)


def call_format_problems(environments: EnvironmentsConfig) -> Iterator[str]:
    """Yield a message for an `environments.call_format` that is no tool parser of vLLM."""
    name = environments.call_format
    if is_known(name):
        return
    try:
        parsers = _tool_parsers()
    except ValueError as error:
        yield str(error)
        return
    if name not in parsers:
        near = difflib.get_close_matches(name, parsers, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(parsers)}"
        yield f"`environments.call_format` = {name}: vLLM has no such tool parser (code needs none); {hint}"


@cache  # a process of its own takes seconds to import vLLM
def _tool_parsers() -> tuple[str, ...]:
    """Return the names of vLLM's tool parsers. Raises ValueError where vLLM does not answer."""
    return tuple(_answer("actors.workers.tool_calls", "environments.call_format", None))


def _answer(module: str, key: str, question: Any) -> Any:
    """Run ``module`` with a question, and return its answer. Raises ValueError where there is none."""
    try:
        asked = subprocess.run(
            [sys.executable, "-m", module],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"`{key}` could not be checked: vLLM has not answered within {_CHECK_S:g} s; try again"
        ) from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"`{key}` could not be checked, because vLLM cannot be imported ({last}); reinstall it"
        )
    return json.loads(asked.stdout.splitlines()[-1])
