"""The GPU and host memory of a worker in bytes, by purpose.

    policy rank     weights | gradients | optimiser | activations | routes | logits | buckets | runtime
    engine          weights | activations | logits | runtime | the rest: key-value cache
    reference, teacher, reward model    weights | activations | logits or attention mask | runtime

Computed from the trainer's tensors (`deepspeed_config`, `logprobs`, `attention`) and DeepSpeed 0.19's
allocations. N parameters, W ranks, b bytes per weight (2 for bfloat16, 4 for float32).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.workers.drafter import HISTORY_TOKENS, history_bytes
from actors.workers.engine_settings import GPU_MEMORY, EngineSpec
from grpo_dist.batch.sharding import ATTENDED
from grpo_dist.config import (
    BatchConfig,
    Config,
    FixedLengths,
    ModelConfig,
    PolicyConfig,
    RewardModelConfig,
    RolloutConfig,
    SamplingConfig,
    SFTConfig,
    SupervisedConfig,
    WeightSyncConfig,
)
from grpo_dist.errors import UserError
from grpo_dist.policy.deepspeed_config import overlaps_reduction
from grpo_dist.runtime.hardware import (
    COLD_START_LOGITS,
    GIB,
    has_layer_kernels,
    logprob_chunk_mib,
    micro_batch_tokens,
    torch_computes_on_gpus,
)
from grpo_dist.tools.plan.models import FrozenModel, ModelShape, itemsize_of
from grpo_dist.tools.plan.workload import Workload

# A CUDA context with torch's kernels, NCCL's channels, and allocator fragmentation.
GPU_RUNTIME = 2 * GIB
# Resident size of a process with torch, transformers and DeepSpeed, or with vLLM, before a model is loaded.
CPU_RUNTIME = {"policy": 0.7 * GIB, "reference": 0.6 * GIB, "rollout": 1.3 * GIB}
_VARLEN = ("auto", "flash_attention_2")  # values of `model.attention`
_BATCHED_TOKENS = 8192  # prefill tokens per engine step: vLLM's server default on a GPU
_SAMPLER_BLOCKS = 3  # float32 [sequences, vocabulary]: logits, log-probs, and one temporary
_DRAFTS, _ROUTES, _MASKS = "texts for drafts", "routes", "sampling masks"
# Mean number of tokens kept by `sampling.top_p` or `min_p`: a conservative guess.
_KEPT = 64


@dataclass(frozen=True)
class Footprint:
    """Bytes of one worker. ``parts``: on its GPU, or in RAM without one; ``host``: in host memory;
    ``host_first``: additional host memory of the first worker.
    """

    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    host_first: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def total_host(self) -> int:
        """Host memory of the first worker, the maximum over workers."""
        return sum(self.host.values()) + sum(self.host_first.values())


@dataclass(frozen=True, slots=True)
class Sizes:
    """Settings that affect memory and times. ``gpu``: whether there are GPUs. ``micro_batch``: tokens per
    micro-batch. ``chunk``: bytes per block of logits. ``varlen``: attention uses a variable-length kernel.
    ``kernels``: layers use liger-kernel.
    """

    gpu: bool
    itemsize: int
    micro_batch: int
    reference_micro_batch: int
    chunk: int
    varlen: bool = False
    kernels: bool = False

    @classmethod
    def from_config(cls, config: Config, *, gpu: bool, memory: int = 0) -> Sizes:
        """Choose sizes like `hardware`, with or without GPUs of ``memory`` bytes each."""
        device: Any = "cuda" if gpu else "cpu"
        itemsize = itemsize_of(config.model.dtype, gpu=gpu)
        # If this machine has no GPU, assume the extra `gpu` (liger-kernel) on the machine that has.
        has_package = has_layer_kernels() or not torch_computes_on_gpus()
        return cls(
            gpu,
            itemsize,
            micro_batch_tokens(config.batch.micro_batch_tokens, device),
            micro_batch_tokens(config.reference.micro_batch_tokens, device),
            logprob_chunk_mib(device, memory) * 2**20,
            varlen=gpu and itemsize == 2 and config.model.packing and config.model.attention in _VARLEN,
            kernels=gpu and config.model.kernels != "torch" and not config.policy.compile and has_package,
        )


# A policy rank


def policy_rank(config: Config, model: ModelShape, sizes: Sizes, workload: Workload) -> Footprint:
    """Return a policy rank's peak memory, in the backward pass of a full micro-batch. A background checkpoint
    is a copy in host memory; below ZeRO 3 only rank 0 copies the whole weights.
    """
    policy = config.policy
    parts, host = _states(policy, model, sizes)
    first = _delta_copies(config.weight_sync, model, sizes)  # only rank 0, the sender, keeps a copy
    if sizes.gpu and config.checkpoint.background:
        copies = rank_bytes(policy, model, sizes)
        host["checkpoint"] = min(copies)
        if more := max(copies) - min(copies):
            first["checkpoint"] = more
    # A row above the budget is a separate micro-batch.
    tokens = max(sizes.micro_batch, config.max_length) / policy.sequence_parallel
    parts["activations"] = activation_bytes(
        model,
        sizes,
        tokens=tokens,
        attended=attended(config.batch, config.model, workload, tokens),
        longest=config.max_length,
        checkpointing=config.model.gradient_checkpointing,
    )
    if policy.router_replay:
        parts["routes"] = round(2 * tokens) * model.route_numbers  # int16
    parts["logits"] = _logits(sizes, 0 if policy.lora else model.embedding)
    if config.sampling.is_truncated:  # ids with row indices, and a block of booleans
        parts[_MASKS] = round(2 * tokens * _mask_bytes(config.sampling, model)) + sizes.chunk // 4
    parts["buckets"] = _buckets(policy, model, sizes)
    parts["runtime"] = round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["policy"])
    return Footprint(parts, host, first) if sizes.gpu else Footprint(parts | first, host)


def supervised_rank(config: SupervisedConfig, model: ModelShape, sizes: Sizes) -> Footprint:
    """Return the peak memory of a rank in an sft stage. Demonstrations are assumed to share no tokens, and no
    engine sleeps on the GPU.
    """
    sft = config.sft
    assert sft is not None  # the configuration was checked
    longest = config.model.model_copy(update={"max_length": sft.max_length})
    rows = -(-sft.batch_size // config.policy.replicas)  # maximum per rank and step, so per micro-batch
    sizes = replace(sizes, micro_batch=min(sizes.micro_batch, rows * sft.max_length))
    whole_rows = FixedLengths(tokens=sft.max_length)
    config = config.model_copy(update={"model": longest})
    return policy_rank(config, model, sizes, Workload(0, whole_rows, sft.max_length))


def cold_start(sft: SFTConfig, model: ModelShape, sizes: Sizes, *, longest: int | None = None) -> Footprint:
    """Return the memory of supervised training before a run (`model.path: sft`): one float32 process that
    computes each batch at once and keeps all activations.

    ``longest``: tokens of the longest demonstration; None: `sft.max_length`.
    """
    sizes, longest = replace(sizes, itemsize=4), longest or sft.max_length
    tokens = sft.batch_size * longest
    block = min(tokens, COLD_START_LOGITS) * model.shape.vocabulary * 4
    activations = activation_bytes(
        model, sizes, tokens=tokens, attended=tokens, longest=longest, checkpointing=False
    )
    return Footprint(
        {
            "weights": 4 * model.parameters,
            "gradients": 4 * model.parameters,
            "optimiser": 8 * model.parameters,
            "activations": activations,
            "logits": 2 * block + 4 * model.embedding,
            "runtime": round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["policy"]),
        }
    )


def is_trained_first(model: ModelConfig, sft: SFTConfig | None) -> bool:
    """Return whether a run begins with supervised training in one process."""
    return model.path == "sft" and sft is not None


def lora_parameters(policy: PolicyConfig, model: ModelShape) -> int:
    """Return the number of adapter parameters; all weights without LoRA. The adapter of a matrix [out, in]
    has rank * (in + out).
    """
    lora, sides = policy.lora, model.linear_sides
    if lora is None:
        return model.parameters
    names = sides if isinstance(lora.target_modules, str) else [n for n in sides if n in lora.target_modules]
    return lora.rank * sum(sides[name] for name in names)


def _loaded_parameters(policy: PolicyConfig, model: ModelShape) -> int:
    return model.parameters + (lora_parameters(policy, model) if policy.lora else 0)


def states(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> dict[str, int]:
    """Return a rank's weights, gradients and optimiser states on its GPU."""
    return _states(policy, model, sizes)[0]


def _states(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weights, gradients and optimiser states of a rank, and their part in host memory.

    From stage 1, master weights and two moments, float32 or 8-bit, are sharded. Stage 1 keeps whole float32
    gradients until the last micro-batch, and then, except for bfloat16, a rank's shard in addition. Stages 2
    and 3 keep a rank's shard in float32.

    With the optimiser in host memory, its gradient shard is there. On the GPU stage 1 still keeps whole
    gradients, and bfloat16 weights need a shard for accumulation or reduction.
    """
    offload, stage, ranks, b = policy.offload, policy.zero_stage, policy.num_workers, sizes.itemsize
    trained = lora_parameters(policy, model)
    weights = _loaded_parameters(policy, model) * b // (ranks if stage == 3 else 1)
    whole, share = 4 * trained, 4 * trained // ranks
    gradients = (whole, whole + (0 if b == 2 else share), share, share)[stage]
    averages = 2 if policy.optimizer.name == "adamw_8bit" else 8  # bytes; block scales add 1/64
    optimizer = (4 + averages) * trained // ranks if stage else averages * trained
    parts = {"weights": weights, "gradients": gradients, "optimiser": optimizer}
    host: dict[str, int] = {}
    where = policy.offload.optimizer
    if where != "none":
        parts["optimiser"] = 0
        summed = share if b == 2 else 0
        parts["gradients"] = (0, whole + summed, summed, 0)[stage]
        host = {"optimiser": optimizer, "gradients": share} if where == "cpu" else {"gradients": share}
    if offload.parameters != "none":
        parts["weights"] = 0
        if offload.parameters == "cpu":
            host["weights"] = weights
    return parts, host


def rank_bytes(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> list[int]:
    """Return the bytes that each policy rank writes with DeepSpeed 0.19: trained weights in their dtype and
    two moments, from ZeRO 1 with a float32 copy. ZeRO 3 writes no other weights.

    weights of T parameters and b bytes, W ranks    rank 0                other ranks
    ZeRO 0                                          b T + 8 T
    ZeRO 1, 2                                       b T + 12 T / W        12 T / W
    ZeRO 3                                          12 T / W              12 T / W
    """
    ranks, stage = policy.num_workers, policy.zero_stage
    trained = lora_parameters(policy, model)
    sizes_by_rank = [12 * trained // ranks] * ranks if stage else [8 * trained] + [0] * (ranks - 1)
    if stage < 3:
        sizes_by_rank[0] += sizes.itemsize * trained
    return sizes_by_rank


def activation_bytes(
    model: ModelShape, sizes: Sizes, *, tokens: float, attended: float, longest: int, checkpointing: bool
) -> int:
    """Return the bytes that the forward pass over ``tokens`` keeps for the backward pass. ``attended``:
    tokens in attention; ``longest``: tokens of the longest row.

    Per token a layer keeps the norms' input and output, in float32 and in the weights' dtype; the attention
    output; gate, its activation, up, and their product. Per attended token it keeps queries, keys, values,
    the output and a float32 of the softmax. Per expert of a token it keeps the input and two copies of the
    output. A variable-length attention kernel keeps only keys and values per attended token, and shares the
    attention output. liger-kernel's norms keep nothing in float32, and its gate recomputes the activation.
    With checkpointing only each layer's input is kept, plus one whole layer at a time.

    Attention with sinks keeps the softmax per token pair. Eager attention keeps 8 bytes per pair: the softmax
    in float32, in the weights' dtype if it differs, and the result of a cap.
    """
    s, b = model.shape, sizes.itemsize
    query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
    fused = sizes.kernels and not s.experts
    norm = (2 * b if fused else 4 + 2 * b) * s.hidden + 4  # the input in float32, free in float32 models
    gate = (3 if fused else 4) * b * s.intermediate
    experts = 3 * b * s.experts_per_token * s.hidden
    layer = tokens * (s.norms * norm + gate + b * query + experts)
    if sizes.varlen:
        layer += tokens * (b * query + 4 * s.heads) + attended * 2 * b * key
    else:  # blocks of rows with repeated key heads
        layer += attended * (4 * b * query + 4 * s.heads)
    pair = {"fused": 0, "sinks": b, "eager": 8}[model.attention]
    layer += pair * s.heads * attended * min(longest, attended)
    last = tokens * (norm + b * s.hidden)
    if checkpointing:
        return round(s.layers * tokens * b * s.hidden + layer + last)
    return round(s.layers * layer + last)


def attended(batch: BatchConfig, settings: ModelConfig, workload: Workload, tokens: float) -> float:
    """Return the attended tokens of a packed stream of ``tokens``; each row repeats the prompt."""
    if not settings.packing:
        return tokens
    each = (workload.prompt_tokens - workload.shared_tokens) / batch.samples_per_prompt + workload.mean
    return tokens * min(ATTENDED, (workload.prompt_tokens + workload.mean) / each)


def _mask_bytes(sampling: SamplingConfig, model: ModelShape) -> int:
    """Return the bytes per token of the sampling mask (`KeptTokens`)."""
    return 4 + min(4 * min(_KEPT, sampling.top_k or _KEPT), model.shape.vocabulary // 8)


def _logits(sizes: Sizes, head: int) -> int:
    """Return the bytes of logit blocks and of the gradient of a head with ``head`` weights, which is
    accumulated in float32 and then rounded to the weights' dtype.

    A block is float32. Its gradient has the weights' dtype on a GPU, float32 on a CPU (`logit_kernels`,
    `logit_rows`).
    """
    blocks = 1 + sizes.itemsize / 4 if sizes.gpu else 2
    rounded = sizes.itemsize if sizes.itemsize < 4 else 0
    return max(round(blocks * sizes.chunk) + 4 * head, (4 + rounded) * head)


def _buckets(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> int:
    """Return the bytes of DeepSpeed's reduction buffers and, under ZeRO-3, of weights gathered at once. They
    are freed before the weight sync allocates its buffers.
    """
    settings = policy.deepspeed.get("zero_optimization", {})
    stage, b, loaded = policy.zero_stage, sizes.itemsize, _loaded_parameters(policy, model)
    bucket = int(float(settings.get("reduce_bucket_size", 5e8)))
    if stage == 0:  # flattened for the all-reduce
        return min(bucket, loaded) * b if policy.num_workers > 1 else 0
    if stage == 1 and b == 2:
        if policy.offload.optimizer == "none":  # reduced in place
            return 0
        b = 4
    # Without GPUs pages are allocated on write.
    buckets = (bucket if sizes.gpu else min(bucket, loaded)) * b
    if stage == 2 and overlaps_reduction(policy):
        buckets *= 2  # double buffering
    if stage == 3:
        live = int(float(settings.get("stage3_max_live_parameters", 1e9)))
        ahead = int(float(settings.get("stage3_prefetch_bucket_size", 5e7)))
        buckets += min(loaded, live + ahead) * b
    return buckets


def _delta_copies(
    settings: WeightSyncConfig, model: ModelShape, sizes: Sizes, copies: int = 1
) -> dict[str, int]:
    """Return the bytes of a worker's weight copies for `weight_sync.deltas`=true."""
    size = copies * model.weight_bytes(sizes.itemsize, fp8=False)
    return {"copy of the weights": size} if settings.deltas is True else {}


# Forward-only workers


def reference_worker(max_length: int, model: ModelShape, sizes: Sizes) -> Footprint:
    """Return the memory of a reference worker or a teacher: whole weights, and passes without activations."""
    tokens = max(sizes.reference_micro_batch, max_length)
    s = model.shape
    widest = max(3 * s.intermediate, (2 * s.heads + 2 * s.kv_heads) * s.head_dim) + 3 * s.hidden
    return Footprint(
        {
            "weights": model.parameters * sizes.itemsize,
            "activations": tokens * widest * sizes.itemsize,
            "logits": (1 if sizes.gpu else 2) * sizes.chunk,
            "runtime": round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["reference"]),
        }
    )


def refreshed_bytes(config: Config, model: ModelShape, *, itemsize: int) -> int:
    """Return the bytes of the reference in a checkpoint: 0 if it never changes. ``itemsize``: bytes per
    weight; a moving average is float32.
    """
    if not (config.needs_reference and config.reference.refresh_every):
        return 0
    return model.parameters * (itemsize if config.reference.refresh_mix == 1 else 4)


def frozen_worker(max_length: int, model: FrozenModel, sizes: Sizes) -> Footprint:
    """Return the memory of a teacher's or reward model's worker on one GPU.

    A reward model has a full batch of the longest padded rows. Their mask is [rows, 1, T, T], once with a
    byte per entry and once in the weights' dtype; with a mask, key and value heads are repeated for all
    query heads.
    """
    settings = model.settings
    assert settings is not None  # the reference has `reference_worker`
    if not isinstance(settings, RewardModelConfig):
        return reference_worker(max_length, model.shape, sizes)
    s, b = model.shape.shape, itemsize_of(settings.dtype, gpu=sizes.gpu)
    tokens = max(settings.micro_batch_tokens, max_length)
    widest = -(-max(3 * s.intermediate, 4 * s.heads * s.head_dim) // settings.tensor_parallel_size)
    return Footprint(
        {
            "weights": model.weight_bytes(sizes.itemsize, gpu=sizes.gpu),
            "activations": tokens * (widest + 3 * s.hidden) * b,
            "attention mask": tokens * max_length * (1 + b),
            "runtime": round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["reference"]),
        }
    )


# An engine


@dataclass(frozen=True)
class EngineFootprint(Footprint):
    """``cache``: bytes of the key-value cache per GPU, negative if the weights do not fit. ``token_bytes``:
    cache bytes per token. ``longest``, ``mean``: number of sequences of full and of mean length that fit.
    ``most``: upper bound on concurrent sequences.
    """

    cache: int = 0
    token_bytes: int = 1
    longest: int = 0
    mean: int = 0
    most: int = 1

    def sequences_of(self, tokens: float) -> int:
        """Return the number of concurrently decoded sequences of ``tokens`` each."""
        return min(self.most, int(max(0, self.cache) // self.token_bytes // max(1.0, tokens)))


def is_quantised(rollout: RolloutConfig) -> bool:
    return rollout.quantization == "fp8"


def rollout_engine(
    config: Config,
    model: ModelShape,
    sizes: Sizes,
    workload: Workload,
    *,
    memory: int,
    asleep: int = 0,
    trains: bool = True,
) -> EngineFootprint:
    """Return an engine's memory per GPU. ``memory``: bytes of a GPU; 0: no GPU, the cache size is configured.
    ``asleep``: bytes that sleeping roles keep on the GPU. ``trains``: its samples are used for training.

    With `rollout.speculation` each engine process keeps texts in host memory. With `policy.router_replay`
    host memory holds the routes of all cached tokens and of untrained samples; with truncated sampling also
    the masks of untrained samples. In fp8 linear layers and experts have a byte per weight; embedding, LM
    head, norms and cache keep the model's dtype. The scales, a float32 per output, are not counted.
    """
    rollout, tensor_parallel, b = config.rollout, config.rollout.tensor_parallel_size, sizes.itemsize
    s = model.shape
    sequences = EngineSpec.from_config(config, Path(), colocated=asleep > 0).max_num_seqs
    token_bytes = model.kv_values(tensor_parallel) * b
    batched = max(_BATCHED_TOKENS, config.max_length if not sizes.gpu else 0)
    parts = {
        "weights": model.weight_bytes(b, fp8=is_quantised(rollout)) // tensor_parallel,
        "activations": batched * (3 * s.intermediate // tensor_parallel + 4 * s.hidden) * b,
        "logits": _SAMPLER_BLOCKS * sequences * s.vocabulary * 4,
        "runtime": round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["rollout"]),
    }
    if sizes.gpu:
        share = rollout.gpu_memory_utilization or GPU_MEMORY[asleep > 0]
        cache = min(int(memory * share), memory - asleep) - sum(parts.values())
    elif rollout.kv_cache_gib:
        cache = int(rollout.kv_cache_gib * GIB)
    else:
        cache = sequences * config.max_length * token_bytes
    parts["key-value cache"] = max(0, cache)
    cached_tokens = max(0, cache) // token_bytes
    host: dict[str, int] = {}
    steps = 1 + config.max_staleness if trains else 0
    samples = steps * config.batch.prompts_per_step * config.batch.samples_per_prompt / rollout.num_workers
    if config.policy.router_replay:
        if not s.experts:
            raise UserError(f"policy.router_replay: model {model.name} has no experts; remove it")
        pending_tokens = round(samples * (workload.prompt_tokens + workload.mean))
        host[_ROUTES] = (pending_tokens + cached_tokens) * model.route_bytes
    if config.sampling.is_truncated and trains:
        host[_MASKS] = round(samples * workload.mean) * _mask_bytes(config.sampling, model)
    mean = workload.prompt_tokens / config.batch.samples_per_prompt + workload.mean
    host |= _delta_copies(config.weight_sync, model, sizes, tensor_parallel)  # each process has one
    if rollout.speculation:
        host[_DRAFTS] = tensor_parallel * history_bytes(HISTORY_TOKENS)
    return EngineFootprint(
        parts if sizes.gpu else parts | host,
        host if sizes.gpu else {},
        cache=cache,
        token_bytes=token_bytes,
        longest=cached_tokens // config.max_length,
        mean=min(sequences, int(cached_tokens // max(1.0, mean))),
        most=sequences,
    )


def with_snapshot(
    engine: EngineFootprint, policy: PolicyConfig, model: ModelShape, sizes: Sizes, *, engines: int
) -> tuple[EngineFootprint, dict[str, int]]:
    """Return the memory of one of the evaluation ``engines``, and policy rank 0's weight snapshot for them in
    host memory. Without GPUs each engine has its share of the snapshot.
    """
    only_adapters = policy.lora is not None and policy.lora.sync == "adapter"
    copied = (
        lora_parameters(policy, model) * sizes.itemsize
        if only_adapters
        else model.weight_bytes(sizes.itemsize, fp8=False)
    )
    if not sizes.gpu:
        return replace(engine, parts=engine.parts | {"snapshot": copied // engines}), {}
    kept = {name: size for name, size in engine.host.items() if name in (_DRAFTS, _ROUTES)}
    return replace(engine, host=kept), {"snapshot": copied}
