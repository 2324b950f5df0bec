"""From scored groups to padded rows with fixed denominators, and to the updates of a step.

    prompt [7 8 9], completion [4 5 2]   tokens     7 8 9 4 5 2
                                         loss_mask  . . . x x x     the EOS a model produced (2) is trained

A sample that could not be scored (its reward is not finite) stays in the batch as a row with an empty mask:
it adds to no loss, no KL term and no denominator. So does a sample with a token whose log-prob the engine
gave as NaN or infinite: its sampling distribution is unknown. Its reward still counts in its group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from grpo_dist.types import Group, Rollout, TrainBatch


def make_batch(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    *,
    ref_logprobs: Sequence[np.ndarray] | None,
    max_new_tokens: int,
    mask_truncated: bool = False,
) -> TrainBatch:
    """Make one right-padded row per sample, group after group.

    Args:
        advantages: [G] for each group; the batch's have their type.
        ref_logprobs: float32 [C] for each sample in row order, or None when there is no KL term.
        max_new_tokens: longest completion that could have been sampled.
        mask_truncated: train nothing of a completion that was cut at ``max_new_tokens``; its reward still
            counts in its group (DAPO's overlong filtering, arXiv:2503.14476, section 3.4).
    """
    samples = [r for g in groups for r in g.rollouts]
    sizes = [len(g.rollouts) for g in groups]
    starts = np.repeat([len(g.prompt.token_ids) for g in groups], sizes)
    lengths = starts + np.fromiter((len(r.completion_ids) for r in samples), np.int64, len(samples))
    # Allocated and filled by numpy: torch pays for every fresh page, and a call for each row.
    tokens = np.zeros((len(samples), int(lengths.max())), np.int64)
    for group, first in zip(groups, np.cumsum([0, *sizes]).tolist(), strict=False):
        tokens[first : first + len(group.rollouts), : len(group.prompt.token_ids)] = group.prompt.token_ids
    _fill(tokens, starts, lengths, [r.completion_ids for r in samples])
    trained = np.isfinite(np.concatenate([g.rewards for g in groups]))
    trained &= np.fromiter(map(has_logprobs, samples), bool, len(samples))
    if mask_truncated:
        trained &= np.array([r.finish_reason != "length" for r in samples])
    column = np.arange(tokens.shape[1])
    loss_mask = (column >= starts[:, None]) & (column < np.where(trained, lengths, 0)[:, None])
    advantage = np.where(loss_mask, np.concatenate(list(advantages))[:, None], 0)
    rollout = np.zeros(tokens.shape, np.float32)
    _fill(rollout, starts, lengths, [r.logprobs for r in samples], trained)
    reference = None if ref_logprobs is None else np.zeros(tokens.shape, np.float32)
    if reference is not None and ref_logprobs is not None:
        _fill(reference, starts, lengths, ref_logprobs, trained)
    return TrainBatch(
        tokens=torch.from_numpy(tokens),
        lengths=torch.from_numpy(lengths),
        loss_mask=torch.from_numpy(loss_mask),
        advantages=torch.from_numpy(advantage),
        rollout_logprobs=torch.from_numpy(rollout),
        ref_logprobs=None if reference is None else torch.from_numpy(reference),
        row_ids=torch.arange(len(samples)),
        max_tokens=max_new_tokens,
        group_ids=torch.from_numpy(np.repeat(np.arange(len(groups)), sizes)),
        prompt_lengths=torch.from_numpy(starts),
        **_denominators(torch.from_numpy(loss_mask)),
    )


def has_logprobs(rollout: Rollout) -> bool:
    """Return whether the engine gave a finite log-prob for every token of the sample."""
    return bool(np.isfinite(rollout.logprobs).all())


def _fill(
    out: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    values: Sequence[np.ndarray],
    wanted: np.ndarray | None = None,
) -> None:
    """Write ``values[i]`` into ``out[i]`` from ``starts[i]`` to ``ends[i]``, for the rows ``wanted``."""
    rows = range(len(values)) if wanted is None else np.flatnonzero(wanted).tolist()
    begin, end = starts.tolist(), ends.tolist()
    for i in rows:
        out[i, begin[i] : end[i]] = values[i]


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids with 0 on the right: int64 [B, T]; and bool [B, T], True from ``starts`` to each
    row's end.
    """
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = torch.as_tensor(row)
        mask[i, start : len(row)] = True
    return tokens, mask


def split_updates(batch: TrainBatch, *, num_groups: int, num_updates: int) -> list[TrainBatch]:
    """Split whole groups in order, as many to each optimiser update, each with denominators of its own."""
    if num_updates == 1:
        return [batch]
    assert num_groups % num_updates == 0 and len(batch) % num_groups == 0, (
        len(batch),
        num_groups,
        num_updates,
    )
    size = len(batch) // num_updates
    parts = [batch.select(list(range(i * size, (i + 1) * size))) for i in range(num_updates)]
    return [replace(part, **_denominators(part.loss_mask)) for part in parts]


def _denominators(mask: torch.Tensor) -> dict[str, Any]:
    trained = mask.numpy()  # counts booleans a hundred times faster
    return {"num_tokens": float(trained.sum()), "num_sequences": float(trained.any(axis=1).sum())}
