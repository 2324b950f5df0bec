"""Whether a group has a signal: something that its estimator turns into an advantage other than 0.

    estimator        what must differ within the group; of one with the input `parts` or `baselines` what
                     gdpo or remax looks at
    gdpo             any reward whose weight is not 0
    process          the rewards of steps, or of turns
    turn             the returns of a turn, over the episodes that have it
    remax            the reward of a sample, from that of the greedy answer
    pass_at_k        the best of k samples, between the tries
    grpo_passk       the best sample, from the second best
    any other        the total reward
    process          with any estimator: the rewards of steps, or of turns

Total rewards and that of the greedy answer are clipped first, as for the estimator: under a clip of 1 the
rewards [2, 3] are equal.

REINFORCE++ compares with the whole batch, so it also learns from a group of equal rewards; what dynamic
sampling replaces is such a group nevertheless (DAPO, arXiv:2503.14476, equation 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from grpo_dist.algorithms.advantages import ADVANTAGES
from grpo_dist.algorithms.estimators import estimator_of
from grpo_dist.algorithms.token_advantages import turn_level
from grpo_dist.batch.credit_assignment import PROCESS, TURN, clipped_baselines, clipped_rewards
from grpo_dist.types import Group, correctness, has_signal

ACCURACY = "accuracy"  # a metric of every run: right or wrong


@dataclass(frozen=True, slots=True)
class SignalRule:
    """Which groups have a signal.

    Attributes:
        estimator: name in the registry of advantages.
        metric: reward whose values must differ, or `ACCURACY`; None: what the estimator looks at.
        weights: of each reward, for gdpo.
        discount: of the estimator turn.
        k: of the estimator pass_at_k.
        steps: advantages of steps are added, `algorithm.process.coef`.
        reward_clip: total rewards are clipped to +- this before the estimator; None: they are not. A
            ``metric`` is compared as it is.
    """

    estimator: str = "grpo"
    metric: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    discount: float = 1.0
    k: int = 4
    steps: bool = False
    reward_clip: float | None = None

    def __call__(self, group: Group) -> bool:
        """Return whether ``group`` has a signal. A sample without a total reward has no part in it."""
        if self.metric is not None:
            return has_signal(_of_scored(group, self._metric(group)))
        return (self.steps and has_signal(_step_rewards(group))) or self._by_estimator(group)

    def _by_estimator(self, group: Group) -> bool:
        inputs = estimator_of(self.estimator).inputs
        if "parts" in inputs:
            parts = [part for name, part in group.reward_parts.items() if self.weights.get(name)]
            return any(has_signal(_of_scored(group, part)) for part in parts)
        if self.estimator == PROCESS:
            return has_signal(_step_rewards(group))
        if self.estimator == TURN:
            return _turns_differ(group, self.discount)
        if "baselines" in inputs:
            return self._differs_from_greedy(group)
        rewards = clipped_rewards([group], self.reward_clip)
        if inputs and set(inputs) <= {"std", "eps", "k"}:
            return self._has_advantages(rewards)
        return has_signal(rewards.numpy())

    def _differs_from_greedy(self, group: Group) -> bool:
        rewards, greedy = (own([group], self.reward_clip) for own in (clipped_rewards, clipped_baselines))
        return bool((rewards[rewards.isfinite()] != greedy[rewards.isfinite()]).any())

    def _has_advantages(self, rewards: Tensor) -> bool:
        own = {"k": self.k} if "k" in estimator_of(self.estimator).inputs else {}
        ids = torch.zeros(len(rewards), dtype=torch.long)
        return bool(ADVANTAGES[self.estimator](rewards, ids, **own).any())

    def _metric(self, group: Group) -> np.ndarray:
        """Return the metric of each sample [G]: the total reward where the group's source has no such
        reward.
        """
        assert self.metric is not None
        if self.metric == ACCURACY and ACCURACY not in group.reward_parts:
            return correctness(group)
        if self.metric in group.reward_parts:
            return group.reward_parts[self.metric]
        return clipped_rewards([group], self.reward_clip).numpy()


def _of_scored(group: Group, values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(group.rewards) & np.isfinite(values), values, np.nan)


def _step_rewards(group: Group) -> np.ndarray:
    """Return the rewards of all steps and turns of the scored samples, end to end."""
    scored = np.isfinite(group.rewards)
    steps = [own for own, is_scored in zip(group.step_rewards or (), scored, strict=False) if is_scored]
    samples = zip(group.rollouts, scored, strict=True)
    turns = [turn.reward for sample, is_scored in samples if is_scored for turn in sample.turns]
    given = np.array([reward for reward in turns if reward is not None], dtype=np.float64)
    found = np.concatenate([given, *steps]).astype(np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def _turns_differ(group: Group, discount: float) -> bool:
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
