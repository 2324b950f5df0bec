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
from grpo_dist.types import TrainBatch


def further_streams(
    logprobs: TokenValues, top_logprobs: Tensor | None, batch: TrainBatch, settings: LossSettings
) -> Iterator[tuple[Float[Tensor, ""], Stats]]:
    """Yield the weighted loss of each further stream of ``batch``, and its statistics."""
    if batch.teacher_logprobs is not None and batch.taught is not None:
        kl = _from_teacher(logprobs, top_logprobs, batch, settings)
        term = settings.teacher_coef * mean_over(kl, batch.taught, batch.num_taught)
        yield term, {"loss_teacher": term, "taught": batch.taught.sum()}
    if batch.demonstrated is not None:
        term = settings.demonstration_coef * cross_entropy(
            logprobs, batch.demonstrated, batch.num_demonstrated
        )
        nll = torch.where(batch.demonstrated, -logprobs.detach(), 0.0).double().sum()
        yield term, {"loss_demonstrations": term, "demonstrated": batch.demonstrated.sum(), "nll": nll}


def _from_teacher(
    logprobs: TokenValues, top_logprobs: Tensor | None, batch: TrainBatch, settings: LossSettings
) -> TokenValues:
    """Return the divergence from the teacher of each taught token, in nats: an estimate from the sampled one,
    or that of both distributions over the teacher's likeliest tokens.
    """
    taught, teacher = batch.taught, batch.teacher_logprobs
    assert taught is not None and teacher is not None, "the caller has looked"
    if batch.top_logprobs is None:
        estimate = named(KL_ESTIMATORS, settings.teacher_estimator, "KL estimator")
        return estimate(torch.where(taught, logprobs, 0.0), torch.where(taught, teacher, 0.0))
    assert top_logprobs is not None, "the teacher's likeliest tokens need their log-probs"
    divergence = named(DIVERGENCES, settings.teacher_divergence, "divergence")
    inside = taught[..., None]
    return divergence(torch.where(inside, top_logprobs, 0.0), torch.where(inside, batch.top_logprobs, 0.0))


def cross_entropy(logprobs: TokenValues, mask: TokenMask, num_tokens: float) -> Float[Tensor, ""]:
    """Return the share of these rows in the update's mean of -log p over the tokens of ``mask``, in nats."""
    return mean_over(-logprobs, mask, num_tokens)


def mean_over(values: TokenValues, mask: TokenMask, num_tokens: float) -> Float[Tensor, ""]:
    return aggregate(values, mask, "token-mean", num_tokens=num_tokens, num_sequences=1.0, max_tokens=1)
