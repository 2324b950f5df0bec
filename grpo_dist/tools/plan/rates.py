"""Stage times: data-sheet rooflines, scaled by the efficiency that programs reach.

    decode   max(bytes of weights and cache / memory bandwidth, operations / peak) + all-reduces + host
             without CUDA graphs at least the launches of all layers; with drafts / tokens gained per pass
    prefill  operations / peak
    update   operations / peak of the busiest rank + ZeRO's collectives + the optimiser's pass
    sync     bytes / network
    reference, reward models    operations / peak of one worker

Efficiencies are assumptions (`Reached`), or come from a benchmark of this project (`calibration`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from grpo_dist.config import Config, RewardModelConfig
from grpo_dist.tools.plan.accelerators import Peaks
from grpo_dist.tools.plan.memory import Sizes, is_quantised, lora_parameters, states
from grpo_dist.tools.plan.models import FrozenModel, ModelShape

_HOP_S = 12e-6  # a small all-reduce within a node
_CPU_ADAM = 4e9  # parameters per second on one node's CPUs
# Share of the weights' bytes that `weight_sync.deltas` sends in bfloat16, by learning rate, measured in
# grpo_dist/guides/throughput.md. In float32 nearly every weight changes.
_DELTA_SHARES = ((1e-6, 0.019), (1e-5, 0.16))


@dataclass(frozen=True, slots=True)
class Reached:
    """Achieved shares of data-sheet rates, and times missing from data sheets. The defaults are reported by
    well-tuned public systems, not measured by this project.

    ``decode_curve``: measured (sequences, factor on the roofline of a decode step), interpolated linearly and
    constant beyond the ends. ``accepted``: tokens that a pass with drafts gains per sequence, at least the
    one that it computes anyway.
    """

    training: float = 0.4  # share of peak operations, recomputation included
    prefill: float = 0.5
    decode: float = 0.65  # share of memory bandwidth
    network: float = 0.7
    sync: float = 0.3  # share of the network
    step_s: float = 0.004  # scheduler and sampler in a decode step
    # Kernel launches per layer without CUDA graphs: a model of 28 layers takes 22 to 23 ms per token on A800,
    # including `step_s`, and 13 ms with graphs (vllm-project/vllm-omni#7960).
    launch_s: float = 0.65e-3
    accepted: float = 1.0
    sync_s: float = 0.2  # pause, repack and resume in a weight sync
    sample_s: float = 100e-6  # the driver's loop per completion (tests/evidence/driver_scaling.py)
    score_s: float = 0.005  # a grader process per completion
    overhead_s: float = 0.05  # logging and messages per training step
    host: float = 0.8  # share of PCIe, to and from pinned memory
    turn_s: float = 0.5  # a role switch without copies: sleep, wake, free caches
    decode_curve: tuple[tuple[float, float], ...] = ()
    source: str = "data sheet with assumed efficiencies"

    def decode_factor(self, sequences: float) -> float:
        if not self.decode_curve:
            return 1.0
        at, factors = zip(*self.decode_curve, strict=True)
        return float(np.interp(sequences, at, factors))


@dataclass(frozen=True)
class UpdateWork:
    """Rows of one optimiser update: tokens of each prompt and its completions. ``shared``: common prefix of
    all prompts in ``groups``. ``demonstrations`` share nothing.
    """

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    shared: int = 0
    demonstrations: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @cached_property
    def rows(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return self.groups + self.demonstrations

    @cached_property
    def own_tokens(self) -> int:
        """Tokens without the shared prefix, each prompt once."""
        return sum(prompt for prompt, _ in self.rows) + self.trained - self.shared * len(self.groups)

    @cached_property
    def trained(self) -> int:
        """Tokens of completions."""
        return sum(sum(lengths) for _, lengths in self.rows)

    @cached_property
    def pairs(self) -> float:
        """Pairs of (token, attended token)."""
        return sum(_group_pairs(prompt, lengths) for prompt, lengths in self.rows) / 2

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Tokens of prompt and completion of the longest row."""
        return max(((prompt, max(lengths)) for prompt, lengths in self.rows), key=sum)


@lru_cache(maxsize=1 << 14)
def _group_pairs(prompt: int, lengths: tuple[int, ...]) -> int:
    """Return twice the `UpdateWork.pairs` of a group; cached because all compared splits train on it."""
    return sum((prompt + n) * (prompt + n + 1) for n in lengths)


@lru_cache(maxsize=1 << 14)
def _group_work(prompt: int, lengths: tuple[int, ...]) -> UpdateWork:
    return UpdateWork(((prompt, lengths),))


@dataclass(frozen=True)
class Rates:
    """Seconds of every stage for one configuration."""

    config: Config
    model: ModelShape
    sizes: Sizes
    peaks: Peaks
    reached: Reached

    @property
    def _precision(self) -> float:
        """Return the speed in the model's dtype relative to half precision."""
        return self.peaks.float32 if self.sizes.itemsize == 4 else 1.0

    def decode_step_s(self, sequences: float, context: float) -> float:
        """Return the mean seconds per token of each of ``sequences``, with ``context`` tokens in total."""
        # Cached: a simulation calls this a hundred thousand times with few numbers of sequences.
        if (pass_times := self._cached_passes.get(sequences)) is None:
            pass_times = self._cached_passes[sequences] = self._decode_pass(sequences)
        return pass_times(context)

    @cached_property
    def _cached_passes(self) -> dict[float, Callable[[float], float]]:
        return {}

    def _decode_pass(self, sequences: float) -> Callable[[float], float]:
        """Return `decode_step_s` of ``sequences`` as a function of their context."""
        rollout, reached = self.config.rollout, self.reached
        speculation = rollout.speculation
        drafts = speculation.tokens if speculation and sequences <= speculation.max_sequences else 0
        reading, more_reading, computing, more_computing, between = self._roofline(sequences, 1 + drafts)
        factor, host_s = reached.decode_factor(sequences), reached.step_s
        gained = reached.accepted if drafts else 1.0
        launches = rollout.enforce_eager and self.sizes.gpu
        least = reached.launch_s * self.model.shape.layers if launches else 0.0

        def step_s(context: float) -> float:
            read, computed = reading + more_reading * context, computing + more_computing * context
            seconds = ((read if read > computed else computed) + between) * factor
            return ((seconds if seconds > least else least) + host_s) / gained

        return step_s

    def decode_roofline_s(self, sequences: float, context: float) -> float:
        """Return the seconds of a pass that computes one token per sequence."""
        reading, more_reading, computing, more_computing, between = self._roofline(sequences, 1)
        return max(reading + more_reading * context, computing + more_computing * context) + between

    def _roofline(self, sequences: float, positions: int) -> tuple[float, float, float, float, float]:
        """Return the bounds of a pass that computes ``positions`` tokens per sequence: seconds of memory
        reads, and per cached token; seconds of compute, and per cached token; seconds of all-reduces.
        """
        m, s, t, b = (
            self.model,
            self.model.shape,
            self.config.rollout.tensor_parallel_size,
            self.sizes.itemsize,
        )
        tokens, memory = positions * sequences, self.peaks.memory * self.reached.decode
        rate = t * self.peaks.engine_flops * self._precision * self.reached.prefill
        reading = m.read_bytes(tokens, b, fp8=is_quantised(self.config.rollout)) / t / memory
        # Each process has at least one key-value head.
        more_reading = b * m.kv_values() / min(t, s.kv_heads) / memory
        computing = (self._linear_flops(tokens) + 2 * m.embedding * tokens) / rate
        more_computing = 4 * s.layers * s.heads * s.head_dim * positions / rate
        between = 0.0
        if t > 1:
            sent = 2 * (t - 1) / t * tokens * s.hidden * b
            between = 2 * s.layers * (_HOP_S + sent / (self.peaks.link * self.reached.network))
        if not self.sizes.gpu:  # GPUs overlap reads with compute; measured CPUs do not
            return reading + computing, more_reading + more_computing, 0.0, 0.0, between
        return reading, more_reading, computing, more_computing, between

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds in which an engine prefills ``tokens``."""
        t = self.config.rollout.tensor_parallel_size
        return (
            self._linear_flops(tokens)
            / t
            / (self.peaks.engine_flops * self._precision * self.reached.prefill)
        )

    def _linear_flops(self, tokens: float) -> float:
        """Return the operations of an engine's linear layers; for fp8 the operations in the model's dtype
        that take the same time.
        """
        faster = self.peaks.fp8 / self._precision if is_quantised(self.config.rollout) else 1.0
        return 2 * self.model.shape.layers * self.model.shape.layer_weights * tokens / faster

    def forward_flops(self, work: UpdateWork) -> float:
        """Return the operations of a forward pass over ``work``."""
        s = self.model.shape
        weights = s.layers * s.layer_weights * self.stream_tokens(work) + self.model.embedding * work.trained
        return float(2 * weights + 4 * s.layers * s.heads * s.head_dim * work.pairs)

    def stream_tokens(self, work: UpdateWork) -> float:
        """Return the tokens computed for ``work``. Packed rows share prompts, and a micro-batch computes the
        common prefix of its prompts once.
        """
        if not self.config.model.packing:
            return float(sum(p * len(n) + sum(n) for p, n in work.rows))
        repeated = work.shared and work.shared * self._micro_batches(work) * self.config.policy.replicas
        return work.own_tokens + repeated

    def update_s(self, updates: Sequence[UpdateWork]) -> float:
        """Return the seconds of all updates of a step, over `batch.epochs_per_batch`."""
        epochs, before = self.config.batch.epochs_per_batch, self._passes_before(len(updates))
        return sum(
            epochs * self._one_update_s(work) + self._compute_s(work, passes)
            for work, passes in zip(updates, before, strict=True)
        )

    def compute_s(self, updates: Sequence[UpdateWork]) -> float:
        """Return the part of `update_s` in forward and backward passes."""
        epochs, before = self.config.batch.epochs_per_batch, self._passes_before(len(updates))
        return sum(
            self._compute_s(work, epochs * self._passes + passes)
            for work, passes in zip(updates, before, strict=True)
        )

    @property
    def _passes(self) -> float:
        """Return an update's cost in forward passes: a backward pass is two, one of them for weight
        gradients, which LoRA's frozen weights lack; recomputation is one more.
        """
        backward = 2.0 if self.config.policy.lora is None else 1.0
        return 1.0 + backward + float(self.config.model.gradient_checkpointing)

    def _passes_before(self, updates: int) -> list[float]:
        """Return the extra forward passes of each update for log-probs before it."""
        algorithm, epochs = self.config.algorithm, self.config.batch.epochs_per_batch
        estimates = float(any(estimator.traits.reads_policy for estimator in self.config.estimators))
        if algorithm.top_entropy_share < 1.0:
            return [1.0 + estimates] * updates
        moves = updates * epochs > 1 and not algorithm.correction.bypasses
        return [(1.0 if moves and (i > 0 or epochs > 1) else 0.0) + estimates for i in range(updates)]

    def reference_s(self, work: UpdateWork) -> float:
        """Return the seconds of a group's log-probs on one reference worker."""
        return self.forward_flops(work) / (self.peaks.flops * self._precision * self.reached.training)

    def scoring_s(self, model: FrozenModel, prompt: int, lengths: Sequence[int]) -> float:
        """Return the seconds in which a worker of ``model``, with its GPUs or one thread, scores a group.

        A reward model gets its share of a shared GPU, as if all computed at once. The all-reduces of a
        tensor-parallel model are not counted.
        """
        if not isinstance(model.settings, RewardModelConfig):
            rates = self if model.shape is self.model else replace(self, model=model.shape)
            return rates.reference_s(_group_work(prompt, tuple(lengths)))
        precision = self.peaks.float32 if model.settings.dtype == "float32" else 1.0
        flops = self.peaks.thread_flops or self.peaks.flops * precision * model.settings.gpus
        return model.padded_flops(prompt, lengths) / (flops * self.reached.training)

    def sync_s(self) -> float:
        """Return the seconds of sending weights or adapters to the engines. ZeRO-3 gathers them first.

        `weight_sync.deltas`=true sends a `delta_share` of the bytes; auto counts as false, because it depends
        on the engines' placement.
        """
        adapters = self.config.policy.lora is not None and self.config.policy.lora.sync == "adapter"
        sent = (lora_parameters(self.config.policy, self.model) if adapters else self.model.parameters) * (
            self.sizes.itemsize
        )
        gathers = self.config.policy.zero_stage == 3
        network, copies = self.peaks.network * self.reached.sync, 0.0
        if self.config.weight_sync.deltas is True:
            if self.peaks.host:  # the copy to the policy's GPU and back, and the engine's to its GPU
                copies = 3 * sent / (self.peaks.host * self.reached.host)
            share = delta_share(self.sizes.itemsize, self.config.policy.optimizer.lr)
            return (gathers + share) * sent / network + copies + self.reached.sync_s
        return (1 + gathers) * sent / network + self.reached.sync_s

    def turn_s(self) -> float:
        """Return the seconds of a role switch that moves a rank's states to host memory or back."""
        return self._copy_s(sum(states(self.config.policy, self.model, self.sizes).values()))

    def scoring_turn_s(self, model: FrozenModel) -> float:
        """Return the seconds until a colocated ``model`` has its weights on the GPU."""
        return self._copy_s(model.weight_bytes(self.sizes.itemsize, gpu=self.sizes.gpu))

    def resend_s(self) -> float:
        """Return the seconds to resend dropped weights to engines outside a weight sync: the policy's weights
        are loaded from host memory, sent, and offloaded.
        """
        weights = states(self.config.policy, self.model, self.sizes)["weights"]
        return 2 * self._copy_s(weights) + self.sync_s()

    def _copy_s(self, size: int) -> float:
        return size / (self.peaks.host * self.reached.host) + self.reached.turn_s

    def score_s(self, samples: int) -> float:
        """Return the seconds in which one reward worker's processes score a group."""
        processes = min(samples, self.config.rewards.processes_per_worker)
        return samples / processes * self.reached.score_s

    def _one_update_s(self, work: UpdateWork) -> float:
        compute = self._compute_s(work, self._passes)
        gathers, others = self._collectives_s(self._micro_batches(work))
        # ZeRO-3 prefetches the next layer's weights during compute; other collectives follow it.
        return max(compute, gathers) + others + self._optimizer_s()

    def _compute_s(self, work: UpdateWork, passes: float) -> float:
        """Return the load of the busiest group of ranks: an equal share, or the longest row."""
        replicas, shared = self.config.policy.replicas, self.config.policy.sequence_parallel
        prompt, longest = work.longest
        row = self.forward_flops(UpdateWork(((prompt, (longest,)),)))
        busiest = max(self.forward_flops(work) / replicas, row)
        return passes * busiest / shared / (self.peaks.flops * self._precision * self.reached.training)

    def _micro_batches(self, work: UpdateWork) -> int:
        tokens = work.own_tokens / self.config.policy.replicas
        room = max(self.sizes.micro_batch, sum(work.longest)) - work.shared
        return max(1, round(np.ceil(tokens / room)))

    def _collectives_s(self, micro_batches: int) -> tuple[float, float]:
        """Return the seconds of ZeRO-3's gathers, and of all other transfers in an update."""
        ranks, stage, b = self.config.policy.num_workers, self.config.policy.zero_stage, self.sizes.itemsize
        if ranks == 1:
            return 0.0, 0.0
        trained = lora_parameters(self.config.policy, self.model)
        one_way = (ranks - 1) / ranks / (self._between_ranks(ranks) * self.reached.network)
        if stage == 0:
            return 0.0, 2 * 4 * trained * one_way
        if stage == 1:  # gradients once in float32, and new weights
            return 0.0, (2 * 4 + b) * trained * one_way
        reduced = micro_batches * b * trained * one_way
        if stage == 2:
            return 0.0, reduced + b * trained * one_way
        return 2 * micro_batches * b * self.model.parameters * one_way, reduced

    def _between_ranks(self, ranks: int) -> float:
        """Return a collective's bytes per second per rank: all cards of a node send to the next at once."""
        inside = min(ranks, self.peaks.node)
        return (
            self.peaks.link if ranks <= self.peaks.node else min(self.peaks.link, self.peaks.network * inside)
        )

    def _optimizer_s(self) -> float:
        shard = lora_parameters(self.config.policy, self.model) / max(1, self.config.policy.num_workers)
        if self.config.policy.offload.optimizer == "none":
            return 7 * 4 * shard / (self.peaks.memory * self.reached.decode)
        inside = min(self.config.policy.num_workers, self.peaks.node)
        sent = shard * (4 + self.sizes.itemsize) / (self.peaks.host * self.reached.host)
        return shard * inside / _CPU_ADAM + sent


def delta_share(itemsize: int, lr: float) -> float:
    """Return the share of the weights' bytes that deltas send at ``lr``, for ``itemsize`` bytes per weight.

    For bfloat16 it is interpolated between measured learning rates on logarithmic scales. Below the lowest
    rate its share counts; above the highest all weights are sent.
    """
    rates, shares = zip(*_DELTA_SHARES, strict=True)
    if itemsize > 2 or lr > rates[-1] * (1 + 1e-9):
        return 1.0
    return float(np.exp(np.interp(np.log(lr), np.log(rates), np.log(shares))))
