"""From scored groups to padded rows with fixed denominators, and every way a batch is split afterwards.

    prompt [7 8 9], completion [4 5 2]   tokens     7 8 9 4 5 2
                                         loss_mask  . . . x x x     the EOS a model produced (2) is trained

A sample that could not be scored (NaN) stays in the batch as a row with an empty mask: it adds to no loss, no
KL term and no denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from grpo_dist.types import Group, TrainBatch


def make_batch(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    *,
    ref_logprobs: Sequence[np.ndarray] | None,
    max_new_tokens: int,
    mask_truncated: bool = False,
) -> TrainBatch:
    """One right-padded row per sample, group after group.

    Args:
        advantages: [G] for each group.
        ref_logprobs: float32 [C] for each sample in row order, or None when there is no KL term.
        max_new_tokens: longest completion that could have been sampled.
        mask_truncated: train nothing of a completion that was cut at ``max_new_tokens``; its reward still
            counts in its group (DAPO's overlong filtering, arXiv:2503.14476, section 3.4).
    """
    members = [(index, i, r) for index, g in enumerate(groups) for i, r in enumerate(g.rollouts)]
    samples = [(groups[index], i, r) for index, i, r in members]
    rows = [np.concatenate([g.prompt.token_ids, r.completion_ids]) for g, _, r in samples]
    starts, lengths = [len(g.prompt.token_ids) for g, _, _ in samples], [len(row) for row in rows]
    tokens, loss_mask = pad_rows(rows, starts)
    advantage, rollout = (np.zeros(tokens.shape, np.float32) for _ in range(2))
    reference = None if ref_logprobs is None else np.zeros(tokens.shape, np.float32)
    flat = np.concatenate(list(advantages))
    for row, (group, i, sample) in enumerate(samples):
        start, end = starts[row], lengths[row]
        if np.isnan(group.rewards[i]) or (mask_truncated and sample.finish_reason == "length"):
            loss_mask[row] = False
            continue
        advantage[row, start:end] = flat[row]
        rollout[row, start:end] = sample.logprobs
        if reference is not None and ref_logprobs is not None:
            reference[row, start:end] = ref_logprobs[row]
    return TrainBatch(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        loss_mask=loss_mask,
        advantages=torch.from_numpy(advantage),
        rollout_logprobs=torch.from_numpy(rollout),
        ref_logprobs=None if reference is None else torch.from_numpy(reference),
        old_logprobs=None,
        max_tokens=max_new_tokens,
        group_ids=torch.tensor([g for g, _, _ in members]),
        prompt_lengths=torch.tensor(starts),
        **_denominators(loss_mask),
    )


def pad_rows(
    rows: Sequence[Sequence[int] | np.ndarray], starts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids, right-padded with 0: int64 [B, T]; and bool [B, T], True from ``starts`` to each
    row's end.
    """
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[i, : len(row)] = torch.as_tensor(row)
        mask[i, start : len(row)] = True
    return tokens, mask


def split_updates(batch: TrainBatch, *, num_groups: int, num_updates: int) -> list[TrainBatch]:
    """Whole groups in order, equally many to each optimiser update, each with denominators of its own."""
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
    return {"num_tokens": float(mask.sum()), "num_sequences": float(mask.any(dim=1).sum())}
