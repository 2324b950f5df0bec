"""The weight of the entropy bonus of a rank, from update to update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_dist.policy.loss_settings import LossSettings

_KEY = "entropy_bonus"


class EntropyBonus:
    """Steers the weight where the settings have an entropy control. The same on every rank: it follows a
    metric of all ranks. `state` belongs to a checkpoint.
    """

    def __init__(self, settings: LossSettings) -> None:
        self._control = settings.entropy_control
        self._coef, self._entropy = settings.entropy_coef, math.inf

    @property
    def weight(self) -> float | None:
        """Weight in the next update; None: that of the loss settings."""
        return None if self._control is None else self._control.applied(self._coef, self._entropy)

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take the entropy of an update from its ``metrics``; return the metric of the weight that it had. An
        update without a token of the policy loss has no entropy, and moves nothing.
        """
        if self._control is None:
            return {}
        applied = self._control.applied(self._coef, self._entropy)
        entropy = metrics.get("policy/entropy", math.nan)
        self._coef = self._control.next_coef(self._coef, entropy)
        self._entropy = entropy if math.isfinite(entropy) else self._entropy
        return {"policy/entropy_coef": applied}

    def state(self) -> dict[str, Any]:
        return {_KEY: (self._coef, self._entropy)} if self._control else {}

    def restore(self, counters: Mapping[str, Any]) -> None:
        """Continue from `state`. A checkpoint of a run without a control has none; the first weight stays."""
        if self._control is not None and _KEY in counters:
            self._coef, self._entropy = counters[_KEY]
