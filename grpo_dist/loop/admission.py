"""How many prompts are drawn and how many groups are in flight, so that no prompt is sampled twice before
another is sampled once.

    n   `batch.prompts_per_step`
    S   `max_staleness`
    P   prompts that can be drawn without repeating one, see `most_at_once`
    r   `dynamic_sampling.max_extra_prompts`, or 3 n; 0 without dynamic sampling
    f   `batch.order.oversample`, or 1 + S / 2

`batch.order: launched` has S + 1 batches in flight, each of n prompts and r to replace zero-variance groups:

    per_draw     = n + r, at most P / (S + 1), at least n
    drawn        = (S + 1) per_draw

`batch.order: completion` launches groups one by one:

    replacements = r, at most P / (S + 1) - n, at least 0     zero-variance groups that one step replaces
    groups       = n f, at most P - 2 replacements, at least n
    per_draw     = groups + 2 replacements, at most P, at least groups
    drawn        = per_draw

Twice the replacements: between the end of a step and the next launch the prompts that this step replaced are
not free yet, and the next one may replace as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_dist.config import Config, DynamicSamplingConfig
from grpo_dist.config.data import CompletionOrder
from grpo_dist.data.stream import most_at_once
from grpo_dist.types import Prompt


@dataclass(frozen=True, slots=True)
class Admission:
    """The bounds of one run; see the module.

    Attributes:
        groups: in flight at once, with `batch.order` completion.
        replacements: zero-variance groups that a step may replace, with that order.
        per_draw: prompts drawn by one batch, or one launch, including those that it may not need.
        drawn: prompts drawn by all that is in flight.
    """

    groups: int
    replacements: int
    per_draw: int
    drawn: int

    @classmethod
    def from_config(cls, config: Config, prompts: Sequence[Prompt]) -> Admission:
        batch, dynamic, staleness = config.batch, config.dynamic_sampling, config.max_staleness
        n, available = batch.prompts_per_step, most_at_once(config.data.weights, prompts)
        further = (dynamic.max_extra_prompts or 3 * n) if isinstance(dynamic, DynamicSamplingConfig) else 0
        share = available // (staleness + 1)
        replacements = max(0, min(further, share - n))
        oversample = batch.order.oversample if isinstance(batch.order, CompletionOrder) else None
        oversample = oversample or 1 + staleness / 2
        groups = max(n, min(rounded_up(n * oversample), available - 2 * replacements))
        if isinstance(batch.order, CompletionOrder):
            per_draw = max(groups, min(available, groups + 2 * replacements))
            return cls(groups, replacements, per_draw, per_draw)
        per_draw = max(n, min(n + further, share))
        return cls(groups, replacements, per_draw, per_draw * (staleness + 1))


def rounded_up(product: float) -> int:
    """Return a product of a count and a factor of the configuration, rounded up: 50 * 1.1 is 55, though in
    floating point it is above.
    """
    return math.ceil(round(product, 9))
