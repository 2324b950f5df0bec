"""The streams of a batch besides the policy loss: a teacher, and demonstrations. Each is a mean over its own
tokens, as the share of some rows in the update's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.aggregation import aggregate
from grpo_dist.algorithms.divergences import DIVERGENCES
from grpo_dist.algorithms.kl import KL_ESTIMATORS
from grpo_dist.algorithms.lookup import named
from grpo_dist.algorithms.shapes import Stats, TokenMask, TokenValues
from grpo_dist.policy.loss_settings import LossSettings
from grpo_dist.policy.packing import Layout
from grpo_dist.types import TrainBatch


def further_streams(
    logprobs: TokenValues, from_teacher: TokenValues | None, batch: TrainBatch, settings: LossSettings
) -> Iterator[tuple[Float[Tensor, ""], Stats]]:
    """Yield the weighted loss of each further stream of ``batch``, and its statistics."""
    taught, teacher = batch.taught, batch.teacher_logprobs
    if taught is not None and teacher is not None:
        if from_teacher is None:
            estimate = named(KL_ESTIMATORS, settings.teacher_estimator, "KL estimator")
            from_teacher = estimate(torch.where(taught, logprobs, 0.0), torch.where(taught, teacher, 0.0))
        term = settings.teacher_coef * mean_over(from_teacher, taught, batch.num_taught)
        yield term, {"loss_teacher": term, "taught": taught.sum()}
    if batch.demonstrated is not None:
        term = settings.demonstration_coef * cross_entropy(
            logprobs, batch.demonstrated, batch.num_demonstrated
        )
        nll = torch.where(batch.demonstrated, -logprobs.detach(), 0.0).double().sum()
        yield term, {"loss_demonstrations": term, "demonstrated": batch.demonstrated.sum(), "nll": nll}


def divergence_from_teacher(
    candidates: Float[Tensor, "M K"] | None, layout: Layout, settings: LossSettings
) -> TokenValues | None:
    """Return the divergence from the teacher at each token of ``layout``, nats; None without ``candidates``,
    the policy's log-probs of the teacher's likeliest tokens. What stands at a token without a teacher means
    nothing.
    """
    if candidates is None or layout.candidates_at_teacher is None:
        return None
    divergence = named(DIVERGENCES, settings.teacher_divergence, "divergence")
    return layout.as_rows(divergence(candidates, layout.candidates_at_teacher))


def cross_entropy(logprobs: TokenValues, mask: TokenMask, num_tokens: float) -> Float[Tensor, ""]:
    """Return the share of these rows in the update's mean of -log p over the tokens of ``mask``, in nats."""
    return mean_over(-logprobs, mask, num_tokens)


def mean_over(values: TokenValues, mask: TokenMask, num_tokens: float) -> Float[Tensor, ""]:
    return aggregate(values, mask, "token-mean", num_tokens=num_tokens, num_sequences=1.0, max_tokens=1)
