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
    """Of one sample of a batch that was made to train on. More than ``advantage`` is known of some steps
    only; ``trainer_logprobs`` None: the step was not trained on.
    """

    advantage: float  # mean over its tokens
    advantages: np.ndarray | None = None  # float32 [C]
    ref_logprobs: np.ndarray | None = None  # float32 [C], nats; None: no KL term
    trainer_logprobs: np.ndarray | None = None  # float32 [C], nats, before its update

    def trained(self, logprobs: np.ndarray | None) -> TokenValues:
        return replace(self, trainer_logprobs=logprobs)


# By prompt uid and the sample's place in its group.
ValuesOfSamples = Mapping[tuple[str, int], TokenValues]


def values_of_rows(updates: Sequence[TrainBatch], *, tokens: bool) -> dict[int, TokenValues]:
    """By row id: of every row of ``updates`` of which something is trained. ``tokens``: of each of its
    tokens, too.
    """
    return {row: values for update in updates for row, values in _of_rows(update, tokens)}


def has_tokens(values: ValuesOfSamples | None) -> bool:
    """Whether they are of a step whose tokens are recorded."""
    return any(own.advantages is not None for own in (values or {}).values())


def by_sample(
    groups: Sequence[Group], values: Mapping[int, TokenValues], logprobs: Mapping[int, np.ndarray]
) -> ValuesOfSamples:
    """``values`` and the ranks' ``logprobs``, both by row id, as the values of the samples of ``groups``.
    A scored sample that no update has teaches nothing: its advantage is 0.
    """
    samples = [(group.prompt.uid, rollout.sample) for group in groups for rollout in group.rollouts]
    scored = np.isfinite(np.concatenate([group.rewards for group in groups])).tolist()
    found = {sample: TokenValues(0.0) for sample, is_scored in zip(samples, scored, strict=True) if is_scored}
    return found | {samples[row]: own.trained(logprobs.get(row)) for row, own in values.items()}


def _of_rows(update: TrainBatch, tokens: bool) -> Iterator[tuple[int, TokenValues]]:
    assert update.row_ids is not None, "rows without ids are of no sample"
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
