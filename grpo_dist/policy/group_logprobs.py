"""Log-probs of sampled groups under a frozen model: a reference, or a policy without its adapters.

Each group goes through the model alone: its numbers depend neither on other groups nor on the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_dist.batch.rows import context_ids, pad_rows, shared_tokens
from grpo_dist.batch.shared_prefixes import Prefixes
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.model import HeadOutputs
from grpo_dist.policy.packing import Layout
from grpo_dist.types import KeptTokens, Prompt, Rollout, Rows, TeacherLogprobs

SampledGroup = tuple[Prompt, Sequence[Rollout]]


@torch.no_grad()
def group_logprobs(
    forward: Callable[..., HeadOutputs],
    groups: Sequence[SampledGroup],
    micro: MicroBatches,
    *,
    top_k: int = 0,
    together: bool = False,
) -> list[list[TeacherLogprobs]]:
    """Return for each group the log-probs of the rows of its samples, float32 [C], nats; 0 for given tokens.

    Args:
        forward: as `TokenLogprobs.forward`.
        top_k: number of likeliest tokens per position to return, too.
        together: ``forward`` is collective: all ranks call it equally often.
    """

    def compute(layout: Layout) -> tuple[Tensor, ...]:
        values, *tops = (t for t in forward(layout, top_k=top_k) if t is not None)
        if not top_k:
            return (values,)
        # Move each micro-batch to the host: the top-k values are K times the size of the log-probs.
        host_layout = replace(layout, places=layout.places.cpu())
        return values.cpu(), *(host_layout.unpack_rows(t.cpu()) for t in tops)

    rows = [_rows(prompt, samples) for prompt, samples in groups]
    plan = [(group, chosen) for group, group_rows in enumerate(rows) for chosen in _plan(group_rows, micro)]
    out: list[list[Any]] = [[None] * len(group_rows) for group_rows in rows]
    # Before the first pass: under ZeRO-3 passes are collectives, and no other collective may interleave.
    further = micro.max_over_ranks(len(plan)) - len(plan) if together else 0
    values = [compute(_layout([rows[group][i] for i in chosen], micro)) for group, chosen in plan]
    for (group, chosen), outputs in zip(plan, values, strict=True):
        for i, parts in zip(chosen, zip(*(t.cpu().numpy() for t in outputs), strict=True), strict=True):
            row = rows[group][i]
            sampled_logprobs, *tops = (part[row.start : len(row.tokens)].copy() for part in parts)
            out[group][i] = TeacherLogprobs(sampled_logprobs, *tops)
    for _ in range(further):
        compute(_layout([_SampleRow(np.zeros(2, np.int32), 1, 1, None)], micro))
    return out


@dataclass(frozen=True, slots=True)
class _SampleRow:
    tokens: np.ndarray  # int32 [P + C]
    start: int  # P
    shared: int  # tokens shared with the other rows of the group
    sampled: np.ndarray | None  # bool [C]
    temperature: float | None = None  # the sample's
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
