"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens alone.

With d = log pi - log ref and tokens sampled from pi (Schulman 2020, "Approximating KL divergence"):

    d          0.5        -1         0
    k1         0.5        -1         0       unbiased, high variance, may be negative
    k2         0.125       0.5       0       biased, low variance; its gradient is that of the KL
    k3         0.1065307   0.7182818 0       unbiased, never negative

None of them is clamped: a clamp makes the gradient exactly 0 where the divergence is largest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor


def k1(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """d, in nats."""
    return logprobs - ref_logprobs


def k2(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """d^2 / 2, in nats."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """exp(-d) - 1 + d, in nats; DeepSeekMath (arXiv:2402.03300), equation 4. ``expm1`` keeps it exact where d
    is tiny. In float32 it overflows to inf below d = -88, and the trainer refuses a loss that is not finite.
    """
    d = logprobs - ref_logprobs
    return torch.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
