"""The loss of some rows of an update, and the statistics that go with it.

    loss = aggregate(correction weight * policy loss) + kl_coef * aggregate(kl)
           - entropy_coef * aggregate(entropy)
           + teacher_coef * mean(divergence from the teacher)
           + demonstration_coef * mean(-log p of demonstrations)

The first line and the entropy are the policy loss, over `TrainBatch.loss_mask`; the others are means over the
tokens of their own streams. All terms are divided by the denominators of the whole update, so losses,
gradients and statistics of any split of the rows simply add up. The correction weight belongs to the policy
loss alone: times the KL term it would bend the penalty.

A sequence with a trained token whose engine log-prob is NaN has policy loss 0 under every correction, none
included, and with ratios to the engine's log-probs. `rows.make_batch` gives such a sample an empty mask,
so that no loss of a run meets one; `rollout/nan_logprobs` counts them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_dist.algorithms.loss_settings import MEANS_OF_KEPT, POLICY_LOSS_SETTINGS, SELECTION_SETTINGS
from grpo_dist.algorithms.offpolicy import correction
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.algorithms.ratios import LOG_LIMIT
from grpo_dist.algorithms.rejection import accepted, off_policy_sequence_mask
from grpo_dist.algorithms.shapes import LossAndStats, Stats, TokenMask, TokenValues
from grpo_dist.plugins.algorithm import aggregated, kl_estimate, own_policy_loss
from grpo_dist.plugins.inputs import AggregationInputs, PolicyLossInputs
from grpo_dist.policy.loss_settings import LossSettings
from grpo_dist.policy.streams import cross_entropy, further_streams
from grpo_dist.types import PreparedBatch, TrainBatch


def batch_loss(
    logprobs: TokenValues,
    batch: PreparedBatch,
    settings: LossSettings,
    *,
    entropy: TokenValues | None = None,
    from_teacher: TokenValues | None = None,
    kl_coef: float | None = None,
    entropy_coef: float | None = None,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the loss of ``batch``'s rows as their share of the whole update's, and its statistics, for
    `add_stats` and `finish_stats`.

    Args:
        logprobs: nats, at the sampling temperature, with gradient.
        batch: without ``old_logprobs``, the importance ratio is to ``logprobs`` themselves, hence exactly 1
            with the right gradient. ``ref_logprobs`` is needed when kl_coef > 0.
        entropy: nats; for the statistics, and with gradient for the bonus.
        from_teacher: `divergence_from_teacher`, nats; None: that of a teacher is estimated from ``logprobs``.
        kl_coef: weight of the KL term in this update; None: that of ``settings``. Settings without a KL term
            have none in any update.
        entropy_coef: weight of the entropy bonus in this update; None: that of ``settings``.
    """
    if settings.objective == "cross_entropy":
        loss = cross_entropy(logprobs, batch.loss_mask, batch.num_tokens)
        stats: Stats = {"tokens": batch.loss_mask.sum()}
        if entropy is not None:
            stats["entropy"] = torch.where(batch.loss_mask, entropy, 0.0).sum()
    else:
        weight = settings.entropy_coef if entropy_coef is None else entropy_coef
        loss, stats = _policy_objective(logprobs, batch, settings, entropy, kl_coef, weight)
        for term, own in further_streams(logprobs, from_teacher, batch, settings):
            loss, stats = loss + term, stats | own
    stats["loss_total"] = loss
    return loss, {name: value.detach().double() for name, value in stats.items()}


def _policy_objective(
    logprobs: TokenValues,
    batch: PreparedBatch,
    settings: LossSettings,
    entropy: TokenValues | None,
    kl_coef: float | None,
    entropy_coef: float,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the policy loss with its KL and entropy terms, and their statistics."""
    mask = batch.loss_mask
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    known = ~(mask & batch.rollout_logprobs.isnan()).any(dim=1, keepdim=True)
    old = torch.where(known, old, logprobs.detach())  # where ratios are to the engine's, these are NaN too
    weights = known.to(logprobs.dtype).expand_as(logprobs)
    if batch.policy_mask is not None:
        weights = weights * batch.policy_mask
    policy, stats = _policy_term(logprobs, old, weights, batch, settings)
    loss = policy
    if not settings.kl_coef or kl_coef is None:
        kl_coef = settings.kl_coef
    assert batch.ref_logprobs is not None or not kl_coef, "kl_coef > 0 needs reference log-probs"
    if batch.ref_logprobs is not None:
        kl_loss, kl = _kl_term(logprobs, batch.ref_logprobs, known, batch, settings)
        loss = loss + kl_coef * kl_loss if kl_coef else loss
        stats |= {"kl": kl, "loss_kl": kl_coef * kl_loss}
    if entropy is not None:
        entropy = torch.where(mask, entropy, 0.0)
        stats["entropy"] = entropy.sum()
    if settings.entropy_coef or settings.entropy_control:
        assert entropy is not None, "an entropy bonus needs entropies"
        bonus = entropy_coef * _aggregate(entropy, batch, settings)
        loss = loss - bonus
        stats["loss_entropy"] = -bonus
    # The trainer's log-probs before it moved, where they are known. With ratios to the engine's own they are
    # not: the first update of a step, which has not moved yet, is then the one that is reported.
    own = logprobs.detach() if settings.old_policy == "rollout" else old
    return loss, stats | {"loss_policy": policy, "tokens": mask.sum(), **_mismatch(own, batch)}


def _policy_term(
    logprobs: TokenValues,
    old: TokenValues,
    weights: TokenValues,
    batch: PreparedBatch,
    settings: LossSettings,
) -> tuple[Float[Tensor, ""], Stats]:
    """Return the aggregated policy loss, each token's times its weight and correction, and its statistics."""
    weight_stats: Stats = {}
    if settings.correction_kind != "none":
        importance, weight_stats = correction(
            old, batch.rollout_logprobs, batch.loss_mask,
            kind=settings.correction_kind, level=settings.correction_level,
            low=settings.correction_low, high=settings.correction_high, veto=settings.correction_veto,
        )  # fmt: skip
        weights = weights * importance / batch.mean_weight
    weights, kept_stats = _with_masks(logprobs.detach(), old, weights, batch, settings)
    advantages = _without_overflow(batch.advantages, logprobs.detach() - old, weights, batch.loss_mask)
    if settings.policy_loss in POLICY_LOSSES:
        chosen = (batch.selected,) if settings.policy_loss in SELECTION_SETTINGS else ()
        if settings.policy_loss in MEANS_OF_KEPT:
            chosen = (weights != 0,)
        token_losses, stats = POLICY_LOSSES[settings.policy_loss](
            logprobs, old, advantages, batch.loss_mask, *chosen, **_own_settings(settings)
        )
    else:
        inputs = PolicyLossInputs(logprobs, old, batch.rollout_logprobs, advantages, batch.loss_mask)
        token_losses, stats = own_policy_loss(settings.policy_loss, settings.own, inputs)
    stats |= kept_stats | {f"correction_{name}": value for name, value in weight_stats.items()}
    return _aggregate(token_losses * weights, batch, settings), stats


@torch.no_grad()
def _with_masks(
    logprobs: TokenValues,
    old: TokenValues,
    weights: TokenValues,
    batch: PreparedBatch,
    settings: LossSettings,
) -> LossAndStats:
    """Return ``weights``, 0 for the tokens that are rejected or off-policy, and how many those are."""
    mask, stats = batch.loss_mask, {}
    # With ratios to the engine's log-probs no others are known but those that are being trained.
    own = logprobs if settings.old_policy == "rollout" else old
    veto = settings.correction_veto if settings.correction_kind == "none" else 0.0
    if settings.reject or veto:
        keep = accepted(own, batch.rollout_logprobs, mask, settings.reject, veto=veto)
        weights, stats["rejected"] = weights * keep, (mask & ~keep).sum()
    if settings.off_policy_mask_threshold is not None:
        keep = off_policy_sequence_mask(
            logprobs, batch.rollout_logprobs, batch.advantages, mask,
            threshold=settings.off_policy_mask_threshold,
        )  # fmt: skip
        weights, stats["off_policy"] = weights * keep, (mask & ~keep).sum()
    return weights, stats


def _kl_term(
    logprobs: TokenValues,
    ref_logprobs: TokenValues,
    known: Bool[Tensor, "B 1"],
    batch: TrainBatch,
    settings: LossSettings,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the aggregated KL, still without its coefficient, and its sum over trained tokens, in nats.

    With the bias correction each token's KL is multiplied by its ratio to what sampled it, the engine,
    gradient included, which makes value and gradient those of KL(policy || reference) for tokens that older
    weights sampled (DeepSeek-V3.2, arXiv:2512.02556, equation 7). ``known``: rows whose sampling log-probs
    are; the ratio of the others is 1.
    """
    mask = batch.loss_mask
    own, ref = torch.where(mask, logprobs, 0.0), torch.where(mask, ref_logprobs, 0.0)
    kl = kl_estimate(settings.kl_estimator, settings.own, own, ref)
    if settings.kl_bias_correction:
        sampled = torch.where(known, batch.rollout_logprobs, logprobs.detach())
        kl = kl * torch.where(mask, logprobs - sampled, 0.0).exp()
    return _aggregate(kl, batch, settings), torch.where(mask, kl, 0.0).sum()


def add_stats(a: Stats, b: Stats) -> Stats:
    """Statistics of two disjoint sets of rows together: maxima where the name ends in ``_max``, sums
    otherwise.
    """
    return {name: torch.maximum(a[name], b[name]) if is_maximum(name) else a[name] + b[name] for name in a}


def is_maximum(name: str) -> bool:
    return name.endswith("_max")


# Metrics that only some settings have: shares of the trained tokens.
_SHARES = {
    "selected": "policy/selected_share",
    "off_policy": "policy/off_policy_share",
    "rejected": "correction/rejected_share",
}


def finish_stats(stats: Stats) -> dict[str, float]:
    """Return metrics of the whole update: means over the tokens of a stream where the statistic is a sum over
    them. A stream without a token has no metrics: a mean of 0 would read as a policy without entropy.
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
    if "entropy" in s:
        metrics["policy/entropy"] = s["entropy"] / tokens
    if "loss_policy" not in s:  # cross-entropy
        return metrics
    metrics |= {
        "loss/policy": s["loss_policy"],
        "policy/ratio_mean": s["ratio"] / tokens,
        "policy/ratio_max": s["ratio_max"],
        "policy/clip_low_share": s["clip_low"] / tokens,
        "policy/clip_high_share": s["clip_high"] / tokens,
        "policy/dual_clip_share": s["dual_clip"] / tokens,
        "policy/approx_kl": s["approx_kl"] / tokens,
        "mismatch/logprob_diff_mean": s["mismatch"] / tokens,
        "mismatch/logprob_diff_max": s["mismatch_max"],
        "mismatch/kl": s["mismatch_kl"] / tokens,
        "mismatch/ess_share": _effective_share(s["mismatch_w"], s["mismatch_w2"], tokens),
    }
    if "loss_entropy" in s:
        metrics["loss/entropy"] = s["loss_entropy"]
    if "kl" in s:
        metrics |= {"ref/kl": s["kl"] / tokens, "loss/kl": s["loss_kl"]}
    for stat, name in _SHARES.items():
        if stat in s:
            metrics[name] = s[stat] / tokens
    if "correction_weight" in s:
        metrics |= {
            "correction/weight_mean": s["correction_weight"] / tokens,
            "correction/weight_max": s["correction_weight_max"],
            "correction/outside_share": s["correction_outside"] / tokens,
            "correction/dropped_share": s["correction_dropped"] / tokens,
            "correction/ess_share": _effective_share(
                s["correction_weight"], s["correction_weight_sq"], tokens
            ),
        }
    return metrics


def _effective_share(weights: float, squares: float, tokens: float) -> float:
    """Effective sample size of importance weights as a share of the samples: (sum w)^2 / (n sum w^2)."""
    # Where this is beyond a float a product is inf, and a power raises.
    return weights * weights / (tokens * squares) if squares else 1.0


def _own_settings(settings: LossSettings) -> dict[str, float]:
    """Return the settings of the policy loss that are set; for the others its own defaults hold."""
    names = POLICY_LOSS_SETTINGS.get(settings.policy_loss, ())
    own = {name: getattr(settings, name) for name in names}
    return {name: value for name, value in own.items() if value is not None}


def _aggregate(token_losses: TokenValues, batch: TrainBatch, settings: LossSettings) -> Float[Tensor, ""]:
    mask = batch.loss_mask
    of_samples = mask.sum(dim=1) if batch.sample_tokens is None else batch.sample_tokens
    by_prompt = batch.prompt_tokens is not None  # else each sample has a prompt of its own
    inputs = AggregationInputs(
        token_losses, mask, batch.num_tokens, batch.num_sequences, batch.max_tokens, of_samples,
        batch.num_prompts if by_prompt else batch.num_sequences,
        of_samples if batch.prompt_tokens is None else batch.prompt_tokens,
    )  # fmt: skip
    return aggregated(settings.aggregation, settings.own, inputs)


@torch.no_grad()
def _mismatch(old: TokenValues, batch: TrainBatch) -> Stats:
    """Sum differences between the trainer's and the engine's log-probs of the sampled tokens."""
    difference = old.double() - batch.rollout_logprobs.double()
    known = batch.loss_mask & ~batch.rollout_logprobs.isnan()
    difference = torch.where(known, difference, 0.0)
    return {
        "mismatch": difference.abs().sum(),
        "mismatch_max": difference.abs().max() if difference.numel() else difference.sum(),
        "mismatch_kl": (torch.expm1(difference) - difference).sum(),  # k3 of rollout to trainer
        "mismatch_w": torch.where(known, difference.exp(), 0.0).sum(),
        "mismatch_w2": torch.where(known, (2 * difference).exp(), 0.0).sum(),
    }


def _without_overflow(
    advantages: TokenValues, log_ratio: TokenValues, weights: TokenValues, mask: TokenMask
) -> TokenValues:
    """Return ``advantages``, 0 where the weight is 0 and the loss could overflow: 0 * inf would be NaN.

    Only ratios of tokens with A < 0 are that large, because no bound of the loss applies to them; the one of
    a sequence only if the whole sequence is dropped.
    """
    dropped = mask & (weights == 0)
    far = mask & (log_ratio > LOG_LIMIT)
    whole = (dropped | ~mask).all(dim=1, keepdim=True) & far.any(dim=1, keepdim=True)
    return torch.where(dropped & (whole | (far & (advantages < 0))), 0.0, advantages)
