"""The loss of some rows of an update, and the statistics that go with it.

    loss = aggregate(correction weight * policy loss) + kl_coef * aggregate(kl)

Both terms are divided by the denominators of the whole update, so losses, gradients and statistics of any
split of the rows simply add up. The correction weight belongs to the policy loss alone: times the KL term it
would bend the penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.aggregation import aggregate
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.offpolicy import correction
from grpo_dist.algorithms.policy_losses import POLICY_LOSSES
from grpo_dist.types import TrainBatch

Stats = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the objective is made of; the names are those of the registries in `grpo_dist.algorithms`."""

    policy_loss: str = "ppo_clip"
    clip_low: float = 0.2  # the ratio is held above 1 - clip_low where the advantage is negative
    clip_high: float = 0.2  # and below 1 + clip_high where it is positive
    dual_clip: float | None = None
    aggregation: str = "token-mean"
    kl_coef: float = 0.0  # 0: no KL term, and no reference log-probs are looked at
    kl_estimator: str = "k3"
    correction_kind: str = "none"  # none: samples count as the trainer's own
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0


def batch_loss(
    logprobs: Float[Tensor, "B T"],
    batch: TrainBatch,
    settings: LossSettings,
    *,
    entropy: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, ""], Stats]:
    """Loss of ``batch``'s rows as their share of the whole update's, and statistics for `add_stats` and
    `finish_stats`.

    Args:
        logprobs: nats, at the sampling temperature, with gradient.
        batch: ``old_logprobs`` None says that this update is the first on these samples: the importance ratio
            is to ``logprobs`` themselves, hence exactly 1 with the right gradient. ``ref_logprobs`` is needed
            when kl_coef > 0.
        entropy: nats, for the statistics.
    """
    mask = batch.loss_mask
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    token_losses, stats = POLICY_LOSSES[settings.policy_loss](
        logprobs, old, batch.advantages, mask,
        clip_low=settings.clip_low, clip_high=settings.clip_high, dual_clip=settings.dual_clip,
    )  # fmt: skip
    if settings.correction_kind != "none":
        weights, weight_stats = correction(
            old, batch.rollout_logprobs, mask,
            kind=settings.correction_kind, level=settings.correction_level,
            low=settings.correction_low, high=settings.correction_high,
        )  # fmt: skip
        token_losses = token_losses * weights
        stats |= {f"correction_{name}": value for name, value in weight_stats.items()}
    policy = _aggregate(token_losses, batch, settings)
    loss = policy
    if settings.kl_coef > 0:
        assert batch.ref_logprobs is not None, "kl_coef > 0 needs reference log-probs"
        kl = KL_ESTIMATORS[settings.kl_estimator](
            torch.where(mask, logprobs, 0.0), torch.where(mask, batch.ref_logprobs, 0.0)
        )
        kl_loss = _aggregate(kl, batch, settings)
        loss = policy + settings.kl_coef * kl_loss
        stats |= {"kl": torch.where(mask, kl, 0.0).sum(), "loss_kl": settings.kl_coef * kl_loss}
    stats |= {"loss_policy": policy, "loss_total": loss, "tokens": mask.sum(), **_mismatch(old, batch)}
    if entropy is not None:
        stats["entropy"] = torch.where(mask, entropy, 0.0).sum()
    return loss, {name: value.detach().double() for name, value in stats.items()}


def add_stats(a: Stats, b: Stats) -> Stats:
    """Statistics of two disjoint sets of rows together: maxima where the name ends in ``_max``, sums
    otherwise.
    """
    return {name: torch.maximum(a[name], b[name]) if is_maximum(name) else a[name] + b[name] for name in a}


def is_maximum(name: str) -> bool:
    return name.endswith("_max")


def finish_stats(stats: Stats) -> dict[str, float]:
    """Metrics of the whole update: means over its trained tokens where the statistic is a sum over tokens."""
    s = {name: float(value) for name, value in stats.items()}
    tokens = max(s["tokens"], 1.0)
    metrics = {
        "loss/total": s["loss_total"],
        "loss/policy": s["loss_policy"],
        "policy/ratio_mean": s["ratio"] / tokens if s["tokens"] else 1.0,
        "policy/ratio_max": s["ratio_max"],
        "policy/clip_low_share": s["clip_low"] / tokens,
        "policy/clip_high_share": s["clip_high"] / tokens,
        "policy/dual_clip_share": s["dual_clip"] / tokens,
        "policy/approx_kl": s["approx_kl"] / tokens,
        "mismatch/logprob_diff_mean": s["mismatch"] / tokens,
        "mismatch/logprob_diff_max": s["mismatch_max"],
        "mismatch/kl": s["mismatch_kl"] / tokens,
    }
    if "entropy" in s:
        metrics["policy/entropy"] = s["entropy"] / tokens
    if "kl" in s:
        metrics |= {"ref/kl": s["kl"] / tokens, "loss/kl": s["loss_kl"]}
    if "correction_weight" in s:
        metrics |= {
            "correction/weight_mean": s["correction_weight"] / tokens,
            "correction/weight_max": s["correction_weight_max"],
            "correction/outside_share": s["correction_outside"] / tokens,
        }
    return metrics


def _aggregate(
    token_losses: Float[Tensor, "B T"], batch: TrainBatch, settings: LossSettings
) -> Float[Tensor, ""]:
    return aggregate(
        token_losses, batch.loss_mask, settings.aggregation,
        num_tokens=batch.num_tokens, num_sequences=batch.num_sequences, max_tokens=batch.max_tokens,
    )  # fmt: skip


@torch.no_grad()
def _mismatch(old: Float[Tensor, "B T"], batch: TrainBatch) -> Stats:
    """How far the trainer's log-probs of the sampled tokens lie from those the engine sampled with."""
    difference = torch.where(batch.loss_mask, old.double() - batch.rollout_logprobs.double(), 0.0)
    return {
        "mismatch": difference.abs().sum(),
        "mismatch_max": difference.abs().max() if difference.numel() else difference.sum(),
        "mismatch_kl": (torch.expm1(difference) - difference).sum(),  # k3 of rollout to trainer
    }
