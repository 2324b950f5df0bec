"""Arguments of vLLM's engine that `rollout.engine` may not set.

Refused are arguments that a key of the configuration sets, arguments that change the model or the
distribution of the engine's log-probs, which the trainer compares with its own, and arguments that do not
work with one engine for each worker. All others are allowed; a test names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from grpo_dist.config.algorithm import AlgorithmConfig
from grpo_dist.config.checks import corrects
from grpo_dist.config.monitoring import EvaluationConfig
from grpo_dist.config.sampling import SamplingConfig
from grpo_dist.config.secrets import shown_setting
from grpo_dist.config.workers import RolloutConfig


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_SET_BY = {
    **_each("model.path", "model model_weights tokenizer hf_config_path"),
    **_each("model.revision", "revision code_revision tokenizer_revision"),
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "max_model_len": "model.max_length, or data.max_prompt_tokens and sampling.max_new_tokens",
    "seed": "seed",
    "max_num_seqs": "rollout.max_num_seqs",
    **_each(
        "rollout.tensor_parallel_size",
        "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
        "decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
        "cp_kv_cache_interleave_size distributed_executor_backend ray_workers_use_nsight",
    ),
    **_each(
        "rollout.num_workers",
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_backend",
    ),
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib, or rollout.gpu_memory_utilization on GPUs",
    "enforce_eager": "rollout.enforce_eager",
    **_each("rollout.quantization", "quantization allow_deprecated_quantization"),
    **_each("cluster.placement", "enable_sleep_mode sleep_preserve_parameter_names"),
    "weight_transfer_config": "weight_sync.backend",
    **_each("sampling", "generation_config override_generation_config return_sampling_mask"),
    **_each(
        "policy.lora",
        "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype "
        "lora_target_modules enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels",
    ),
    **_each("rollout.speculation", "speculative_config spec_method spec_model spec_tokens"),
    **_each("policy.router_replay", "enable_return_routed_experts aux_output_config worker_cls"),
}
_OTHER_DISTRIBUTION = "the engine's log-probs would not be those of the sampled distribution"
_RANDOM_STATE = (
    "the engine would round its state at random, and its log-probs would not be those of the model"
)
_CHANGES = {
    **_each(
        "the engine would not use the trainer's weights unchanged",
        "quantization_config load_format config_format hf_overrides model_class_overrides "
        "disable_sliding_window",
    ),
    **_each(_OTHER_DISTRIBUTION, "logprobs_mode logits_processors watermark_config diffusion_config"),
    **_each(_RANDOM_STATE, "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds"),
    **_each(
        "the engine would reuse keys and values of older weights after a weight sync",
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config",
    ),
    **_each(
        "vLLM cannot replace offloaded weights in a weight sync",
        "offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group "
        "offload_prefetch_step offload_params",
    ),
    **_each(
        "the engine would move experts between GPUs, and a weight sync would load them where they were",
        "enable_eplb eplb_config",
    ),
    **_each("the engine could not return texts", "skip_tokenizer_init tokens_only"),
    "tokenizer_mode": "the engine would not read and write the trainer's tokens",
    **_each("the engine would not generate", "runner convert pooler_config mm_encoder_only"),
    **_each(
        "it is for engines with data parallelism, and each rollout worker has an engine of its own",
        "enable_elastic_ep elastic_ep_max_dp_size all2all_backend enable_dbo ubatch_size "
        "dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval prefill_schedule_interval "
        "disable_nccl_for_dp_synchronization fault_tolerance_config enable_fault_tolerance",
    ),
    **_each(
        "an engine runs on the GPUs that Ray assigns to its worker, on one node",
        "device_ids nnodes node_rank master_addr master_port",
    ),
    "scheduler_cls": "a weight sync pauses vLLM's own scheduler",
}
# An engine without a GPU prefills prompts whole: in chunks it crashes, or never starts a longer prompt.
_CHUNKS = ("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_scheduled_tokens")
_WHOLE_PROMPTS = "without a GPU the engine crashes or hangs when it may not prefill a prompt whole"
# Settings within an argument that is a mapping.
_NESTED = {
    "mamba_config": _each(_RANDOM_STATE, "enable_stochastic_rounding stochastic_rounding_philox_rounds")
}
_CACHE_TYPES = ("kv_cache_dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype")


def engine_problems(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, device: Literal["cpu", "cuda"] | None
) -> Iterator[str]:
    """Yield a problem for each refused argument in `rollout.engine`, without an engine. ``device``: that of
    the engines; None: unknown.
    """
    yield from _nested_problems(rollout.engine)
    for name, value in rollout.engine.items():
        setting = f"`rollout.engine.{name}` = {shown_setting(name, value)}"
        if name in _SET_BY:
            yield f"{setting} is set by {_SET_BY[name]}; remove it"
        elif name in _CHANGES:
            yield f"{setting}: {_CHANGES[name]}; remove it"
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
    those of all samples of an engine.
    """
    from_all = evaluation.top_p == 1.0 and evaluation.top_k == 0 and evaluation.temperature > 0
    lent = not evaluation.num_workers and (evaluation.before or evaluation.every)
    if device == "cuda" and sampling.is_truncated and from_all and lent:
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
    """Return why an engine of ``tensor_parallel`` processes cannot split ``kv_heads`` of keys and values; ""
    where it can: each process has as many whole heads as the others, or a copy of one.
    """
    if kv_heads % tensor_parallel == 0 or tensor_parallel % kv_heads == 0:
        return ""
    return (
        f"`rollout.tensor_parallel_size` = {tensor_parallel} neither divides the {kv_heads} key-value heads "
        "of the model nor is a multiple of them, which vLLM needs; use a divisor or a multiple"
    )
