"""Prefixes that rows share, which packed rows compute once.

Samples of a group share their prompt, and prompts share a prefix: a system prompt, worked examples. With
prompts sorted by their tokens, the longest prefix that a prompt shares with any earlier prompt is shared with
the one right before it:

    prompt    tokens        shared with the prompt before
    0         7 7 7 3 1
    1         7 7 7 3 5     4
    2         7 7 7 9       3

so the prompts of a step need no more tokens than their prefix tree has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from grpo_dist.types import Rows, TrainBatch

# Shorter prefixes save less than attention pays to gather them; a BOS token alone does not count.
_MIN_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Shared prefix of each row. Rows of a group with the same number of prompt tokens have the same prompt.

    ``begun``: tokens that the row's prompt shares with the previous group's prompt, in group order.
    """

    groups: list[int]
    prompts: list[int]
    begun: list[int]

    @classmethod
    def of_prompts(cls, groups: Sequence[int], prompts: Sequence[int]) -> Prefixes:
        """Return prefixes where rows share their group's prompt, and groups share nothing."""
        return cls(list(groups), list(prompts), [0] * len(groups))


def shared_prefixes(rows: Rows) -> Prefixes:
    """Return the prefixes that ``rows`` share. If prompts share any, groups are renumbered in the order of
    their prompts' tokens. Rows with routes share only their group's prompt: another group's prompt may use
    other experts.
    """
    prefixes = Prefixes.of_prompts(prompt_groups(rows), rows.prompt_lengths.tolist())
    return prefixes if rows.routes is not None else _sort_by_tokens(prefixes, rows.tokens.cpu().numpy())


def _sort_by_tokens(unordered: Prefixes, tokens: np.ndarray) -> Prefixes:
    prefixes, first, inverse = distinct_prefixes(unordered.groups, unordered.prompts)
    prompts = [tokens[row, :size] for row, size in zip(first, prefixes[1], strict=True)]
    order, begun = _sort_prompts(prompts)
    if not begun.any():
        return unordered
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return Prefixes(rank[inverse].tolist(), unordered.prompts, begun[inverse].tolist())


def prompt_groups(rows: Rows) -> list[int]:
    """Return group ids; rows with the same id share a computed prompt. Rows whose prompt used other experts
    get another id: the engine may have computed the prompt per sample, in batches that round differently.
    """
    groups, prompts = rows.group_ids.tolist(), rows.prompt_lengths.tolist()
    if rows.routes is None:
        return [int(group) for group in groups]
    ids: dict[tuple[int, int, bytes | None], int] = {}
    keys = (
        (group, prompt, None if route is None else route.digest(prompt))
        for group, prompt, route in zip(groups, prompts, rows.routes, strict=True)
    )
    return [ids.setdefault(key, len(ids)) for key in keys]


def needed_tokens(updates: Sequence[TrainBatch]) -> float:
    """Return the tokens of an update with shared prefixes counted once, the minimum for packed rows: the mean
    over updates that train on anything.
    """
    trained = [update for update in updates if update.denominators.tokens] or updates
    return sum(map(_count_needed, trained)) / len(trained)


def _count_needed(rows: Rows) -> int:
    (_, sizes), first, _ = distinct_prefixes(rows.group_ids.tolist(), rows.prompt_lengths.tolist())
    tokens = rows.tokens.cpu().numpy()
    prompts = [tokens[row, :size] for row, size in zip(first, sizes, strict=True)]
    completions = int(rows.lengths.sum() - rows.prompt_lengths.sum())
    return completions + int(sizes.sum() - shared_prefix_lengths(prompts).sum())


def shared_prefix_lengths(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return how many tokens each prompt shares with an earlier one in token order, int64 [N]. A prefix too
    short to be worth sharing counts as 0.
    """
    return _sort_prompts(prompts)[1]


def _sort_prompts(prompts: Sequence[np.ndarray]) -> tuple[list[int], np.ndarray]:
    """Return the prompts' order by tokens, and how many tokens each shares with the one before it."""
    keys = [prompt.astype(">i4").tobytes() for prompt in prompts]  # big-endian bytes sort as tokens do
    order = sorted(range(len(keys)), key=keys.__getitem__)
    begun = np.zeros(len(order), np.int64)
    for before, this in pairwise(order):
        begun[this] = common_length(prompts[before], prompts[this])
    begun[begun < _MIN_TOKENS] = 0
    return order, begun


def distinct_prefixes(
    groups: Sequence[int] | np.ndarray, prompts: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct pairs of group and prompt length [2, N], the first row of each, and the pair of
    each row.
    """
    pairs = np.array([groups, prompts], np.int64)
    factor = int(pairs[1].max(initial=0)) + 1  # numpy sorts numbers ten times faster than pairs
    keys, first, inverse = np.unique(pairs[0] * factor + pairs[1], return_index=True, return_inverse=True)
    return np.array(divmod(keys, factor)), first, inverse.reshape(-1)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix."""
    size = min(len(a), len(b))
    other = a[:size] != b[:size]
    return int(other.argmax()) if other.any() else size
