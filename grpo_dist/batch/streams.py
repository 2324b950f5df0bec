"""Demonstrations in the batch of an update: rows of the cross-entropy stream, behind those of the samples.

sample          prompt [7 8], completion [4 2]      loss_mask     . . x x .
demonstration   prompt [7 9 9], completion [5 2]    demonstrated  . . . x x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.batch.rows import make_batch
from grpo_dist.types import Group, TrainBatch


def batch_of(groups: Sequence[Group], max_length: int) -> TrainBatch:
    """Make the batch of an update on demonstrations alone: a row for each, and the tokens of all completions
    as denominator.
    """
    ones = [np.ones(1, np.float32)] * len(groups)
    return make_batch(groups, ones, ref_logprobs=None, max_new_tokens=max_length)


def with_demonstrations(update: TrainBatch, groups: Sequence[Group], *, first_row: int) -> TrainBatch:
    """Return ``update`` with a row for each of ``groups``, demonstrations, for the cross-entropy alone.

    ``first_row``: id of the first of these rows, above those of all samples of the step.
    """
    own = batch_of(groups, update.max_tokens)
    samples = update.rows  # where groups are unknown, it names some
    count, first_group = len(own), int(samples.group_ids.max()) + 1
    own = replace(
        own,
        loss_mask=torch.zeros_like(own.loss_mask),
        advantages=torch.zeros_like(own.advantages),
        demonstrated=own.loss_mask,
        row_ids=torch.arange(first_row, first_row + count),
        group_ids=torch.arange(first_group, first_group + count),
        prompt_lengths=torch.zeros(count, dtype=torch.long),
        # Cross-entropy is that of the model itself, whatever its samples were drawn at.
        temperatures=None if update.temperatures is None else torch.ones(count, dtype=torch.float64),
    )
    update = replace(update, group_ids=samples.group_ids, prompt_lengths=samples.prompt_lengths)
    joined: dict[str, Any] = {}
    for f in fields(update):
        above, below = getattr(update, f.name), getattr(own, f.name)
        if isinstance(above, Tensor) or isinstance(below, Tensor):
            joined[f.name] = _stacked(above, below, update, own)
    if update.routes is not None:  # no engine has sampled a demonstration
        joined["routes"] = (*update.routes, *[None] * count)
    return replace(update, **joined, num_demonstrated=own.num_tokens)


def _stacked(above: Tensor | None, below: Tensor | None, first: TrainBatch, second: TrainBatch) -> Tensor:
    """Return the rows of both, padded with 0 to the same width; what one batch lacks is 0 in its rows."""
    known = above if above is not None else below
    assert known is not None
    rows, width = len(first) + len(second), max(first.tokens.shape[1], second.tokens.shape[1])
    out = known.new_zeros((rows, width, *known.shape[2:]) if known.ndim > 1 else (rows,))
    for part, start in ((above, 0), (below, len(first))):
        if part is not None:
            out[(slice(start, start + len(part)), *(slice(size) for size in part.shape[1:]))] = part
    return out
