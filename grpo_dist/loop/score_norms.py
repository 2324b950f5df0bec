"""What an estimator reads of the policy: the score norms of a step's tokens, before the update.

staging | batch k ready -> | rows, without advantages | -> advantages, padding, rows dealt to ranks
policy                     | one forward pass        |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.batch.rows import make_batch
from grpo_dist.types import Group
from grpo_dist.workers import PolicyHandle


async def score_norms_of(policy: PolicyHandle, groups: Sequence[Group]) -> Float[Tensor, "B T"]:
    """Return the score norms of all sampled tokens of ``groups`` under the weights of ``policy``, for the
    rows of `make_batch`; 0 for other tokens. They do not depend on rewards, which `rewards.shuffle` deals
    again: a sample that could not be scored has its own, too.
    """
    none = [np.zeros(len(group.rewards), np.float32) for group in groups]
    groups = [replace(group, rewards=rewards) for group, rewards in zip(groups, none, strict=True)]
    batch = await asyncio.to_thread(make_batch, groups, none, ref_logprobs=None, max_new_tokens=1)
    norms_by_row = await policy.score_norms(batch)
    norms = torch.zeros(batch.tokens.shape)
    for row, values in norms_by_row.items():
        norms[row, batch.policy.mask[row]] = torch.tensor(values)  # a copy: Ray gives arrays read-only
    return norms
