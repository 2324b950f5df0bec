"""Which groups each optimiser update has, and those of later epochs over the same batch.

    epoch 1   update 1: groups 0 1     update 2: groups 2 3      in the order of the batch
    epoch 2   update 1: groups 3 0     update 2: groups 1 2      dealt again, `batch.shuffle_epochs`

Groups stay whole, so that rows share their prompt and an update's mean over prompts keeps its meaning. Who
deals is the driver, by a seed: all ranks have the same updates, however many they are. A rank regroups its
own rows; none moves to another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from grpo_dist.batch.rows import count_denominators
from grpo_dist.types import EpochUpdate, TrainBatch


def rows_of_updates(
    group_ids: np.ndarray, *, num_groups: int, num_updates: int, order: np.ndarray | None = None
) -> list[np.ndarray]:
    """Return the rows of each update: whole groups, as many to each, in ``order`` (of group ids; None: that
    of the ids).
    """
    assert num_groups % num_updates == 0, (num_groups, num_updates)
    place = np.arange(num_groups) if order is None else np.argsort(order)
    update_of = place[group_ids] // (num_groups // num_updates)
    return [np.flatnonzero(update_of == i) for i in range(num_updates)]


def redrawn(batch: TrainBatch, *, num_groups: int, num_updates: int, seed: int) -> list[EpochUpdate]:
    """Deal the groups of a whole step to the updates of an epoch; a function of ``seed``."""
    order = np.random.default_rng(seed).permutation(num_groups)
    dealt = rows_of_updates(
        batch.group_ids.numpy(), num_groups=num_groups, num_updates=num_updates, order=order
    )
    ids, batch = batch.row_ids.numpy(), batch.drop_candidates()
    return [EpochUpdate(ids[rows], count_denominators(batch.select(rows.tolist()))) for rows in dealt]


def with_rows_of(update: EpochUpdate, other: TrainBatch, *, first_row: int) -> EpochUpdate:
    """Return ``update`` with the demonstrations of ``other``: its rows from the id ``first_row`` on."""
    ids = other.row_ids.numpy()
    return EpochUpdate(
        np.concatenate([update.row_ids, ids[ids >= first_row]]),
        replace(update.denominators, demonstrated=other.denominators.demonstrated),
    )


def regrouped(batches: Sequence[TrainBatch], update: EpochUpdate) -> TrainBatch:
    """Return the rows of ``batches``, those of one rank, that belong to ``update``, in their order."""
    parts = [
        batch.select(np.flatnonzero(np.isin(batch.row_ids.numpy(), update.row_ids)).tolist())
        for batch in batches
    ]
    parts = [part for part in parts if len(part)] or parts[:1]
    joined = replace(TrainBatch.combine(parts, _join), denominators=update.denominators)
    routes, kept = (
        None
        if getattr(joined, name) is None
        else tuple(item for part in parts for item in getattr(part, name))
        for name in ("routes", "kept")
    )
    return replace(joined, routes=routes, kept=kept)


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts, those of tokens padded with 0 to the widest."""
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    behind = [0] * 2 * (parts[0].ndim - 2)  # `pad` begins with the last dimension
    pad = torch.nn.functional.pad
    return torch.cat([pad(part, (*behind, 0, width - part.shape[1])) for part in parts])
