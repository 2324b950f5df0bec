"""Demonstrations in the batch of an update: rows of the cross-entropy stream, behind those of the samples.

sample          prompt [7 8], completion [4 2]      policy.mask   . . x x .
demonstration   prompt [7 9 9], completion [5 2]    demonstrated  . . . x x
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
    demonstration_rows = batch_of(groups, update.policy.max_tokens)
    above, rows, count = len(update), len(update) + len(demonstration_rows), len(demonstration_rows)
    width = max(update.tokens.shape[1], demonstration_rows.tokens.shape[1])

    def extend(values: Tensor) -> Tensor:
        """Add rows and padding of zeros."""
        out = values.new_zeros((rows, width, *values.shape[2:]) if values.ndim > 1 else (rows,))
        out[(slice(above), *(slice(size) for size in values.shape[1:]))] = values
        return out

    joined = update.map_tensors(extend)
    first_group = int(update.group_ids.max()) + 1
    joined.tokens[above:, : demonstration_rows.tokens.shape[1]] = demonstration_rows.tokens
    joined.lengths[above:] = demonstration_rows.lengths
    joined.group_ids[above:] = torch.arange(first_group, first_group + count)
    joined.row_ids[above:] = torch.arange(first_row, first_row + count)
    if joined.temperatures is not None:
        joined.temperatures[above:] = 1.0  # cross-entropy is that of the model itself
    demonstrated = torch.zeros(rows, width, dtype=torch.bool)
    demonstrated[above:, : demonstration_rows.tokens.shape[1]] = demonstration_rows.policy.mask
    return replace(
        joined,
        demonstrated=demonstrated,
        # No engine has sampled a demonstration.
        routes=None if update.routes is None else (*update.routes, *[None] * count),
        kept=None if update.kept is None else (*update.kept, *[None] * count),
        denominators=replace(update.denominators, demonstrated=demonstration_rows.denominators.tokens),
    )
