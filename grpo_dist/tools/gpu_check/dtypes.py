"""Bounds on differences that rounding explains."""

from __future__ import annotations

import math

import torch

from grpo_dist.runtime.hardware import device_type
from grpo_dist.tools.gpu_check.lines import CheckTask

# Largest relative error of rounding a number once.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
_PER_LAYER = 24  # results that are rounded in a layer, forward and backward
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def forward_dtype(task: CheckTask) -> torch.dtype:
    """Return bfloat16, or in a rehearsal float32, which is what a CPU computes in."""
    return torch.float32 if device_type() == "cpu" else torch.bfloat16


def gradient_bound(dtype: str, *, layers: int, widest: int) -> tuple[float, str]:
    """Return the bound on the relative difference of two correct gradients, and why.

    Two computations round `_PER_LAYER` results in each of ``layers``, independently of each other. Sums are
    float32 in both dtypes: in bfloat16 only their results are rounded, in float32 each of the ``widest``
    terms, too.
    """
    each, results = ROUNDING[_DTYPES[dtype]], _PER_LAYER * layers
    if dtype == "float32":
        each *= math.sqrt(widest)
    why = f"two computations, {results} roundings each of {each:.1e}, independent"
    return 2 * math.sqrt(results) * each, why
