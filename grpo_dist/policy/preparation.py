"""What a rank computes for a batch before its weights move: old log-probs, token selection over an update's
tokens on all ranks, and the weight of the entropy bonus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_dist.algorithms.offpolicy import correction, mean_weight_sums
from grpo_dist.algorithms.ratios import LOG_LIMIT, clipped_surrogate
from grpo_dist.algorithms.selection import lowest, random_keys, token_covariances, up_to
from grpo_dist.config import AdaptiveEntropyConfig, AlgorithmConfig
from grpo_dist.config.algorithm import ClipCovLoss, Entropy, KLCovLoss, WeightedCorrection
from grpo_dist.policy.ranks import find_top_threshold, gather_values
from grpo_dist.types import PolicyStream, TokenChoice, TrainBatch

_ROW = 1 << 20  # more than the tokens of any row: the id of a token is row * this + column
_BONUS = "entropy_bonus"  # key in a checkpoint's counters


@dataclass(frozen=True, slots=True)
class Preparation:
    """``logprobs``: returns log-probs and entropies [B, T] of a batch under the current weights, collective.
    ``reports``: False on a rank whose rows another rank reports.
    """

    logprobs: Callable[[TrainBatch], tuple[Tensor, Tensor]]
    device: torch.device
    reports: bool

    def prepare_step(self, batch: TrainBatch, algorithm: AlgorithmConfig, *, moves: bool) -> TrainBatch:
        """Return ``batch`` with the old log-probs and entropies, which it needs from before any weight moves.
        ``moves``: weights move before the batch is trained on. Collective.
        """
        bypassed = algorithm.correction.bypasses
        old, entropies = batch.policy.rollout_logprobs if bypassed else None, None
        by_entropy = algorithm.top_entropy_share < 1.0
        if by_entropy or algorithm.normalizes_weights or (moves and not bypassed):
            logprobs, entropy = self.logprobs(batch)
            old, entropies = old if bypassed else logprobs, entropy if by_entropy else None
        return replace(batch, policy=replace(batch.policy, old_logprobs=old, old_entropies=entropies))

    def prepare_update(
        self, batch: TrainBatch, algorithm: AlgorithmConfig, *, number: int, unmoved: bool = False
    ) -> TrainBatch:
        """Return ``batch`` with its `TokenChoice`, under the current weights. Collective.

        Args:
            number: of the update in the run, for random selection.
            unmoved: no weight has moved since `prepare_step`, so that every ratio is exactly 1.
        """
        kept, mean_weight, selected = None, 1.0, None
        stream = batch.policy
        if stream.old_entropies is not None:
            entropies = stream.old_entropies[self._reported(stream.mask)]
            threshold = find_top_threshold(entropies, algorithm.top_entropy_share, self.device)
            kept = stream.mask & (stream.old_entropies >= threshold)
        if isinstance(algorithm.correction, WeightedCorrection) and algorithm.correction.normalize:
            assert stream.old_logprobs is not None
            mean_weight = self._mean_weight(stream, stream.old_logprobs, algorithm.correction)
        old = None if unmoved else stream.old_logprobs
        if isinstance(algorithm.loss, ClipCovLoss | KLCovLoss):
            logprobs, _ = self.logprobs(batch)
            selected = self._selected(batch, old, logprobs, algorithm.loss, number)
        return replace(
            batch,
            policy=replace(stream, old_logprobs=old, old_entropies=None),
            choice=TokenChoice(kept, selected, mean_weight),
        )

    def _reported(self, mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        return mask if self.reports else torch.zeros_like(mask)

    def _mean_weight(self, stream: PolicyStream, old: Float[Tensor, "B T"], how: WeightedCorrection) -> float:
        """Return the mean correction weight of the update, after its bounds; 1 if all are 0."""
        weights, _ = correction(
            old, stream.rollout_logprobs, stream.mask,
            kind=how.kind, level=how.level, low=how.low, high=how.high,
        )  # fmt: skip
        total, count = self._sum(*mean_weight_sums(weights, self._reported(stream.mask), level=how.level))
        return total / count if total else 1.0

    def _selected(
        self,
        batch: TrainBatch,
        old: Float[Tensor, "B T"] | None,
        logprobs: Float[Tensor, "B T"],
        loss: ClipCovLoss | KLCovLoss,
        number: int,
    ) -> Bool[Tensor, "B T"]:
        mask, reported = batch.policy.mask, self._reported(batch.policy.mask)
        advantages = torch.where(mask, batch.policy.advantages, 0.0)
        num_tokens = batch.denominators.tokens
        totals = self._sum(
            float(logprobs[reported].double().sum()), float(advantages[reported].double().sum())
        )
        mean_logprob, mean_advantage = (total / max(num_tokens, 1.0) for total in totals)
        products = token_covariances(
            logprobs, advantages, mask, mean_logprob=mean_logprob, mean_advantage=mean_advantage
        )
        ids = batch.row_ids[:, None] * _ROW + torch.arange(mask.shape[1])
        count = max(int(loss.cov_share * num_tokens), 1)
        if isinstance(loss, KLCovLoss):
            return mask & self._lowest(-products, ids, reported, mask, count)
        clipped = _is_clipped(batch.policy.advantages, old, logprobs, loss)
        within = mask & (products > loss.cov_low) & (products < loss.cov_high) & ~clipped
        return within & self._lowest(random_keys(ids, number), ids, reported & within, within, count)

    def _lowest(
        self,
        values: Float[Tensor, "B T"],
        ids: Int[Tensor, "B T"],
        reported: Bool[Tensor, "B T"],
        among: Bool[Tensor, "B T"],
        count: int,
    ) -> Bool[Tensor, "B T"]:
        """Return which of this rank's tokens ``among`` have the ``count`` lowest values of all ranks.
        ``reported``: the subset of them that this rank reports. Collective.
        """
        all_values, all_ids = (gather_values(t[reported], self.device) for t in (values, ids))
        return among & up_to(values, ids, lowest(all_values.cpu(), all_ids.cpu(), count))

    def _sum(self, *rank_values: float) -> list[float]:
        """Return the sums over all ranks. Collective."""
        sums = torch.tensor(rank_values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)  # bounded: the process group has a deadline
        totals: list[float] = sums.tolist()
        return totals


def _is_clipped(
    advantages: Float[Tensor, "B T"],
    old: Float[Tensor, "B T"] | None,
    logprobs: Float[Tensor, "B T"],
    loss: ClipCovLoss,
) -> Bool[Tensor, "B T"]:
    """Return which tokens lose their gradient by clip_cov's bounds. ``old`` None: ratios are 1."""
    if old is None:
        return torch.zeros_like(logprobs, dtype=torch.bool)
    ratio = (logprobs - old).clamp(max=LOG_LIMIT).exp()
    _, falls, rises = clipped_surrogate(ratio, advantages, clip_low=loss.clip_low, clip_high=loss.clip_high)
    return falls | rises


class EntropyBonus:
    """Steers the weight of an adaptive bonus: adaptive entropy control, Skywork-OR1 (He et al. 2025,
    arXiv:2505.22312), section 3.3. The same on every rank, because its metric covers all ranks. Checkpoints
    have its `state`.

        target 0.2, delta 0.005     entropy 0.15   0.15    0.25    0.18
        coefficient, from 0.01      0.01   0.015   0.02    0.015   0.02
        applied in the update       0      0.015   0.02    0       0.02
    """

    def __init__(self, config: Entropy) -> None:
        self._config = config
        self._coef, self._entropy = config.coef, math.inf

    @property
    def weight(self) -> float:
        """Weight in the next update: 0 for an adaptive bonus while the entropy is above its target."""
        is_off = isinstance(self._config, AdaptiveEntropyConfig) and self._entropy > self._config.target
        return 0.0 if is_off else self._coef

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt to the entropy in the ``metrics`` of an update; return the weight that it used as a metric.
        An update without a token of the policy loss has no entropy and changes nothing.
        """
        config = self._config
        if not isinstance(config, AdaptiveEntropyConfig):
            return {}
        applied = self.weight
        entropy = metrics.get("policy/entropy", math.nan)
        if not math.isnan(entropy):
            moved = self._coef + (config.delta if entropy <= config.target else -config.delta)
            self._coef = min(max(moved, config.low), config.high)
        self._entropy = entropy if math.isfinite(entropy) else self._entropy
        return {"policy/entropy_coef": applied}

    def state(self) -> dict[str, Any]:
        is_steered = isinstance(self._config, AdaptiveEntropyConfig)
        return {_BONUS: (self._coef, self._entropy)} if is_steered else {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Continue from `state`. A checkpoint of a constant bonus has none; the initial weight stays."""
        if isinstance(self._config, AdaptiveEntropyConfig) and _BONUS in counters:
            self._coef, self._entropy = counters[_BONUS]
