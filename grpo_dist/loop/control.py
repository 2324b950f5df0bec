"""The control experiment: rewards that have nothing to do with the samples they are given for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_dist.types import Group


def shuffle_rewards(groups: Sequence[Group], seed: int) -> list[Group]:
    """The same groups with all rewards of the step dealt out anew among their samples, a function of
    ``seed``.

    Their distribution stays, their meaning goes: whatever still improves does not come from the reward.
    """
    sizes = [len(g.rewards) for g in groups]
    dealt = np.random.default_rng(seed).permutation(np.concatenate([g.rewards for g in groups]))
    parts = np.split(dealt, np.cumsum(sizes)[:-1])
    return [replace(group, rewards=part) for group, part in zip(groups, parts, strict=True)]
