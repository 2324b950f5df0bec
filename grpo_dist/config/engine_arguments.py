"""Arguments of vLLM's engine that `rollout.engine` may not set.

Refused are arguments that a configuration key sets, that change the model or the distribution of the engine's
log-probs, which the trainer compares with its own, or that do not work with one engine per worker. All others
are allowed; a test lists them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.checks import corrects
from grpo_dist.config.monitoring import EvaluationConfig
from grpo_dist.config.sampling import SamplingConfig
from grpo_dist.config.secrets import shown_setting
from grpo_dist.config.workers import RolloutConfig

_TABLE = Path(__file__).with_suffix(".yaml")
_RANDOM_STATE = "the engine would round its state at random, and its log-probs would not match the model"
# An engine without a GPU prefills prompts whole: in chunks it crashes, or never starts a longer prompt.
_CHUNKS = ("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_scheduled_tokens")
_WHOLE_PROMPTS = "without a GPU the engine crashes or hangs when it may not prefill a prompt whole"
# Settings within an argument that is a mapping.
_NESTED = {
    "mamba_config": dict.fromkeys(
        ("enable_stochastic_rounding", "stochastic_rounding_philox_rounds"), _RANDOM_STATE
    )
}
_CACHE_TYPES = ("kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")


@cache
def refused_arguments() -> Mapping[str, Mapping[str, str]]:
    """Read the table of refused arguments: by name, the key that sets it, or what it changes."""
    table: dict[str, dict[str, str]] = yaml.safe_load(_TABLE.read_text())
    return {
        part: {name: reason for reason, names in rows.items() for name in names.split()}
        for part, rows in table.items()
    }


def engine_problems(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, device: Literal["cpu", "cuda"] | None
) -> Iterator[str]:
    """Yield a problem for each refused argument in `rollout.engine`, without an engine. ``device``: the
    device of the engines; None: unknown.
    """
    yield from _nested_problems(rollout.engine)
    for name, value in rollout.engine.items():
        setting = f"`rollout.engine.{name}` = {shown_setting(name, value)}"
        if key := refused_arguments()["set_by"].get(name):
            yield f"{setting} is set by {key}; remove it"
        elif reason := refused_arguments()["changes"].get(name):
            yield f"{setting}: {reason}; remove it"
        elif name in _CHUNKS and value and device == "cpu":
            yield f"{setting}: {_WHOLE_PROMPTS}; remove it"
        elif name in _CACHE_TYPES and value != "auto" and not corrects(algorithm):
            yield (
                f"{setting} makes the engine's log-probs differ from the trainer's, uncorrected; "
                "set algorithm.correction (tis is the default), or remove it"
            )


def mask_problems(
    sampling: SamplingConfig, evaluation: EvaluationConfig, device: Literal["cpu", "cuda"]
) -> Iterator[str]:
    """Yield a problem where engines on GPUs would return whole vocabularies as sampling masks: vLLM returns
    masks for all samples of an engine.
    """
    from_all = evaluation.top_p == 1.0 and evaluation.top_k == 0 and evaluation.temperature > 0
    shares_engines = not evaluation.num_workers and (evaluation.before or evaluation.every)
    if device == "cuda" and sampling.is_truncated and from_all and shares_engines:
        yield (
            "`evaluation.top_p` = 1, `evaluation.top_k` = 0: engines that return the sampling masks of "
            "`sampling` would return the whole vocabulary for every token of an evaluation; set one of them, "
            "`evaluation.temperature` to 0, or `evaluation.num_workers` to 1 or more"
        )


def _nested_problems(engine: Mapping[str, Any]) -> Iterator[str]:
    for name, refused in _NESTED.items():
        argument = engine.get(name)
        if not isinstance(argument, Mapping):
            continue
        for key in (key for key in refused if key in argument):
            setting = f"`rollout.engine.{name}.{key}` = {shown_setting(key, argument[key])}"
            yield f"{setting}: {refused[key]}; remove it"


def head_problem(tensor_parallel: int, kv_heads: int) -> str:
    """Return why an engine of ``tensor_parallel`` processes cannot split ``kv_heads`` key-value heads; "" if
    it can: each process has the same number of whole heads, or a copy of one.
    """
    if kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0:
        return ""
    return (
        f"`rollout.tensor_parallel_size` = {tensor_parallel} neither divides the {kv_heads} key-value heads "
        "of the model nor is a multiple of them, which vLLM needs; use a divisor or a multiple"
    )
