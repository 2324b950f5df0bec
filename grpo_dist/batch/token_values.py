"""Per-token values of each trained sample, for the run's records: advantages, the policy's log-probs when it
trained on the sample, and the reference's.

Rows are dealt to ranks in another order than samples; `TrainBatch.row_ids` says which sample a row is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_dist.types import Group, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of one sample in a step's batch. Some steps record more than ``advantage``; ``trainer_logprobs``
    None: the step was not trained on.
    """

    advantage: float  # mean over its tokens
    advantages: np.ndarray | None = None  # float32 [C]
    ref_logprobs: np.ndarray | None = None  # float32 [C], nats; None: no KL term
    trainer_logprobs: np.ndarray | None = None  # float32 [C], nats, before its update

    def trained(self, logprobs: np.ndarray | None) -> TokenValues:
        return replace(self, trainer_logprobs=logprobs)


# By prompt uid and the sample's index in its group.
ValuesOfSamples = Mapping[tuple[str, int], TokenValues]


def values_of_rows(updates: Sequence[TrainBatch], *, tokens: bool) -> dict[int, TokenValues]:
    """Return the values of every row of ``updates`` with a trained token, by row id. ``tokens``: include
    those of each token.
    """
    return {row: values for update in updates for row, values in _of_rows(update, tokens)}


def has_tokens(values: ValuesOfSamples | None) -> bool:
    """Return whether ``values`` belong to a step whose tokens are recorded."""
    return any(own.advantages is not None for own in (values or {}).values())


def by_sample(
    groups: Sequence[Group], values: Mapping[int, TokenValues], logprobs: Mapping[int, np.ndarray]
) -> ValuesOfSamples:
    """Return ``values`` with the ranks' ``logprobs``, both by row id, for the samples of ``groups``. A scored
    sample that no update has gets advantage 0.
    """
    samples = [(group.prompt.uid, rollout.sample) for group in groups for rollout in group.rollouts]
    scored = np.isfinite(np.concatenate([group.rewards for group in groups])).tolist()
    found = {sample: TokenValues(0.0) for sample, is_scored in zip(samples, scored, strict=True) if is_scored}
    return found | {samples[row]: own.trained(logprobs.get(row)) for row, own in values.items()}


def _of_rows(update: TrainBatch, tokens: bool) -> Iterator[tuple[int, TokenValues]]:
    reference = None if update.ref_logprobs is None else update.ref_logprobs.numpy()
    mask, advantages = update.loss_mask.numpy(), update.advantages.numpy()
    for i, row in enumerate(update.row_ids.tolist()):  # row by row: a step is hundreds of megabytes
        own = mask[i]
        if not own.any():
            continue
        trained = advantages[i][own]
        mean = float(trained.mean(dtype=np.float64))
        known = None if reference is None or not tokens else reference[i][own]
        yield row, TokenValues(mean, trained if tokens else None, known)
