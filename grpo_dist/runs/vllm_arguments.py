"""Asks vLLM, in a separate process, whether it accepts `rollout.engine`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_dist.config import Config
from grpo_dist.config.engine_arguments import engine_problems
from grpo_dist.runtime.hardware import DeviceType, device_type

_CHECK_S = 600.0  # importing vLLM takes seconds, on a busy machine a minute


def vllm_problems(config: Config, device: DeviceType, model_dir: Path | None) -> Iterator[str]:
    """Yield a message for everything that vLLM refuses of `rollout.engine`.

    vLLM checks names and values of arguments. With ``model_dir``, and engines on the same kind of device as
    this machine has, it checks the whole configuration of the engine. With an empty `rollout.engine` there is
    nothing to check: all arguments are this project's.
    """
    own = config.rollout.engine
    if not own or any(engine_problems(config, device)):  # the run is refused before an engine gets them
        return
    whole: Mapping[str, Any] | None = None
    if model_dir is not None and device == device_type():
        from actors.workers.engine_settings import EngineSpec, fitting_arguments

        whole = fitting_arguments(EngineSpec.of(config, model_dir))
    try:
        asked = subprocess.run(
            [sys.executable, "-m", "actors.workers.engine_check"],
            input=json.dumps({"own": own, "whole": whole}),
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"`rollout.engine` could not be checked: vLLM has not answered within {_CHECK_S:g} s; try again"
        return
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        yield f"`rollout.engine` could not be checked, because vLLM cannot be imported ({last}); reinstall it"
        return
    yield from json.loads(asked.stdout.splitlines()[-1])
