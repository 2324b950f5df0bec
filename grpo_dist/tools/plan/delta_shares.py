"""What a sync with `weight_sync.deltas` sends, as a share of the weights' bytes, by type and learning rate.

Measured by `python -m grpo_dist.tools.bench.weight_deltas`, see grpo_dist/guides/weight_deltas.md: AdamW,
random gradients. A changed word of 16 bits takes 2 bytes and a gap of one byte, sometimes two; a bucket of
which more than half would be sent is sent whole.

    float32     all        nearly every weight changes, in its lower half
    bfloat16    1e-6       1.9 % in the twelfth step
                1e-5       16 % in the sixth; the first is whole
"""

from __future__ import annotations

import numpy as np

from grpo_dist.config import OptimizerConfig, WeightSyncConfig

_BFLOAT16 = ((1e-6, 0.019), (1e-5, 0.16))  # learning rate, share


def delta_share(itemsize: int, lr: float) -> float:
    """Return the share of the bytes of weights of ``itemsize`` bytes each that changes take at ``lr``.

    Between the measured learning rates of bfloat16 it is interpolated, on logarithmic scales. Below them it
    is that of the lowest, and above all weights are sent.
    """
    rates, shares = zip(*_BFLOAT16, strict=True)
    if itemsize > 2 or lr > rates[-1] * (1 + 1e-9):
        return 1.0
    return float(np.exp(np.interp(np.log(lr), np.log(rates), np.log(shares))))


def delta_line(sync: WeightSyncConfig, optimizer: OptimizerConfig, itemsize: int) -> list[str]:
    """Describe the share that a plan assumes; [] without deltas."""
    if sync.deltas is not True:
        return []
    lr, share = optimizer.lr, delta_share(itemsize, optimizer.lr)
    kind = "float32" if itemsize > 2 else "bfloat16"
    if share < 1.0:
        what = f"{100 * share:.2g} % of the weights' bytes"
        why = f"{kind} at `policy.optimizer.lr` = {lr:g}, after the first steps"
    elif itemsize > 2:
        what, why = "all of the weights' bytes", f"in {kind} nearly every weight changes"
    else:
        what = "all of the weights' bytes"
        why = f"{kind} is measured up to 1e-5, `policy.optimizer.lr` = {lr:g}"
    return [f"assumed: `weight_sync.deltas` sends {what} ({why})"]
