"""A step of DeepSpeed that is not made although its gradient is finite.

DeepSpeed itself gives up a step whose gradient norm is not a number, on all ranks and with everything
cleared, whatever the ZeRO stage and wherever its states are. A gate makes it none where a step is refused.
"""

from __future__ import annotations

import math
import sys
from typing import Any

# What measures the norm in a step of each of DeepSpeed's optimizers: a method of it, or a function of its
# module. A list holds norms of parameter groups.
_METHODS = {
    "DeepSpeedZeroOptimizer": "scaled_global_norm",
    "DeepSpeedZeroOptimizer_Stage3": "_get_norm_groups",
}
_FUNCTIONS = {"BF16_Optimizer": "get_global_norm_of_tensors"}


class NormGate:
    """Put on an optimizer of DeepSpeed, once. ``limit``: the greatest norm that steps are made with;
    ``norm``: the last one that came by, the same on all ranks, NaN where it was not finite.
    """

    def __init__(self, optimizer: Any) -> None:
        self.limit, self.norm = math.inf, math.nan
        kind = type(optimizer)
        name = _METHODS.get(kind.__name__) or _FUNCTIONS[kind.__name__]
        owner = optimizer if kind.__name__ in _METHODS else sys.modules[kind.__module__]
        measure = getattr(owner, name)

        def gated(*arguments: Any, **others: Any) -> Any:
            measured = measure(*arguments, **others)
            norms = measured if isinstance(measured, list) else [measured]
            self.norm = _together([float(norm) for norm in norms])
            if self.norm <= self.limit:
                return measured
            refused = [norm * math.nan for norm in norms]
            return refused if isinstance(measured, list) else refused[0]

        setattr(owner, name, gated)


def _together(norms: list[float]) -> float:
    """Of all groups; DeepSpeed writes -1 for one that is not finite."""
    finite = all(math.isfinite(norm) and norm >= 0 for norm in norms)
    return math.hypot(*norms) if finite else math.nan
