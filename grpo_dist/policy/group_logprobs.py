"""Log-probs of sampled groups under a model that stays as it is: a reference, or a policy without adapters.

Each group goes through the model alone: its numbers depend neither on other groups nor on who computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from grpo_dist.batch.rows import context_ids, pad_rows, shared_tokens
from grpo_dist.batch.shared_prefixes import Prefixes
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.packing import Layout
from grpo_dist.types import KeptTokens, Prompt, Rollout, Rows, TeacherLogprobs

SampledGroup = tuple[Prompt, Sequence[Rollout]]


@torch.no_grad()
def group_logprobs(
    forward: Callable[[Layout], Tensor],
    groups: Sequence[SampledGroup],
    micro: MicroBatches,
    *,
    together: bool = False,
) -> list[list[np.ndarray]]:
    """Return for each group the log-probs of the rows of its samples, float32 [C], nats; 0 for given tokens.

    Args:
        forward: float32 [B, T] of a layout, 0 where nothing is wanted.
        together: ``forward`` is a collective, which all ranks call equally often.
    """
    values_of_groups = _values_of_rows(lambda layout: (forward(layout),), groups, micro, together=together)
    return [[values for (values,) in group_values] for group_values in values_of_groups]


@torch.no_grad()
def group_top_logprobs(
    forward: Callable[[Layout], tuple[Tensor, Tensor, Tensor]],
    groups: Sequence[SampledGroup],
    micro: MicroBatches,
    *,
    together: bool = False,
) -> list[list[TeacherLogprobs]]:
    """Do as `group_logprobs`, with the likeliest tokens instead of each sampled one.

    ``forward``: of a layout log-probs [B, T], and likeliest tokens, int32, and their log-probs [M, K].
    """

    def on_host(layout: Layout) -> tuple[Tensor, ...]:
        # One micro-batch after the other: together they are K times as much as log-probs.
        values, *tops = (t.cpu() for t in forward(layout))
        there = replace(layout, places=layout.places.cpu())
        return values, *map(there.unpack_rows, tops)

    values_of_groups = _values_of_rows(on_host, groups, micro, together=together)
    return [[TeacherLogprobs(*row) for row in rows] for rows in values_of_groups]


def _values_of_rows(
    forward: Callable[[Layout], tuple[Tensor, ...]],
    groups: Sequence[SampledGroup],
    micro: MicroBatches,
    *,
    together: bool,
) -> list[list[tuple[np.ndarray, ...]]]:
    """Return for each group and each row of its samples what ``forward`` gives for its completion, each of
    the tensors [C, ...].
    """
    rows = [_rows(prompt, samples) for prompt, samples in groups]
    plan = [(group, chosen) for group, group_rows in enumerate(rows) for chosen in _plan(group_rows, micro)]
    out: list[list[tuple[np.ndarray, ...]]] = [[()] * len(group_rows) for group_rows in rows]
    # Before the first pass: under ZeRO-3 passes are collectives, which no other may come between.
    further = micro.max_over_ranks(len(plan)) - len(plan) if together else 0
    values = [forward(_layout([rows[group][i] for i in chosen], micro)) for group, chosen in plan]
    for (group, chosen), outputs in zip(plan, values, strict=True):
        for i, parts in zip(chosen, zip(*(t.cpu().numpy() for t in outputs), strict=True), strict=True):
            row = rows[group][i]
            out[group][i] = tuple(part[row.start : len(row.tokens)].copy() for part in parts)
    for _ in range(further):
        forward(_layout([_SampleRow(np.zeros(2, np.int32), 1, 1, None)], micro))
    return out


@dataclass(frozen=True, slots=True)
class _SampleRow:
    tokens: np.ndarray  # int32 [P + C]
    start: int  # P
    shared: int  # tokens that it shares with the other rows of its group
    sampled: np.ndarray | None  # bool [C]
    temperature: float | None = None  # of its sample
    kept: KeptTokens | None = None


def _rows(prompt: Prompt, samples: Sequence[Rollout]) -> list[_SampleRow]:
    out = []
    for owner, row in ((sample, row) for sample in samples for row in sample.rows):
        context = context_ids(prompt, row)
        tokens = np.concatenate([context, row.completion_ids])
        shared = shared_tokens(prompt, row)
        out.append(_SampleRow(tokens, len(context), shared, row.sampled, owner.temperature, row.kept))
    return out


def _plan(rows: Sequence[_SampleRow], micro: MicroBatches) -> list[list[int]]:
    prefixes = Prefixes.of_prompts([0] * len(rows), [row.shared for row in rows])
    return micro.split([len(row.tokens) for row in rows], prefixes)


def _layout(rows: Sequence[_SampleRow], micro: MicroBatches) -> Layout:
    tokens, wanted = pad_rows([row.tokens for row in rows], [row.start for row in rows])
    for i, row in enumerate(rows):
        if row.sampled is not None:
            wanted[i, row.start : len(row.tokens)] = torch.from_numpy(row.sampled.copy())
    lengths, shared = (torch.tensor(v) for v in ([len(r.tokens) for r in rows], [r.shared for r in rows]))
    group_ids = torch.zeros(len(rows), dtype=torch.long)
    row_temperatures = [row.temperature for row in rows if row.temperature is not None]
    temperatures = (
        torch.tensor(row_temperatures, dtype=torch.float64) if len(row_temperatures) == len(rows) else None
    )
    kept = tuple(row.kept for row in rows) if any(row.kept for row in rows) else None
    return micro.layout(Rows(tokens, lengths, group_ids, shared, temperatures, None, kept), wanted)
