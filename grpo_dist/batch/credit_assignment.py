"""Credit assignment: from the rewards of a step to the advantage of every token, over all of its groups.

rewards [G] of each group     clipped, normalised                  reward_clip, reward_norm
                              (what is not finite: not scored)
  -> advantages [G]           the estimator                        advantage
  -> advantages [B, T]        spread over tokens, or of steps      process, turn, otb
                              plus those of steps                  process.outcome_coef, process.coef
                              weighed                              reward_coef
                              less the KL still to come            kl_coef
                              whitened over tokens                 advantage.whiten, then the weight
                              plus those of a teacher              teacher_coef
                              clipped                              advantage_clip
                              weighed by length                    length_weights
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

# The estimators whose advantages belong to tokens from the start: of steps, of turns, of tokens.
PROCESS, TURN, OTB = "process", "turn", "otb"


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages: the configuration, and what a run and its step add to it.

    Attributes:
        algorithm: estimator, normalisation and clips, with the settings of each.
        weights: of each reward, for gdpo and user-supplied estimators.
        moments: of all rewards so far, these groups' included, for `reward_norm` running.
        kl_coef: weight of the KL term in the reward; 0: no such term.
        reward_coef: weight of the advantages of rewards; whitened: not with a KL term.
        teacher_coef: weight of a teacher's advantages; 0: it is no part of them.
        code_paths: where user-supplied code is.
        by_source: `algorithm` for the sources with parts of their own.
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
        """Return which of ``groups``, by index, share an estimator, with its settings: the groups of each
        source that has its own, and all others.
        """
        shared = self.algorithm.advantage
        apart = {
            name: algorithm for name, algorithm in self.by_source.items() if algorithm.advantage is not shared
        }
        members: dict[str | None, list[int]] = {}
        for index, group in enumerate(groups):
            source = group.prompt.source
            members.setdefault(source if source in apart else None, []).append(index)
        return [
            (self if source is None else replace(self, algorithm=apart[source]), indices)
            for source, indices in members.items()
        ]

    @property
    def own(self) -> UserCode:
        """User-supplied pieces of the algorithm."""
        return UserCode.from_pieces(self.code_paths, self.algorithm.user_components)

    @property
    def gamma(self) -> float:
        """Discount of the reward, and of the KL in it, for each later token."""
        estimator = self.algorithm.advantage
        return estimator.gamma if isinstance(estimator, ReinforceAdvantage) else 1.0

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return the settings called ``names`` that the estimator has."""
        return {name: value for name, value in self.algorithm.advantage.arguments.items() if name in names}


def sample_advantages(groups: Sequence[Group], settings: AdvantageSettings) -> list[np.ndarray]:
    """Return advantages [G] for each group, by the estimator of its source; zeros with the estimators
    `process`, `turn` and `otb`.

    float64 where whitening, or a term of the KL, of steps or of a teacher still follows, which
    `token_advantages` ends in float32: whitening looks at differences, of which float32 keeps few digits
    where the mean is large. float32 otherwise.
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
        advantages = user_advantages(name, settings.own, _user_inputs(rewards, ids, groups, settings))
    follows = algorithm.advantage.whiten or algorithm.process or settings.kl_coef or settings.teacher_coef
    return [part.numpy() for part in (advantages if follows else advantages.float()).split(sizes)]


def clipped_rewards(groups: Sequence[Group], clip: float | None) -> Tensor:
    """Return the rewards of all groups end to end, float64, within +- ``clip``; NaN if not finite."""
    return _clipped(_finite(torch.from_numpy(np.concatenate([g.rewards for g in groups]))), clip)


def _normalised(groups: Sequence[Group], settings: AdvantageSettings) -> Tensor:
    """Return the rewards of all groups end to end as an estimator takes them."""
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
    """Return ``batch``, made of ``groups`` with `sample_advantages`, with its final token advantages.
    ``score_norms``: of its tokens, for the estimator `otb`.

    The KL in the reward is that of the policy that sampled: token t loses ``kl_coef`` times the KL of all
    sampled tokens from t to the end of its sample (OpenRLHF's and InstructGPT's reward, arXiv:2203.02155).
    The KL to a teacher is that of token t alone: each token gains ``teacher_coef`` times log p of the teacher
    minus that of the policy that sampled (on-policy distillation, thinkingmachines.ai, October 2025). The
    batch is then without a teacher's stream.
    """
    parts = settings.by_estimator(groups)
    if len(parts) == 1:
        advantages = _token_advantages(batch, groups, parts[0][0], score_norms)
    else:
        advantages = torch.zeros(batch.tokens.shape, dtype=torch.float64)
        for of_part, indices in parts:
            rows = np.flatnonzero(np.isin(batch.group_ids.numpy(), indices))
            part = batch.select(rows.tolist())
            width = part.tokens.shape[1]
            norms = None if score_norms is None else score_norms[rows, :width]
            values = _token_advantages(part, [groups[i] for i in indices], of_part, norms)
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
    """Return the advantages of tokens, of groups that share an estimator."""
    algorithm, estimator = settings.algorithm, settings.algorithm.advantage
    assert not (estimator.whiten and settings.kl_coef) or settings.reward_coef == 1.0, "refused by the config"
    whole, advantages, is_trained = batch, batch.policy.advantages, batch.policy.mask
    if settings.teacher_coef:  # a sample without a reward has none of its advantages, whatever follows
        is_trained = is_trained & _scored_rows(groups)[:, None]
        batch = replace(batch, policy=replace(batch.policy, mask=is_trained))
    if estimator.name == PROCESS:
        advantages = _process(batch, groups, settings)
    if estimator.name == TURN:
        advantages = _turn_level(batch, groups, settings)
    if estimator.name == OTB:
        assert score_norms is not None, "the policy gives them"
        # Samples that are not trained stay in the baseline of their siblings, as in that of a group.
        inputs = (_normalised(groups, settings), _group_ids(groups), score_norms, sampled_tokens(groups))
        every = optimal_token_baseline(*inputs, sequence_ids=_samples_of_rows(groups))
        advantages = torch.where(is_trained, every, 0.0)
    if algorithm.process:
        # PRIME (Cui et al. 2025, arXiv:2502.01456), equation 6: each has a baseline of its own.
        steps = _process(batch, groups, settings)
        advantages = algorithm.process.outcome_coef * advantages + algorithm.process.coef * steps
    if settings.gamma < 1.0:
        advantages = advantages * _discounted(batch, settings.gamma, _samples_of_rows(groups))
    if not estimator.whiten and settings.reward_coef != 1.0:  # whitening would undo any weight but 0
        advantages = advantages * settings.reward_coef
    if settings.kl_coef:
        kl = _kl_to_go(batch, settings, _samples_of_rows(groups))
        if (weights := batch.policy.kl_weights) is not None:  # without one no overflow counts
            kl = torch.where(weights[:, None] > 0, weights[:, None] * kl, 0.0)
        advantages = advantages - settings.kl_coef * kl
    if estimator.whiten:
        # A KL that is not finite must not become advantage 0: the loss is then NaN, and the update refused.
        broken = is_trained & ~torch.isfinite(advantages)
        whitened = settings.reward_coef * whiten(advantages, is_trained)
        advantages = torch.where(broken, torch.nan, whitened)
    if settings.teacher_coef:
        advantages = advantages + settings.teacher_coef * _nearer_to_teacher(whole)
    if (bound := algorithm.advantage_clip) is not None:
        # An infinite KL must not become the bound either.
        clipped = advantages.clamp(-bound, bound)
        advantages = torch.where(torch.isfinite(advantages), clipped, torch.nan)
    return advantages


def _scored_rows(groups: Sequence[Group]) -> Tensor:
    """Return which rows belong to a sample with a reward, bool [B]."""
    counts = [len(r.rows) for g in groups for r in g.rollouts]
    return torch.from_numpy(np.repeat(np.isfinite(np.concatenate([g.rewards for g in groups])), counts))


def _nearer_to_teacher(batch: TrainBatch) -> Tensor:
    """Return -(log p of the policy that sampled - log p of the teacher), float64 [B, T]; 0 where none is."""
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
    """Return each reward before weighting, of the rewards whose weight is not 0. One that a group's source
    does not have is NaN in it: it adds nothing, and is in no statistic.
    """
    return _finite(torch.from_numpy(np.stack([_part(groups, name) for name in _weighted(settings)])))


def _part(groups: Sequence[Group], name: str) -> np.ndarray:
    """Return a reward of all samples, float32 [B]; NaN where the group's source does not have it."""
    return np.concatenate([g.reward_parts.get(name, np.full_like(g.rewards, np.nan)) for g in groups])


def _weights(groups: Sequence[Group], settings: AdvantageSettings) -> Float[Tensor, " K"]:
    return torch.tensor(list(_weighted(settings).values()))


def _weighted(settings: AdvantageSettings) -> dict[str, float]:
    return {name: weight for name, weight in settings.weights.items() if weight}


# The `ADVANTAGE_INPUTS` that are made of groups; the others are settings of the estimator.
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
    """Return float64, with NaN ("could not be scored") for infinities: a clip must not make them rewards."""
    return torch.where(torch.isfinite(rewards), rewards.double(), torch.nan)


def _group_ids(groups: Sequence[Group]) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(len(groups)), [len(g.rewards) for g in groups]))


@dataclass(frozen=True, slots=True)
class _TurnSpan:
    """The tokens [begin, end) of row ``row`` of the batch from behind the turn before to the turn's end."""

    turn: Turn
    sample: int
    row: int
    begin: int
    end: int


def _turn_spans(groups: Sequence[Group]) -> Iterator[_TurnSpan]:
    """Yield the turns of all samples in order. A turn of an episode without a reward has reward NaN."""
    first = 0
    samples = ((g, g.rollouts[i], np.isfinite(g.rewards[i])) for g in groups for i in range(len(g.rollouts)))
    for sample, (group, rollout, is_scored) in enumerate(samples):
        starts = [len(context_ids(group.prompt, row)) for row in rollout.rows]
        ends = list(starts)
        for turn in rollout.turns:
            begin, ends[turn.row] = ends[turn.row], starts[turn.row] + turn.end
            own = turn if is_scored else replace(turn, reward=np.nan)
            yield _TurnSpan(own, sample, first + turn.row, begin, ends[turn.row])
        first += len(starts)


def _samples_of_rows(groups: Sequence[Group]) -> Int[Tensor, " B"] | None:
    """Return the sample of each row; None where each row is one."""
    counts = [len(r.rows) for g in groups for r in g.rollouts]
    if max(counts, default=1) == 1:
        return None
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _wants_steps(settings: AdvantageSettings) -> str:
    added = settings.algorithm.process
    return f"algorithm.process.coef = {added.coef:g}" if added else "algorithm.advantage = process"


def _process(batch: TrainBatch, groups: Sequence[Group], settings: AdvantageSettings) -> Tensor:
    """Take the steps of a process reward model, or the turns that have a reward."""
    spans = [span for span in _turn_spans(groups) if span.turn.reward is not None]
    rewards: list[float] = [span.turn.reward or 0.0 for span in spans]
    rows, ends, row = [span.row for span in spans], [span.end - 1 for span in spans], 0
    for group in groups:
        first = row + np.cumsum([0, *(len(r.rows) for r in group.rollouts)])  # row of each sample
        scored = zip(group.step_rewards or (), group.step_ends or (), strict=True)
        for sample, (values, last) in enumerate(scored):
            # A sample without a reward is not trained, so its steps are in no statistic of its siblings.
            rewards += values.tolist() if np.isfinite(group.rewards[sample]) else [math.nan] * len(values)
            ends += (last.astype(np.int64) + len(group.prompt.token_ids)).tolist()
            rows += [int(first[sample])] * len(values)
        has_none = group.step_rewards is None and not any(r.turns for r in group.rollouts)
        if has_none and np.isfinite(group.rewards).any():  # one that was not scored at all trains nothing
            raise ValueError(
                f"{_wants_steps(settings)}, but {group.prompt.uid} has no step rewards; add a process reward "
                "model to rewards.models, or use an environment that rewards turns"
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
    """Return ``gamma`` to the number of tokens that were sampled behind each token of its sample, [B, T].

    The reward belongs to the last token, and a return counts later ones less (REINFORCE++, arXiv:2501.03262;
    the ``gamma`` of verl and OpenRLHF).
    """
    later = sum_to_go(batch.policy.mask.double(), samples) - 1
    return torch.where(batch.policy.mask, gamma**later, 0.0)


def _kl_to_go(batch: TrainBatch, settings: AdvantageSettings, samples: Int[Tensor, " B"] | None) -> Tensor:
    stream, mask = batch.policy, batch.policy.mask
    assert stream.ref_logprobs is not None, "a KL term in the reward needs reference log-probs"
    sampled = torch.where(mask, stream.rollout_logprobs, 0.0).double()
    ref = torch.where(mask, stream.ref_logprobs, 0.0).double()
    kl = kl_estimate(settings.algorithm.kl.estimator.name, settings.own, sampled, ref)
    kl = torch.where(mask, kl, 0.0)
    if settings.gamma < 1.0:
        return torch.where(mask, discounted_to_go(kl, mask, settings.gamma, samples), 0.0)
    return torch.where(mask, sum_to_go(kl, samples), 0.0)
