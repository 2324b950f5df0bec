"""The memory of a rollout engine in bytes.

    weights | activations | logits | runtime | what is left: key-value cache

With `rollout.speculation` each process of an engine remembers texts in host memory.

With `policy.router_replay` host memory holds the routes of all tokens in the cache, and of the samples that
are not trained on yet; engines of evaluation keep those of the cache alone.

With `rollout.quantization` = fp8 the linear layers and the experts have a byte a weight; embedding, LM head,
norms and the cache keep the model's type. The scales, one float32 for each output of a layer, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from actors.workers.drafter import history_bytes
from actors.workers.engine_settings import GPU_MEMORY, EngineSpec
from grpo_dist.config import BatchConfig, Config, PolicyConfig, RolloutConfig
from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import GIB
from grpo_dist.tools.plan.memory import (
    CPU_RUNTIME,
    GPU_RUNTIME,
    Footprint,
    Sizes,
    held_copies,
    lora_parameters,
)
from grpo_dist.tools.plan.models import ModelShape
from grpo_dist.tools.plan.workload import Workload

_BATCHED_TOKENS = 8192  # prefilled at once by an engine: vLLM's default for a server on a GPU
_DRAFTS, _ROUTES = "texts for drafts", "routes"
_SAMPLER_BLOCKS = 3  # float32 [sequences, vocabulary]: logits, log-probs, and one temporary


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
    own = {name: size for name, size in engine.host.items() if name in (_DRAFTS, _ROUTES)}
    return replace(engine, host=own | snapshot)


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
    """
    rollout, tensor_parallel, b = config.rollout, config.rollout.tensor_parallel_size, sizes.itemsize
    s = model.shape
    sequences = EngineSpec.from_config(config, Path(), colocated=asleep > 0).max_num_seqs
    token_bytes = model.kv_values(tensor_parallel) * b
    batched = max(_BATCHED_TOKENS, config.max_length if not sizes.gpu else 0)
    parts = {
        "weights": model.weight_bytes(b, fp8=is_quantised(config.rollout)) // tensor_parallel,
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
    room = max(0, cache) // token_bytes
    routes = 0
    if config.policy.router_replay:
        steps = 1 + config.max_staleness if trains else 0
        routes = _routes(config.batch, model, workload, steps=steps, engines=rollout.num_workers)
        routes += room * model.route_bytes
    mean = workload.prompt_tokens / config.batch.samples_per_prompt + workload.mean
    host = {_ROUTES: routes} if routes else {}
    host |= held_copies(config.weight_sync, model, sizes, tensor_parallel)  # each process has one
    if rollout.speculation.tokens:
        host[_DRAFTS] = tensor_parallel * history_bytes(rollout.speculation.history_tokens)
    return EngineFootprint(
        parts if sizes.gpu else parts | host,
        host if sizes.gpu else {},
        cache=cache,
        token_bytes=token_bytes,
        longest=room // config.max_length,
        mean=min(sequences, int(room // max(1.0, mean))),
        most=sequences,
    )


def _routes(batch: BatchConfig, model: ModelShape, workload: Workload, *, steps: int, engines: int) -> int:
    """Return the bytes of the routes of one engine's share of the samples of ``steps`` steps."""
    if not model.shape.experts:
        raise UserError(f"policy.router_replay: model {model.name} has no experts; remove it")
    samples = steps * batch.prompts_per_step * batch.samples_per_prompt
    return round(samples * (workload.prompt_tokens + workload.mean) / engines) * model.route_bytes
