"""The GPU and host memory of a worker in bytes, by purpose.

    policy rank     weights | gradients | optimiser | activations | routes | logits | buckets | runtime
    reference       weights | activations | logits | runtime

Arithmetic only, of what the trainer keeps (`deepspeed_config`, `logprobs`, `attention`) and DeepSpeed 0.19
allocates. N parameters, W ranks, b bytes of a weight (2 for bfloat16, 4 for float32).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_dist.batch.sharding import ATTENDED
from grpo_dist.config import BatchConfig, Config, ModelConfig, PolicyConfig, WeightSyncConfig
from grpo_dist.policy.deepspeed_config import optimizer_device, overlaps_reduction
from grpo_dist.policy.layer_kernels import installed
from grpo_dist.runtime.hardware import GIB, logprob_chunk_mib, micro_batch_tokens
from grpo_dist.tools.plan.models import ModelShape
from grpo_dist.tools.plan.workload import Workload

# A CUDA context with torch's kernels, NCCL's channels, and fragments that the allocator cannot use.
GPU_RUNTIME = 2 * GIB
# What a sleeping worker keeps on a shared GPU: its context, NCCL's channels, an engine's CUDA graphs.
ASLEEP = 2 * GIB
# Resident size of a process with torch, transformers and DeepSpeed, or with vLLM, before a model is loaded.
CPU_RUNTIME = {"policy": 0.7 * GIB, "reference": 0.6 * GIB, "rollout": 1.3 * GIB}
USABLE = 0.95  # of a GPU's memory: what a plan may fill


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
    def of(cls, config: Config, *, gpu: bool, memory: int = 0) -> Sizes:
        """Choose them as `hardware` does on a machine with or without GPUs, of ``memory`` bytes each."""
        device: Any = "cuda" if gpu else "cpu"
        itemsize = itemsize_of(config.model.dtype, gpu=gpu)
        return cls(
            gpu,
            itemsize,
            micro_batch_tokens(config.batch.micro_batch_tokens, device),
            micro_batch_tokens(config.reference.micro_batch_tokens, device),
            logprob_chunk_mib(config.policy.logprob_chunk_mib, device, memory) * 2**20,
            varlen=gpu and itemsize == 2 and config.model.packing and config.model.attention in _VARLEN,
            kernels=gpu and config.model.kernels != "torch" and not config.policy.compile and _has_package(),
        )


_VARLEN = ("auto", "flash_attention_2")  # of `model.attention`


def _has_package() -> bool:
    """Without a GPU here the GPUs are another machine's, where the extra `gpu` installs it."""
    return installed() or torch.version.cuda is None


def itemsize_of(dtype: str, *, gpu: bool) -> int:
    """Return the bytes of a weight as `hardware.resolve_dtype` does, without asking this machine's GPU."""
    return 2 if dtype == "bfloat16" or (dtype == "auto" and gpu) else 4


def lora_parameters(policy: PolicyConfig, model: ModelShape) -> int:
    """Return the parameters of the adapters; all weights where there are none. An adapter of a matrix
    [out, in] has rank * (in + out).
    """
    lora, sides = policy.lora, model.linear_sides
    if lora is None:
        return model.parameters
    names = sides if isinstance(lora.target_modules, str) else [n for n in sides if n in lora.target_modules]
    return lora.rank * sum(sides[name] for name in names)


def policy_rank(config: Config, model: ModelShape, sizes: Sizes, workload: Workload) -> Footprint:
    """Return the peak memory of a policy rank, in the backward pass of a full micro-batch. A checkpoint that
    is written in the background is a copy in host memory, below ZeRO 3 of whole weights in rank 0 alone.
    """
    policy, b = config.policy, sizes.itemsize
    trained = lora_parameters(config.policy, model)
    held = model.parameters + (trained if policy.lora else 0)
    parts, host = _states(config.policy, trained=trained, held=held, itemsize=b)
    first = held_copies(config.weight_sync, model, sizes)  # rank 0 sends, so it alone knows what was sent
    if sizes.gpu and config.checkpoint.background:
        copies = rank_bytes(config.policy, model, sizes)
        host["checkpoint"] = min(copies)
        if more := max(copies) - min(copies):
            first["checkpoint"] = more
    tokens = _stream(config.policy, config.max_length, sizes.micro_batch)
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
    head = 0 if policy.lora else model.embedding
    parts["logits"] = _logits(sizes, head)
    parts["buckets"] = _buckets(config.policy, held, sizes)
    parts["runtime"] = round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["policy"])
    return Footprint(parts, host, first) if sizes.gpu else Footprint(parts | first, host)


def _logits(sizes: Sizes, head: int) -> int:
    """Return the bytes of blocks of logits and of the gradient of a head of ``head`` weights, which is added
    up in float32 and then rounded to the weights' type.

    A block is in float32, and its gradient on a GPU in the weights' type, on a CPU in float32, too
    (`logit_kernels`, `logit_rows`).
    """
    blocks = 1 + sizes.itemsize / 4 if sizes.gpu else 2
    rounded = sizes.itemsize if sizes.itemsize < 4 else 0
    return max(round(blocks * sizes.chunk) + 4 * head, (4 + rounded) * head)


def held_copies(
    settings: WeightSyncConfig, model: ModelShape, sizes: Sizes, copies: int = 1
) -> dict[str, int]:
    """Return the bytes of the copies of the weights that a worker holds for `weight_sync.deltas`=true."""
    own = copies * model.weight_bytes(sizes.itemsize, fp8=False)
    return {"copy of the weights": own} if settings.deltas is True else {}


def reference_worker(max_length: int, model: ModelShape, sizes: Sizes, workload: Workload) -> Footprint:
    """Return the memory of a reference worker: whole weights, and forward passes that keep nothing."""
    tokens = max(sizes.reference_micro_batch, max_length)
    s = model.shape
    widest = max(3 * s.intermediate, (2 * s.heads + 2 * s.kv_heads) * s.head_dim) + 3 * s.hidden
    runtime = round(GPU_RUNTIME if sizes.gpu else CPU_RUNTIME["reference"])
    return Footprint(
        {
            "weights": model.parameters * sizes.itemsize,
            "activations": tokens * widest * sizes.itemsize,
            "logits": (1 if sizes.gpu else 2) * sizes.chunk,
            "runtime": runtime,
        }
    )


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
    float32, and where that is another type that of the weights, and what a cap makes.
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


def states(policy: PolicyConfig, model: ModelShape, sizes: Sizes) -> dict[str, int]:
    """Return the weights, gradients and optimiser states that a rank has on its GPU."""
    trained = lora_parameters(policy, model)
    held = model.parameters + (trained if policy.lora else 0)
    return _states(policy, trained=trained, held=held, itemsize=sizes.itemsize)[0]


def expert_bytes(policy: PolicyConfig, model: ModelShape, itemsize: int) -> int:
    """Return the bytes of the experts in `states`: their weights and, where these are trained, the rest."""
    own = model.expert_parameters
    return sum(_states(policy, trained=0 if policy.lora else own, held=own, itemsize=itemsize)[0].values())


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
    own = [12 * trained // ranks] * ranks if stage else [8 * trained] + [0] * (ranks - 1)
    if stage < 3:
        own[0] += sizes.itemsize * trained
    return own


def _stream(policy: PolicyConfig, max_length: int, budget: int) -> float:
    """Return the tokens of a rank's largest micro-batch: a row above the budget is one on its own."""
    return max(budget, max_length) / policy.sequence_parallel


def _states(
    policy: PolicyConfig, *, trained: int, held: int, itemsize: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the weights, gradients and optimiser states of a rank, and their part in host memory.

    From stage 1 on, master weights and two moments, all float32, are shared out. Stage 1 keeps whole
    gradients in float32 until the last micro-batch, and then, but for bfloat16, a rank's share next to them.
    Stages 2 and 3 keep a rank's share, in float32.

    With the optimiser in host memory, its share of the gradients is there. On the GPU stage 1 still keeps
    them whole, and bfloat16 weights have a share in which they are added up or reduced.
    """
    offload, stage, ranks, b = policy.offload, policy.zero_stage, policy.num_workers, itemsize
    weights = held * b // (ranks if stage == 3 else 1)
    whole, own = 4 * trained, 4 * trained // ranks
    gradients = (whole, whole + (0 if b == 2 else own), own, own)[stage]
    optimizer = 12 * trained // ranks if stage else 8 * trained
    parts = {"weights": weights, "gradients": gradients, "optimiser": optimizer}
    host: dict[str, int] = {}
    where = optimizer_device(policy)
    if where != "none":
        parts["optimiser"] = 0
        summed = own if b == 2 else 0
        parts["gradients"] = (0, whole + summed, summed, 0)[stage]
        host = {"optimiser": optimizer, "gradients": own} if where == "cpu" else {"gradients": own}
    if offload.parameters != "none":
        parts["weights"] = 0
        if offload.parameters == "cpu":
            host["weights"] = weights
    return parts, host


def _buckets(policy: PolicyConfig, held: int, sizes: Sizes) -> int:
    """Return the bytes of DeepSpeed's reduction buffers and, under ZeRO-3, of weights gathered at once. They
    are free again before the weight sync takes its own.
    """
    settings = policy.deepspeed.get("zero_optimization", {})
    stage, b = policy.zero_stage, sizes.itemsize
    bucket = int(float(settings.get("reduce_bucket_size", 5e8)))
    if stage == 0:  # flattened to be sent
        return min(bucket, held) * b if policy.num_workers > 1 else 0
    if stage == 1 and b == 2:
        if optimizer_device(policy) == "none":  # reduced where they are
            return 0
        b = 4
    # Without GPUs the system allocates pages as they are written.
    buckets = (bucket if sizes.gpu else min(bucket, held)) * b
    if stage == 2 and overlaps_reduction(policy):
        buckets *= 2  # one is filled while the other is reduced
    if stage == 3:
        live = int(float(settings.get("stage3_max_live_parameters", 1e9)))
        ahead = int(float(settings.get("stage3_prefetch_bucket_size", 5e7)))
        buckets += min(held, live + ahead) * b
    return buckets
