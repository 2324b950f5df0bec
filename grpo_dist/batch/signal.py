"""Whether a group has a signal: rewards that its estimator turns into a non-zero advantage.

    estimator        what must differ within the group
    gdpo             any reward whose weight is not 0
    process          the rewards of steps, or of turns
    turn             the returns of a turn, over the episodes that have it
    remax            the reward of a sample, from the greedy answer's reward
    pass_at_k        the best of k samples, between the tries
    grpo_passk       the best sample, from the second best
    any other        the total reward
    process          with any estimator: the rewards of steps, or of turns

Total rewards and the greedy answer's reward are clipped first, as for the estimator: under a clip of 1 the
rewards [2, 3] are equal.

REINFORCE++ and FlashREINFORCE compare with the whole batch, so they also learn from zero-variance groups;
dynamic sampling replaces these groups nevertheless (DAPO, arXiv:2503.14476, equation 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from grpo_dist.config import AlgorithmConfig
from grpo_dist.config.algorithm import (
    AdvantageConfig,
    DROLoss,
    KimiLoss,
    PassAtKAdvantage,
    TurnAdvantage,
)
from grpo_dist.plugins.user_code import AGGREGATION, LOSS
from grpo_dist.types import Group, correctness, has_signal

if TYPE_CHECKING:
    from torch import Tensor

ACCURACY = "accuracy"  # a metric of every run: right or wrong


@dataclass(frozen=True, slots=True)
class SignalRule:
    """Which groups have a signal.

    Attributes:
        algorithm: estimator, added step rewards, and the clip of total rewards.
        metric: reward whose values must differ, or `ACCURACY`, without clipping; None: what the estimator
            reads.
        weights: weight of each reward, for gdpo.
        mean_low: exclusive lower bound on the mean of the metric or total reward; None: no bound.
        mean_high: exclusive upper bound on it; None: no bound.
        by_source: ``algorithm`` of the sources that override parts of it.
    """

    algorithm: AlgorithmConfig
    metric: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    mean_low: float | None = None
    mean_high: float | None = None
    by_source: Mapping[str, AlgorithmConfig] = field(default_factory=dict)

    def __call__(self, group: Group) -> bool:
        """Return whether ``group`` has a signal. Unscored samples are ignored."""
        if not self._is_in_range(group):
            return False
        if self.metric is not None:
            return has_signal(_drop_unscored(group, self._metric(group)))
        if self.algorithm.process and has_signal(_step_rewards(group)):
            return True
        return self._by_estimator(group, self.by_source.get(group.prompt.source, self.algorithm).advantage)

    def _is_in_range(self, group: Group) -> bool:
        if self.mean_low is None and self.mean_high is None:
            return True
        values = _drop_unscored(group, self._metric(group))
        finite = values[np.isfinite(values)]
        if not len(finite):
            return False
        # Compare in float32, as rewards are: the mean of equal rewards of 0.2 is not above 0.2.
        mean = np.float32(finite.mean(dtype=np.float64))
        above = self.mean_low is None or mean > np.float32(self.mean_low)
        return bool(above and (self.mean_high is None or mean < np.float32(self.mean_high)))

    def _by_estimator(self, group: Group, advantage: AdvantageConfig) -> bool:
        # Imported here, as below: these import torch, which a plan does not need, since it compares a metric.
        from grpo_dist.algorithms.advantages import ADVANTAGE_INPUTS
        from grpo_dist.batch.credit_assignment import PROCESS

        if advantage.traits.reads_each_reward:
            parts = [part for name, part in group.reward_parts.items() if self.weights.get(name)]
            return any(has_signal(_drop_unscored(group, part)) for part in parts)
        if advantage.name == PROCESS:
            return has_signal(_step_rewards(group))
        if isinstance(advantage, TurnAdvantage):
            return _turns_differ(group, advantage.discount)
        if advantage.traits.reads_greedy_answer:
            return self._differs_from_greedy(group)
        inputs = ADVANTAGE_INPUTS.get(advantage.name)
        if inputs and set(inputs) <= {"std", "eps", "k"}:
            return self._has_advantages(group, advantage)
        return has_signal(self._total_rewards(group).numpy())

    def _differs_from_greedy(self, group: Group) -> bool:
        from grpo_dist.batch.credit_assignment import clipped_baselines

        rewards, greedy = self._total_rewards(group), clipped_baselines([group], self.algorithm.reward_clip)
        return bool((rewards[rewards.isfinite()] != greedy[rewards.isfinite()]).any())

    def _has_advantages(self, group: Group, advantage: AdvantageConfig) -> bool:
        import torch

        from grpo_dist.algorithms.advantages import ADVANTAGES

        rewards = self._total_rewards(group)
        arguments = {"k": advantage.k} if isinstance(advantage, PassAtKAdvantage) else {}
        ids = torch.zeros(len(rewards), dtype=torch.long)
        return bool(ADVANTAGES[advantage.name](rewards, ids, **arguments).any())

    def _metric(self, group: Group) -> np.ndarray:
        """Return each sample's metric [G]; the total reward without a metric or if the source lacks it."""
        if self.metric == ACCURACY and ACCURACY not in group.reward_parts:
            return correctness(group)
        if self.metric is not None and self.metric in group.reward_parts:
            return group.reward_parts[self.metric]
        return self._total_rewards(group).numpy()

    def _total_rewards(self, group: Group) -> Tensor:
        """Return the clipped total reward of each sample [G]."""
        from grpo_dist.batch.credit_assignment import clipped_rewards

        return clipped_rewards([group], self.algorithm.reward_clip)


def trains_all_rows(algorithm: AlgorithmConfig, *, has_kl_term: bool) -> bool:
    """Return whether rows with advantage 0 are trained like others: `algorithm.skip_idle_rows` is off, or the
    loss has another term for them, or it selects or weights tokens by a statistic over all tokens. A
    user-supplied loss or aggregation may do either.
    """
    if any(component.kind in (LOSS, AGGREGATION) for component in algorithm.user_components):
        return True
    has_penalty = isinstance(algorithm.loss, DROLoss | KimiLoss) or (
        has_kl_term and not algorithm.kl.in_reward
    )
    ranks_tokens = bool(algorithm.loss.selection) or algorithm.top_entropy_share < 1.0
    reads_all = algorithm.has_entropy_bonus or has_penalty or ranks_tokens or algorithm.normalizes_weights
    return reads_all or not algorithm.skip_idle_rows


def _drop_unscored(group: Group, values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(group.rewards) & np.isfinite(values), values, np.nan)


def _step_rewards(group: Group) -> np.ndarray:
    """Return the rewards of all steps and turns of the scored samples, end to end."""
    scored = np.isfinite(group.rewards)
    steps = [each for each, is_scored in zip(group.step_rewards or (), scored, strict=False) if is_scored]
    samples = zip(group.rollouts, scored, strict=True)
    turns = [turn.reward for sample, is_scored in samples if is_scored for turn in sample.turns]
    turn_rewards = np.array([reward for reward in turns if reward is not None], dtype=np.float64)
    rewards = np.concatenate([turn_rewards, *steps]).astype(np.float64)
    return np.where(np.isfinite(rewards), rewards, np.nan)


def _turns_differ(group: Group, discount: float) -> bool:
    import torch

    from grpo_dist.algorithms.token_advantages import turn_level

    turns = [(sample, turn.reward or 0.0) for sample, r in enumerate(group.rollouts) for turn in r.turns]
    rewards = np.where(np.isfinite(group.rewards), group.rewards, np.nan).astype(np.float64)
    advantages = turn_level(
        torch.tensor([reward for _, reward in turns], dtype=torch.float64),
        torch.tensor([sample for sample, _ in turns], dtype=torch.long),
        torch.from_numpy(rewards),
        torch.zeros(len(rewards), dtype=torch.long),
        discount=discount,
        std="none",
    )
    return bool(advantages.any())
