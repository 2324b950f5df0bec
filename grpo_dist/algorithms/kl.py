"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens alone.

With d = log pi - log ref and tokens sampled from pi (Schulman 2020, "Approximating KL divergence"):

    d          0.5        -1         0
    k1         0.5        -1         0       unbiased, high variance, may be negative
    k2         0.125       0.5       0       biased, low variance; its gradient is that of the KL
    k3         0.1065307   0.7182818 0       unbiased, never negative
    k1+, k3+   as k1, k3                     the gradient of k2
    abs        0.5         1         0       not a divergence; the same slope at any distance

As terms of a loss k1 and k3 mislead: for tokens sampled from pi the expected gradient of k1 is 0, and that of
k3 is the gradient of KL(reference || policy). That of k2 is the gradient of KL(policy || reference); ``k1+``
and ``k3+`` are straight-through forms that report the unbiased value and have that gradient (Tang and Munos
2025, arXiv:2506.09477). In a reward there is no gradient, and k1 or k3 are the unbiased choice.

No gradient is clamped: a clamp makes it exactly 0 where the divergence is largest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_dist.algorithms.ratios import LOG_LIMIT, at_least_float32


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
    return _with_gradient_of(k1(logprobs, ref_logprobs), k2(logprobs, ref_logprobs))


def k3_straight_through(
    logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """exp(-d) - 1 + d with the gradient of k2, which grows with d instead of exp(-d).

    The value is held at that of d = -60, 1.1e26, before it overflows: the gradient is finite there, and an
    infinite value would have the trainer refuse the update. The gradient is not held.
    """
    value = k3(at_least_float32(logprobs).clamp(min=at_least_float32(ref_logprobs) - LOG_LIMIT), ref_logprobs)
    return _with_gradient_of(value, k2(logprobs, ref_logprobs))


def absolute(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """|d|, in nats, whose gradient is the sign of d, and 0 at d = 0: verl's ``abs``."""
    return _difference(logprobs, ref_logprobs).abs()


def _difference(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return at_least_float32(logprobs) - at_least_float32(ref_logprobs)


def _with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    return value.detach() + (other - other.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": k1_straight_through,
    "k3+": k3_straight_through,
    "abs": absolute,
}
