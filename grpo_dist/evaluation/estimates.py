"""Estimates from an evaluation's samples: pass@k and avg@n with standard errors over problems."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples is right.

    1 - C(n - c, k) / C(n, k), as a product that neither overflows nor cancels (Chen et al. 2021,
    arXiv:2107.03374, equation 1). With n = 4, c = 1: k = 1 gives 0.25, k = 2 gives 0.5, k = 4 gives 1. Needs
    k <= n.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_samples} samples")
    if num_samples - num_correct < k:
        return 1.0
    misses = np.arange(num_samples - num_correct + 1, num_samples + 1)
    return float(1.0 - np.prod(1.0 - k / misses))


def summarise(correct: Sequence[np.ndarray], ks: Sequence[int]) -> dict[str, float]:
    """``pass@k`` for each k, ``avg@n`` (n: samples per problem, when more than one), each with ``_stderr``.

    ``correct``: for each problem a float array [n] of 1 (right), 0 (wrong) or NaN (could not be scored). NaN
    samples are left out, and a problem with fewer than k scored samples is left out of pass@k. The standard
    error is that of the mean over problems: sample deviation / sqrt(problems). Nothing to estimate from gives
    NaN.
    """
    scored = [c[~np.isnan(c)] for c in correct]
    estimates = {f"pass@{k}": [pass_at_k(len(c), int(c.sum()), k) for c in scored if len(c) >= k] for k in ks}
    longest = max((len(c) for c in correct), default=0)
    if longest > 1:
        estimates[f"avg@{longest}"] = [float(c.mean()) for c in scored if len(c)]
    summary: dict[str, float] = {}
    for name, values in estimates.items():
        summary[name] = float(np.mean(values)) if values else float("nan")
        summary[f"{name}_stderr"] = (
            float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")
        )
    return summary
