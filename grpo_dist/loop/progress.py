"""What a run knows at the end of a step besides the weights; a checkpoint keeps all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_dist.algorithms.moments import Moments
from grpo_dist.data.order import OrderState
from grpo_dist.health.state import HealthState
from grpo_dist.types import Group


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The groups of one step, and those sampled besides that dynamic sampling put aside."""

    groups: list[Group]
    discarded: list[Group] = field(default_factory=list)

    @property
    def sampled(self) -> list[Group]:
        return self.groups + self.discarded


@dataclass(frozen=True, slots=True)
class Progress:
    """``ahead``: finished batches that are not trained on yet, by number; ``begun``: finished groups of those
    that are not. ``kl_coef`` None: as configured.

    ``unassessed``: the evaluation that was due after the step was not finished.

    ``rewards``: moments of the rewards of all steps so far, for `algorithm.reward_norm` running.

    ``taken``: places in the order of prompts that each batch launched and not trained on yet has taken, and
    ``order``: what the order remembers.
    """

    ahead: Mapping[int, SampledBatch] = field(default_factory=dict)
    kl_coef: float | None = None
    taken: Mapping[int, list[int]] = field(default_factory=dict)
    order: OrderState = field(default_factory=OrderState)
    health: HealthState = field(default_factory=HealthState)
    begun: Mapping[int, list[Group]] = field(default_factory=dict)
    unassessed: bool = False
    rewards: Moments = field(default_factory=Moments)
