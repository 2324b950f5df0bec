"""Divergences of a policy from a reference, from a teacher and from older weights.

KL_ESTIMATORS: per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens alone.

With d = log pi - log ref and tokens sampled from pi (Schulman 2020, "Approximating KL divergence"):

    d          0.5        -1         0
    k1         0.5        -1         0       unbiased, high variance, may be negative
    k2         0.125       0.5       0       biased, low variance; has the gradient of the KL
    k3         0.1065307   0.7182818 0       unbiased, never negative
    k1+, k3+   as k1, k3                     the gradient of k2
    abs        0.5         1         0       not a divergence; the same slope at any distance

As loss terms k1 and k3 mislead: for tokens sampled from pi, k1 has expected gradient 0, and k3 the gradient
of KL(reference || policy). k2 has the gradient of KL(policy || reference); ``k1+`` and ``k3+`` are
straight-through forms that report the unbiased value with k2's gradient (Tang and Munos 2025,
arXiv:2506.09477). In a reward there is no gradient, and k1 or k3 are the unbiased choice.

No gradient is clamped: a clamp makes it exactly 0 where the divergence is largest.

DIVERGENCES: divergences of a policy from a teacher, of which only the K likeliest tokens are known.

These tokens and "any other" are K + 1 events. With p the teacher's and q the policy's probabilities:

    reverse          KL(q || p) = sum of q log(q / p)      q avoids what p finds unlikely
    forward          KL(p || q) = sum of p log(p / q)      q covers what p finds likely
    jensen_shannon   (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2; at most log 2

They are non-negative, 0 where p and q agree, and at most the divergence of the full distributions, which they
equal at K = V. Without "any other", sums over the K tokens may be negative; renormalised to 1, they ignore
the probability that the policy gives to all other tokens. (Agarwal et al. 2024, arXiv:2306.13649, over the
whole vocabulary.)

With float32 log-probs, the sum of K probabilities and the remainder to 1 are accurate to about 1e-7. So a
probability of "any other" below 1e-5 counts as 1e-5, in its value and where its gradient divides by it. All
of the above then holds to 1e-5; where the policy leaves less than 1e-5, the gradient falls to 0 with the
remainder.

`binary_kl` and `total_variation` use only the sampled token, as a binary distribution: this token or any
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.ratios import LOG_LIMIT, TokenValues, at_least_float32

TopValues = Float[Tensor, "... K"]
_LEAST_OTHER_TOP = 1e-5
_LEAST_OTHER_BINARY = 1e-8  # least probability of "any other": float32 has none below 6e-8


def k1(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """d, in nats."""
    return _difference(logprobs, ref_logprobs)


def k2(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """d^2 / 2, in nats."""
    return _difference(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """exp(-d) - 1 + d, in nats; DeepSeekMath (arXiv:2402.03300), equation 4. ``expm1`` keeps it exact where d
    is tiny. In float32 it overflows to inf below d = -88, and the trainer refuses a loss that is not finite.
    """
    d = _difference(logprobs, ref_logprobs)
    return torch.expm1(-d) + d


def k1_straight_through(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """d with the gradient of k2, d grad log pi, which is unbiased for KL(policy || reference)."""
    return _straight_through(k1(logprobs, ref_logprobs), k2(logprobs, ref_logprobs))


def k3_straight_through(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """exp(-d) - 1 + d with the gradient of k2, which grows with d instead of exp(-d).

    The value is capped at its value for d = -60, 1.1e26, before it overflows: the gradient is finite there,
    and an infinite value would make the trainer refuse the update. The gradient is not capped.
    """
    value = k3(at_least_float32(logprobs).clamp(min=at_least_float32(ref_logprobs) - LOG_LIMIT), ref_logprobs)
    return _straight_through(value, k2(logprobs, ref_logprobs))


def absolute(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """|d|, in nats, whose gradient is the sign of d, and 0 at d = 0: verl's ``abs``."""
    return _difference(logprobs, ref_logprobs).abs()


def _difference(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return at_least_float32(logprobs) - at_least_float32(ref_logprobs)


def _straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    return value.detach() + (surrogate - surrogate.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": k1_straight_through,
    "k3+": k3_straight_through,
    "abs": absolute,
}


def reverse(logprobs: TopValues, teacher_logprobs: TopValues) -> Float[Tensor, ...]:
    """Return KL(policy || teacher), in nats, from both log-probs of the teacher's K likeliest tokens."""
    q, p = _events(logprobs, teacher_logprobs)
    return (q.exp() * (q - p)).sum(dim=-1)


def forward(logprobs: TopValues, teacher_logprobs: TopValues) -> Float[Tensor, ...]:
    """Return KL(teacher || policy), in nats; arguments as for `reverse`."""
    q, p = _events(logprobs, teacher_logprobs)
    return (p.exp() * (p - q)).sum(dim=-1)


def jensen_shannon(logprobs: TopValues, teacher_logprobs: TopValues) -> Float[Tensor, ...]:
    """Return the Jensen-Shannon divergence, in nats; arguments as for `reverse`."""
    q, p = _events(logprobs, teacher_logprobs)
    middle = torch.logaddexp(q, p) - math.log(2)
    return (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(dim=-1) / 2


def _events(logprobs: Tensor, teacher_logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs of the K + 1 events under the policy and the teacher."""
    return _append_other(at_least_float32(logprobs)), _append_other(at_least_float32(teacher_logprobs))


def _append_other(logprobs: Tensor) -> Tensor:
    logprobs = logprobs.masked_fill(logprobs == -torch.inf, -LOG_LIMIT)  # tokens that are ruled out
    rest = 1 - logprobs.exp().sum(dim=-1, keepdim=True)
    lower_bound = rest.detach().clamp(min=_LEAST_OTHER_TOP)
    return torch.cat([logprobs, lower_bound.log() + (rest - rest.detach()) / lower_bound], dim=-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse": reverse,
    "forward": forward,
    "jensen_shannon": jensen_shannon,
}


def binary_kl(old_logprobs: TokenValues, new_logprobs: TokenValues) -> TokenValues:
    """Return KL(old, new), in nats, of the distributions over "this token" and "any other".

    p log(p / q) + (1 - p) log((1 - p) / (1 - q)) with p = exp(old), q = exp(new). 1 - p and 1 - q are at
    least 1e-8, so that the value is finite for a certain token.
    """
    old, new = at_least_float32(old_logprobs), at_least_float32(new_logprobs)
    other_old, other_new = _log_complement(old), _log_complement(new)
    return old.exp() * (old - new) + other_old.exp() * (other_old - other_new)


def total_variation(old_logprobs: TokenValues, new_logprobs: TokenValues) -> TokenValues:
    """Return |exp(new) - exp(old)|, the total variation between the same binary distributions."""
    return (at_least_float32(new_logprobs).exp() - at_least_float32(old_logprobs).exp()).abs()


def _log_complement(logprobs: TokenValues) -> TokenValues:
    return torch.log(-torch.expm1(logprobs.clamp(max=-_LEAST_OTHER_BINARY)))
