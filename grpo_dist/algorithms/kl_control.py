"""Steering the weight of the KL term so that the KL stays near a target."""

from __future__ import annotations

_LARGEST_ERROR = 0.2  # of a single step, whatever the KL


def next_kl_coef(coef: float, kl: float, *, target: float, gain: float) -> float:
    """Return ``coef`` * (1 + gain * clip(kl / target - 1, -0.2, 0.2)), Ziegler et al. 2019, arXiv:1909.08593,
    section 2.2.

    Args:
        kl: measured, nats per token. NaN changes nothing.
        target: wanted, nats per token, above 0.
    """
    if kl != kl:
        return coef
    error = min(max(kl / target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
    return coef * (1.0 + gain * error)
