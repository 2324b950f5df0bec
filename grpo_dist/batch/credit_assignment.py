"""Credit assignment: from the rewards of a step to the advantage of every token, over all of its groups.

rewards [G] of each group     clipped, normalised                  reward_clip, reward_norm
                              (what is not finite: not scored)
  -> advantages [G]           the estimator                        advantage, std
  -> advantages [B, T]        spread over tokens, or step rewards  process
                              less the KL still to come            kl_coef
                              whitened over tokens, clipped        whiten, clip
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_dist.algorithms.advantages import ADVANTAGE_INPUTS, ADVANTAGES
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.lookup import named
from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.normalise import normalise_rewards, whiten
from grpo_dist.algorithms.process import process, sum_to_go
from grpo_dist.types import Group, TrainBatch

PROCESS = "process"  # the estimator that takes step rewards; its advantages belong to tokens from the start


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages. Names are those of the registries in `grpo_dist.algorithms`."""

    estimator: str = "grpo"
    std: str = "group"
    eps: float = 1e-6
    k: int = 4  # of pass_at_k
    weights: Mapping[str, float] = field(default_factory=dict)  # of each reward, for gdpo
    reward_clip: float | None = None  # rewards are clipped to +- this
    reward_norm: str = "none"
    reward_shift: bool = True
    reward_scale: bool = True
    moments: Moments | None = None  # of reward_norm running: of all rewards so far, these groups' included
    kl_coef: float = 0.0  # of the KL term in the reward; 0: no such term
    kl_estimator: str = "k1"
    whiten: bool = False
    clip: float | None = None  # advantages are clipped to +- this


def sample_advantages(groups: Sequence[Group], settings: AdvantageSettings) -> list[np.ndarray]:
    """Return advantages [G] for each group; zeros with the estimator `process`.

    float64 where whitening or a KL term still follows, which `token_advantages` ends in float32: whitening
    looks at differences, of which float32 keeps few digits where the mean is large. float32 otherwise.
    """
    sizes = [len(g.rewards) for g in groups]
    if settings.estimator == PROCESS:
        return [np.zeros(size, np.float32) for size in sizes]
    rewards = clipped_rewards(groups, settings.reward_clip)
    ids = _group_ids(groups)
    rewards = normalise_rewards(
        rewards, ids, over=settings.reward_norm, shift=settings.reward_shift, scale=settings.reward_scale,
        eps=settings.eps, moments=settings.moments,
    )  # fmt: skip
    estimator = named(ADVANTAGES, settings.estimator, "advantage")
    inputs = {name: _INPUTS[name](groups, settings) for name in ADVANTAGE_INPUTS.get(settings.estimator, ())}
    advantages = estimator(rewards, ids, **inputs)
    follows = settings.whiten or settings.kl_coef
    return [part.numpy() for part in (advantages if follows else advantages.float()).split(sizes)]


def clipped_rewards(groups: Sequence[Group], clip: float | None) -> Tensor:
    """Return the rewards of all groups end to end, float64, within +- ``clip``; NaN if not finite."""
    return _clipped(_finite(torch.from_numpy(np.concatenate([g.rewards for g in groups]))), clip)


def token_advantages(batch: TrainBatch, groups: Sequence[Group], settings: AdvantageSettings) -> TrainBatch:
    """Return ``batch``, made of ``groups`` with `sample_advantages`, with its final token advantages.

    The KL in the reward is that of the policy that sampled: token t loses ``kl_coef`` times the KL of all
    tokens from t to the end of its completion (OpenRLHF's and InstructGPT's reward, arXiv:2203.02155).
    """
    advantages = batch.advantages
    if settings.estimator == PROCESS:
        advantages = _process(batch, groups, settings)
    if settings.kl_coef:
        advantages = advantages - settings.kl_coef * _kl_to_go(batch, settings.kl_estimator)
    if settings.whiten:
        # A KL that is not finite must not become advantage 0: the loss is then NaN, and the update refused.
        broken = batch.loss_mask & ~torch.isfinite(advantages)
        advantages = torch.where(broken, torch.nan, whiten(advantages, batch.loss_mask))
    if settings.clip is not None:
        advantages = advantages.clamp(-settings.clip, settings.clip)
    return replace(batch, advantages=advantages.float())


def _lengths(groups: Sequence[Group], settings: AdvantageSettings) -> Int[Tensor, " B"]:
    return torch.tensor([len(r.completion_ids) for g in groups for r in g.rollouts])


def _baselines(groups: Sequence[Group], settings: AdvantageSettings) -> Float[Tensor, " B"]:
    """Return the reward of each prompt's greedy answer, once per sample."""
    greedy = [g.baseline_reward for g in groups for _ in g.rewards]
    assert None not in greedy, "the estimator needs a greedy sample of every prompt"
    return _clipped(_finite(torch.tensor(greedy)), settings.reward_clip)


def _parts(groups: Sequence[Group], settings: AdvantageSettings) -> Float[Tensor, "K B"]:
    """Return each reward before weighting, of the rewards whose weight is not 0."""
    parts = [np.concatenate([g.reward_parts[name] for g in groups]) for name in _weighted(settings)]
    return _finite(torch.from_numpy(np.stack(parts)))


def _weights(groups: Sequence[Group], settings: AdvantageSettings) -> Float[Tensor, " K"]:
    return torch.tensor(list(_weighted(settings).values()))


def _weighted(settings: AdvantageSettings) -> dict[str, float]:
    return {name: weight for name, weight in settings.weights.items() if weight}


# How each of `ADVANTAGE_INPUTS` is made.
_INPUTS: dict[str, Callable[[Sequence[Group], AdvantageSettings], Any]] = {
    "std": lambda groups, settings: settings.std,
    "eps": lambda groups, settings: settings.eps,
    "k": lambda groups, settings: settings.k,
    "lengths": _lengths,
    "baselines": _baselines,
    "parts": _parts,
    "weights": _weights,
}


def _clipped(rewards: Float[Tensor, " B"], clip: float | None) -> Float[Tensor, " B"]:
    return rewards if clip is None else rewards.clamp(-clip, clip)


def _finite(rewards: Tensor) -> Tensor:
    """Return float64, with NaN ("could not be scored") for infinities: a clip must not make them rewards."""
    return torch.where(torch.isfinite(rewards), rewards.double(), torch.nan)


def _group_ids(groups: Sequence[Group]) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g.rewards) for g in groups]))


def _process(batch: TrainBatch, groups: Sequence[Group], settings: AdvantageSettings) -> Tensor:
    rewards, rows, ends = [], [], []
    row = 0
    for group in groups:
        if group.step_rewards is None or group.step_ends is None:
            raise ValueError(
                f"algorithm.advantage = process, but {group.prompt.uid} has no step rewards; add a process "
                "reward model to rewards.models"
            )
        for values, last in zip(group.step_rewards, group.step_ends, strict=True):
            rewards.append(values)
            ends.append(last.astype(np.int64) + len(group.prompt.token_ids))
            rows.append(np.full(len(values), row))
            row += 1
    return process(
        torch.from_numpy(np.concatenate(rewards)),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(ends)),
        _group_ids(groups),
        batch.loss_mask,
        std=settings.std,
        eps=settings.eps,
    )


def _kl_to_go(batch: TrainBatch, estimator: str) -> Tensor:
    assert batch.ref_logprobs is not None, "a KL term in the reward needs reference log-probs"
    mask = batch.loss_mask
    kl = named(KL_ESTIMATORS, estimator, "KL estimator")(
        torch.where(mask, batch.rollout_logprobs, 0.0).double(),
        torch.where(mask, batch.ref_logprobs, 0.0).double(),
    )
    kl = torch.where(mask, kl, 0.0)
    return torch.where(mask, sum_to_go(kl), 0.0)
