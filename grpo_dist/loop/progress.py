"""The state of a run at the end of a step, without the weights; a checkpoint keeps all of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_dist.algorithms.moments import Moments
from grpo_dist.config import Config
from grpo_dist.data.order import OrderState
from grpo_dist.health import HealthState
from grpo_dist.types import Group, Sampling


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """The groups of one step, and the groups that dynamic sampling discarded."""

    groups: list[Group]
    discarded: list[Group] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """Current values of adaptive sampling settings; None: as at the start, or not adaptive.

    ``above``: consecutive steps with too large a share of truncated samples.
    """

    temperature: float | None = None
    max_new_tokens: int | None = None
    above: int = 0


@dataclass(frozen=True, slots=True)
class PipelineState:
    """The batches in flight, numbered by the step that trains on them.

    Attributes:
        ahead: finished batches that are not trained on yet, by number.
        partial: finished groups of batches that are not finished themselves.
        order_indices: indices into the prompt order, by batch.
        order: state of the prompt order.
        sampling: settings of each launched batch, by number.
        schedule: state of adaptive `sampling` settings.
        lengths: sums of `first_come.LengthBias`, with `batch.order` completion.
    """

    ahead: Mapping[int, SampledBatch] = field(default_factory=dict)
    partial: Mapping[int, list[Group]] = field(default_factory=dict)
    order_indices: Mapping[int, list[int]] = field(default_factory=dict)
    order: OrderState = field(default_factory=OrderState)
    sampling: Mapping[int, Sampling] = field(default_factory=dict)
    schedule: ScheduleState = field(default_factory=ScheduleState)
    lengths: Mapping[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """Attributes:
    step: number of steps done.
    kl_coef: weight of the KL term; None: as configured.
    evaluation_pending: the evaluation due after the step is not finished.
    evaluations: steps whose evaluations on separate engines are not finished.
    rewards: moments of the rewards of all steps so far, for `algorithm.reward_norm` running.
    best: step of the highest `checkpoint.keep_best` so far, and its value.
    """

    step: int = 0
    pipeline: PipelineState = field(default_factory=PipelineState)
    health: HealthState = field(default_factory=HealthState)
    kl_coef: float | None = None
    evaluation_pending: bool = False
    rewards: Moments = field(default_factory=Moments)
    evaluations: tuple[int, ...] = ()
    best: tuple[int, float] | None = None


def ends_early(config: Config, step: int, best: tuple[int, float] | None) -> str:
    """Return why a run ends after ``step``, by `checkpoint.patience` or `target`; "": it goes on. ``best``:
    see `Progress`.
    """
    settings = config.checkpoint
    if best is None:
        return ""
    at, value = best
    highest = f"{settings.keep_best} = {value:.6g} of step {at}"
    if settings.target is not None and value >= settings.target:
        return f"{highest} has reached `checkpoint.target` = {settings.target:g}"
    every = config.evaluation.every
    if settings.patience is not None and every and step // every - at // every >= settings.patience:
        return f"{highest} was not exceeded by {settings.patience} evaluations (`checkpoint.patience`)"
    return ""
