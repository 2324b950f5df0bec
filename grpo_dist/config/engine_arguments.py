"""Arguments of vLLM's engine that `rollout.engine` may not set.

Refused are arguments that a key of the configuration sets, and arguments that change the model or the
distribution of the engine's log-probs. The trainer compares these with its own log-probs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.checks import corrects
from grpo_dist.config.secrets import shown_setting
from grpo_dist.config.workers import RolloutConfig

_SET_BY = {
    "model": "model.path",
    "model_weights": "model.path",
    "tokenizer": "model.path",
    "hf_config_path": "model.path",
    "revision": "model.revision",
    "code_revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length, or data.max_prompt_tokens and sampling.max_new_tokens",
    "seed": "seed",
    "max_num_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "rollout.num_workers",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib, or rollout.gpu_memory_utilization on GPUs",
    "enforce_eager": "rollout.enforce_eager",
    "distributed_executor_backend": "rollout.tensor_parallel_size",
    "quantization": "rollout.quantization",
    "enable_sleep_mode": "cluster.placement",
    "weight_transfer_config": "weight_sync.backend",
    "generation_config": "sampling",
    "override_generation_config": "sampling",
    "enable_lora": "policy.lora",
    "speculative_config": "rollout.speculation",
    "spec_method": "rollout.speculation",
    "spec_model": "rollout.speculation",
    "spec_tokens": "rollout.speculation",
    "enable_return_routed_experts": "policy.router_replay",
    "aux_output_config": "policy.router_replay",
    "worker_cls": "policy.router_replay",
}
_OTHER_MODEL = "the engine would not use the trainer's weights unchanged"
_OTHER_DISTRIBUTION = "the engine's log-probs would not be those of the sampled distribution"
_CHANGES = {
    "quantization_config": _OTHER_MODEL,
    "load_format": _OTHER_MODEL,
    "hf_overrides": _OTHER_MODEL,
    "model_class_overrides": _OTHER_MODEL,
    "disable_sliding_window": _OTHER_MODEL,
    "kv_transfer_config": "the engine would reuse keys and values of older weights after a weight sync",
    "logprobs_mode": _OTHER_DISTRIBUTION,
    "logits_processors": _OTHER_DISTRIBUTION,
    "watermark_config": _OTHER_DISTRIBUTION,
    "diffusion_config": _OTHER_DISTRIBUTION,
    "skip_tokenizer_init": "the engine could not return texts",
    "runner": "the engine would not generate",
    "convert": "the engine would not generate",
}
_WHOLE_PROMPTS = "without a GPU the engine crashes when it prefills a prompt in chunks"


def engine_problems(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, device: Literal["cpu", "cuda"] | None
) -> Iterator[str]:
    """Yield a problem for each refused argument in `rollout.engine`, by its name alone, without an engine.
    ``device``: the device of the engines; None: unknown.
    """
    for name, value in rollout.engine.items():
        setting = f"`rollout.engine.{name}` = {shown_setting(name, value)}"
        if name in _SET_BY:
            yield f"{setting} is set by {_SET_BY[name]}; remove it"
        elif name in _CHANGES:
            yield f"{setting}: {_CHANGES[name]}; remove it"
        elif name == "enable_chunked_prefill" and value and device == "cpu":
            yield f"{setting}: {_WHOLE_PROMPTS}; remove it"
        elif name in ("kv_cache_dtype", "mamba_cache_dtype") and value != "auto" and not corrects(algorithm):
            yield (
                f"{setting} makes the engine's log-probs differ from the trainer's, uncorrected; "
                "set algorithm.correction.kind (tis is the default), or remove it"
            )
