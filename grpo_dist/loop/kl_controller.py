"""The weight of the KL term, fixed or steered to `algorithm.kl.target`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from grpo_dist.algorithms.schedules import steer
from grpo_dist.config import KLConfig


class KLController:
    """``coef`` is the weight for the next update. ``resumed``: from a checkpoint; None: as configured."""

    def __init__(self, settings: KLConfig, resumed: float | None = None) -> None:
        self._settings = settings
        self.coef = settings.coef if resumed is None else resumed

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Steer ``coef`` by the KL in a step's ``metrics``; return the weight that the step was trained with.

        The weight stays where no target is set, the step had no token of the policy loss and so no KL, or
        the KL is not finite.
        """
        used, observed = self.coef, metrics.get("ref/kl")
        target, gain = self._settings.target, self._settings.gain
        if target is not None and observed is not None and math.isfinite(observed):
            self.coef = steer(used, observed, target=target, gain=gain)
        return {"ref/kl_coef": used}
