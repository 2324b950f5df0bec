"""Credit assignment: from the rewards of a step's groups to the advantage of every token.

rewards [G] of each group     clipped, normalised                  reward_clip, reward_norm
                              (not finite: unscored)
  -> advantages [G]           the estimator                        advantage
  -> advantages [B, T]        one per token, or by step or turn    process, turn, otb
                              plus step advantages                 process.outcome_coef, process.coef
                              weighted                             reward_coef
                              minus the KL to go                   kl_coef
                              whitened over tokens                 advantage.whiten, then the weight
                              plus teacher advantages              teacher_coef
                              clipped                              advantage_clip
                              weighted by length                   length_weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from grpo_dist.algorithms.advantages import ADVANTAGE_INPUTS, ADVANTAGES
from grpo_dist.algorithms.moments import Moments
from grpo_dist.algorithms.normalise import length_weights, normalise_rewards, whiten
from grpo_dist.algorithms.token_advantages import (
    discounted_to_go,
    optimal_token_baseline,
    process,
    sum_to_go,
    turn_level,
)
from grpo_dist.batch.rows import context_ids, sampled_tokens
from grpo_dist.config import AlgorithmConfig
from grpo_dist.config.algorithm import ReinforceAdvantage
from grpo_dist.plugins.algorithm import UserCode, kl_estimate, user_advantages
from grpo_dist.plugins.inputs import AdvantageInputs
from grpo_dist.types import Group, TrainBatch, Turn

# Estimators that assign advantages to tokens directly: by step, turn and token.
PROCESS, TURN, OTB = "process", "turn", "otb"


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages: the configuration, plus values of the run and the step.

    Attributes:
        algorithm: estimator, normalisation and clips, with the settings of each.
        weights: weight of each reward, for gdpo and user-supplied estimators.
        moments: moments of all rewards so far, including these groups, for `reward_norm` running.
        kl_coef: weight of the KL term in the reward; 0: no KL term.
        reward_coef: weight of the reward advantages; must be 1 with both whitening and a KL term.
        teacher_coef: weight of the teacher's advantages; 0: none are added.
        code_paths: directories of user-supplied code.
        by_source: `algorithm` of the sources that override parts of it.
    """

    algorithm: AlgorithmConfig
    weights: Mapping[str, float] = field(default_factory=dict)
    moments: Moments | None = None
    kl_coef: float = 0.0
    reward_coef: float = 1.0
    teacher_coef: float = 0.0
    code_paths: Sequence[str] = ()
    by_source: Mapping[str, AlgorithmConfig] = field(default_factory=dict)

    def by_estimator(self, groups: Sequence[Group]) -> list[tuple[AdvantageSettings, list[int]]]:
        """Return settings and group indices for each estimator. Sources that set no estimator share one."""
        shared = self.algorithm.advantage
        overrides = {
            name: algorithm for name, algorithm in self.by_source.items() if algorithm.advantage is not shared
        }
        members: dict[str | None, list[int]] = {}
        for index, group in enumerate(groups):
            source = group.prompt.source
            members.setdefault(source if source in overrides else None, []).append(index)
        return [
            (self if source is None else replace(self, algorithm=overrides[source]), indices)
            for source, indices in members.items()
        ]

    @property
    def user_code(self) -> UserCode:
        """User-supplied components of the algorithm."""
        return UserCode.from_pieces(self.code_paths, self.algorithm.user_components)

    @property
    def gamma(self) -> float:
        """Discount per token of the reward and of the KL in it."""
        estimator = self.algorithm.advantage
        return estimator.gamma if isinstance(estimator, ReinforceAdvantage) else 1.0

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return the estimator's settings among ``names``."""
        return {name: value for name, value in self.algorithm.advantage.arguments.items() if name in names}


def sample_advantages(groups: Sequence[Group], settings: AdvantageSettings) -> list[np.ndarray]:
    """Return advantages [G] for each group, by its source's estimator; zeros for `process`, `turn` and `otb`.

    float64 if whitening or a KL, step or teacher term follows; `token_advantages` then converts to float32.
    Whitening takes differences, of which float32 keeps few digits when the mean is large. Otherwise float32.
    """
    advantages: dict[int, np.ndarray] = {}
    for part, indices in settings.by_estimator(groups):
        advantages |= zip(indices, _sample_advantages([groups[i] for i in indices], part), strict=True)
    return [advantages[i] for i in range(len(groups))]


def _sample_advantages(groups: Sequence[Group], settings: AdvantageSettings) -> list[np.ndarray]:
    sizes = [len(g.rewards) for g in groups]
    algorithm, name = settings.algorithm, settings.algorithm.advantage.name
    if name in (PROCESS, TURN, OTB):
        return [np.zeros(size, np.float32) for size in sizes]
    rewards, ids = _normalised(groups, settings), _group_ids(groups)
    if name in ADVANTAGES:
        arguments = settings.arguments(*ADVANTAGE_INPUTS[name])
        inputs = {key: _INPUTS[key](groups, settings) for key in ADVANTAGE_INPUTS[name] if key in _INPUTS}
        advantages = ADVANTAGES[name](rewards, ids, **arguments, **inputs)
    else:
        advantages = user_advantages(name, settings.user_code, _user_inputs(rewards, ids, groups, settings))
    follows = algorithm.advantage.whiten or algorithm.process or settings.kl_coef or settings.teacher_coef
    return [part.numpy() for part in (advantages if follows else advantages.float()).split(sizes)]


def clipped_rewards(groups: Sequence[Group], clip: float | None) -> Tensor:
    """Return the rewards of all groups end to end, float64, within +- ``clip``; NaN if not finite."""
    return _clipped(_finite(torch.from_numpy(np.concatenate([g.rewards for g in groups]))), clip)


def _normalised(groups: Sequence[Group], settings: AdvantageSettings) -> Tensor:
    """Return the clipped and normalised rewards of all groups end to end."""
    algorithm = settings.algorithm
    return normalise_rewards(
        clipped_rewards(groups, algorithm.reward_clip), _group_ids(groups), over=algorithm.reward_norm.name,
        **algorithm.reward_norm.arguments, moments=settings.moments,
    )  # fmt: skip


def token_advantages(
    batch: TrainBatch,
    groups: Sequence[Group],
    settings: AdvantageSettings,
    score_norms: Float[Tensor, "B T"] | None = None,
) -> TrainBatch:
    """Return ``batch``, made from ``groups`` with `sample_advantages`, with its final token advantages.
    ``score_norms``: per token, for the estimator `otb`.

    The KL in the reward uses the sampling policy: token t loses ``kl_coef`` times the KL of all sampled
    tokens from t to the end of its sample (OpenRLHF's and InstructGPT's reward, arXiv:2203.02155). The
    teacher term uses token t only: the token gains ``teacher_coef`` times log p of the teacher minus log p of
    the sampling policy (on-policy distillation, thinkingmachines.ai, October 2025). The returned batch then
    has no teacher stream.
    """
    parts = settings.by_estimator(groups)
    if len(parts) == 1:
        advantages = _token_advantages(batch, groups, parts[0][0], score_norms)
    else:
        advantages = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        for part_settings, indices in parts:
            rows = np.flatnonzero(np.isin(batch.group_ids.numpy(), indices))
            part = batch.select(rows.tolist())
            width = part.tokens.shape[1]
            norms = None if score_norms is None else score_norms[rows, :width]
            values = _token_advantages(part, [groups[i] for i in indices], part_settings, norms)
            advantages[rows, :width] = values.double()
    if settings.teacher_coef:
        batch = replace(batch, teacher=None, denominators=replace(batch.denominators, taught=0.0))
    if settings.algorithm.length_weights:
        advantages = advantages * length_weights(batch.policy.mask, _samples_of_rows(groups))
    return replace(batch, policy=replace(batch.policy, advantages=advantages.float()))


def _token_advantages(
    batch: TrainBatch,
    groups: Sequence[Group],
    settings: AdvantageSettings,
    score_norms: Float[Tensor, "B T"] | None,
) -> Float[Tensor, "B T"]:
    """Return the token advantages of ``groups``, which share an estimator."""
    algorithm, estimator = settings.algorithm, settings.algorithm.advantage
    assert not (estimator.whiten and settings.kl_coef) or settings.reward_coef == 1.0, "refused by the config"
    whole, advantages, is_trained = batch, batch.policy.advantages, batch.policy.mask
    if settings.teacher_coef:  # unscored samples get teacher advantages only
        is_trained = is_trained & _scored_rows(groups)[:, None]
        batch = replace(batch, policy=replace(batch.policy, mask=is_trained))
    if estimator.name == PROCESS:
        advantages = _process(batch, groups, settings)
    if estimator.name == TURN:
        advantages = _turn_level(batch, groups, settings)
    if estimator.name == OTB:
        assert score_norms is not None, "estimator otb needs score norms"
        # Untrained samples still count in their group's baseline, as with the group estimators.
        inputs = (_normalised(groups, settings), _group_ids(groups), score_norms, sampled_tokens(groups))
        otb_advantages = optimal_token_baseline(*inputs, sequence_ids=_samples_of_rows(groups))
        advantages = torch.where(is_trained, otb_advantages, 0.0)
    if algorithm.process:
        # PRIME (Cui et al. 2025, arXiv:2502.01456), equation 6: separate baselines for outcome and steps.
        steps = _process(batch, groups, settings)
        advantages = algorithm.process.outcome_coef * advantages + algorithm.process.coef * steps
    if settings.gamma < 1.0:
        advantages = advantages * _discounted(batch, settings.gamma, _samples_of_rows(groups))
    if not estimator.whiten and settings.reward_coef != 1.0:  # whitening would undo any weight but 0
        advantages = advantages * settings.reward_coef
    if settings.kl_coef:
        kl = _kl_to_go(batch, settings, _samples_of_rows(groups))
        if (weights := batch.policy.kl_weights) is not None:  # weight 0 ignores an overflowing KL
            kl = torch.where(weights[:, None] > 0, weights[:, None] * kl, 0.0)
        advantages = advantages - settings.kl_coef * kl
    if estimator.whiten:
        # Keep NaN for a non-finite KL, so that the update is refused: whitening would make it 0.
        broken = is_trained & ~torch.isfinite(advantages)
        whitened = settings.reward_coef * whiten(advantages, is_trained)
        advantages = torch.where(broken, torch.nan, whitened)
    if settings.teacher_coef:
        advantages = advantages + settings.teacher_coef * _teacher_advantages(whole)
    if (bound := algorithm.advantage_clip) is not None:
        # Clamping must not turn an infinite KL into the bound either.
        clipped = advantages.clamp(-bound, bound)
        advantages = torch.where(torch.isfinite(advantages), clipped, torch.nan)
    return advantages


def _scored_rows(groups: Sequence[Group]) -> Tensor:
    """Return which rows belong to a sample with a reward, bool [B]."""
    counts = [len(r.rows) for g in groups for r in g.rollouts]
    return torch.from_numpy(np.repeat(np.isfinite(np.concatenate([g.rewards for g in groups])), counts))


def _teacher_advantages(batch: TrainBatch) -> Tensor:
    """Return log p of the teacher minus log p of the sampling policy, float64 [B, T]; 0 where untaught."""
    assert batch.teacher is not None, "a teacher gives log-probs"
    gap = batch.teacher.logprobs.double() - batch.policy.rollout_logprobs.double()
    return torch.where(batch.teacher.mask, gap, 0.0)


def _lengths(groups: Sequence[Group], settings: AdvantageSettings) -> Int[Tensor, " B"]:
    return torch.tensor([r.num_sampled for g in groups for r in g.rollouts])


def clipped_baselines(groups: Sequence[Group], clip: float | None) -> Float[Tensor, " B"]:
    """Return the reward of each prompt's greedy answer, once per sample, as `clipped_rewards` does."""
    greedy = [g.baseline_reward for g in groups for _ in g.rewards]
    assert None not in greedy, "the estimator needs a greedy sample of every prompt"
    return _clipped(_finite(torch.tensor(greedy)), clip)


def _parts(groups: Sequence[Group], settings: AdvantageSettings) -> Float[Tensor, "K B"]:
    """Return each reward with a non-zero weight, before weighting. It is NaN where the group's source lacks
    the reward: it adds nothing there and enters no statistic.
    """
    return _finite(torch.from_numpy(np.stack([_part(groups, name) for name in _weighted(settings)])))


def _part(groups: Sequence[Group], name: str) -> np.ndarray:
    """Return the reward ``name`` of all samples, float32 [B]; NaN where the group's source lacks it."""
    return np.concatenate([g.reward_parts.get(name, np.full_like(g.rewards, np.nan)) for g in groups])


def _weights(groups: Sequence[Group], settings: AdvantageSettings) -> Float[Tensor, " K"]:
    return torch.tensor(list(_weighted(settings).values()))


def _weighted(settings: AdvantageSettings) -> dict[str, float]:
    return {name: weight for name, weight in settings.weights.items() if weight}


# `ADVANTAGE_INPUTS` computed from groups; the others are settings of the estimator.
_INPUTS: dict[str, Callable[[Sequence[Group], AdvantageSettings], Any]] = {
    "lengths": _lengths,
    "baselines": lambda groups, settings: clipped_baselines(groups, settings.algorithm.reward_clip),
    "parts": _parts,
    "weights": _weights,
}


def _user_inputs(
    rewards: Tensor, ids: Tensor, groups: Sequence[Group], settings: AdvantageSettings
) -> AdvantageInputs:
    truncated = [r.finish_reason == "length" for g in groups for r in g.rollouts]
    names = dict.fromkeys(name for group in groups for name in group.reward_parts)
    parts = {name: _finite(torch.from_numpy(_part(groups, name))) for name in names}
    lengths = _lengths(groups, settings)
    return AdvantageInputs(rewards, ids, lengths, torch.tensor(truncated), parts, settings.weights)


def _clipped(rewards: Float[Tensor, " B"], clip: float | None) -> Float[Tensor, " B"]:
    return rewards if clip is None else rewards.clamp(-clip, clip)


def _finite(rewards: Tensor) -> Tensor:
    """Return float64 with NaN (unscored) for infinities, which a clip would turn into rewards."""
    return torch.where(torch.isfinite(rewards), rewards.double(), torch.nan)


def _group_ids(groups: Sequence[Group]) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g.rewards) for g in groups]))


@dataclass(frozen=True, slots=True)
class _TurnSpan:
    """Tokens [begin, end) of batch row ``row``: from the end of the previous turn to the end of this one."""

    turn: Turn
    sample: int
    row: int
    begin: int
    end: int


def _turn_spans(groups: Sequence[Group]) -> Iterator[_TurnSpan]:
    """Yield the turn spans of all samples in order. Turns of unscored episodes have reward NaN."""
    first = 0
    samples = ((g, g.rollouts[i], np.isfinite(g.rewards[i])) for g in groups for i in range(len(g.rollouts)))
    for sample, (group, rollout, is_scored) in enumerate(samples):
        starts = [len(context_ids(group.prompt, row)) for row in rollout.rows]
        ends = list(starts)
        for turn in rollout.turns:
            begin, ends[turn.row] = ends[turn.row], starts[turn.row] + turn.end
            scored_turn = turn if is_scored else replace(turn, reward=np.nan)
            yield _TurnSpan(scored_turn, sample, first + turn.row, begin, ends[turn.row])
        first += len(starts)


def _samples_of_rows(groups: Sequence[Group]) -> Int[Tensor, " B"] | None:
    """Return the sample index of each row; None if every sample has one row."""
    counts = [len(r.rows) for g in groups for r in g.rollouts]
    if max(counts, default=1) == 1:
        return None
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _step_setting(settings: AdvantageSettings) -> str:
    added = settings.algorithm.process
    return f"algorithm.process.coef = {added.coef:g}" if added else "algorithm.advantage = process"


def _process(batch: TrainBatch, groups: Sequence[Group], settings: AdvantageSettings) -> Tensor:
    """Return token advantages from the steps of a process reward model, or from turns with a reward."""
    spans = [span for span in _turn_spans(groups) if span.turn.reward is not None]
    rewards: list[float] = [span.turn.reward or 0.0 for span in spans]
    rows, ends, row = [span.row for span in spans], [span.end - 1 for span in spans], 0
    for group in groups:
        first = row + np.cumsum([0, *(len(r.rows) for r in group.rollouts)])  # first row of each sample
        scored = zip(group.step_rewards or (), group.step_ends or (), strict=True)
        for sample, (values, last) in enumerate(scored):
            # Unscored samples are not trained: their steps stay out of the group's statistics.
            rewards += values.tolist() if np.isfinite(group.rewards[sample]) else [math.nan] * len(values)
            ends += (last.astype(np.int64) + len(group.prompt.token_ids)).tolist()
            rows += [int(first[sample])] * len(values)
        lacks_steps = group.step_rewards is None and not any(r.turns for r in group.rollouts)
        if lacks_steps and np.isfinite(group.rewards).any():  # an unscored group trains nothing
            raise ValueError(
                f"{_step_setting(settings)}, but {group.prompt.uid} has no step rewards; add a process "
                "reward model to rewards.models, or use an environment that rewards turns"
            )
        row = int(first[-1])
    return process(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(rows, dtype=torch.long),
        torch.tensor(ends, dtype=torch.long),
        batch.group_ids,
        batch.policy.mask,
        sequence_ids=_samples_of_rows(groups),
        **settings.arguments("std", "eps"),
    )


def _turn_level(batch: TrainBatch, groups: Sequence[Group], settings: AdvantageSettings) -> Tensor:
    spans = list(_turn_spans(groups))
    advantages = turn_level(
        torch.tensor([span.turn.reward or 0.0 for span in spans], dtype=torch.float64),
        torch.tensor([span.sample for span in spans], dtype=torch.long),
        _finite(torch.from_numpy(np.concatenate([g.rewards for g in groups]))),
        _group_ids(groups),
        **settings.arguments("discount", "std", "eps"),
    )
    out = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for span, advantage in zip(spans, advantages.tolist(), strict=True):
        out[span.row, span.begin : span.end] = advantage
    return torch.where(batch.policy.mask, out, 0.0)


def _discounted(batch: TrainBatch, gamma: float, samples: Int[Tensor, " B"] | None) -> Tensor:
    """Return ``gamma`` to the power of the number of later sampled tokens in the sample, [B, T].

    The reward belongs to the last token, and earlier tokens discount it (REINFORCE++, arXiv:2501.03262; the
    ``gamma`` of verl and OpenRLHF).
    """
    later = sum_to_go(batch.policy.mask.double(), samples) - 1
    return torch.where(batch.policy.mask, gamma**later, 0.0)


def _kl_to_go(batch: TrainBatch, settings: AdvantageSettings, samples: Int[Tensor, " B"] | None) -> Tensor:
    stream, mask = batch.policy, batch.policy.mask
    assert stream.ref_logprobs is not None, "a KL term in the reward needs reference log-probs"
    sampled = torch.where(mask, stream.rollout_logprobs, 0.0).double()
    ref = torch.where(mask, stream.ref_logprobs, 0.0).double()
    kl = kl_estimate(settings.algorithm.kl.estimator.name, settings.user_code, sampled, ref)
    kl = torch.where(mask, kl, 0.0)
    if settings.gamma < 1.0:
        return torch.where(mask, discounted_to_go(kl, mask, settings.gamma, samples), 0.0)
    return torch.where(mask, sum_to_go(kl, samples), 0.0)
