"""One ZeRO rank of the policy: the model under DeepSpeed and its optimiser updates.

No Ray here: `actors.workers.policy` puts one of these into each actor, and a script may use it on its own.
All ranks call the same methods in the same order; each method that communicates is marked "Collective".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_dist.algorithms.schedules import learning_rate
from grpo_dist.batch.rows import select_update
from grpo_dist.batch.sharding import COMPUTED_TOKENS
from grpo_dist.config import ModelConfig, PolicyConfig
from grpo_dist.health import BAD_WEIGHTS, GRAD_NORM, REFUSED, SKIPPED, Bound, passed
from grpo_dist.policy.attention import choose_kernel
from grpo_dist.policy.deepspeed_config import check_offload, deepspeed_config, size_buffers
from grpo_dist.policy.deepspeed_engine import NormGate, forward_only, initialize, zero3_loading
from grpo_dist.policy.full_weights import FullWeights
from grpo_dist.policy.group_logprobs import SampledGroup, group_logprobs
from grpo_dist.policy.lora import empty_model, untrained
from grpo_dist.policy.loss import Objective, add_stats, batch_loss, divergence_from_teacher, finish_stats
from grpo_dist.policy.micro_batches import MicroBatches, values_by_row
from grpo_dist.policy.model import (
    HeadOutputs,
    TokenLogprobs,
    attention_cost,
    reads_packed_rows,
    trainable_model,
)
from grpo_dist.policy.preparation import EntropyBonus, Preparation
from grpo_dist.policy.rank_memory import RankMemory
from grpo_dist.policy.ranks import join, reduce_over_ranks
from grpo_dist.policy.router_replay import check_routes
from grpo_dist.policy.saved_state import SavedState
from grpo_dist.policy.sequence_parallel import SequenceGroup
from grpo_dist.runtime.hardware import device_type, logprob_chunk_mib, micro_batch_tokens, resolve_dtype
from grpo_dist.runtime.rendezvous import Rank
from grpo_dist.types import EpochUpdate, TeacherLogprobs, TrainBatch

# ZeRO 1 and 2 sum squares in float32: they skip a larger gradient, which stages 0 and 3 would clip.
_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)
_FIRST_UPDATE = ("policy/ratio_mean", "policy/ratio_max", "ref/kl")  # also reported for the first update


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of the optimiser updates, the same on every rank."""

    objective: Objective
    temperature: float  # sampling temperature
    token_budget: int | None  # tokens of a micro-batch; None: the device's default
    epochs: int  # passes over the updates of a step
    total_updates: int  # in the whole run, for the learning-rate schedule
    seed: int


class Trainer:
    """A rank. Construction is collective: it joins all ranks.

    ``weights`` gives out full tensors, ``state`` saves and loads sharded tensors, ``memory`` moves them off
    the device and back. ``token_logprobs``: log-probs of the tokens that the last `update` trained, from its
    first pass over each row, by row id, float32 [C]; empty without ``keep_logprobs``.
    """

    def __init__(
        self,
        rank: Rank,
        policy: PolicyConfig,
        *,
        model: ModelConfig,
        model_dir: str,
        settings: TrainerSettings,
    ) -> None:
        self.rank, self._policy, self._epochs = rank, policy, settings.epochs
        self._objective = settings.objective
        self._total_updates, self._updates = settings.total_updates, 0
        self._bonus = EntropyBonus(settings.objective.algorithm.entropy)
        self.token_logprobs: dict[int, np.ndarray] = {}
        self._trust_remote_code = model.trust_remote_code
        device = device_type()
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        dtype = resolve_dtype(model.dtype, device)
        self.dtype_name = str(dtype).removeprefix("torch.")
        check_offload(policy)
        engine_settings = deepspeed_config(policy, bfloat16=dtype == torch.bfloat16)
        if policy.offload.parameters == "nvme":
            empty = empty_model(model_dir, trust_remote_code=model.trust_remote_code)
            size_buffers(engine_settings, max(-(-p.numel() // rank.world_size) for p in empty.parameters()))
        torch.manual_seed(settings.seed)
        join(rank)
        self._zero3 = zero3_loading(engine_settings) if policy.zero_stage == 3 else None
        causal_lm = trainable_model(model_dir, dtype, model, policy, settings.seed)
        budget, packs = micro_batch_tokens(settings.token_budget, device), reads_packed_rows(causal_lm)
        kernel = choose_kernel(model.attention, self.device, dtype) if packs else None
        shared = policy.sequence_parallel
        self._micro = MicroBatches(budget, kernel, shared, self.device)
        self._sharing = SequenceGroup.join(shared, rank.timeout_s) if shared > 1 else None
        module = TokenLogprobs(
            causal_lm,
            temperature=settings.temperature,
            chunk_mib=logprob_chunk_mib(device),
            ranks=self._sharing,
        )
        self.attention_cost = attention_cost(causal_lm)
        self.engine = initialize(module, policy, engine_settings)
        self._gate = NormGate(self.engine.optimizer) if policy.zero_stage > 0 else None
        self.state = SavedState(self.engine, policy, rank.world_size)
        self.memory = RankMemory(self.engine, self.device)
        self.weights = FullWeights(causal_lm, policy)

    def update(
        self,
        batches: Sequence[TrainBatch],
        bounds: Sequence[Bound] = (),
        *,
        kl_coef: float | None = None,
        keep_logprobs: bool = False,
        later_epochs: Sequence[Sequence[EpochUpdate]] = (),
    ) -> dict[str, float]:
        """Run one optimiser update per batch and epoch, on this rank's rows of each. Collective.

        The second and later updates are off-policy with respect to the first, so their ``old_logprobs`` come
        from the weights at the start of the step, or from the engine with `correction: bypass`. An update is
        skipped if its loss or gradient is not finite, or if its metrics pass one of ``bounds``.

        Args:
            kl_coef: weight of the KL term in these updates; None: the configured one.
            keep_logprobs: fill `token_logprobs`.
            later_epochs: updates of each epoch after the first; (): repeat the first epoch's.

        Returns:
            Metrics of the whole step over all ranks, see `step_metrics`. `health/skipped_updates` counts
            skipped updates, `health/refused_<key of the bound>` updates that passed a bound.
            `health/bad_weights` is 1 if weights are not finite afterwards.
        """
        if self._policy.router_replay and not self._objective.supervised:
            for batch in batches:
                check_routes(batch)
        prepare, algorithm = Preparation(self.logprobs, self.device, self._reports), self._objective.algorithm
        first = [
            prepare.prepare_step(b, algorithm, moves=i > 0 or self._epochs > 1) for i, b in enumerate(batches)
        ]
        # A generator, because each is a copy of its rows.
        later = (select_update(first, update_rows) for epoch in later_epochs for update_rows in epoch)
        plan = chain(first, later) if later_epochs else first * self._epochs
        self.token_logprobs = {}
        has_old = not algorithm.correction.bypasses
        norm_limit = min((b.value for b in bounds if b.metric == GRAD_NORM), default=math.inf)
        per_update, trained, refused = [], list[bool](), Counter[str]()
        for index, update in enumerate(plan):
            batch = prepare.prepare_update(
                update, algorithm, number=self._updates, unmoved=has_old and index == 0
            )
            values = self.accumulate(batch, kl_coef, keep_logprobs=keep_logprobs)
            values |= self._bonus.observe(values)
            if index > 0 and not has_old:  # it compares the engine with weights that have moved since
                values = {k: v for k, v in values.items() if not k.startswith("mismatch/")}
            too_far = passed(bounds, values)
            values |= self.step(limit=-math.inf if too_far else norm_limit)
            per_update.append(values)
            sizes = batch.denominators
            trained.append(sizes.tokens + sizes.demonstrated + sizes.taught > 0)
            refused.update(f"{REFUSED}{bound.key}" for bound in too_far or passed(bounds, values))
        metrics = step_metrics(per_update, trained)
        metrics |= {name: float(count) for name, count in refused.items()}
        return metrics | {BAD_WEIGHTS: float(not self._weights_are_finite())}

    def logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, float32 [B, T], of ``batch`` under the current weights; 0 outside
        the loss mask. Collective.
        """
        logprobs, entropies = (torch.zeros_like(batch.policy.rollout_logprobs) for _ in range(2))
        batch = batch.drop_candidates()
        with forward_only(self.engine):
            plan, outputs = self._forward(batch, with_entropy=True)
        for rows, (values, entropy, _) in zip(plan, outputs, strict=True):
            assert entropy is not None, "with_entropy returns entropies"
            if rows:
                logprobs[rows, : values.shape[1]] = values.cpu()
                entropies[rows, : values.shape[1]] = entropy.cpu()
        return logprobs, entropies

    def row_logprobs(
        self, batches: Sequence[TrainBatch], *, score_norms: bool = False
    ) -> dict[int, np.ndarray]:
        """Return log-probs of the rows of ``batches`` under the current weights, or with ``score_norms``
        their `selected_score_norms`, float32 [C], by row id. Collective.
        """
        by_row: dict[int, np.ndarray] = {}
        with forward_only(self.engine):
            for batch in (each.drop_candidates() for each in batches):
                plan, outputs = self._forward(batch, score_norms=score_norms)
                by_row |= values_by_row(batch, plan, [values for values, *_ in outputs])
        return by_row

    def _forward(self, batch: TrainBatch, **how: bool) -> tuple[list[list[int]], list[HeadOutputs]]:
        """Return the rows of each micro-batch, and the engine's outputs for them. Collective."""
        plan = self._micro.plan(batch)
        parts = (self._micro.part(batch, rows) for rows in plan)
        return plan, [self.engine(self._micro.layout(part, part.wanted), **how) for part in parts]

    def base_logprobs(self, groups: Sequence[SampledGroup], top_k: int = 0) -> list[list[TeacherLogprobs]]:
        """Return `group_logprobs` of the initial model. Collective."""
        with forward_only(self.engine), untrained(self.engine.module):
            return group_logprobs(self.engine, groups, self._micro, top_k=top_k, together=True)

    def accumulate(
        self, batch: TrainBatch, kl_coef: float | None = None, *, keep_logprobs: bool = False
    ) -> dict[str, float]:
        """Compute gradients of this rank's rows of ``batch``, reduced over ranks; return metrics of the whole
        batch. Collective.
        """
        plan = self._micro.plan(batch)
        stats: dict[str, Tensor] = {}
        values: list[Tensor] = []
        computed = 0
        for i, rows in enumerate(plan):
            part = self._micro.part(batch, rows)
            self.engine.set_gradient_accumulation_boundary(i == len(plan) - 1)
            layout = self._micro.layout(part, part.wanted, part.teacher)
            computed += layout.tokens.numel()
            logprobs, entropy, candidates = self.engine(layout, with_entropy=True)
            if keep_logprobs:
                values.append(logprobs.detach())
            loss, part_stats = batch_loss(
                logprobs, self._micro.move_to_device(part), self._objective, entropy=entropy,
                from_teacher=divergence_from_teacher(candidates, layout, self._objective.distillation),
                kl_coef=kl_coef, entropy_coef=self._bonus.weight,
            )  # fmt: skip
            # DeepSpeed averages gradients over ranks; the loss is already a share of the whole batch's, so
            # undo that. A non-finite loss gets a non-finite gradient: the one check of the reduced gradient
            # then stops all ranks.
            finite = torch.where(loss.detach().isfinite(), 1.0, torch.nan)
            self.engine.backward(loss * self.rank.world_size * finite)
            if not self._reports:
                part_stats = {name: torch.zeros_like(value) for name, value in part_stats.items()}
            stats = add_stats(stats, part_stats) if stats else part_stats
        self.token_logprobs = values_by_row(batch, plan, values) | self.token_logprobs
        stats["computed"] = stats["tokens"].new_tensor(self._reports * computed)
        total = reduce_over_ranks(stats)
        return finish_stats(total) | {COMPUTED_TOKENS: float(total["computed"])}

    def gradients(self) -> dict[str, Tensor]:
        """Return full float32 gradients of the trained parameters by name, between `accumulate` and `step`.
        Collective.
        """
        from deepspeed.utils import safe_get_full_grad  # optional: only ranks need it

        weights = self.weights.named_weights(adapters_only=self._policy.lora is not None)
        trained = ((name, p) for name, p in weights if p.requires_grad)
        return {name: safe_get_full_grad(p).detach().float().cpu().clone() for name, p in trained}

    def step(self, *, limit: float = math.inf) -> dict[str, float]:
        """Clip the gradients, move the weights and clear the gradients. Collective.

        If the gradient or the square of its norm is not finite in float32, or its norm is above ``limit``,
        all ranks leave weights, optimiser and schedule unchanged.
        """
        o = self._policy.optimizer
        rate = learning_rate(
            self._updates,
            lr=o.lr,
            schedule=o.schedule,
            warmup=o.warmup(self._total_updates),
            total=self._total_updates,
            min_ratio=o.min_lr_ratio,
        )
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        gate, limit = self._gate, min(limit, _LARGEST_NORM)
        norm, applied = self._gated_step(gate, limit) if gate else self._step_without_zero(limit)
        self._updates += applied
        finite_norm = norm if norm <= _LARGEST_NORM else math.nan
        return {GRAD_NORM: finite_norm, "policy/lr": rate, SKIPPED: float(not applied)}

    def _gated_step(self, gate: NormGate, limit: float) -> tuple[float, bool]:
        """Return the gradient's norm, and whether the weights moved."""
        gate.limit, gate.norm = limit, math.nan  # DeepSpeed skips an infinite gradient without a norm
        self.engine.step()
        return gate.norm, self.engine.was_step_applied()

    def _step_without_zero(self, limit: float) -> tuple[float, bool]:
        # Every rank holds the whole gradient. DeepSpeed does not report its norm, and would move the weights
        # for any norm.
        grads = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        applied = norm <= limit
        if applied:
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm, applied

    @torch.no_grad()
    def _weights_are_finite(self) -> bool:
        """Return whether all ranks' weights in memory are finite. Collective."""
        trained = [p for p in self.engine.module.parameters() if p.requires_grad]
        shards = [getattr(p, "ds_tensor", p).detach() for p in trained]  # under ZeRO-3 this rank's part
        # The 2-norm takes a tenth of the max norm's time on CPUs. Weights above 1e19 overflow it.
        norm = torch.nn.utils.get_total_norm([t for t in shards if t.numel()]).to(self.device)
        bad = norm.isfinite().logical_not().int()
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # bounded: the process group has a deadline
        return not bad

    @property
    def _reports(self) -> bool:
        """True if this rank's statistics count: ranks that share their rows all have the same."""
        return self._sharing is None or self._sharing.index == 0

    def save(self, directory: Path, *, blocking: bool = True) -> None:
        """Write the sharded state, see `SavedState.save`. Collective."""
        counters = {"updates": self._updates, "rng": torch.get_rng_state()} | self._bonus.state()
        self.state.save(directory, counters, blocking=blocking)

    def load(self, directory: Path) -> None:
        """Continue from what `save` wrote, see `SavedState.load`. Collective."""
        counters = self.state.load(directory)
        self._updates = counters["updates"]
        self._bonus.restore(counters)
        torch.set_rng_state(counters["rng"])

    def export(self, directory: Path, *, tokenizer_dir: str) -> None:
        """Write the model in Hugging Face format, see `FullWeights.export`. Collective."""
        trusted = self._trust_remote_code
        self.weights.export(directory, tokenizer_dir=tokenizer_dir, trust_remote_code=trusted)

    def close(self) -> None:
        dist.destroy_process_group()


def step_metrics(per_update: Sequence[dict[str, float]], trained: Sequence[bool]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it, the maximum if the name ends in ``_max``.

    An update has no metrics of a stream without a token (`loss.finish_stats`): {nll 1, entropy 2} and {nll 5}
    -> {nll 3, entropy 2}. Metrics that every update has, such as the gradient norm, are averaged over the
    updates that trained a token, unless none did. ``first_update/*`` is of the first update.

    Args:
        per_update: at least one.
        trained: whether each update had a token of any stream.
    """
    first = per_update[0]
    means = [
        values for values, had_tokens in zip(per_update, trained, strict=True) if had_tokens
    ] or per_update
    metrics = {}
    for name in dict.fromkeys(name for values in per_update for name in values):
        selected = per_update if name.endswith("_max") or name == SKIPPED else means
        if numbers := [values[name] for values in selected if name in values]:
            metrics[name] = _reduce(name, numbers)
    return metrics | {f"first_update/{k}": first[k] for k in _FIRST_UPDATE if k in first}


def _reduce(name: str, values: Sequence[float]) -> float:
    if name == SKIPPED:
        return sum(values)
    return max(values) if name.endswith("_max") else sum(values) / len(values)
