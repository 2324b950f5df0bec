"""Checks of what policy ranks, reference workers and engines would refuse, before they start.

The workers use the same functions. ``device``: of the run's workers, which may be on another machine. vLLM
answers in a separate process: importing it takes seconds.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import torch

from actors.workers.engine_settings import EngineSpec, fitting_arguments
from grpo_dist.config import Config, EnvironmentsConfig, ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.config.engine_arguments import engine_problems, head_problem, mask_problems
from grpo_dist.environments.tools import is_known
from grpo_dist.policy.attention import choose_kernel, recurrent_layers
from grpo_dist.policy.checkpoint_format import check_expert_names
from grpo_dist.policy.deepspeed_config import check_values, deepspeed_config
from grpo_dist.policy.layer_kernels import kernels_problem
from grpo_dist.policy.lora import check_continued, check_targets, empty_model
from grpo_dist.policy.model import check_supported
from grpo_dist.policy.router_replay import replay_problem
from grpo_dist.policy.sequence_parallel import check_heads
from grpo_dist.runtime import model_config
from grpo_dist.runtime.hardware import DeviceType, device_type, has_layer_kernels, resolve_dtype
from grpo_dist.runtime.model_files import cached, cached_path, fingerprint

_ARCHITECTURE_VERSION = 1  # raise it when the checks of a model change
_CHECK_S = 600.0  # importing vLLM takes seconds, on a busy machine a minute
_PLUGINS = "vllm.general_plugins"
_PLUGIN = ("grpo_dist", "actors.transfer.vllm_plugin:register")


def setting_problems(config: Config, device: DeviceType) -> Iterator[str]:
    """Yield a message for every setting that the workers would refuse for any model."""
    dtype = resolve_dtype(config.model.dtype, device)
    kernel_device = torch.device(device)
    checks: list[Callable[[], Any]] = [
        lambda: deepspeed_config(config.policy, bfloat16=dtype == torch.bfloat16),
        lambda: check_values(config.policy),
        lambda: check_backend(config.weight_sync, device),
    ]
    if config.model.packing:
        checks.append(lambda: choose_kernel(config.model.attention, kernel_device, dtype))
    for check in checks:
        yield from _refusal(check)
    if config.policy.optimizer.name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        yield (
            "`policy.optimizer.name` = adamw_8bit needs the package bitsandbytes, which is not installed; "
            "pip install bitsandbytes, or set it to adamw"
        )
    if not config.is_supervised:
        yield from plugin_problems()
    yield from engine_problems(config.rollout, config.algorithm, device)
    if config.data.eval:
        yield from mask_problems(config.sampling, config.evaluation, device)
    if config.has_environments:
        yield from call_format_problems(config.environments)
    if config.rollout.quantization != "none" and device == "cpu":
        yield (
            f"`rollout.quantization` = {config.rollout.quantization} needs GPUs that multiply in 8 bits "
            "(Ada, Hopper or newer), and the cluster has none; remove it"
        )
    is_flash = config.model.attention == "flash_attention_2" and device == device_type() == "cuda"
    if is_flash and importlib.util.find_spec("flash_attn") is None:
        yield (
            "`model.attention` = flash_attention_2 needs the package flash-attn, which is not installed; "
            "install it, or use model.attention=auto"
        )


def plugin_problems() -> Iterator[str]:
    """Yield a message if vLLM would not find this project's weight transfer: the installed metadata of a
    checkout are older than its code.
    """
    if _PLUGIN not in {(point.name, point.value) for point in entry_points(group=_PLUGINS)}:
        name, value = _PLUGIN
        yield (
            f"no installed package names {name} = {value} as an entry point of {_PLUGINS}, so engines "
            "cannot receive weights: the installation is older than the code; run `make setup`, or "
            "`pip install -e .`"
        )


def model_problems(config: Config, device: DeviceType, model_dir: Path) -> Iterator[str]:
    """Yield a message for every problem that workers would have with the model. Reads no weights."""
    trusted = config.model.trust_remote_code
    if unreadable := list(_refusal(lambda: position_limit(config.model, model_dir))):
        yield from unreadable
        return
    if config.is_supervised and config.sft is not None:
        rows = config.sft.max_length
        yield from _refusal(lambda: check_length(config.model, model_dir, rows, supervised=True))
    else:
        yield from _refusal(lambda: check_length(config.model, model_dir, config.max_length))
    if config.policy.lora is not None:
        lora = config.policy.lora
        yield from _refusal(lambda: check_targets(model_dir, lora, trust_remote_code=trusted))
        yield from _refusal(lambda: check_continued(model_dir, lora, trust_remote_code=trusted))
    if not trusted:  # the model's remote code may need weights to run
        # Without a GPU here, the workers are on another machine.
        has_package = has_layer_kernels() or device_type() == "cpu"
        yield from _cached_problems(config, device, model_dir, has_package)
    yield from vllm_problems(config, device, model_dir)


def _cached_problems(config: Config, device: DeviceType, model_dir: Path, has_package: bool) -> list[str]:
    """Return `_architecture_problems`. If there are none, cache that, if the cache is writable: building the
    model takes seconds, most of them transformers' imports.
    """
    decides = {
        "version": _ARCHITECTURE_VERSION,
        "model": [str(model_dir), fingerprint(model_dir)],
        "settings": [
            config.model.kernels, config.policy.sequence_parallel, config.policy.router_replay,
            config.rollout.tensor_parallel_size, config.is_supervised, device, has_package,
        ],
        "transformers": version("transformers"),
    }  # fmt: skip
    if os.path.isdir(cached_path("fitting-model", decides)):  # False also if it cannot be read
        return []
    problems = list(_architecture_problems(config, device, model_dir, has_package))
    if not problems:
        with suppress(OSError):
            cached("fitting-model", decides, lambda _: None)
    return problems


def _architecture_problems(
    config: Config, device: DeviceType, model_dir: Path, has_package: bool
) -> Iterator[str]:
    with readable_model(model_dir, "architecture"):
        model = empty_model(model_dir, trust_remote_code=False)
    yield from _refusal(lambda: check_supported(model, str(model_dir)))
    if problem := kernels_problem(config.model.kernels, model, device, has_package=has_package):
        yield problem
    with readable_model(model_dir, "list of weights"):
        yield from _refusal(lambda: check_expert_names(model, model_dir))
    yield from _refusal(lambda: check_heads(model, config.policy.sequence_parallel))
    if config.policy.router_replay and (problem := replay_problem(model.config)):
        yield f"model {model_dir}: {problem}; remove it"
    yield from _tensor_parallel(config.rollout, model)
    on_cpu = device == "cpu" and not config.is_supervised
    if on_cpu and (kinds := recurrent_layers(model.config.get_text_config())):
        yield (
            f"model {model_dir}: it has layers of type {', '.join(kinds)}, which vLLM's CPU build does "
            "not compute as transformers does in float32; use GPUs, or a model with attention alone"
        )


@contextmanager
def readable_model(model_dir: Path, what: str) -> Iterator[None]:
    """Turn every error inside the block into a ValueError: for damaged files, libraries raise errors of any
    type.
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"{model_dir}: the {what} of the model cannot be read ({reason}); check its JSON files, or "
            "download the model again"
        ) from error


def check_backend(weight_sync: WeightSyncConfig, device: DeviceType) -> None:
    """Raise ValueError for a weight transport that ``device`` does not support."""
    if weight_sync.backend in ("nccl", "ipc") and device == "cpu":
        where = "torch sees none here" if device_type() == "cpu" else "the cluster has none"
        raise ValueError(
            f"weight_sync.backend = {weight_sync.backend} needs GPUs, and {where}; use auto or gloo"
        )


def position_limit(settings: ModelConfig, model_dir: Path) -> int | None:
    """Return `model_config.position_limit` of the model in ``model_dir``."""
    from transformers import AutoConfig

    with readable_model(model_dir, "configuration"):
        model = AutoConfig.from_pretrained(model_dir, trust_remote_code=settings.trust_remote_code)
    return model_config.position_limit(model.get_text_config().to_dict())


def check_length(model: ModelConfig, model_dir: Path, longest: int, *, supervised: bool = False) -> None:
    """Raise ValueError if a row of ``longest`` tokens is too long for the model. ``supervised``: rows are
    demonstrations, not prompts with completions.
    """
    limit = position_limit(model, model_dir)
    if problem := model_config.length_problem(limit, longest, model_dir.name, supervised=supervised):
        raise ValueError(problem)


def _tensor_parallel(rollout: RolloutConfig, model: Any) -> Iterator[str]:
    size = rollout.tensor_parallel_size
    for heads in dict.fromkeys(model_config.heads_of_layers(model.config.get_text_config())):
        if heads.queries % size:
            yield (
                f"`rollout.tensor_parallel_size` = {size} does not divide the {heads.queries} attention "
                "heads of the model, which vLLM needs; use a divisor of them"
            )
        elif problem := head_problem(size, heads.keys):
            yield problem


def _refusal(check: Callable[[], Any]) -> Iterator[str]:
    try:
        check()
    except (ValueError, OSError) as error:
        yield str(error)


def vllm_problems(config: Config, device: DeviceType, model_dir: Path | None) -> Iterator[str]:
    """Yield a message for everything in `rollout.engine` that vLLM refuses.

    vLLM checks names and values of arguments. With ``model_dir``, and engines on the device type of this
    machine, it checks the whole configuration of the engine. With an empty `rollout.engine` there is nothing
    to check: all arguments are this project's.
    """
    arguments, refused = config.rollout.engine, engine_problems(config.rollout, config.algorithm, device)
    if not arguments or any(refused):  # the run is refused before an engine gets them
        return
    whole: Mapping[str, Any] | None = None
    if model_dir is not None and device == device_type():
        whole = fitting_arguments(EngineSpec.from_config(config, model_dir))
    try:
        yield from _answer(
            "actors.workers.engine_check", "rollout.engine", {"own": arguments, "whole": whole}
        )
    except ValueError as error:
        yield str(error)


def call_format_problems(environments: EnvironmentsConfig) -> Iterator[str]:
    """Yield a message if `environments.call_format` is not a tool parser of vLLM."""
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


@cache  # a separate process takes seconds to import vLLM
def _tool_parsers() -> tuple[str, ...]:
    """Return the names of vLLM's tool parsers. Raises ValueError if vLLM does not answer."""
    return tuple(_answer("actors.workers.tool_calls", "environments.call_format", None))


def _answer(module: str, key: str, question: Any) -> Any:
    """Run ``module`` with a question, and return its answer. Raises ValueError if there is none."""
    try:
        result = subprocess.run(
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
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(
            f"`{key}` could not be checked, because vLLM cannot be imported ({last}); reinstall it"
        )
    return json.loads(result.stdout.splitlines()[-1])
