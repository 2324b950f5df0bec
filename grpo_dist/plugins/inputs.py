"""The inputs of every kind of piece: a function names those that it wants as its arguments.

``B`` rows, ``T`` tokens of the longest; a [B, T] value belongs to the token of its index. A row is a sample,
or one of the rows of an episode whose history was rewritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Of an advantage estimator, over the whole step: it returns a number per sample, [B].

    Attributes:
        rewards: float64 [B], clipped and normalised as configured. NaN: could not be scored; whatever is
            returned for it becomes 0.
        group_ids: int64 [B]; samples of one prompt share an id.
        lengths: int64 [B], sampled tokens.
        truncated: bool [B], cut off at the largest length.
        parts: float64 [B] of each reward by name, before weights.
        weights: of each reward by name.
    """

    rewards: Tensor
    group_ids: Tensor
    lengths: Tensor
    truncated: Tensor
    parts: Mapping[str, Tensor]
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Of a policy loss, over some rows of a step: it returns a loss per token, [B, T], with gradient.

    The same rows must get the same losses in any split of the step. Correction weights, aggregation, KL and
    entropy terms are applied by the run.

    Attributes:
        logprobs: float32 [B, T], nats, of the weights being trained, with gradient; 0 where masked.
        old_logprobs: float32 [B, T], nats, of the weights before the step (`algorithm.old_logprobs`).
        rollout_logprobs: float32 [B, T], nats, of the engine that sampled.
        advantages: float32 [B, T]; 0 where masked.
        mask: bool [B, T], tokens that are trained.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class KLInputs:
    """Of a KL estimator: it returns nats per token, [B, T], as a loss with gradient.

    Attributes:
        logprobs: [B, T], nats, of the policy; float64 for a KL term in the rewards.
        ref_logprobs: [B, T], nats, of the reference.
    """

    logprobs: Tensor
    ref_logprobs: Tensor


@dataclass(frozen=True, slots=True)
class AggregationInputs:
    """Of an aggregation, over some rows of an update: it returns their share of the update's loss, a scalar.
    The shares of any split of the rows must add up to that of all rows.

    Attributes:
        token_losses: float32 [B, T]; 0 where masked.
        mask: bool [B, T], tokens that are trained.
        num_tokens: trained tokens of the whole update.
        num_sequences: sequences of the whole update that have a trained token.
        max_tokens: `sampling.max_new_tokens` of the step.
        sequence_tokens: int64 [B], trained tokens of the sequence of each row.
    """

    token_losses: Tensor
    mask: Tensor
    num_tokens: float
    num_sequences: float
    max_tokens: int
    sequence_tokens: Tensor
