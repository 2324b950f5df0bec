"""Divergences of a policy from a teacher of whose distribution the K likeliest tokens are known.

These tokens and "any other" are K + 1 events. With p of the teacher and q of the policy over them:

    reverse          KL(q || p) = sum of q log(q / p)      q avoids what p finds unlikely
    forward          KL(p || q) = sum of p log(p / q)      q covers what p finds likely
    jensen_shannon   (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2; at most log 2

As divergences of these events they are not negative, 0 where p and q agree on all of them, and not above
those of the whole distributions, which they are with K = V. Over the K tokens alone, without "any other", the
sums may be negative, and renormalised to 1 they do not see what the policy gives to all other tokens.
(Agarwal et al. 2024, arXiv:2306.13649, over the whole vocabulary.)

With log-probs in float32 the sum of K of them is known to about 1e-7, and so is what is left of 1. So a
probability of "any other" below 1e-5 counts as 1e-5, in its value and where its gradient divides by it: all
of the above holds to 1e-5, and the gradient of a policy that is surer than that of the K tokens falls to 0
with what it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.ratios import LOG_LIMIT, at_least_float32

TopValues = Float[Tensor, "... K"]
_LEAST_OTHER = 1e-5


def reverse(logprobs: TopValues, teacher_logprobs: TopValues) -> Float[Tensor, ...]:
    """KL(policy || teacher), in nats, from their log-probs of the teacher's K likeliest tokens."""
    q, p = _events(logprobs, teacher_logprobs)
    return (q.exp() * (q - p)).sum(dim=-1)


def forward(logprobs: TopValues, teacher_logprobs: TopValues) -> Float[Tensor, ...]:
    """KL(teacher || policy), in nats; arguments as for `reverse`."""
    q, p = _events(logprobs, teacher_logprobs)
    return (p.exp() * (p - q)).sum(dim=-1)


def jensen_shannon(logprobs: TopValues, teacher_logprobs: TopValues) -> Float[Tensor, ...]:
    """The Jensen-Shannon divergence, in nats; arguments as for `reverse`."""
    q, p = _events(logprobs, teacher_logprobs)
    middle = torch.logaddexp(q, p) - math.log(2)
    return (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(dim=-1) / 2


def _events(logprobs: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of the K + 1 events under the policy and the teacher."""
    return _with_other(at_least_float32(logprobs)), _with_other(at_least_float32(teacher_logprobs))


def _with_other(logprobs: Tensor) -> Tensor:
    logprobs = logprobs.masked_fill(logprobs == -torch.inf, -LOG_LIMIT)  # a token that is ruled out
    rest = 1 - logprobs.exp().sum(dim=-1, keepdim=True)
    known = rest.detach().clamp(min=_LEAST_OTHER)
    return torch.cat([logprobs, known.log() + (rest - rest.detach()) / known], dim=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse": reverse,
    "forward": forward,
    "jensen_shannon": jensen_shannon,
}
