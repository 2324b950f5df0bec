"""Assignment of rows to ranks by cost, and micro-batches filled to a token budget.

No plan changes a gradient: denominators cover the whole update. Samples of a group share their prompt when
they are computed together (`packing`), so a plan weighs even loads against whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from itertools import accumulate

import numpy as np

from grpo_dist.batch.shared_prefixes import Prefixes, distinct_prefixes, prompt_groups
from grpo_dist.types import TrainBatch

# Attention sees every row with its own copy of the prompt. Its queries, keys, values and outputs are about a
# quarter of what a token takes in a layer, so rows of this many times the budget take as much memory again.
ATTENDED = 4
# Metric: tokens that go through the model in an update, over all ranks.
COMPUTED_TOKENS = "throughput/computed_tokens"


def rows_of_ranks(batch: TrainBatch, ranks: int, *, square: float = 0.0) -> list[list[int]]:
    """Deal rows to ranks with balanced cost; return each rank's rows, in order.

    Takes the better of two plans: longest row first to the least loaded rank, which evens out long rows; or
    contiguous runs of rows, which keeps groups together. Deterministic. With fewer rows than ranks, some
    ranks get none.

    Args:
        square: extra cost of a token for each token before it (attention), as a share of its own cost.
    """
    lengths, prompts = batch.lengths.tolist(), batch.prompt_lengths.numpy()
    costs = [length + square * length**2 for length in lengths]
    (_, sizes), _, prefixes = distinct_prefixes(prompt_groups(batch), prompts)

    def load(rows: list[int]) -> float:
        repeated = prompts[rows].sum() - sizes[np.unique(prefixes[rows])].sum() if rows else 0
        return sum(map(costs.__getitem__, rows)) - int(repeated)

    plans = [_plan_greedily(costs, ranks), _plan_runs(costs, ranks)]
    best = min(plans, key=lambda plan: max(map(load, plan)))
    return [sorted(rows) for rows in best]


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Plan padded rows: row indices of each micro-batch, longest rows first, so that rows * longest <=
    ``token_budget``.

        lengths [3, 9, 4, 8], budget 18 -> [[1, 3], [2, 0]]

    A row above the budget goes alone. Deterministic; every row once.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= token_budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def packed_micro_batches(lengths: Sequence[int], prefixes: Prefixes, token_budget: int) -> list[list[int]]:
    """Plan packed rows in group order: as few micro-batches as the budget allows, about equally full. Shared
    prompt tokens count once per micro-batch; the rows with their prompts are at most `ATTENDED` times the
    budget.

        lengths [5, 6, 4, 8], groups [0, 0, 1, 1], prompts of 3 tokens, budget 12 -> [[0, 1], [2, 3]]

    A row above the budget goes alone. Deterministic; every row once.
    """
    parts = _fill_budget(lengths, prefixes, token_budget)
    low, high = 1, token_budget  # binary search for the smallest budget that needs no more micro-batches
    while parts and low < high:
        middle = (low + high) // 2
        if len(_fill_budget(lengths, prefixes, middle)) <= len(parts):
            high = middle
        else:
            low = middle + 1
    return _fill_budget(lengths, prefixes, high)


def _fill_budget(lengths: Sequence[int], prefixes: Prefixes, budget: int) -> list[list[int]]:
    groups, prompts, begun = prefixes.groups, prefixes.prompts, prefixes.begun
    parts: list[list[int]] = []
    tokens = attended = 0
    inside: set[tuple[int, int]] = set()
    for row in sorted(range(len(lengths)), key=groups.__getitem__):
        prefix = groups[row], prompts[row]
        added = lengths[row] - (prompts[row] if prefix in inside else begun[row])
        if not parts or tokens + added > budget or attended + lengths[row] > ATTENDED * budget:
            parts.append([])
            tokens, added, attended, inside = 0, lengths[row], 0, set()
        parts[-1].append(row)
        tokens += added
        attended += lengths[row]
        inside.add(prefix)
    return parts


def _plan_greedily(costs: list[float], ranks: int) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0.0, 0, rank) for rank in range(ranks)]  # a heap of (cost so far, rows so far, rank)
    for row in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # ties in row order
        load, count, rank = least[0]
        rows[rank].append(row)
        heapreplace(least, (load + costs[row], count + 1, rank))
    return rows


def _plan_runs(costs: list[float], ranks: int) -> list[list[int]]:
    """Give each row to the rank whose equal share of the total cost contains the row's midpoint."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    total = sum(costs)
    for row, (cost, end) in enumerate(zip(costs, accumulate(costs), strict=True)):
        rows[min(int((end - cost / 2) / total * ranks), ranks - 1)].append(row)
    return rows
