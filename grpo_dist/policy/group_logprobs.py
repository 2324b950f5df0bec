"""Log-probs of sampled groups under a model that stays as it is: a reference, or a policy without adapters.

Each group goes through the model alone: its numbers depend neither on other groups nor on who computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_dist.batch.rows import pad_rows
from grpo_dist.policy.micro_batches import MicroBatches
from grpo_dist.policy.packing import Layout
from grpo_dist.types import Prompt, Rollout, Rows

SampledGroup = tuple[Prompt, Sequence[Rollout]]


@torch.no_grad()
def group_logprobs(
    forward: Callable[[Layout], Tensor],
    groups: Sequence[SampledGroup],
    micro: MicroBatches,
    *,
    together: bool = False,
) -> list[list[np.ndarray]]:
    """Return for each group the log-probs of its samples, float32 [C], nats.

    Args:
        forward: float32 [B, T] of a layout, 0 where nothing is wanted.
        together: ``forward`` is a collective, which all ranks call equally often.
    """
    plan = [
        (own, rows) for own, (prompt, samples) in enumerate(groups) for rows in _plan(prompt, samples, micro)
    ]
    out = [[np.empty(0, np.float32)] * len(samples) for _, samples in groups]
    for own, chosen in plan:
        prompt, samples = groups[own]
        start = len(prompt.token_ids)
        rows = [np.concatenate([prompt.token_ids, samples[i].completion_ids]) for i in chosen]
        values = forward(_layout(rows, start, micro)).cpu().numpy()
        for i, row, value in zip(chosen, rows, values, strict=True):
            out[own][i] = value[start : len(row)].copy()
    for _ in range(micro.most_of_all(len(plan)) - len(plan) if together else 0):
        forward(_layout([np.zeros(2, np.int32)], 1, micro))
    return out


def _plan(prompt: Prompt, samples: Sequence[Rollout], micro: MicroBatches) -> list[list[int]]:
    start = len(prompt.token_ids)
    lengths = [start + len(sample.completion_ids) for sample in samples]
    return micro.split(lengths, [0] * len(lengths), [start] * len(lengths))


def _layout(rows: Sequence[np.ndarray], prompt: int, micro: MicroBatches) -> Layout:
    tokens, wanted = (t.to(micro.device) for t in pad_rows(rows, [prompt] * len(rows)))
    lengths = torch.tensor([len(row) for row in rows])
    group = torch.zeros(len(rows), dtype=torch.long), torch.full((len(rows),), prompt)
    return micro.layout(Rows(tokens, lengths, wanted, *group))
