"""Fake records: one token whose value is the number of tokens it represents. The samples of a thousand GPUs
fit a small machine this way.

    prompt of 200 tokens, completion of 3,812  ->  token_ids [200], completion_ids [3812]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_dist.tools.plan.rates import UpdateWork
from grpo_dist.types import Group, Prompt, Rollout, TrainBatch

_LOGPROB = np.zeros(1, np.float32)


class PlannedRollout(Rollout):
    """A rollout whose one token represents ``num_tokens``."""

    __slots__ = ()

    @property
    def num_tokens(self) -> int:
        return int(self.completion_ids[0])


def prompts(count: int, tokens: int) -> list[Prompt]:
    ids = np.array([tokens], np.int32)
    return [Prompt(f"planned/{i}", ids, "", "planned") for i in range(count)]


def rollouts(uid: str, lengths: Sequence[int], version: int) -> tuple[Rollout, ...]:
    versions = np.array([version], np.int32)
    return tuple(
        PlannedRollout(uid, i, np.array([length], np.int32), _LOGPROB, "stop", "", versions)
        for i, length in enumerate(lengths)
    )


def group(prompt: Prompt, samples: tuple[Rollout, ...], *, signal: bool) -> Group:
    """Make a group in which every other sample is right; without ``signal``, all of them."""
    rewards = ((np.arange(len(samples)) % 2) | (not signal)).astype(np.float32)
    return Group(prompt, samples, rewards, {"planned": rewards}, ("correct",) * len(samples))


def tokens_of(samples: Sequence[Rollout]) -> tuple[int, ...]:
    return tuple(int(r.completion_ids[0]) for r in samples)


def work_of(
    batch: TrainBatch, shared_tokens: int, demonstrations: tuple[tuple[int, tuple[int, ...]], ...] = ()
) -> UpdateWork:
    """Return the lengths that the rows of ``batch`` represent. ``shared_tokens``: of all their prompts;
    ``demonstrations``: of the same update.
    """
    assert batch.group_ids is not None
    by_group: dict[int, list[list[int]]] = {}
    for number, row in zip(batch.group_ids.tolist(), batch.tokens.tolist(), strict=True):
        by_group.setdefault(number, []).append(row)
    groups = tuple((rows[0][0], tuple(row[1] for row in rows)) for rows in by_group.values())
    return UpdateWork(groups, shared_tokens, demonstrations)
