"""What training made of the tokens of each sample, for people to look at: advantages, the policy's log-probs
when the sample was trained on, those of the reference.

A step's rows are dealt to ranks and put in another order; `TrainBatch.row_ids` says which sample a row is.
Ranks keep log-probs only of batches that have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_dist.types import Group, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Of one sample that was trained on. ``trainer_logprobs`` None: the step was not trained on."""

    advantages: np.ndarray  # float32 [C]
    ref_logprobs: np.ndarray | None = None  # float32 [C], nats; None: no KL term
    trainer_logprobs: np.ndarray | None = None  # float32 [C], nats, before its update

    def trained(self, logprobs: np.ndarray | None) -> TokenValues:
        return replace(self, trainer_logprobs=logprobs)


# By prompt uid and the sample's place in its group.
ValuesOfSamples = Mapping[tuple[str, int], TokenValues]


def values_of_rows(updates: Sequence[TrainBatch]) -> dict[int, TokenValues]:
    """By row id: of every row of ``updates`` of which something is trained."""
    return {row: values for update in updates for row, values in _of_rows(update)}


def by_sample(
    groups: Sequence[Group], values: Mapping[int, TokenValues], logprobs: Mapping[int, np.ndarray]
) -> ValuesOfSamples:
    """``values`` and the ranks' ``logprobs``, both by row id, as the values of the samples of ``groups``."""
    samples = [(group.prompt.uid, rollout.sample) for group in groups for rollout in group.rollouts]
    return {samples[row]: own.trained(logprobs.get(row)) for row, own in values.items()}


def _of_rows(update: TrainBatch) -> Iterator[tuple[int, TokenValues]]:
    assert update.row_ids is not None, "rows without ids are of no sample"
    reference = None if update.ref_logprobs is None else update.ref_logprobs.numpy()
    mask, advantages = update.loss_mask.numpy(), update.advantages.numpy()
    for i, row in enumerate(update.row_ids.tolist()):
        own = mask[i]
        if own.any():
            yield row, TokenValues(advantages[i][own], None if reference is None else reference[i][own])
