"""What a run knows at the end of a step besides the weights; a checkpoint keeps all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_dist.algorithms.moments import Moments
from grpo_dist.data.order import OrderState
from grpo_dist.drift import Followed
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
class HealthState:
    """What watches remember of the steps so far. ``best_reward``: the greatest mean of a step;
    ``grad_norms``: the latest, oldest first; ``skipped``: steps in a row, up to the last, with an update that
    was not made; ``idle``: steps in a row that trained on no token; ``avoid``: steps that the run was rolled
    back from, and that are not trained on; ``followed``: metrics that may drift, by name.
    """

    best_reward: float | None = None
    grad_norms: tuple[float, ...] = ()
    skipped: int = 0
    avoid: tuple[int, ...] = ()
    followed: Mapping[str, Followed] = field(default_factory=dict)
    idle: int = 0


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
    health: HealthState = HealthState()
    begun: Mapping[int, list[Group]] = field(default_factory=dict)
    unassessed: bool = False
    rewards: Moments = field(default_factory=Moments)
