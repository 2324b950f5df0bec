"""Specify a rollout worker's vLLM engine, and choose arguments that fit model and machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.transfer import WEIGHT_TRANSFER
from actors.workers import drafter
from grpo_dist.config import (
    Config,
    DataConfig,
    EnvironmentsConfig,
    EvaluationConfig,
    ModelConfig,
    RejectionConfig,
    RolloutConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from grpo_dist.config.engine_arguments import engine_problems
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import DeviceType, device_type, processor_digest, resolve_dtype
from grpo_dist.runtime.model_config import heads_of_layers
from grpo_dist.runtime.model_files import cache_dir
from grpo_dist.types import Sampling

# Default range of sequences decoded at once. Fewer make an evaluation slow; more only make engine steps
# longer.
_DECODED_AT_ONCE = (256, 1024)
_CPU_PREFILL_TOKENS = 8192  # prefilled at once by an engine without a GPU
# Tokens per block without a GPU: the smallest that the kernels support. Samples share only full blocks of
# their prompt, and vLLM's default of 128 would share nothing of most prompts.
_CPU_BLOCK = 32

# Share of the key-value cache kept free on admission, for the growth of running sequences. Without it, vLLM
# admits every sequence whose prompt fits, and preempts the last one as soon as others grow. With a cache far
# too small for the sequences in flight, it recomputes 64 to 83 % of all tokens; with this share 15 to 45 %,
# in 0.92 to 0.99 of the time (simulated by vLLM's rules).
_HEADROOM = 0.05
_SHARE_OF_FREE_MEMORY = 0.25  # limit for the caches of all engines on a machine without a GPU
GPU_MEMORY = {False: 0.85, True: 0.6}  # share of a GPU, by whether policy ranks are colocated
# Niceness of engines that share cores with training. They get about a tenth of a contended core: at 19 they
# would get a hundredth, and would be taken for hung.
_NICENESS = 10
# Unless configured, vLLM captures CUDA graphs for up to 512 sequences, beyond 256 for multiples of 16;
# larger batches run without a graph.
_GRAPHS, _GRAPH_STEP = 512, 16
# The worker class that records routes where vLLM's own recorder cannot run.
RECORDING_WORKER = "actors.workers.recorders.RecordingWorker"
# vLLM's name for linear layers and experts in fp8 with a scale per output channel and per token.
_QUANTIZATION = {"fp8": "fp8_per_channel"}


@dataclass(frozen=True)
class EngineSpec:
    """The specification of an engine.

    ``max_length``: prompt and completion together, tokens. ``in_flight``: training samples on one engine at
    once. ``engines``: number of engines in the run, for training and evaluation. ``colocated``: it shares the
    policy ranks' GPUs and sleeps while they train. ``sampling``: all sampling settings of the run, for the
    warm-up. ``data``: the chat template's settings; None: prompts are plain text. ``environments``: None if
    no prompt has one. ``niceness``: added to the niceness of its process on CPUs. ``router_replay``: it
    returns the experts of every token. ``returns_masks``: it returns the sampling masks of truncated
    sampling. ``trains``: its samples are trained on, so they keep routes; else only sync-probe samples do.
    ``code_paths``: import paths of a user-supplied rollout function.
    """

    rollout: RolloutConfig
    sync: WeightSyncConfig
    model: ModelConfig
    model_dir: str
    max_length: int
    seed: int
    in_flight: int = 0
    engines: int = 1
    colocated: bool = False
    sampling: tuple[Sampling, ...] = (Sampling(),)
    environments: EnvironmentsConfig | None = None
    data: DataConfig | None = None
    niceness: int = 0
    router_replay: bool = False
    returns_masks: bool = False
    trains: bool = True
    code_paths: tuple[str, ...] = ()

    def make_evaluation_spec(self, settings: EvaluationConfig) -> EngineSpec:
        """Return the specification of an engine on which evaluation runs while training continues."""
        return replace(
            self,
            rollout=self.rollout.model_copy(update={"num_workers": settings.num_workers}),
            in_flight=0,  # as many as fit into the cache: an evaluation sends all prompts at once
            sampling=(Sampling(settings.temperature, settings.top_p, settings.top_k),),
            niceness=_NICENESS,
            returns_masks=False,
            trains=False,
        )

    @classmethod
    def from_config(cls, config: Config, model_dir: Path, *, colocated: bool = False) -> EngineSpec:
        """Make the specification. Raises UserError for reserved arguments in `rollout.engine`."""
        if problems := list(engine_problems(config.rollout, config.algorithm, None)):
            raise UserError("; ".join(problems))
        return cls(
            config.rollout,
            config.weight_sync,
            config.model,
            str(model_dir),
            config.max_length,
            config.seed,
            in_flight=config.samples_in_flight // config.rollout.num_workers,
            engines=config.rollout.most_workers + config.evaluation.num_workers,
            colocated=colocated,
            sampling=_ways_to_sample(config.sampling, config.evaluation, config.rejection),
            environments=config.environments if config.has_environments else None,
            data=config.data,
            router_replay=config.policy.router_replay,
            returns_masks=config.sampling.is_truncated,
            code_paths=config.code_paths,
        )

    @property
    def max_num_seqs(self) -> int:
        """Sequences decoded at once."""
        low, high = _DECODED_AT_ONCE
        return self.rollout.max_num_seqs or min(max(self.in_flight, low), high)


def _ways_to_sample(
    training: SamplingConfig, evaluation: EvaluationConfig, rejection: RejectionConfig
) -> tuple[Sampling, ...]:
    """Return the distinct sampling settings of training, evaluation and rejection sampling."""
    temperature = training.first_temperature
    ways = [Sampling(temperature, training.top_p, training.top_k, min_p=training.min_p)]
    for section in (evaluation, rejection):
        ways.append(Sampling(section.temperature, section.top_p, section.top_k))
    return tuple(dict.fromkeys(ways))


def set_environment() -> None:
    """Set the variables that vLLM reads at import and at the start of its processes."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # vLLM would refuse positions that YaRN adds; `position_limit` has checked the length.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    # This sampler supports neither seeds nor log-probs of the sampled distribution. vLLM would load it,
    # compile it for some GPUs, and never use it.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")  # see `_own_all_reduce`
    # Let the scheduler place threads on cores: engine and trainer alternate on the same cores, and
    # OMP_NUM_THREADS already limits this engine's threads.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if device_type() != "cuda":
        # vLLM prefers this variable to the argument: `rollout.kv_cache_gib`, or a share of the memory.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        # If a step has few requests, attention would split long contexts between threads: the last digit of a
        # log-prob would depend on the other requests. (vLLM reads this per batch; a single request with a
        # long context is slower without it.)
        os.environ.setdefault("VLLM_CPU_ATTN_SPLIT_KV", "0")
        # Run the model in the scheduler's process: a second process, woken at every token, takes CPU time
        # from the model.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        # vLLM keys its cache of compiled models by the model's path. Without a GPU, vLLM 0.32 writes it but
        # cannot read it back ("'function' object has no attribute 'finalize_loading'"), so every start
        # compiles. Inductor keys its cache by what a graph computes.
        os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
        # torch's default is a temporary directory, and its keys do not include the processor.
        compiled = cache_dir() / "compiled" / processor_digest()
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compiled))


def fitting_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return `engine_arguments` for this machine and its free memory."""
    import psutil
    from transformers import AutoConfig

    model = AutoConfig.from_pretrained(spec.model_dir, trust_remote_code=spec.model.trust_remote_code)
    free = psutil.virtual_memory().available
    return engine_arguments(spec, model, device=device_type(), free_memory=free)


def shares_tails(spec: EngineSpec) -> bool:
    """Return whether samples wait for the first one of their prompt, see `SharedTails`: on CPUs, whose blocks
    are large. Not with router replay, which records only tokens that a request computes itself. Not with
    speculation: vLLM pads a first pass of one token with nonexistent drafts.
    """
    return device_type() == "cpu" and not (spec.router_replay or spec.rollout.speculation)


def engine_arguments(spec: EngineSpec, model: Any, *, device: DeviceType, free_memory: int) -> dict[str, Any]:
    """Return the vLLM engine's arguments. ``model``: its transformers configuration. ``free_memory``: this
    machine's free memory, bytes.
    """
    settings, dtype = spec.rollout, resolve_dtype(spec.model.dtype, device)
    arguments: dict[str, Any] = {
        "model": spec.model_dir,
        # Beside consolidated*.safetensors, "auto" would read Mistral's files, with other tensor names.
        "tokenizer_mode": "hf",
        "config_format": "hf",
        "load_format": "hf",
        "dtype": str(dtype).removeprefix("torch."),
        "trust_remote_code": spec.model.trust_remote_code,
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "enable_prefix_caching": True,  # samples of a group share their prompt's prefill
        "seed": spec.seed,
        "watermark": _HEADROOM,
        "logprobs_mode": "processed_logprobs",  # log-probs of the sampled distribution, with temperature
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
        "disable_log_stats": True,
    }
    if device == "cpu":
        arguments["block_size"] = _CPU_BLOCK
        arguments["kv_cache_memory_bytes"] = (
            int(settings.kv_cache_gib * 2**30)
            if settings.kv_cache_gib
            else _cache_bytes(spec, kv_bytes_per_token(model, dtype.itemsize), free_memory)
        )
        # Chunked prefill makes vLLM rewind the request's generator, which CPU generators cannot do: the
        # engine dies with "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_CPU_PREFILL_TOKENS, spec.max_length)
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization or GPU_MEMORY[spec.colocated]
        arguments["enable_sleep_mode"] = spec.colocated
        if arguments["dtype"] == "bfloat16":
            # bfloat16 logits have a relative error of 2^-9; the trainer's logits are float32.
            arguments["hf_overrides"] = {"head_dtype": "float32"}
        arguments |= _graph_sizes(spec)
    if settings.tensor_parallel_size > 1:
        # In a Ray actor with a placement group, vLLM would start its workers as Ray actors, each in a bundle
        # of one GPU. Here all GPUs of an engine are in its actor's bundle.
        arguments["distributed_executor_backend"] = "mp"
    if spec.router_replay:
        arguments |= _recording(spec, model, device)
    if spec.returns_masks:
        arguments |= _masks(spec, device)
    if settings.quantization != "none":
        arguments["quantization"] = _QUANTIZATION[settings.quantization]
    return arguments | settings.engine | _own_all_reduce(settings, device) | _speculation(settings)


def _speculation(settings: RolloutConfig) -> dict[str, Any]:
    """Return the arguments of lossless speculative decoding; {} if it is not configured."""
    speculation = settings.speculation
    if speculation is None:
        return {}
    drafting = {drafter.MAX_SEQUENCES: speculation.max_sequences}
    return {
        "speculative_config": {
            "method": drafter.METHOD,
            "model": drafter.NAME,
            "num_speculative_tokens": speculation.tokens,
        },
        "additional_config": _mapping(settings.engine, "additional_config") | drafting,
    }


def _recording(spec: EngineSpec, model: Any, device: DeviceType) -> dict[str, Any]:
    """Return the arguments that make the engine record routes. Raises UserError if it cannot."""
    from grpo_dist.policy.router_replay import replay_problem  # imports torch, which a plan does not need

    if problem := replay_problem(model):
        raise UserError(f"{problem}; remove it")
    if device != "cpu":
        return {"enable_return_routed_experts": True}
    if spec.rollout.tensor_parallel_size > 1:
        raise UserError(
            f"policy.router_replay without a GPU: `rollout.tensor_parallel_size` = "
            f"{spec.rollout.tensor_parallel_size} puts the routers in other processes; set it to 1"
        )
    return {"worker_cls": RECORDING_WORKER}


def _masks(spec: EngineSpec, device: DeviceType) -> dict[str, Any]:
    """Return the arguments that make the engine return sampling masks; {} if `recorders` records them. Raises
    UserError if it cannot.
    """
    keys = "`sampling.top_p`, `sampling.top_k`, `sampling.min_p`"
    if device != "cpu":
        return {"return_sampling_mask": True}
    if spec.rollout.tensor_parallel_size > 1:
        raise UserError(
            f"{keys} without a GPU: `rollout.tensor_parallel_size` = {spec.rollout.tensor_parallel_size} "
            "puts the sampler in another process; set it to 1"
        )
    return {}


def _graph_sizes(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments that make vLLM capture CUDA graphs up to the largest batch, unless the user sets
    sizes. vLLM drops sizes above `max_num_seqs`, which is therefore rounded up to a size.
    """
    user_arguments = spec.rollout.engine
    compilation = user_arguments.get("compilation_config")
    user_keys = {*user_arguments, *(compilation if isinstance(compilation, dict) else {})}
    sizes = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    if spec.rollout.enforce_eager or spec.max_num_seqs <= _GRAPHS or user_keys & sizes:
        return {}
    most = -(-spec.max_num_seqs // _GRAPH_STEP) * _GRAPH_STEP
    # vLLM requires `max_num_batched_tokens`, here the user's, to be at least `max_num_seqs`.
    if user_arguments.get("max_num_batched_tokens", most) < most:
        most = spec.max_num_seqs
    return {"max_num_seqs": most, "max_cudagraph_capture_size": most}


def _own_all_reduce(settings: RolloutConfig, device: DeviceType) -> dict[str, Any]:
    """Return the argument that keeps a tensor-parallel engine from fusing all-reduce and norm, unless the
    user has set it. vLLM fuses them on Hopper and Blackwell if flashinfer is installed: log-probs and the
    time of a first start, which may compile it, would depend on the installation.
    """
    compilation = settings.engine.get("compilation_config") or {}
    if settings.tensor_parallel_size == 1 or device == "cpu" or not isinstance(compilation, dict):
        return {}
    passes = {"fuse_allreduce_rms": False} | _mapping(compilation, "pass_config")
    return {"compilation_config": compilation | {"pass_config": passes}}


def _mapping(settings: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the user's mapping at ``key``; {} for any other type, which vLLM's check refuses."""
    value = settings.get(key)
    return value if isinstance(value, dict) else {}


def _cache_bytes(spec: EngineSpec, bytes_per_token: int, free_memory: int) -> int:
    """Return the cache's bytes: room for all sequences at full length, limited by memory, but at least for
    one. vLLM keeps one block for itself.
    """
    sequence = -(-spec.max_length // _CPU_BLOCK) * _CPU_BLOCK * bytes_per_token
    bound = int(free_memory * _SHARE_OF_FREE_MEMORY) // spec.engines
    return max(min(spec.max_num_seqs * sequence, bound), sequence) + _CPU_BLOCK * bytes_per_token


def kv_bytes_per_token(model: Any, itemsize: int) -> int:
    """Return the bytes of one token's keys and values in all layers: 24 layers x 2 heads of size 64 in
    float32 are 2 * 24 * 2 * 64 * 4 = 24,576.
    """
    return 2 * itemsize * sum(h.keys * h.size for h in heads_of_layers(model.get_text_config()))
