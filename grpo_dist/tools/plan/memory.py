"""The GPU and host memory of a worker in bytes, by purpose.

    policy rank     weights | gradients | optimiser | activations | routes | logits | buckets | runtime
    engine          weights | activations | logits | runtime | what is left: key-value cache
    reference, teacher, reward model    weights | activations | logits or attention mask | runtime

Arithmetic only, of what the trainer keeps (`deepspeed_config`, `logprobs`, `attention`) and DeepSpeed 0.19
allocates. N parameters, W ranks, b bytes of a weight (2 for bfloat16, 4 for float32).
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

# A CUDA context with torch's kernels, NCCL's channels, and fragments that the allocator cannot use.
GPU_RUNTIME = 2 * GIB
# Resident size of a process with torch, transformers and DeepSpeed, or with vLLM, before a model is loaded.
CPU_RUNTIME = {"policy": 0.7 * GIB, "reference": 0.6 * GIB, "rollout": 1.3 * GIB}
_VARLEN = ("auto", "flash_attention_2")  # values of `model.attention`
_BATCHED_TOKENS = 8192  # prefilled at once by an engine: vLLM's default for a server on a GPU
_SAMPLER_BLOCKS = 3  # float32 [sequences, vocabulary]: logits, log-probs, and one temporary
_DRAFTS, _ROUTES, _MASKS = "texts for drafts", "routes", "sampling masks"
# Mean number of tokens that `sampling.top_p` or `min_p` keep: a guess on the safe side.
_KEPT = 64


@dataclass(frozen=True)
class Footprint:
    """Bytes of one worker. ``parts``: on its GPU, or of the machine without one; ``host``: in host memory;
    ``host_first``: in host memory too, of the first worker alone.
    """

    parts: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    host_first: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def total_host(self) -> int:
        """Bytes of the first worker in host memory: no other has more."""
        return sum(self.host.values()) + sum(self.host_first.values())


@dataclass(frozen=True, slots=True)
class Sizes:
    """What memory and times both depend on. ``gpu``: True where there are GPUs; ``micro_batch``, ``chunk``:
    tokens of a micro-batch, bytes of a block of logits. ``varlen``: attention is a variable-length kernel's;
    ``kernels``: layers compute by liger-kernel's.
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
        """Choose them as `hardware` does on a machine with or without GPUs, of ``memory`` bytes each."""
        device: Any = "cuda" if gpu else "cpu"
        itemsize = itemsize_of(config.model.dtype, gpu=gpu)
        # Without a GPU here the GPUs are another machine's, where the extra `gpu` installs liger-kernel.
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
    """Return the peak memory of a policy rank, in the backward pass of a full micro-batch. A checkpoint that
    is written in the background is a copy in host memory, below ZeRO 3 of whole weights in rank 0 alone.
    """
    policy = config.policy
    parts, host = _states(policy, model, sizes)
    first = _delta_copies(config.weight_sync, model, sizes)  # rank 0 sends, so it alone knows what was sent
    if sizes.gpu and config.checkpoint.background:
        copies = rank_bytes(policy, model, sizes)
        host["checkpoint"] = min(copies)
        if more := max(copies) - min(copies):
            first["checkpoint"] = more
    # A row above the budget is a micro-batch on its own.
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
    if config.sampling.is_truncated:  # ids with their rows, and a block of booleans
        parts[_MASKS] = round(2 * tokens * _mask_bytes(config.sampling, model)) + sizes.chunk // 4
    parts["buckets"] = _buckets(policy, model, sizes)
    parts["runtime"] = round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["policy"])
    return Footprint(parts, host, first) if sizes.gpu else Footprint(parts | first, host)


def supervised_rank(config: SupervisedConfig, model: ModelShape, sizes: Sizes) -> Footprint:
    """Return the peak memory of a rank of an sft stage: its micro-batches hold demonstrations, which are
    taken to share no tokens, and no engine sleeps there.
    """
    sft = config.sft
    assert sft is not None  # the configuration was checked
    longest = config.model.model_copy(update={"max_length": sft.max_length})
    rows = -(-sft.batch_size // config.policy.replicas)  # a rank has in one step and so in a micro-batch
    sizes = replace(sizes, micro_batch=min(sizes.micro_batch, rows * sft.max_length))
    whole_rows = FixedLengths(tokens=sft.max_length)
    config = config.model_copy(update={"model": longest})
    return policy_rank(config, model, sizes, Workload(0, whole_rows, sft.max_length))


def cold_start(sft: SFTConfig, model: ModelShape, sizes: Sizes, *, longest: int | None = None) -> Footprint:
    """Return the memory of supervised training before a run (`model.path: sft`): one process in float32,
    which computes each batch at once and keeps all activations.

    ``longest``: tokens of the longest demonstration; None: `sft.max_length`, the most that it may be.
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
    """Return the parameters of the adapters; all weights where there are none. An adapter of a matrix
    [out, in] has rank * (in + out).
    """
    lora, sides = policy.lora, model.linear_sides
    if lora is None:
        return model.parameters
    names = sides if isinstance(lora.target_modules, str) else [n for n in sides if n in lora.target_modules]
    return lora.rank * sum(sides[name] for name in names)


def _loaded_parameters(policy: PolicyConfig, model: ModelShape) -> int:
    return model.parameters + (lora_parameters(policy, model) if policy.lora else 0)


def states(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> dict[str, int]:
    """Return the weights, gradients and optimiser states that a rank has on its GPU."""
    return _states(policy, model, sizes)[0]


def _states(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weights, gradients and optimiser states of a rank, and their part in host memory.

    From stage 1 on, master weights and two moments, float32 or in 8 bits, are shared out. Stage 1 keeps whole
    gradients in float32 until the last micro-batch, and then, but for bfloat16, a rank's share next to them.
    Stages 2 and 3 keep a rank's share, in float32.

    With the optimiser in host memory, its share of the gradients is there. On the GPU stage 1 still keeps
    them whole, and bfloat16 weights have a share in which they are added up or reduced.
    """
    offload, stage, ranks, b = policy.offload, policy.zero_stage, policy.num_workers, sizes.itemsize
    trained = lora_parameters(policy, model)
    weights = _loaded_parameters(policy, model) * b // (ranks if stage == 3 else 1)
    whole, share = 4 * trained, 4 * trained // ranks
    gradients = (whole, whole + (0 if b == 2 else share), share, share)[stage]
    averages = 2 if policy.optimizer.name == "adamw_8bit" else 8  # bytes; scales of blocks are 1/64 of it
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
    """Return the bytes that each policy rank writes with DeepSpeed 0.19: trained weights in their own type
    and two moments, from ZeRO 1 on with a float32 copy. ZeRO 3 writes no other weights.

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
    """Return the bytes that the forward pass of ``tokens`` keeps for the backward pass. ``attended``: tokens
    that go through attention; ``longest``: tokens of a row.

    A layer keeps of each token the input and the result of its norms, in float32 and in the weights' type;
    the attention's output; gate, its activation, up, and their product; and of each attended token queries,
    keys, values, the output and a float32 of the softmax; and of each of a token's experts the input and two
    copies of the output. Attention by a variable-length kernel keeps keys and values alone of each attended
    token, and its output is the one that is kept. liger-kernel's norms keep nothing in float32, and its
    gate computes the activation again. With checkpointing only the input of each layer is kept, and one whole
    layer at a time.

    Attention with sinks keeps the softmax of each pair of tokens, and eager attention 8 bytes: the softmax in
    float32, in the weights' type where that is another one, and what a cap makes.
    """
    s, b = model.shape, sizes.itemsize
    query, key = s.heads * s.head_dim, s.kv_heads * s.head_dim
    fused = sizes.kernels and not s.experts
    norm = (2 * b if fused else 4 + 2 * b) * s.hidden + 4  # the input in float32, which float32 has anyway
    gate = (3 if fused else 4) * b * s.intermediate
    experts = 3 * b * s.experts_per_token * s.hidden
    layer = tokens * (s.norms * norm + gate + b * query + experts)
    if sizes.varlen:
        layer += tokens * (b * query + 4 * s.heads) + attended * 2 * b * key
    else:  # blocks of rows, for which the heads of keys are repeated
        layer += attended * (4 * b * query + 4 * s.heads)
    pair = {"fused": 0, "sinks": b, "eager": 8}[model.attention]
    layer += pair * s.heads * attended * min(longest, attended)
    last = tokens * (norm + b * s.hidden)
    if checkpointing:
        return round(s.layers * tokens * b * s.hidden + layer + last)
    return round(s.layers * layer + last)


def attended(batch: BatchConfig, settings: ModelConfig, workload: Workload, tokens: float) -> float:
    """Return the tokens of the rows in a packed stream of ``tokens``; each row repeats the prompt."""
    if not settings.packing:
        return tokens
    each = (workload.prompt_tokens - workload.shared_tokens) / batch.samples_per_prompt + workload.mean
    return tokens * min(ATTENDED, (workload.prompt_tokens + workload.mean) / each)


def _mask_bytes(sampling: SamplingConfig, model: ModelShape) -> int:
    """Return the bytes of the sampling mask of a token, as `KeptTokens` has it."""
    return 4 + min(4 * min(_KEPT, sampling.top_k or _KEPT), model.shape.vocabulary // 8)


def _logits(sizes: Sizes, head: int) -> int:
    """Return the bytes of blocks of logits and of the gradient of a head of ``head`` weights, which is added
    up in float32 and then rounded to the weights' type.

    A block is in float32, and its gradient on a GPU in the weights' type, on a CPU in float32, too
    (`logit_kernels`, `logit_rows`).
    """
    blocks = 1 + sizes.itemsize / 4 if sizes.gpu else 2
    rounded = sizes.itemsize if sizes.itemsize < 4 else 0
    return max(round(blocks * sizes.chunk) + 4 * head, (4 + rounded) * head)


def _buckets(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> int:
    """Return the bytes of DeepSpeed's reduction buffers and, under ZeRO-3, of weights gathered at once. They
    are free again before the weight sync takes its own.
    """
    settings = policy.deepspeed.get("zero_optimization", {})
    stage, b, loaded = policy.zero_stage, sizes.itemsize, _loaded_parameters(policy, model)
    bucket = int(float(settings.get("reduce_bucket_size", 5e8)))
    if stage == 0:  # flattened to be sent
        return min(bucket, loaded) * b if policy.num_workers > 1 else 0
    if stage == 1 and b == 2:
        if policy.offload.optimizer == "none":  # reduced where they are
            return 0
        b = 4
    # Without GPUs the system allocates pages as they are written.
    buckets = (bucket if sizes.gpu else min(bucket, loaded)) * b
    if stage == 2 and overlaps_reduction(policy):
        buckets *= 2  # one is filled while the other is reduced
    if stage == 3:
        live = int(float(settings.get("stage3_max_live_parameters", 1e9)))
        ahead = int(float(settings.get("stage3_prefetch_bucket_size", 5e7)))
        buckets += min(loaded, live + ahead) * b
    return buckets


def _delta_copies(
    settings: WeightSyncConfig, model: ModelShape, sizes: Sizes, copies: int = 1
) -> dict[str, int]:
    """Return the bytes of the copies of the weights that a worker holds for `weight_sync.deltas`=true."""
    size = copies * model.weight_bytes(sizes.itemsize, fp8=False)
    return {"copy of the weights": size} if settings.deltas is True else {}


# Workers that only compute forward passes


def reference_worker(max_length: int, model: ModelShape, sizes: Sizes) -> Footprint:
    """Return the memory of a reference worker or a teacher: whole weights, and passes that keep nothing."""
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


def frozen_worker(max_length: int, model: FrozenModel, sizes: Sizes) -> Footprint:
    """Return the memory of a worker of a teacher or of a reward model on one GPU.

    A reward model has a full batch of the longest padded rows. Their mask is [rows, 1, T, T], once of a byte
    and once of the weights' type; with a mask the heads of keys and values are repeated to as many as
    queries have.
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
    """``cache``: bytes of the key-value cache on each GPU, negative where not even the weights fit;
    ``token_bytes``: what a token takes of it; ``longest``, ``mean``: sequences that fit of full and of mean
    length; ``most``: that are decoded at once, whatever they hold.
    """

    cache: int = 0
    token_bytes: int = 1
    longest: int = 0
    mean: int = 0
    most: int = 1

    def sequences_of(self, tokens: float) -> int:
        """Return how many sequences of ``tokens`` each are decoded at once."""
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
    """Return the memory of an engine on each of its GPUs. ``memory``: bytes of a GPU; 0: none, the cache is
    configured. ``asleep``: bytes that others keep on the same GPU while it samples. ``trains``: its samples
    are trained on.

    With `rollout.speculation` each process of an engine remembers texts in host memory. With
    `policy.router_replay` host memory holds the routes of all tokens in the cache, and of the samples that
    are not trained on yet; with truncated sampling the masks of the latter. In fp8 the linear layers and the
    experts have a byte a weight; embedding, LM head, norms and the cache keep the model's type, and the
    scales, a float32 for each output, are left out.
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
        kept = round(samples * (workload.prompt_tokens + workload.mean))
        host[_ROUTES] = (kept + cached_tokens) * model.route_bytes
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
) -> EngineFootprint:
    """Return the memory of one of the ``engines`` of evaluation with its share of the snapshot of the weights
    that policy rank 0 keeps in host memory.
    """
    only_adapters = policy.lora is not None and policy.lora.sync == "adapter"
    copied = (
        lora_parameters(policy, model) * sizes.itemsize
        if only_adapters
        else model.weight_bytes(sizes.itemsize, fp8=False)
    )
    snapshot = {"snapshot": copied // engines}
    if not sizes.gpu:
        return replace(engine, parts=engine.parts | snapshot)
    kept = {name: size for name, size in engine.host.items() if name in (_DRAFTS, _ROUTES)}
    return replace(engine, host=kept | snapshot)
