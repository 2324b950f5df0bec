"""How many groups may be on their way, and how many of those that have no signal a step may replace."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_dist.config import BatchConfig, DynamicSamplingConfig


@dataclass(frozen=True, slots=True)
class Admission:
    """Attributes:
    most: groups on their way at once, with `batch.order` finished.
    extra: groups without a signal that a step may replace.
    """

    most: int
    extra: int

    @classmethod
    def of(
        cls, batch: BatchConfig, dynamic: DynamicSamplingConfig, *, max_staleness: int, prompts: int
    ) -> Admission:
        """Read the bounds from the configuration, for a run of so many ``prompts``.

        All that is on its way holds one epoch at most, so that no prompt is in it twice.
        """
        own = batch.prompts_per_step
        asked = (dynamic.max_extra_prompts or 3 * own) if dynamic.enabled else 0
        extra = max(0, min(asked, prompts // (max_staleness + 1) - own))
        oversample = batch.oversample or 1 + max_staleness / 2
        # A prompt that is trained stays out until the next launch, where groups may be replaced before it.
        free = prompts - extra - (own if extra else 0)
        return cls(max(own, min(rounded_up(own * oversample), free)), extra)

    def per_draw(self, own: int, prompts: int) -> int:
        """Return how many prompts hold one that is not on its way, with ``own`` of a step just trained."""
        return min(prompts, self.most + self.extra + own + 1)


def rounded_up(product: float) -> int:
    """Return a product of a count and a factor of the configuration, rounded up: 50 * 1.1 is 55, though in
    floating point it is above.
    """
    return math.ceil(round(product, 9))
