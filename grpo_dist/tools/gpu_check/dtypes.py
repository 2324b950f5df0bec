"""Bounds on differences that rounding explains."""

from __future__ import annotations

import math

import torch

# Largest relative error of rounding a number once.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_PER_LAYER = 24  # results that are rounded in a layer, forward and backward


def gradient_bound(dtype: str, *, layers: int, widest: int) -> tuple[float, str]:
    """Return the bound on the relative difference of two correct gradients, and why.

    Two computations round `_PER_LAYER` results in each of ``layers``, independently of each other. Sums are
    float32 in both dtypes: in bfloat16 only their results are rounded, in float32 each of the ``widest``
    terms, too.
    """
    each, results = ROUNDING[getattr(torch, dtype)], _PER_LAYER * layers
    if dtype == "float32":
        each *= math.sqrt(widest)
    why = f"two computations, {results} roundings each of {each:.1e}, independent"
    return 2 * math.sqrt(results) * each, why
