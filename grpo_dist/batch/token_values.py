"""Per-token values of each trained sample, for the run's records: advantages, the policy's log-probs when it
trained on the sample, and the reference's log-probs.

Ranks hold rows in another order than samples; `TrainBatch.row_ids` has each row's number in the step. Ranks
know only the values of trained tokens; the records have 0 for given tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_dist.types import FurtherRow, Group, Rollout, TrainBatch, select_sampled


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of one sample in a step's batch; token values are of its first row. Some steps record more than
    ``advantage``; ``trainer_logprobs`` None: the step was not trained on.
    """

    advantage: float  # mean over the trained tokens of all its rows
    advantages: np.ndarray | None = None  # float32 [C]
    ref_logprobs: np.ndarray | None = None  # float32 [C], nats; None: no KL term
    trainer_logprobs: np.ndarray | None = None  # float32 [C], nats, before its update
    further_rows: tuple[TokenValues | None, ...] = ()  # the episode's other rows; None: not trained


_NOT_TRAINED = TokenValues(0.0)
_ROWS = 256  # rows per block: a step is hundreds of megabytes, a block stays in a core's cache

# Keys: the prompt's uid, and the sample's index in its group.
ValuesOfSamples = Mapping[tuple[str, int], TokenValues]


def values_of_rows(updates: Sequence[TrainBatch], *, tokens: bool) -> dict[int, TokenValues]:
    """Return the values of every row of ``updates`` with a trained token, by row id. ``tokens``: include
    per-token values.
    """
    return {row: values for update in updates for row, values in _iterate_rows(update, tokens)}


def has_tokens(values: ValuesOfSamples | None) -> bool:
    """Return whether ``values`` belong to a step whose tokens are recorded."""
    return any(row_values.advantages is not None for row_values in (values or {}).values())


def by_sample(
    groups: Sequence[Group], values: Mapping[int, TokenValues], logprobs: Mapping[int, np.ndarray]
) -> ValuesOfSamples:
    """Return ``values`` with the ranks' ``logprobs``, both by row id, for the samples of ``groups``. A scored
    sample that is in no update gets advantage 0.
    """
    by_key: dict[tuple[str, int], TokenValues] = {}
    first = 0  # id of the sample's first row
    for group in groups:
        uid, scored = group.prompt.uid, np.isfinite(group.rewards).tolist()
        for rollout, is_scored in zip(group.rollouts, scored, strict=True):
            row_values, end = values.get(first), first + 1
            if further := rollout.further_rows:
                end += len(further)
                rows = zip(rollout.rows, range(first, end), strict=True)
                row_values = _merge_rows(
                    rollout, [_expand_to_row(row, values.get(i), logprobs.get(i)) for row, i in rows]
                )
            elif logprobs or rollout.sampled is not None:
                row_values = _expand_to_row(rollout, row_values, logprobs.get(first))
            if row_values is not None:
                by_key[uid, rollout.sample] = row_values
            elif is_scored:
                by_key[uid, rollout.sample] = _NOT_TRAINED
            first = end
    return by_key


def _expand_to_row(
    row: Rollout | FurtherRow, values: TokenValues | None, logprobs: np.ndarray | None
) -> TokenValues | None:
    """Expand ``values`` and ``logprobs`` of sampled tokens to all tokens of ``row``, with 0 for given tokens;
    return None without ``values``.
    """
    if values is None or (logprobs is None and row.sampled is None):
        return values

    def spread(sampled_values: np.ndarray | None) -> np.ndarray | None:
        if sampled_values is None or row.sampled is None:
            return sampled_values
        out = np.zeros(len(row.sampled), sampled_values.dtype)
        out[row.sampled] = sampled_values
        return out

    return TokenValues(
        values.advantage, spread(values.advantages), spread(values.ref_logprobs), spread(logprobs)
    )


def _merge_rows(rollout: Rollout, rows: Sequence[TokenValues | None]) -> TokenValues | None:
    if not any(rows):
        return None
    first = rows[0] or _NOT_TRAINED
    sizes = [len(select_sampled(row, row.completion_ids)) for row in rollout.rows]
    means = [0.0 if values_of_row is None else values_of_row.advantage for values_of_row in rows]
    return replace(first, advantage=float(np.dot(means, sizes) / sum(sizes)), further_rows=tuple(rows[1:]))


def _iterate_rows(update: TrainBatch, tokens: bool) -> Iterator[tuple[int, TokenValues]]:
    stream = update.policy
    reference = None if stream.ref_logprobs is None else stream.ref_logprobs.numpy()
    mask, advantages = stream.mask.numpy(), stream.advantages.numpy()
    row_ids = update.row_ids.tolist()
    shared: dict[float, TokenValues] = {}  # a group has few distinct advantages, and they recur
    for begin in range(0, len(mask), _ROWS):
        part = slice(begin, begin + _ROWS)
        means = _constants(mask[part], advantages[part])
        for i in np.flatnonzero(mask[part].any(axis=1)).tolist():
            row, row_mask, mean = row_ids[begin + i], mask[begin + i], means[i]
            if mean is not None and not tokens:
                if (values := shared.get(mean)) is None:
                    values = shared[mean] = TokenValues(mean)
                yield row, values
                continue
            trained = advantages[begin + i][row_mask]
            mean = float(trained.mean(dtype=np.float64)) if mean is None else mean
            ref_logprobs = None if reference is None or not tokens else reference[begin + i][row_mask]
            yield row, TokenValues(mean, trained if tokens else None, ref_logprobs)


def _constants(mask: np.ndarray, advantages: np.ndarray) -> list[float | None]:
    """Return each row's advantage if all its trained tokens share one, else None. It equals their mean to the
    last bit: a float32 times a token count is exact in float64.
    """
    first = advantages[np.arange(len(mask)), mask.argmax(axis=1)]
    same = ~((advantages != first[:, None]) & mask).any(axis=1) & ((first != 0) | ~np.signbit(first))
    return [value if is_same else None for value, is_same in zip(first.tolist(), same.tolist(), strict=True)]
