"""Turns the scored groups of a step into the batches of its optimiser updates.

An estimator may read the score norms of a step's tokens under the policy, before the update:

staging | batch k ready -> | rows, without advantages | -> advantages, padding, rows dealt to ranks
policy                     | one forward pass        |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.moments import Moments
from grpo_dist.batch.credit_assignment import (
    AdvantageSettings,
    clipped_rewards,
    sample_advantages,
    token_advantages,
)
from grpo_dist.batch.rows import (
    count_denominators,
    make_batch,
    rows_of_updates,
    shuffle_updates,
    split_updates,
    with_demonstrations,
    with_rows_of,
)
from grpo_dist.batch.signal import SignalRule, trains_all_rows
from grpo_dist.config import (
    AlgorithmConfig,
    BatchConfig,
    Config,
    DemonstrationStreamConfig,
    DistillationConfig,
)
from grpo_dist.data.demonstrations import Demonstration
from grpo_dist.data.order import step_indices
from grpo_dist.loop.groups import ScoredGroup
from grpo_dist.runtime.seeds import derived_seed
from grpo_dist.types import EpochUpdate, Group, TeacherLogprobs, TrainBatch
from grpo_dist.workers import PolicyHandle


def reward_moments(algorithm: AlgorithmConfig, scored: Sequence[ScoredGroup], before: Moments) -> Moments:
    """Add the rewards of a step to ``before``, the moments of all earlier steps.

    Returns ``before`` itself unless `algorithm.reward_norm` is running.
    """
    if algorithm.reward_norm.name != "running":
        return before
    return before.updated(clipped_rewards([s.group for s in scored], algorithm.reward_clip).numpy())


def make_updates(
    config: Config,
    scored: Sequence[ScoredGroup],
    step: int,
    *,
    kl_coef: float,
    moments: Moments | None = None,
    advantages: Sequence[np.ndarray] | None = None,
    demonstrations: Sequence[Demonstration] = (),
    score_norms: Tensor | None = None,
) -> tuple[list[TrainBatch], list[list[EpochUpdate]]]:
    """Make one TrainBatch per optimiser update, and the updates of each further epoch, none if they equal the
    first epoch's. Advantages are computed over the whole step before it is split.

    Args:
        kl_coef: weight of the KL term in the advantages, with `algorithm.kl.in_reward`; it changes
            during a run when `algorithm.kl.target` is set. The weight in the loss goes to the update itself.
        moments: see `reward_moments`; None: of this step only.
        advantages: float32 [G] of each group, used as they are, also of samples without a reward; None: by
            `algorithm.advantage`.
        demonstrations: of this step, see `step_demonstrations`.
        score_norms: score norms of the step's tokens, for an estimator that reads the policy.
    """
    groups = [s.group for s in scored]
    if config.rewards.shuffle:
        groups = shuffle_rewards(groups, derived_seed(config.seed, f"shuffle rewards of step {step}"))
    has_signal = _find_signals(config, groups, user_advantages=advantages is not None)
    # Unscored groups are in no statistic of the step. With the caller's advantages all samples count.
    groups = [g if trains else _with_rewards(g, np.nan) for g, trains in zip(groups, has_signal, strict=True)]
    if advantages is not None:
        groups = [_with_rewards(group, 0.0) for group in groups]
    moments = reward_moments(config.algorithm, scored, Moments()) if moments is None else moments
    settings = AdvantageSettings(
        config.algorithm,
        config.rewards.weights,
        moments,
        kl_coef if config.algorithm.kl.in_reward else 0.0,
        reward_coef=config.distillation.reward_coef,
        teacher_coef=_coef_in_advantages(config.distillation),
        code_paths=config.code_paths,
        by_source=config.source_algorithms,
    )
    batch = make_batch(
        groups,
        sample_advantages(groups, settings) if advantages is None else advantages,
        ref_logprobs=[row for s in scored for row in s.ref_logprobs] if config.has_kl_term else None,
        max_new_tokens=longest_allowed(groups) or config.sampling.longest,
        mask_truncated=config.algorithm.mask_truncated,
        mask_outcomes=config.environments.mask_outcomes,
        teachers=_average_teachers(scored, config.distillation, user_advantages=advantages is not None),
        trains_taught=settings.teacher_coef > 0 and advantages is None,
    )
    batch = _with_sources(batch, groups, config)
    if advantages is None:
        batch = token_advantages(batch, groups, settings, score_norms)
    if not all(has_signal):
        batch = _mask_groups(batch, has_signal)
    first, later = _deal_rows(
        batch, config.batch, len(groups), seed=derived_seed(config.seed, f"epochs of step {step}")
    )
    later_rows = [update.row_ids for epoch in later for update in epoch]
    kept = _kept_rows(config, batch, [*first, *later_rows])
    updates = split_updates(batch, num_groups=len(groups), num_updates=len(first))
    updates = [_select(update, kept[rows]) for update, rows in zip(updates, first, strict=True)]
    updates = _with_demonstrations(updates, demonstrations, first_row=len(batch))
    return updates, [
        [with_rows_of(u, at, first_row=len(batch)) for u, at in zip(epoch, updates, strict=True)]
        for epoch in later
    ]


def _with_sources(batch: TrainBatch, groups: Sequence[Group], config: Config) -> TrainBatch:
    """Return ``batch`` with loss ids and KL weights, where sources have their own algorithm."""
    numbers = {source: number for number, source in enumerate(config.source_algorithms, start=1)}
    ids = torch.tensor([numbers.get(group.prompt.source, 0) for group in groups])[batch.group_ids]
    shared, others = config.algorithm, config.source_algorithms.values()
    has_losses = any(algorithm.loss is not shared.loss for algorithm in others)
    has_coefs = any(algorithm.kl.coef != shared.kl.coef for algorithm in others)
    coefs = torch.tensor([algorithm.kl.coef for algorithm in (shared, *others)], dtype=torch.float64)
    stream = replace(
        batch.policy,
        loss_ids=ids if has_losses else None,
        kl_weights=coefs[ids] / shared.kl.coef if has_coefs else None,
    )
    return replace(batch, policy=stream)


def _deal_rows(
    batch: TrainBatch, settings: BatchConfig, num_groups: int, *, seed: int
) -> tuple[list[np.ndarray], list[list[EpochUpdate]]]:
    """Return the rows of each update of the first epoch, and the updates of later ones."""
    count = settings.updates_per_step
    epochs = range(1, settings.epochs_per_batch if settings.shuffle_epochs else 1)
    seeds = [derived_seed(seed, f"updates of epoch {epoch}") for epoch in epochs]
    later = [shuffle_updates(batch, num_groups=num_groups, num_updates=count, seed=s) for s in seeds]
    ids = batch.group_ids.numpy()
    return rows_of_updates(ids, num_groups=num_groups, num_updates=count), later


def step_demonstrations(
    settings: DemonstrationStreamConfig | None, demonstrations: Sequence[Demonstration], seed: int, step: int
) -> list[Demonstration]:
    """Return the demonstrations of ``step``; [] without `demonstrations`."""
    if settings is None:
        return []
    return [demonstrations[i] for i in step_indices(len(demonstrations), settings.rows_per_step, seed, step)]


def _with_demonstrations(
    updates: Sequence[TrainBatch], demonstrations: Sequence[Demonstration], *, first_row: int
) -> list[TrainBatch]:
    """Give each update an equal share of the demonstrations, in order."""
    if not demonstrations:
        return list(updates)
    each = len(demonstrations) // len(updates)
    assert each * len(updates) == len(demonstrations), (len(demonstrations), len(updates))
    groups = [demonstration.to_group() for demonstration in demonstrations]
    return [
        with_demonstrations(update, groups[i * each : (i + 1) * each], first_row=first_row + i * each)
        for i, update in enumerate(updates)
    ]


def _coef_in_advantages(distillation: DistillationConfig) -> float:
    in_advantages = distillation.teachers and distillation.kl_as == "advantage"
    return distillation.coef if in_advantages else 0.0


def _average_teachers(
    scored: Sequence[ScoredGroup], distillation: DistillationConfig, *, user_advantages: bool
) -> list[TeacherLogprobs | None] | None:
    """Return for each row the teacher's log-probs, their mean over several teachers, and None without one;
    None if no teacher's log-probs are used. ``user_advantages``: the caller's, which get no KL to a teacher.
    """
    if not distillation.teachers or (user_advantages and distillation.kl_as == "advantage"):
        return None
    by_row: list[TeacherLogprobs | None] = []
    for s in scored:
        if s.teacher_logprobs:
            by_row += map(_mean_of_teachers, zip(*s.teacher_logprobs.values(), strict=True))
        else:
            by_row += [None] * sum(len(rollout.rows) for rollout in s.group.rollouts)
    return by_row


def _mean_of_teachers(row: tuple[TeacherLogprobs, ...]) -> TeacherLogprobs:
    if len(row) == 1:
        return row[0]
    assert all(teacher.top is None for teacher in row), "a source with top-k tokens has one teacher"
    mean = np.mean(np.stack([teacher.sampled for teacher in row]), axis=0)
    return TeacherLogprobs(np.asarray(mean, np.float32))


def learning_rows(batch: TrainBatch) -> np.ndarray:
    """Return which samples have an advantage other than 0 or a teacher in the loss, bool [B]."""
    # numpy's `any` stops at the first hit in a row, and copies nothing
    learns = np.asarray(batch.policy.advantages.numpy().any(axis=1))
    if batch.teacher is not None:
        learns |= batch.teacher.mask.numpy().any(axis=1)
    return learns


def longest_allowed(groups: Sequence[Group]) -> int | None:
    """Return the length limit that the samples of a step record; None: they record none.

    It is the constant of seq-mean-token-sum-norm. So a step after a rise of `sampling.max_new_tokens` has the
    loss of a run that starts with the new length.
    """
    return max((r.max_new_tokens or 0 for g in groups for r in g.rollouts), default=0) or None


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """Permute all rewards of a step among its samples: the control experiment of `rewards.shuffle`.

    The distribution stays and the meaning goes, so any improvement left does not come from the reward. The
    permutation is a function of ``seed``.
    """
    sizes = [len(g.rewards) for g in groups]
    shuffled = np.random.default_rng(seed).permutation(np.concatenate([g.rewards for g in groups]))
    parts = np.split(shuffled, np.cumsum(sizes)[:-1])
    return [replace(group, rewards=part) for group, part in zip(groups, parts, strict=True)]


def _find_signals(config: Config, groups: Sequence[Group], *, user_advantages: bool) -> list[bool]:
    """Return for each group whether it is trained on under `algorithm.zero_variance_filter`.
    ``user_advantages``: the caller's, with which all groups are.
    """
    if user_advantages or not config.algorithm.zero_variance_filter:
        return [True] * len(groups)
    rule = SignalRule(config.algorithm, weights=config.rewards.weights, by_source=config.source_algorithms)
    return [rule(group) for group in groups]


def _with_rewards(group: Group, reward: float) -> Group:
    """Return ``group`` with ``reward`` for each sample."""
    return replace(group, rewards=np.full_like(group.rewards, reward))


def _mask_groups(batch: TrainBatch, has_signal: Sequence[bool]) -> TrainBatch:
    """Return ``batch`` with empty masks for the rows of zero-variance groups, which then count in no
    denominator: ScaleRL's zero-variance filter, arXiv:2510.13786, section 3.2.
    """
    stream, ref = batch.policy, batch.policy.ref_logprobs
    mask = stream.mask & torch.tensor(has_signal)[batch.group_ids][:, None]
    stream = replace(
        stream,
        mask=mask,
        advantages=torch.where(mask, stream.advantages, 0.0),
        rollout_logprobs=torch.where(mask, stream.rollout_logprobs, 0.0),
        ref_logprobs=None if ref is None else torch.where(mask, ref, 0.0),
    )
    batch = replace(batch, policy=stream)
    return replace(batch, denominators=count_denominators(batch))


def _kept_rows(config: Config, batch: TrainBatch, updates: Sequence[np.ndarray]) -> np.ndarray:
    """Return which rows of ``batch`` stay, bool [B]. Rows that add nothing to the gradient are dropped: every
    advantage is 0, no token is taught, and the loss has no other term.

    The denominators stay, so the gradient stays; only forward passes are saved. ``updates``: the rows of each
    update; an update that would lose all its rows keeps them, so that it still has metrics.
    """
    algorithms = (config.algorithm, *config.source_algorithms.values())
    if any(trains_all_rows(algorithm, has_kl_term=config.has_kl_term) for algorithm in algorithms):
        return np.ones(len(batch), bool)
    learning = learning_rows(batch)
    kept = learning.copy()
    for rows in updates:
        if not learning[rows].any():
            kept[rows] = True
    return kept


def _select(batch: TrainBatch, kept: np.ndarray) -> TrainBatch:
    return batch if kept.all() else batch.select(np.flatnonzero(kept).tolist())


async def score_norms_of(policy: PolicyHandle, groups: Sequence[Group]) -> Float[Tensor, "B T"]:
    """Return the score norms of all sampled tokens of ``groups`` under the weights of ``policy``, for the
    rows of `make_batch`; 0 for other tokens. They do not depend on rewards, which `rewards.shuffle`
    permutes: a sample that could not be scored has them, too.
    """
    groups = [_with_rewards(group, 0.0) for group in groups]
    no_advantages = [group.rewards for group in groups]
    batch = await asyncio.to_thread(make_batch, groups, no_advantages, ref_logprobs=None, max_new_tokens=1)
    norms_by_row = await policy.score_norms(batch)
    norms = torch.zeros(batch.tokens.shape)
    for row, values in norms_by_row.items():
        norms[row, batch.policy.mask[row]] = torch.tensor(values)  # a copy: Ray gives arrays read-only
    return norms
