"""How many groups may be on their way, and how many of those that have no signal a step may replace."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_dist.config import BatchConfig, DynamicSamplingConfig


@dataclass(frozen=True, slots=True)
class Admission:
    """Attributes:
    most: groups on their way at once, with `batch.order` completion.
    extra: groups without a signal that a step may replace.
    """

    most: int
    extra: int

    @classmethod
    def of(
        cls, batch: BatchConfig, dynamic: DynamicSamplingConfig, *, max_staleness: int, prompts: int
    ) -> Admission:
        """Read the bounds from the configuration. ``prompts``: how many can be drawn and none of them twice,
        see `stream.most_at_once`; all that is on its way holds so many at most.
        """
        own = batch.prompts_per_step
        asked = (dynamic.max_extra_prompts or 3 * own) if dynamic.enabled else 0
        extra = max(0, min(asked, prompts // (max_staleness + 1) - own))
        oversample = batch.oversample or 1 + max_staleness / 2
        # Between a step's end and the next launch groups may be replaced, and what the step took stays out:
        # its own groups, in whose place none are launched before, and those that it replaced.
        free = prompts - 2 * extra
        return cls(max(own, min(rounded_up(own * oversample), free)), extra)

    def per_draw(self, prompts: int) -> int:
        """Return how many prompts hold one that may be launched: it is not on its way, and no step has just
        taken it.
        """
        return max(self.most, min(prompts, self.most + 2 * self.extra))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Prompts that are drawn at once.

    Attributes:
        per_batch: by a batch, those that it may not need included.
        in_flight: by all that are on their way together.
    """

    per_batch: int
    in_flight: int

    @classmethod
    def of(
        cls, batch: BatchConfig, dynamic: DynamicSamplingConfig, *, max_staleness: int, prompts: int
    ) -> Drawn:
        """Read the numbers from the configuration. ``prompts``: how many can be drawn and none of them twice,
        see `stream.most_at_once`.

        Together, all batches on their way hold so many at most, or the steps' own prompts where these are
        more. If each could hold a whole epoch, several would be sampled at once, and some prompts twice
        before others once.
        """
        if batch.order == "completion":
            admission = Admission.of(batch, dynamic, max_staleness=max_staleness, prompts=prompts)
            return cls(admission.per_draw(prompts), admission.per_draw(prompts))
        own = batch.prompts_per_step
        extra = (dynamic.max_extra_prompts or 3 * own) if dynamic.enabled else 0
        most = max(own, min(own + extra, prompts // (max_staleness + 1)))
        return cls(most, most * (max_staleness + 1))


def rounded_up(product: float) -> int:
    """Return a product of a count and a factor of the configuration, rounded up: 50 * 1.1 is 55, though in
    floating point it is above.
    """
    return math.ceil(round(product, 9))
