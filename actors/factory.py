"""Create the actors of every role, with their options, placement and restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.lifecycle.calls import nodes_of
from actors.lifecycle.team import ActorSpec, GuestSpec, Team
from actors.placement.demands import Demand, Devices, colocated_ranks, uncounted_threads
from actors.placement.elasticity import cores_in_use
from actors.placement.own_gpus import SHARED, VISIBLE
from actors.placement.reservation import Reservation
from actors.workers.engine_settings import EngineSpec
from actors.workers.environment import EnvironmentPool
from actors.workers.policy import PolicyGroup, PolicySpec
from actors.workers.reference import ReferencePool
from actors.workers.reward import PolicyTokenizer, RewardModelPool, RewardPool
from actors.workers.rollout import RolloutPool
from grpo_dist.config import Config, RewardModelConfig, TeacherConfig
from grpo_dist.environments.registry import may_run_code
from grpo_dist.policy.model import vocabulary_size
from grpo_dist.runtime.hardware import thread_environment

ModelT = TypeVar("ModelT", RewardModelConfig, TeacherConfig)

# A colocated actor has the memory to start only in its turn, which may not come before its answers are
# needed.
_SHARES = "it shares devices with the policy, and all of them restart together"


@dataclass(frozen=True)
class SamplingActors:
    """``environments``: None if no prompt has one."""

    rollouts: RolloutPool
    rewards: RewardPool
    environments: EnvironmentPool | None = None


@dataclass(frozen=True)
class TrainingActors:
    """Handles of all roles of a training run."""

    policy: PolicyGroup
    samplers: SamplingActors
    reference: ReferencePool | None
    evaluation: RolloutPool | None = None  # engines only for evaluation
    teachers: Mapping[str, ReferencePool] = field(default_factory=dict)

    def engines(self) -> list[RolloutPool]:
        """Return the engine pools: training's, and evaluation's if it has dedicated engines."""
        return [self.samplers.rollouts, *([self.evaluation] if self.evaluation else [])]

    def frozen_models(self) -> dict[str, ReferencePool | RewardModelPool]:
        """Return the pools of frozen models, by role."""
        reference = {"reference": self.reference} if self.reference else {}
        teachers = {f"teacher {name}": teacher for name, teacher in self.teachers.items()}
        return reference | teachers | {f"reward_model {m.name}": m for m in self.samplers.rewards.models}

    def teams(self) -> dict[str, list[Team]]:
        """Return the teams of each role, by its name in metrics."""
        rewards, environments = self.samplers.rewards, self.samplers.environments
        return {
            "rollout": [self.samplers.rollouts.team],
            "evaluation": [self.evaluation.team] if self.evaluation else [],
            "environment": [environments.team] if environments else [],
            "reward": [rewards.team],
            "reward_model": [model.team for model in rewards.models],
            "reference": [self.reference.team] if self.reference else [],
            "teacher": [teacher.team for teacher in self.teachers.values()],
            "policy": [self.policy.team],
        }

    async def cores_in_use(self, demands: Mapping[str, Demand]) -> dict[str, int]:
        """Return `elasticity.cores_in_use`. The caller sets the deadline."""
        threads, teams = uncounted_threads(demands), self.teams()
        nodes = {
            role: await nodes_of(actor for team in teams[role] for actor in team.alive()) for role in threads
        }
        return cores_in_use(nodes, threads, in_turns=demands["rollout"].shared)


@dataclass(frozen=True)
class SharedDevices:
    """GPUs of each policy rank and of each colocated engine."""

    ranks: list[Devices]
    engines: list[Devices]

    @property
    def ranks_of_engines(self) -> list[int]:
        """The policy rank on the GPU of each engine process."""
        return colocated_ranks(self.ranks, self.engines)


class Factory:
    """Creates the actors of one run on their reserved devices."""

    def __init__(self, config: Config, demands: Mapping[str, Demand], reservation: Reservation) -> None:
        self._config = config.make_code_paths_absolute()  # actors have other working directories
        self.demands, self.reservation = demands, reservation

    def policy(self, model_dir: Path, *, generation: int) -> PolicyGroup:
        config = self._config
        return PolicyGroup(
            PolicySpec.from_config(config, model_dir),
            replace(self._actors("policy"), generation=generation),
            timeouts=config.cluster.timeouts,
        )

    def environments(self) -> EnvironmentPool | None:
        """Create the environment workers; None if no prompt has an environment."""
        if "environments" not in self.demands:
            return None
        sandboxed = any(map(may_run_code, self._config.environment_names))
        actors = self._actors("environments")
        return EnvironmentPool(self._config.environments, actors, sandboxed=sandboxed)

    def rollouts(
        self, model_dir: Path, shared: SharedDevices | None, environments: EnvironmentPool | None
    ) -> RolloutPool:
        spec = EngineSpec.from_config(self._config, model_dir, colocated=shared is not None)
        if "policy" not in self.demands:  # nothing is trained: no sampling masks are needed
            spec = replace(spec, returns_masks=False)
        actors = replace(self._actors("rollout", shared.engines if shared else ()), guests=self.guests())
        return RolloutPool(spec, actors, environments=environments)

    def guests(self) -> GuestSpec | None:
        """Return how many engines may join beyond the reserved ones, and the devices of each."""
        demand, rollout = self.demands["rollout"], self._config.rollout
        if not rollout.may_grow or "policy" not in self.demands:
            return None
        reserved = 1 if demand.shared else demand.cpus  # shared devices take no CPUs of Ray's
        cpus = reserved if demand.gpus else demand.threads
        return GuestSpec(rollout.most_workers - rollout.num_workers, cpus, demand.gpus)

    def evaluation(self, model_dir: Path, environments: EnvironmentPool | None) -> RolloutPool | None:
        """Create the engines that evaluate while training continues; None if there are none."""
        if "evaluation" not in self.demands:
            return None
        spec = EngineSpec.from_config(self._config, model_dir).make_evaluation_spec(self._config.evaluation)
        actors = self._actors("evaluation")
        return RolloutPool(spec, actors, environments=environments, role="evaluation")

    def rewards(self, model_dir: Path, shared: SharedDevices | None) -> RewardPool:
        config = self._config
        return RewardPool(
            config.rewards,
            self._actors("rewards"),
            max_new_tokens=config.sampling.longest,
            max_length=config.max_length,
            models=self._reward_models(model_dir, shared),
            outcome_rewards=config.environments.outcome_rewards,
            policy=PolicyTokenizer(str(model_dir), config.model.trust_remote_code),
        )

    def _reward_models(self, model_dir: Path, shared: SharedDevices | None) -> list[RewardModelPool]:
        return [
            RewardModelPool(model, actors, policy=self._config.model, policy_dir=str(model_dir))
            for model, actors in self._split_by_model("reward_models", self._config.rewards.models, shared)
        ]

    def reference(self, model_dir: Path, shared: SharedDevices | None) -> ReferencePool | None:
        """Create the reference workers; None if the run needs none."""
        config = self._config
        if "reference" not in self.demands:
            return None
        workers = self.demands["reference"].workers
        return ReferencePool(
            config.reference.model_copy(update={"num_workers": workers}),
            self._actors("reference", shared.ranks if shared else ()),
            model=config.model,
            model_dir=str(model_dir),
            temperature=config.sampling.first_temperature,
            token_budget=config.reference.micro_batch_tokens,
        )

    def teachers(
        self, model_dirs: Mapping[str, Path], policy_dir: Path, shared: SharedDevices | None
    ) -> dict[str, ReferencePool]:
        """Create the workers of teachers that have a model. ``model_dirs``: model directories by teacher;
        ``policy_dir``: the policy's model, whose vocabulary may be smaller.
        """
        config, tokens = self._config, None
        if config.distillation.top_k and model_dirs:
            tokens = vocabulary_size(policy_dir, trust_remote_code=config.model.trust_remote_code)
        return {
            teacher.name: ReferencePool(
                teacher,
                actors,
                model=teacher.model_section(config.model),
                model_dir=str(model_dirs[teacher.name]),
                temperature=config.sampling.first_temperature,
                token_budget=config.reference.micro_batch_tokens,
                vocabulary=tokens,
            )
            for teacher, actors in self._split_by_model(
                "teachers", config.distillation.teachers_with_workers, shared
            )
        }

    def _split_by_model(
        self, role: str, models: Sequence[ModelT], shared: SharedDevices | None
    ) -> Iterator[tuple[ModelT, ActorSpec]]:
        """Yield each of the role's models with its share of the role's actors."""
        if not models:
            return
        if shared:  # one copy of each on every GPU
            models = [_place_on_each(model, len(shared.ranks)) for model in models]
        every = self._actors(role, shared.ranks * len(models) if shared else ())
        left = iter(every.actor_options or ())
        for model in models:
            options = None if every.actor_options is None else list(islice(left, model.num_workers))
            yield model, replace(every, actor_options=options)

    def _actors(self, role: str, shared: Sequence[Devices] = ()) -> ActorSpec:
        """Return options, placement and restarts of a role's actors. ``shared``: the devices of each
        colocated actor.

        Thread counts divide the CPUs, not Ray: actors that never run at the same time share them.
        """
        demand, cluster = self.demands[role], self._config.cluster
        options = {
            "num_cpus": 0,
            "num_gpus": 0 if demand.shared else demand.gpus,
            "runtime_env": {"env_vars": thread_environment(demand.threads)},
        }
        return ActorSpec(
            options,
            [set_devices(options, devices) for devices in shared] or self.reservation.options(role),
            cluster.restarts,
            cluster.timeouts.start_s,
            irreplaceable=_SHARES if demand.shared else None,
            on_gpu=demand.gpus > 0,
        )


def _place_on_each(model: ModelT, gpus: int) -> ModelT:
    """Return ``model`` with a copy on each of ``gpus``, which it has to itself in its turn."""
    whole: dict[str, Any] = {"gpu_share": 1.0} if isinstance(model, RewardModelConfig) else {}
    return model.model_copy(update={"num_workers": gpus} | whole)


def set_devices(options: dict[str, Any], devices: Devices) -> dict[str, Any]:
    """Return options of an actor that sees ``devices``, which Ray has assigned to other actors."""
    gpus = ",".join(devices.gpus)
    environment = options["runtime_env"]["env_vars"] | {VISIBLE: gpus, SHARED: gpus}
    return {
        "runtime_env": {"env_vars": environment},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(devices.node, soft=False),
    }
