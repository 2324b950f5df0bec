"""The weight of the entropy bonus of a rank, from update to update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_dist.config import AdaptiveEntropyConfig
from grpo_dist.config.algorithm import Entropy

_KEY = "entropy_bonus"


class EntropyBonus:
    """Steers the weight of an adaptive bonus: adaptive entropy control, Skywork-OR1 (He et al. 2025,
    arXiv:2505.22312), section 3.3. The same on every rank: it follows a metric of all ranks. `state` belongs
    to a checkpoint.

        target 0.2, delta 0.005     entropy 0.15   0.15    0.25    0.18
        coefficient, from 0.01      0.01   0.015   0.02    0.015   0.02
        applied in the update       0      0.015   0.02    0       0.02
    """

    def __init__(self, config: Entropy) -> None:
        self._config = config
        self._coef, self._entropy = config.coef, math.inf

    @property
    def weight(self) -> float:
        """Weight in the next update: 0 for an adaptive bonus while the entropy is above its target."""
        is_off = isinstance(self._config, AdaptiveEntropyConfig) and self._entropy > self._config.target
        return 0.0 if is_off else self._coef

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the entropy of an update from its ``metrics``; return the metric of the weight that it had. An
        update without a token of the policy loss has no entropy, and moves nothing.
        """
        config = self._config
        if not isinstance(config, AdaptiveEntropyConfig):
            return {}
        applied = self.weight
        entropy = metrics.get("policy/entropy", math.nan)
        if not math.isnan(entropy):
            moved = self._coef + (config.delta if entropy <= config.target else -config.delta)
            self._coef = min(max(moved, config.low), config.high)
        self._entropy = entropy if math.isfinite(entropy) else self._entropy
        return {"policy/entropy_coef": applied}

    def state(self) -> dict[str, Any]:
        return {_KEY: (self._coef, self._entropy)} if isinstance(self._config, AdaptiveEntropyConfig) else {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Continue from `state`. A checkpoint of a constant bonus has none; the first weight stays."""
        if isinstance(self._config, AdaptiveEntropyConfig) and _KEY in counters:
            self._coef, self._entropy = counters[_KEY]
