"""Split of a rank's rows into micro-batches, and their layouts for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Bool
from torch import Tensor

from grpo_dist.batch.sharding import micro_batches, packed_micro_batches
from grpo_dist.batch.shared_prefixes import Prefixes, shared_prefixes
from grpo_dist.policy.attention import Kernel
from grpo_dist.policy.logit_mask import LogitMask
from grpo_dist.policy.packing import Layout, packed, padded
from grpo_dist.runtime.hardware import sent
from grpo_dist.types import Rows, TeacherStream, TrainBatch


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """``token_budget``: maximum tokens of a micro-batch. ``kernel``: attention over packed rows; None: rows
    are padded. ``multiple``: a packed stream has a multiple of this number of tokens.
    """

    token_budget: int
    kernel: Kernel | None
    multiple: int
    device: torch.device

    def plan(self, batch: TrainBatch) -> list[list[int]]:
        """Return the rows of each micro-batch, with equally many micro-batches on every rank: under ZeRO-2
        and 3 each is a collective. Collective.
        """
        plan = self.split(batch.lengths.tolist(), shared_prefixes(batch))
        return plan + [[] for _ in range(self.max_over_ranks(len(plan)) - len(plan))]

    def split(self, lengths: list[int], prefixes: Prefixes) -> list[list[int]]:
        """Return the rows of each micro-batch, for rows of these lengths that share ``prefixes``."""
        if self.kernel is None:
            return micro_batches(lengths, self.token_budget)
        return packed_micro_batches(lengths, prefixes, self.token_budget)

    def max_over_ranks(self, value: int) -> int:
        """Return the greatest ``value`` of all ranks. Collective."""
        count = torch.tensor(value, device=self.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)  # bounded: the process group has a deadline
        return int(count)

    def part(self, batch: TrainBatch, rows: list[int]) -> TrainBatch:
        """Return these rows, in host memory. Without rows: a blank row, which adds nothing to the loss."""
        return batch.select(rows) if rows else _blank(batch)

    def layout(self, rows: Rows, wanted: Bool[Tensor, "B T"], teacher: TeacherStream | None = None) -> Layout:
        """Return the layout, on the device, of ``rows`` in host memory. ``wanted``: tokens whose log-probs
        are wanted, with ``teacher`` also the log-probs of its likeliest tokens there.
        """
        if self.kernel is None:
            how = rows.temperatures, rows.routes, teacher
            layout = padded(rows.tokens, wanted, *how, device=self.device)
        else:
            layout = packed(rows, wanted, self.kernel, teacher, multiple=self.multiple, device=self.device)
        if not any(rows.kept or ()):
            return layout
        return replace(layout, mask=LogitMask.from_rows(rows, wanted, self.device))

    def move_to_device(self, part: TrainBatch) -> TrainBatch:
        """Return ``part`` on the device, without fields that only its layout needs."""
        return part.drop_candidates().map_tensors(lambda values: sent(values, self.device))


def values_by_row(
    batch: TrainBatch, plan: Sequence[Sequence[int]], values: Sequence[Tensor]
) -> dict[int, np.ndarray]:
    """Return the values of each row's trained tokens, float32 [C], by row id, in one transfer to the host.

    ``values``: [B, T] for each micro-batch of ``plan``, on the device; empty: {}.
    """
    if not values:
        return {}
    flat = torch.cat([tensor.flatten().float() for tensor in values]).cpu()
    by_row: dict[int, np.ndarray] = {}
    for rows, tensor, part in zip(
        plan, values, flat.split([tensor.numel() for tensor in values]), strict=True
    ):
        # A micro-batch without rows has one blank row.
        for row, value in zip(rows, part.view(tensor.shape), strict=False):
            by_row[int(batch.row_ids[row])] = value[batch.policy.mask[row, : len(value)]].numpy()
    return by_row


def _blank(batch: TrainBatch) -> TrainBatch:
    """Return a blank row: two masked tokens, of no sample."""
    row = batch.map_tensors(lambda v: v.new_zeros((1, 2, *v.shape[2:]) if v.ndim > 1 else (1,)))
    lengths, row_ids = torch.tensor([2]), torch.tensor([-1])
    return replace(row, lengths=lengths, row_ids=row_ids, temperatures=None, routes=None, kept=None)
