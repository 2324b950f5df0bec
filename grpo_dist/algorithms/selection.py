"""Selection of tokens over a whole update: for clip_cov, kl_cov and `algorithm.top_entropy_share`.

Cui et al. 2025, "The entropy mechanism of reinforcement learning" (arXiv:2505.22617): entropy falls by the
covariance of log-probs and advantages over the tokens of an update, and few tokens have most of it.

    cov_t = (A_t - mean of A) (log pi_t - mean of log pi)      means over all tokens of the update
    clip_cov   tokens with cov between `cov_low` and `cov_high`, a share of all, at random: no policy loss
    kl_cov     the share of tokens with the largest cov: a penalty |log pi - log pi_old| on them

Means and selection cover the whole update, so that no split of its rows changes them: the caller sums over
all ranks, and passes the means to `token_covariances` and the threshold of `lowest` to `up_to`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_dist.algorithms.ratios import TokenMask, TokenValues

_MIX = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's constants, as int64


def token_covariances(
    logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    mean_logprob: float, mean_advantage: float,
) -> TokenValues:  # fmt: skip
    """Return (A - mean_advantage) (log pi - mean_logprob), float64; -inf where masked."""
    products = (advantages.double() - mean_advantage) * (logprobs.double() - mean_logprob)
    return torch.where(mask, products, -torch.inf)


def random_keys(ids: Int[Tensor, "*shape"], seed: int) -> Float[Tensor, "*shape"]:
    """Return a number in [0, 1) for each of ``ids``, float64, by splitmix64 from id and ``seed`` alone, so
    that choosing the smallest does not depend on which rank has which rows.
    """
    x = ids + torch.tensor(seed + 1, device=ids.device) * _MIX[0]
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 11) & ((1 << 53) - 1)).double() / 2.0**53


def lowest(values: Float[Tensor, " N"], ids: Int[Tensor, " N"], count: int) -> tuple[float, int]:
    """Return the last of the ``count`` smallest (value, id) pairs; of equal values the smaller id is first.

    Returns (-inf, -1), below every pair, if there are no pairs or ``count`` is 0.
    """
    count = min(count, len(values))
    if not count:
        return -float("inf"), -1
    by_id = ids.argsort()
    order = by_id[values[by_id].argsort(stable=True)]
    last = order[count - 1]
    return float(values[last]), int(ids[last])


def up_to(
    values: Float[Tensor, "*shape"], ids: Int[Tensor, "*shape"], last: tuple[float, int]
) -> Bool[Tensor, "*shape"]:
    """Return which (value, id) pairs are at most ``last``, in the order of `lowest`."""
    value, identity = last
    return (values < value) | ((values == value) & (ids <= identity))
