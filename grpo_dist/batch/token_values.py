"""Per-token values of each trained sample, for the run's records: advantages, the policy's log-probs when it
trained on the sample, and the reference's.

Rows are dealt to ranks in another order than samples; `TrainBatch.row_ids` is the row of the step that each
is. Ranks know values of trained tokens alone; in the records given tokens have 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from grpo_dist.types import FurtherRow, Group, Rollout, TrainBatch, of_sampled


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of one sample in a step's batch, those of tokens for its first row. Some steps record more than
    ``advantage``; ``trainer_logprobs`` None: the step was not trained on.
    """

    advantage: float  # mean over its trained tokens, of all rows
    advantages: np.ndarray | None = None  # float32 [C]
    ref_logprobs: np.ndarray | None = None  # float32 [C], nats; None: no KL term
    trainer_logprobs: np.ndarray | None = None  # float32 [C], nats, before its update
    further_rows: tuple[TokenValues | None, ...] = ()  # of an episode with more rows; None: not trained


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
    samples = [(group.prompt.uid, rollout) for group in groups for rollout in group.rollouts]
    scored = np.isfinite(np.concatenate([group.rewards for group in groups])).tolist()
    found: dict[tuple[str, int], TokenValues] = {}
    row_ids = count()
    for (uid, rollout), is_scored in zip(samples, scored, strict=True):
        rows = [(row, next(row_ids)) for row in rollout.rows]
        own = [_with_given(row, values[i], logprobs.get(i)) if i in values else None for row, i in rows]
        if any(own):
            found[uid, rollout.sample] = _of_sample(rollout, own)
        elif is_scored:
            found[uid, rollout.sample] = TokenValues(0.0)
    return found


def _with_given(row: Rollout | FurtherRow, values: TokenValues, logprobs: np.ndarray | None) -> TokenValues:
    """Return ``values`` and ``logprobs`` of sampled tokens for all tokens of ``row``, 0 for given ones."""

    def spread(own: np.ndarray | None) -> np.ndarray | None:
        if own is None or row.sampled is None:
            return own
        out = np.zeros(len(row.sampled), own.dtype)
        out[row.sampled] = own
        return out

    return TokenValues(
        values.advantage, spread(values.advantages), spread(values.ref_logprobs), spread(logprobs)
    )


def _of_sample(rollout: Rollout, rows: Sequence[TokenValues | None]) -> TokenValues:
    first = rows[0] or TokenValues(0.0)
    if len(rows) == 1:
        return first
    sizes = [len(of_sampled(row, row.completion_ids)) for row in rollout.rows]
    means = [0.0 if own is None else own.advantage for own in rows]
    return replace(first, advantage=float(np.dot(means, sizes) / sum(sizes)), further_rows=tuple(rows[1:]))


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
