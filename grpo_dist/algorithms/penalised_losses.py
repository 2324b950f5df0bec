"""Policy losses without a ratio: log-likelihood weighted by the advantage, and a squared log-ratio that holds
the policy near the one that sampled.

              penalty of a token             gradient of the penalty at a token
    dro       beta / 2 * d_t^2               beta * d_t
    kimi15    tau / 2 * D * d_t              tau * D          with D the sum of d over the sequence

d = log pi - log pi_old. Both are meant for samples that are not from the policy's own distribution: no
importance ratio is in them, and so nothing is ever clipped.
"""

from __future__ import annotations

from grpo_dist.algorithms.ratios import masked_inputs, masked_logprobs, ratio_stats
from grpo_dist.algorithms.shapes import LossAndStats, Number, TokenMask, TokenValues


def dro(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    beta: Number = 0.1,
) -> LossAndStats:  # fmt: skip
    """-A log pi + beta / 2 (log pi - log pi_old)^2, token by token.

    Direct reward optimisation (Richemond et al. 2024, arXiv:2405.19107) in the token form of Tinker and verl;
    with ``beta`` for tau it is also ROLL's ``kimi15``. The paper's value function is the group's mean here.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    losses = -advantages * masked_logprobs(logprobs, mask) + beta / 2 * log_ratio.square()
    return losses, ratio_stats(log_ratio, mask)


def kimi15(
    logprobs: TokenValues, old_logprobs: TokenValues, advantages: TokenValues, mask: TokenMask, *,
    tau: Number = 0.1,
) -> LossAndStats:  # fmt: skip
    """-A log pi + tau / 2 D^2 of the whole sequence, D = sum of log pi - log pi_old.

    Kimi k1.5 (Kimi team 2025, arXiv:2501.12599), equation 3, whose advantage is r - mean of the group
    (``advantage: dr_grpo``). D^2 / 2 is shared out as D d_t / 2, which adds up to it; the gradient at every
    token is tau D, as that of the square is. Its aggregation is ``seq-mean-token-sum``.
    """
    log_ratio, advantages = masked_inputs(logprobs, old_logprobs, advantages, mask)
    total = log_ratio.detach().sum(dim=1, keepdim=True)
    penalty = total * (log_ratio - log_ratio.detach() / 2)
    losses = -advantages * masked_logprobs(logprobs, mask) + tau * penalty
    return losses, ratio_stats(log_ratio, mask)
