"""What `grpo-dist plan` simulates: a configuration and the speed of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_dist.algorithms.estimators import estimator_of
from grpo_dist.config import Config, DataConfig, HealthConfig, TeacherConfig
from grpo_dist.tools.plan import teachers
from grpo_dist.tools.plan.rates import Rates
from grpo_dist.tools.plan.reward_models import KnownRewardModel, role_of
from grpo_dist.tools.plan.workload import Workload

# Rewards of fake records have one part and no steps. Which estimator reads them takes no time.
_ESTIMATOR = {"advantage": "grpo", "std": None}
_FOREVER_S = 1e9  # deadlines of a simulated run; the report compares its times with the configured ones


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run.

    ``capacity``: sequences an engine decodes at once. ``sharing``: the roles that take turns on the policy's
    GPUs, see `Roles`. ``reference_is_base``: the policy ranks compute the reference. ``signal_share``: share
    of the groups whose rewards differ. ``reward_models``: those whose sizes are known. ``epoch_steps``: the
    prompts last so many steps at least.
    """

    config: Config
    rates: Rates
    workload: Workload
    capacity: int
    sharing: frozenset[str] = frozenset()
    reference_is_base: bool = False
    signal_share: float = 1.0
    reward_models: tuple[KnownRewardModel, ...] = ()
    warmup_steps: int = 1
    steps: int = 4
    epoch_steps: int = 1

    @property
    def reference_workers(self) -> int:
        ranks = self.reference_is_base or "reference" in self.sharing
        return (self.config.policy if ranks else self.config.reference).num_workers

    def teacher_workers(self, teacher: TeacherConfig) -> int:
        shares = teachers.role_of(teacher) in self.sharing
        return self.config.policy.num_workers if shares else teacher.num_workers

    def reward_model_workers(self, model: KnownRewardModel) -> int:
        shares = role_of(model.settings) in self.sharing
        return self.config.policy.num_workers if shares else model.settings.num_workers


def _without_sources(data: DataConfig) -> DataConfig:
    """Return ``data`` with an order that reads no rewards. Groups of a plan have no sources, so none of their
    prompts is drawn by the weight of one.
    """
    train = tuple(source.model_copy(update={"weight": None, "temperature": None}) for source in data.train)
    order = "length" if data.order == "length" else "epochs"
    return data.model_copy(update={"order": order, "train": train})


def as_planned(scenario: Scenario) -> Config:
    """Return the configuration of ``scenario`` with steps alone: no evaluation, checkpoint, deadline, health.

    The last steps of a run that samples ahead have nothing more to sample, so further steps follow.
    """
    config = scenario.config
    # One more answer of each prompt.
    greedy = "baselines" in estimator_of(config.algorithm.advantage).inputs
    timeouts = dict.fromkeys(type(config.cluster.timeouts).model_fields, _FOREVER_S)
    parts: dict[str, Any] = {
        "cluster": config.cluster.model_copy(
            update={"timeouts": config.cluster.timeouts.model_copy(update=timeouts)}
        ),
        "evaluation": config.evaluation.model_copy(update={"before": False, "after": False, "every": 0}),
        "checkpoint": config.checkpoint.model_copy(update={"every": 0, "export": False}),
        "health": HealthConfig(min_signal_groups=0),
        "reference": config.reference.model_copy(update={"refresh_every": 0}),
        "rewards": config.rewards.model_copy(update={"models": (), "shuffle": False}),
        "algorithm": config.algorithm.model_copy(update=_ESTIMATOR) if not greedy else config.algorithm,
        # Groups of a plan have no sources, so each teacher is asked about all of them, and for sampled
        # tokens alone: the likeliest ones of several teachers are not put together.
        "distillation": config.distillation.model_copy(
            update={
                "teachers": tuple(
                    teacher.model_copy(update={"sources": ()}) for teacher in config.distillation.teachers
                ),
                "top_k": 0,
            }
        ),
        "demonstrations": None,
        "data": _without_sources(config.data),
        "tracking": config.tracking.model_copy(update={"samples": False}),
    }
    steps = scenario.warmup_steps + scenario.steps + 2 * config.max_staleness
    return config.model_copy(update={"steps": steps} | parts)
