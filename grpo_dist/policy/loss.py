"""The loss of some rows of an update, and its statistics.

    loss = aggregate(correction weight * policy loss) + kl_coef * aggregate(kl)
           - entropy_coef * aggregate(entropy)
           + teacher_coef * mean(divergence from the teacher)
           + demonstration_coef * mean(-log p of demonstrations)

The first line and the entropy are the policy loss, over the tokens of `PolicyStream.mask`; the other terms
are means over the tokens of their streams. All terms are divided by the denominators of the whole update, so
losses, gradients and statistics of any split of the rows add up. The correction weight applies only to the
policy loss: on the KL term it would distort the penalty.

A sequence with a trained token whose engine log-prob is NaN has policy loss 0 under every correction, none
included, and with ratios to the engine's log-probs. `rows.make_batch` gives such samples an empty mask, so
the loss of a run never sees one; `rollout/nan_logprobs` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_dist.algorithms.aggregation import aggregate
from grpo_dist.algorithms.kl import DIVERGENCES, KL_ESTIMATORS
from grpo_dist.algorithms.offpolicy import RejectionRule, accepted, correction, off_policy_sequence_mask
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.algorithms.ratios import LOG_LIMIT, LossAndStats, Stats, TokenMask, TokenValues
from grpo_dist.config import AlgorithmConfig, DistillationConfig
from grpo_dist.config.algorithm import GMPOLoss, UserAggregation, UserLoss, WeightedCorrection
from grpo_dist.plugins.algorithm import UserCode, kl_estimate, user_aggregation, user_policy_loss
from grpo_dist.plugins.inputs import AggregationInputs, PolicyLossInputs
from grpo_dist.policy.packing import Layout
from grpo_dist.types import PolicyStream, TrainBatch


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update minimises.

    Attributes:
        distillation: settings of a teacher that is not part of the advantages.
        demonstration_coef: weight of the cross-entropy of demonstrations.
        code_paths: search paths of user-supplied functions besides installed packages.
        supervised: minimise the mean of -log p over the trained tokens instead of all other terms.
        of_sources: `algorithm` of sources that override parts of it, in the order of `PolicyStream.loss_ids`.
    """

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    demonstration_coef: float = 0.0
    code_paths: Sequence[str] = ()
    supervised: bool = False
    of_sources: Sequence[AlgorithmConfig] = ()

    @property
    def user_code(self) -> UserCode:
        return UserCode.from_pieces(self.code_paths, self.algorithm.user_components)


def batch_loss(
    logprobs: TokenValues,
    batch: TrainBatch,
    objective: Objective,
    *,
    entropy: TokenValues | None = None,
    from_teacher: TokenValues | None = None,
    kl_coef: float | None = None,
    entropy_coef: float | None = None,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the rows' share of the whole update's loss, and its statistics, for `add_stats` and
    `finish_stats`.

    Args:
        logprobs: nats, at the sampling temperature, with gradient.
        batch: without old log-probs, the importance ratio is to ``logprobs`` themselves, hence exactly 1
            with the right gradient. Reference log-probs are needed when kl_coef > 0.
        entropy: nats; for the statistics, and with gradient for the bonus.
        from_teacher: `divergence_from_teacher`, nats; None: estimated from ``logprobs``.
        kl_coef: weight of the KL term in this update; None: the configured one. Ignored by an objective
            without a KL term.
        entropy_coef: weight of the entropy bonus in this update; None: the configured one.
    """
    if objective.supervised:
        mask = batch.policy.mask
        loss = cross_entropy(logprobs, mask, batch.denominators.tokens)
        stats: Stats = {"tokens": mask.sum()}
        if entropy is not None:
            stats["entropy"] = torch.where(mask, entropy, 0.0).sum()
    else:
        weight = objective.algorithm.entropy.coef if entropy_coef is None else entropy_coef
        loss, stats = _policy_objective(logprobs, batch, objective, entropy, kl_coef, weight)
        for term, term_stats in _further_streams(logprobs, from_teacher, batch, objective):
            loss, stats = loss + term, stats | term_stats
    stats["loss_total"] = loss
    return loss, {name: value.detach().double() for name, value in stats.items()}


def _policy_objective(
    logprobs: TokenValues,
    batch: TrainBatch,
    objective: Objective,
    entropy: TokenValues | None,
    kl_coef: float | None,
    entropy_coef: float,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the policy loss with its KL and entropy terms, and their statistics."""
    algorithm, stream, mask = objective.algorithm, batch.policy, batch.policy.mask
    old = logprobs.detach() if stream.old_logprobs is None else stream.old_logprobs
    has_logprobs = ~(mask & stream.rollout_logprobs.isnan()).any(dim=1, keepdim=True)
    # With ratios to the engine's log-probs, the old log-probs of these rows are NaN too.
    old = torch.where(has_logprobs, old, logprobs.detach())
    weights = has_logprobs.to(logprobs.dtype).expand_as(logprobs)
    if batch.choice.kept is not None:
        weights = weights * batch.choice.kept
    policy, stats = _policy_term(logprobs, old, weights, batch, objective)
    loss = policy
    if not algorithm.kl.loss_coef or kl_coef is None:
        kl_coef = algorithm.kl.loss_coef
    assert stream.ref_logprobs is not None or not kl_coef, "kl_coef > 0 needs reference log-probs"
    if stream.ref_logprobs is not None:
        kl_loss, kl_stats = _kl_term(logprobs, stream.ref_logprobs, has_logprobs, batch, objective)
        loss = loss + kl_coef * kl_loss if kl_coef else loss
        stats |= kl_stats | {"loss_kl": kl_coef * kl_loss}
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0.0)
        stats["entropy"] = entropy.sum()
    if algorithm.has_entropy_bonus:
        assert entropy is not None, "an entropy bonus needs entropies"
        bonus = entropy_coef * _aggregate(entropy, batch, objective)
        loss = loss - bonus
        stats["loss_entropy"] = -bonus
    # The trainer's log-probs before the step, if known. With ratios to the engine's log-probs they are not
    # known, and `Trainer.update` only reads the first update of a step, before which no weight has moved.
    unmoved = logprobs.detach() if algorithm.correction.bypasses else old
    return loss, stats | {"loss_policy": policy, "tokens": mask.sum(), **_mismatch(unmoved, stream)}


def _policy_term(
    logprobs: TokenValues,
    old: TokenValues,
    weights: TokenValues,
    batch: TrainBatch,
    objective: Objective,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the aggregated policy loss, weighted and corrected per token, and its statistics."""
    weight_stats: Stats = {}
    settings = objective.algorithm.correction
    engine, mask, choice = batch.policy.rollout_logprobs, batch.policy.mask, batch.choice
    if isinstance(settings, WeightedCorrection):
        importance, weight_stats = correction(
            old, engine, mask, kind=settings.kind, level=settings.level,
            low=settings.low, high=settings.high, veto=settings.veto,
        )  # fmt: skip
        weights = weights * importance / choice.mean_weight
    weights, kept_stats = _apply_masks(logprobs.detach(), old, weights, batch.policy, objective.algorithm)
    advantages = _drop_overflow(batch.policy.advantages, logprobs.detach() - old, weights, mask)
    inputs = PolicyLossInputs(logprobs, old, engine, advantages, mask)
    ids = batch.policy.loss_ids
    if ids is None:
        token_losses, stats = _token_losses(inputs, objective.algorithm, objective, weights, choice.selected)
    else:
        stats = {}
        token_losses = torch.zeros_like(logprobs, dtype=torch.promote_types(logprobs.dtype, torch.float32))
        for number in ids.unique().tolist():
            rows, algorithm = ids == number, (objective.algorithm, *objective.of_sources)[number]
            part = PolicyLossInputs(*(getattr(inputs, f.name)[rows] for f in fields(inputs)))
            losses, part_stats = _token_losses(part, algorithm, objective, weights[rows], None)
            token_losses[rows] = losses.to(token_losses.dtype)
            stats = add_stats(stats, part_stats) if stats else part_stats
    stats |= kept_stats | {f"correction_{name}": value for name, value in weight_stats.items()}
    return _aggregate(token_losses * weights, batch, objective), stats


def _token_losses(
    inputs: PolicyLossInputs,
    algorithm: AlgorithmConfig,
    objective: Objective,
    weights: TokenValues,
    selected: TokenMask | None,
) -> LossAndStats:
    """Return the unweighted policy loss of each token under ``algorithm``."""
    loss, values = algorithm.loss, (inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.mask)
    if isinstance(loss, UserLoss):
        user_code = UserCode.from_pieces(objective.code_paths, algorithm.user_components)
        return user_policy_loss(loss.name, user_code, inputs)
    chosen = (selected,) if loss.selection else ()
    if isinstance(loss, GMPOLoss):  # a removed token must give no gradient through the mean
        chosen = (weights != 0,)
    return POLICY_LOSSES[loss.name](*values, *chosen, **loss.token_arguments)


@torch.no_grad()
def _apply_masks(
    logprobs: TokenValues,
    old: TokenValues,
    weights: TokenValues,
    stream: PolicyStream,
    algorithm: AlgorithmConfig,
) -> LossAndStats:
    """Return ``weights``, 0 for rejected and off-policy tokens, and the numbers of these tokens."""
    mask, stats, limits = stream.mask, {}, algorithm.correction
    # With ratios to the engine's log-probs, only the current log-probs exist.
    trainer = logprobs if limits.bypasses else old
    veto = 0.0 if isinstance(limits, WeightedCorrection) else limits.veto
    if limits.reject or veto:
        rules = [RejectionRule(**rule.model_dump()) for rule in limits.reject]
        keep = accepted(trainer, stream.rollout_logprobs, mask, rules, veto=veto)
        weights, stats["rejected"] = weights * keep, (mask & ~keep).sum()
    if algorithm.off_policy_mask_threshold is not None:
        keep = off_policy_sequence_mask(
            logprobs, stream.rollout_logprobs, stream.advantages, mask,
            threshold=algorithm.off_policy_mask_threshold,
        )  # fmt: skip
        weights, stats["off_policy"] = weights * keep, (mask & ~keep).sum()
    return weights, stats


def _kl_term(
    logprobs: TokenValues,
    ref_logprobs: TokenValues,
    has_logprobs: Bool[Tensor, "B 1"],
    batch: TrainBatch,
    objective: Objective,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the aggregated KL, weighted per row but without its coefficient, and its statistics: the sum,
    nats, over the trained tokens of rows with a weight above 0, and the number of these tokens.

    The bias correction multiplies each token's KL by its ratio to the engine, gradient included, so that
    value and gradient match KL(policy || reference) also for stale tokens (DeepSeek-V3.2, arXiv:2512.02556,
    equation 7). ``has_logprobs``: rows whose sampling log-probs are known; the ratio of other rows is 1.
    """
    how, mask, weights = objective.algorithm.kl, batch.policy.mask, batch.policy.kl_weights
    if weights is not None:
        # A row of weight 0 may be far from the reference: 0 times an overflowing KL would be NaN, and its KL
        # must count neither for `algorithm.kl.target` nor for `health.kl_above`.
        mask = mask & (weights > 0)[:, None]
    kl = kl_estimate(
        how.estimator.name, objective.user_code,
        torch.where(mask, logprobs, 0.0), torch.where(mask, ref_logprobs, 0.0),
    )  # fmt: skip
    if how.bias_correction:
        sampled = torch.where(has_logprobs, batch.policy.rollout_logprobs, logprobs.detach())
        kl = kl * torch.where(mask, logprobs - sampled, 0.0).exp()
    stats = {"kl": torch.where(mask, kl, 0.0).sum(), "kl_tokens": mask.sum()}
    if weights is not None:
        kl = weights.to(logprobs.dtype)[:, None] * torch.where(mask, kl, 0.0)
    return _aggregate(kl, batch, objective), stats


def _further_streams(
    logprobs: TokenValues, from_teacher: TokenValues | None, batch: TrainBatch, objective: Objective
) -> Iterator[tuple[Float[Tensor, ""], Stats]]:
    """Yield the weighted loss of each further stream of ``batch``, and its statistics."""
    if (teacher := batch.teacher) is not None:
        taught = teacher.mask
        if from_teacher is None:
            estimate = KL_ESTIMATORS[objective.distillation.estimator]
            from_teacher = estimate(
                torch.where(taught, logprobs, 0.0), torch.where(taught, teacher.logprobs, 0.0)
            )
        term = objective.distillation.coef * _mean_over(from_teacher, taught, batch.denominators.taught)
        yield term, {"loss_teacher": term, "taught": taught.sum()}
    if batch.demonstrated is not None:
        term = objective.demonstration_coef * cross_entropy(
            logprobs, batch.demonstrated, batch.denominators.demonstrated
        )
        nll = torch.where(batch.demonstrated, -logprobs.detach(), 0.0).double().sum()
        yield term, {"loss_demonstrations": term, "demonstrated": batch.demonstrated.sum(), "nll": nll}


def divergence_from_teacher(
    candidates: Float[Tensor, "M K"] | None, layout: Layout, distillation: DistillationConfig
) -> TokenValues | None:
    """Return the divergence from the teacher at each token of ``layout``, nats, undefined where untaught;
    None without ``candidates``, the policy's log-probs of the teacher's likeliest tokens.
    """
    if candidates is None or layout.candidates_at_teacher is None:
        return None
    divergence = DIVERGENCES[distillation.divergence]
    return layout.unpack_rows(divergence(candidates, layout.candidates_at_teacher))


def cross_entropy(logprobs: TokenValues, mask: TokenMask, num_tokens: float) -> Float[Tensor, ""]:
    """Return the share of these rows in the update's mean of -log p over the tokens of ``mask``, in nats."""
    return _mean_over(-logprobs, mask, num_tokens)


def _mean_over(values: TokenValues, mask: TokenMask, num_tokens: float) -> Float[Tensor, ""]:
    return aggregate(values, mask, "token-mean", num_tokens=num_tokens, num_sequences=1.0, max_tokens=1)


def add_stats(a: Stats, b: Stats) -> Stats:
    """Combine statistics of two disjoint sets of rows: maxima if the name ends in ``_max``, else sums."""
    return {name: torch.maximum(a[name], b[name]) if is_maximum(name) else a[name] + b[name] for name in a}


def is_maximum(name: str) -> bool:
    return name.endswith("_max")


# Metrics and the statistics they come from, if an update has these: unchanged, means over the trained tokens,
# and effective sample sizes of importance weights, from the sum of weights and the sum of their squares.
_PLAIN = {
    "loss/policy": "loss_policy", "loss/entropy": "loss_entropy", "loss/kl": "loss_kl",
    "policy/ratio_max": "ratio_max", "mismatch/logprob_diff_max": "mismatch_max",
    "correction/weight_max": "correction_weight_max",
}  # fmt: skip
_MEANS = {
    "policy/entropy": "entropy", "policy/ratio_mean": "ratio", "policy/clip_low_share": "clip_low",
    "policy/clip_high_share": "clip_high", "policy/dual_clip_share": "dual_clip",
    "policy/approx_kl": "approx_kl", "mismatch/logprob_diff_mean": "mismatch", "mismatch/kl": "mismatch_kl",
    "policy/selected_share": "selected", "policy/off_policy_share": "off_policy",
    "correction/rejected_share": "rejected", "correction/weight_mean": "correction_weight",
    "correction/outside_share": "correction_outside", "correction/dropped_share": "correction_dropped",
}  # fmt: skip
_EFFECTIVE = {
    "mismatch/ess_share": ("mismatch_w", "mismatch_w2"),
    "correction/ess_share": ("correction_weight", "correction_weight_sq"),
}


def finish_stats(stats: Stats) -> dict[str, float]:
    """Return metrics of the whole update: a sum over the tokens of a stream becomes a mean. A stream without
    a token has no metrics: a mean of 0 would read as a policy without entropy.
    """
    s = {name: float(value) for name, value in stats.items()}
    metrics = {"loss/total": s["loss_total"]}
    if s.get("taught"):
        metrics["loss/teacher"] = s["loss_teacher"]
    if s.get("demonstrated"):
        metrics["loss/demonstrations"] = s["loss_demonstrations"]
        metrics["demonstrations/nll"] = s["nll"] / s["demonstrated"]
    tokens = s["tokens"]
    if not tokens:
        return metrics
    metrics |= {name: s[stat] for name, stat in _PLAIN.items() if stat in s}
    metrics |= {name: s[stat] / tokens for name, stat in _MEANS.items() if stat in s}
    if s.get("kl_tokens"):
        metrics["ref/kl"] = s["kl"] / s["kl_tokens"]
    shares = ((name, s[w], s[w2]) for name, (w, w2) in _EFFECTIVE.items() if w in s)
    return metrics | {name: _effective_share(weights, squares, tokens) for name, weights, squares in shares}


def _effective_share(weights: float, squares: float, tokens: float) -> float:
    """Return the effective sample size as a share of the samples: (sum w)^2 / (n sum w^2)."""
    # On overflow a product is inf, whereas a power raises.
    return weights * weights / (tokens * squares) if squares else 1.0


def _aggregate(token_losses: TokenValues, batch: TrainBatch, objective: Objective) -> Float[Tensor, ""]:
    how, stream, sizes = objective.algorithm.aggregation, batch.policy, batch.denominators
    mask = stream.mask
    sequence_tokens = mask.sum(dim=1) if stream.sequence_tokens is None else stream.sequence_tokens
    # Unknown prompts: no two samples share one.
    num_prompts = sizes.sequences if stream.prompt_tokens is None else sizes.prompts
    prompt_tokens = sequence_tokens if stream.prompt_tokens is None else stream.prompt_tokens
    if isinstance(how, UserAggregation):
        inputs = AggregationInputs(
            token_losses, mask, sizes.tokens, sizes.sequences, stream.max_tokens, sequence_tokens,
            num_prompts, prompt_tokens,
        )  # fmt: skip
        return user_aggregation(how.name, objective.user_code, inputs)
    return aggregate(
        token_losses, mask, how.name,
        num_tokens=sizes.tokens, num_sequences=sizes.sequences, max_tokens=stream.max_tokens,
        sequence_tokens=sequence_tokens, num_prompts=num_prompts, prompt_tokens=prompt_tokens,
    )  # fmt: skip


@torch.no_grad()
def _mismatch(old: TokenValues, stream: PolicyStream) -> Stats:
    """Sum the differences between the trainer's and the engine's log-probs of the sampled tokens."""
    difference = old.double() - stream.rollout_logprobs.double()
    has_logprobs = stream.mask & ~stream.rollout_logprobs.isnan()
    difference = torch.where(has_logprobs, difference, 0.0)
    return {
        "mismatch": difference.abs().sum(),
        "mismatch_max": difference.abs().max() if difference.numel() else difference.sum(),
        "mismatch_kl": (torch.expm1(difference) - difference).sum(),  # k3 of rollout to trainer
        "mismatch_w": torch.where(has_logprobs, difference.exp(), 0.0).sum(),
        "mismatch_w2": torch.where(has_logprobs, (2 * difference).exp(), 0.0).sum(),
    }


def _drop_overflow(
    advantages: TokenValues, log_ratio: TokenValues, weights: TokenValues, mask: TokenMask
) -> TokenValues:
    """Return ``advantages``, 0 where the weight is 0 and the loss could overflow: 0 * inf would be NaN.

    Token ratios overflow only at A < 0, where no bound of the loss applies; a sequence's ratio matters only
    if the whole sequence is dropped.
    """
    dropped = mask & (weights == 0)
    far = mask & (log_ratio > LOG_LIMIT)
    whole = (dropped | ~mask).all(dim=1, keepdim=True) & far.any(dim=1, keepdim=True)
    return torch.where(dropped & (whole | (far & (advantages < 0))), 0.0, advantages)
