"""The sizes of a check's work: 0.5B and full micro-batches on GPUs, tiny ones in a rehearsal; and the bounds
on differences by rounding.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from grpo_dist.config import Config
from grpo_dist.tools.bench.figures import NeededWork
from grpo_dist.tools.plan.memory import Footprint, Sizes, policy_rank
from grpo_dist.tools.plan.models import model_of
from grpo_dist.tools.plan.workload import workload_of
from tests.gpu.process import CheckTask

_SHARED: dict[str, Any] = {
    "model_type": "qwen2", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPE_OF = "Qwen/Qwen2.5-0.5B"  # the model with the measured shape
_REAL: dict[str, Any] = _SHARED | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "rope_theta": 1e6, "dtype": "bfloat16",
}  # fmt: skip
# Heads of size 32, the smallest that the engine's CPU kernels support; two ranks can share them.
_TINY: dict[str, Any] = _SHARED | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 272, "dtype": "float32",
}  # fmt: skip
MEMORY = "device/memory_bytes"  # a figure of `DEVICE`
_MICRO_BATCHES = 2  # per update
_FILLED = 0.85  # share of a GPU's memory that an update may take
# The same in every engine: vLLM compiles again for another number of sequences or another length.
_ENGINE_SEQUENCES, _ENGINE_TOKENS = 256, 576

# Largest relative error of rounding a number once.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_PER_LAYER = 24  # results that are rounded in a layer, forward and backward


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """The rows of an update: ``groups`` prompts in each micro-batch, ``samples`` completions of each."""

    prompt: int
    completion: int
    samples: int
    groups: int

    @property
    def row(self) -> int:
        """Return the tokens of a row."""
        return self.prompt + self.completion

    @property
    def micro_batch(self) -> int:
        """Return the tokens of a packed micro-batch: it has a group's prompt once."""
        return self.groups * (self.prompt + self.samples * self.completion)

    @property
    def prompts(self) -> int:
        return _MICRO_BATCHES * self.groups

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def work(self) -> NeededWork:
        """Return the work of the rows, each prompt once."""
        spans = [(self.prompt, self.row)] * self.rows + [(0, self.prompt)] * self.prompts
        return NeededWork.from_spans(spans, trained=self.rows * self.completion)


_REAL_UPDATES = tuple(UpdateSize(128, 480, 8, groups) for groups in (4, 2, 1))
_TINY_UPDATE = UpdateSize(8, 12, 4, 2)


def model_shape(task: CheckTask) -> dict[str, Any]:
    """Return the config.json of the measured model."""
    return _TINY if task.rehearsal else _REAL


def dtype_of(task: CheckTask) -> str:
    """Return the default dtype of runs."""
    return "float32" if task.rehearsal else "bfloat16"


def random_path(task: CheckTask) -> str:
    """Write the measured model's config.json to the task's directory; return its `model.path`."""
    file = task.directory / ("tiny.json" if task.rehearsal else "qwen2_0.5b.json")
    if not file.exists():
        file.write_text(json.dumps(model_shape(task)))
    return f"random:{file}"


def engine_sections(task: CheckTask, *, dtype: str, eager: bool) -> dict[str, dict[str, Any]]:
    """Return the sections `model` and `rollout` of engines that share vLLM's compiled code."""
    model: dict[str, Any] = {"path": random_path(task), "dtype": dtype}
    rollout = {"enforce_eager": eager or task.rehearsal, "max_num_seqs": _ENGINE_SEQUENCES}
    if task.rehearsal:
        return {"model": model, "rollout": rollout | {"kv_cache_gib": 0.25}}
    return {"model": model | {"max_length": _ENGINE_TOKENS}, "rollout": rollout}


def update_config(task: CheckTask, size: UpdateSize, *, dtype: str, **policy: Any) -> Config:
    """Return the configuration of a run whose steps are updates of this ``size``."""
    return Config.model_validate(
        {
            "name": "gpu-check",
            "model": {"path": random_path(task), "dtype": dtype},
            "data": {"train": [{"path": "demo:add3"}], "max_prompt_tokens": size.prompt},
            "batch": {
                "prompts_per_step": size.prompts,
                "samples_per_prompt": size.samples,
                "micro_batch_tokens": size.micro_batch,
            },
            "sampling": {"max_new_tokens": size.completion},
            "policy": policy,
            "bench": {"lengths": {"kind": "fixed"}},
        }
    )


def update_size(task: CheckTask, *, dtype: str, **policy: Any) -> UpdateSize:
    """Return the largest update that `plan` expects to fit this GPU."""
    if task.rehearsal:
        return _TINY_UPDATE
    most = _FILLED * task.device_figures[MEMORY]
    for size in _REAL_UPDATES:
        if planned(task, update_config(task, size, dtype=dtype, **policy), size).total <= most:
            return size
    return _REAL_UPDATES[-1]


def planned(task: CheckTask, config: Config, size: UpdateSize) -> Footprint:
    """Return the memory that `plan` expects of a policy rank on this GPU."""
    workload, memory = workload_of(config, prompt_tokens=size.prompt), int(task.device_figures.get(MEMORY, 0))
    model = model_of(config.model, config.sft, config.seed)
    return policy_rank(config, model, Sizes.from_config(config, gpu=True, memory=memory), workload)


def gradient_bound(dtype: str, *, layers: int, widest: int) -> tuple[float, str]:
    """Return the bound on the relative difference of two correct gradients, and why.

    Two computations round `_PER_LAYER` results in each of ``layers``, independently of each other. Sums are
    float32 in both dtypes: in bfloat16 only their results are rounded, in float32 also each of the ``widest``
    terms.
    """
    each, results = ROUNDING[getattr(torch, dtype)], _PER_LAYER * layers
    if dtype == "float32":
        each *= math.sqrt(widest)
    why = f"two computations, {results} roundings each of {each:.1e}, independent"
    return 2 * math.sqrt(results) * each, why
