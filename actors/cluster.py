"""Start and stop the workers of a run: placement, creation, restart.

    async with Cluster(config) as cluster:
        workers = await cluster.start_training(model_dir)

The block joins a running Ray cluster and leaves it running, or starts and stops a private local one. No actor
is created before the whole placement fits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError

from actors.colocation import Colocation, colocated
from actors.connection import (
    address_of,
    connect,
    resources_of,
)
from actors.evaluation_engines import EvaluationEngines
from actors.factory import Factory, SamplingActors, SharedDevices, TrainingActors
from actors.lifecycle.calls import LOST, reason, results, where_stuck
from actors.lifecycle.team import ActorUsage, ElasticTeam, Team
from actors.placement.demands import Demand, placement, share_out
from actors.placement.elasticity import Elasticity, leaving_nodes
from actors.placement.fitting import bundles, too_large
from actors.placement.reservation import Reservation, expected
from actors.weight_sync import EngineProbe, ReferenceSync, WeightSync
from actors.workers.environment import EnvironmentPool
from actors.workers.policy import PolicyGroup, devices_of
from actors.workers.reference import ReferencePool
from actors.workers.reward import RewardModelPool, RewardPool
from actors.workers.rollout import RolloutPool
from grpo_dist.config import Config
from grpo_dist.errors import (
    SamplesLost,
    StateLost,
    TransferLost,
    UserError,
    WorkerLost,
    as_user_errors,
    find_cause,
)
from grpo_dist.runtime.concurrency import deadline, gather
from grpo_dist.runtime.stage_log import join_names, stage
from grpo_dist.workers import NO_SAMPLING, Workers

logger = logging.getLogger("grpo_dist")

# Roles of `calls.one_at_a_time`, whose calls wait for earlier ones; `reward` runs several at once.
QUEUEING = {"reference", "teacher", "reward_model", "policy"}
_POLL_S = 1.0  # while waiting for a node to join


class Cluster:
    """Owns the actors of one run. Use as an async context manager. ``teacher_dirs``: directories of the
    teachers' models, by name.
    """

    def __init__(
        self,
        config: Config,
        teacher_dirs: Mapping[str, Path] | None = None,
    ) -> None:
        self._config, self._teacher_dirs = config, dict(teacher_dirs or {})
        self._handles: list[Any] = []
        self._own_connection = self._shared = self._is_connected = False
        self._factory = Factory(config, {}, Reservation([], None))  # nothing is reserved yet
        self._generation = 0  # number of earlier policy groups
        self._parts: TrainingActors | None = None

    async def __aenter__(self) -> Cluster:
        self.connect()
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.stop_workers()
        finally:
            if self._own_connection:
                ray.shutdown()

    def connect(self) -> None:
        """Join or start Ray, unless connected. If the event loop runs in another thread, call this from the
        main thread: Ray installs signal handlers.
        """
        if self._is_connected:
            return
        address = address_of(self._config.cluster)
        with stage("Ray", "a cluster starts here" if address == "local" else f"joins {address}"):
            self._own_connection = connect(self._config.cluster)
        self._shared = not self._own_connection or address != "local"
        self._is_connected = True

    async def start_training(self, model_dir: Path) -> Workers:
        """Start every worker of the loop and connect the engines to the policy.

        Raises UserError when they do not fit, StateLost when a worker dies during the start.
        """
        try:
            return await self._start_training(model_dir)
        except LOST as error:
            raise StateLost(f"a worker is lost while it starts ({reason(error)})") from error

    async def _start_training(self, model_dir: Path) -> Workers:
        await self._reserve(training=True)
        policy = self._create_policy(model_dir)
        shared = await self._shared_devices(policy)
        samplers = self._create_samplers(model_dir, shared)
        reference = self._factory.reference(model_dir, shared)
        teachers = self._factory.teachers(self._teacher_dirs, model_dir, shared)
        evaluation = self._factory.evaluation(model_dir, samplers.environments)
        handles = (reference, *teachers.values(), evaluation)
        self._handles += [handle for handle in handles if handle is not None]
        parts = TrainingActors(policy, samplers, reference, evaluation, teachers)
        if not self._factory.demands["rollout"].shared:
            await self._ready()
            self._parts = parts
            workers = await self._connected(parts, None)
            await self._admit_guests(parts)
            return workers
        models, limit_s = parts.frozen_models(), self._config.cluster.timeouts.sync_s
        rollouts = samplers.rollouts
        colocation = Colocation(policy, rollouts, models, timeout_s=limit_s, where_stuck=self.where_stuck)
        await self._ready(colocation, [policy, rollouts, *models.values()])
        workers = await self._connected(parts, shared)
        colocation.admit(rollouts.team)
        await self._admit_guests(parts)
        return colocated(workers, colocation, has_reference=self._config.needs_reference)

    async def _admit_guests(self, parts: TrainingActors) -> None:
        """Let more engines join from now on, if the run allows it."""
        guests, team = self._factory.guests(), parts.samplers.rollouts.team
        if guests is not None and isinstance(team, ElasticTeam):
            async with deadline(self._config.cluster.timeouts.sync_s, "start: where the actors are"):
                in_use = await parts.cores_in_use(self._factory.demands)
            placed = self._factory.reservation.is_placed
            team.oversee(Elasticity(team, guests, placed, in_use).run())

    async def where_stuck(self) -> str:
        """Return where each actor is in its code."""
        return await where_stuck({name: w for team in self._teams() for name, w in team.named().items()})

    def _teams(self) -> list[Team]:
        models = [m.team for pool in self._handles if isinstance(pool, RewardPool) for m in pool.models]
        return [handle.team for handle in self._handles] + models

    @asynccontextmanager
    async def failures_as_state_lost(self) -> AsyncIterator[None]:
        """Convert unrecoverable actor failures and expired deadlines into StateLost: all workers restart."""
        try:
            yield
        except (RayError, SamplesLost, TimeoutError) as error:
            # A transfer that failed twice, or a partly updated reference, cannot be repaired by its caller.
            unrecoverable = (*LOST, ObjectLostError, SamplesLost, TransferLost, TimeoutError)
            if not isinstance(find_cause(error), unrecoverable):
                raise
            self._parts = None  # other actors may wait for the one that failed
            first, line, stacks = str(error).partition("\n")
            raise StateLost(f"{first}: restarting all workers{line}{stacks}") from error

    async def start_again(self, model_dir: Path) -> Workers:
        """Restart workers after losing one that cannot be replaced alone.

        The policy starts from its initial weights. Healthy roles with dedicated devices keep running:
        engines, rewards, a frozen reference.
        """
        self._generation += 1
        if self._parts is not None and not self._config.reference.refresh_every:
            try:
                return await self._renew_policy(self._parts, model_dir)
            except (RayError, WorkerLost, TimeoutError) as error:  # another actor was lost meanwhile
                logger.warning("%s: restarting all workers", reason(error))
        self._parts = None
        await self._end_workers()
        return await self.start_training(model_dir)

    async def _renew_policy(self, old: TrainingActors, model_dir: Path) -> Workers:
        self._handles.remove(old.policy)
        await old.policy.shutdown()
        cluster = self._config.cluster
        await self._factory.reservation.wait_ready(cluster, only="policy")  # Ray may have moved bundles
        parts = replace(old, policy=self._create_policy(model_dir))
        engines = parts.engines()
        await gather([_wait_until_ready(parts.policy), *(pool.abandon() for pool in engines)])
        if not all(pool.team.is_whole for pool in engines):
            raise WorkerLost("an engine is being replaced")
        workers = await self._connected(parts, None)
        self._parts = parts
        return workers

    async def _connected(self, parts: TrainingActors, shared: SharedDevices | None) -> Workers:
        """Connect policy, engines and reference; all must be ready."""
        policy, reference = parts.policy, parts.reference
        rollouts, rewards = parts.samplers.rollouts, parts.samplers.rewards
        timeout_s = self._config.cluster.timeouts.sync_s
        with stage("weight transfer", "policy ranks and engines connect"):
            sync = await WeightSync.connect(
                policy,
                rollouts,
                self._config.weight_sync,
                colocated_ranks=shared.ranks_of_engines if shared else None,
                timeout_s=timeout_s,
            )
        reference_sync = await self._reference_sync(policy, reference, shared)
        usage = ActorUsage(parts.teams(), queueing=QUEUEING, timeout_s=timeout_s)
        pool, evaluation = parts.evaluation, None
        if pool is not None:
            evaluation = EvaluationEngines(policy, pool, rewards, timeout_s=timeout_s)
        probe = EngineProbe(policy, rollouts)
        leaving = await leaving_nodes(policy.team, timeout_s)
        return Workers(
            rollouts, rewards, reference, policy, sync, reference_sync, usage, self.where_stuck, probe,
            evaluation, parts.teachers, leaving,
        )  # fmt: skip

    async def _shared_devices(self, policy: PolicyGroup) -> SharedDevices | None:
        """Return the policy ranks' GPUs, which all other roles share; None: not colocated, or no GPUs."""
        demand = self._factory.demands["rollout"]
        if not (demand.shared and demand.gpus):
            return None
        async with deadline(self._config.cluster.timeouts.start_s, "start: policy ranks get their GPUs"):
            rank_devices = await results(rank.__ray_call__.remote(devices_of) for rank in policy.ranks)
        return SharedDevices(rank_devices, share_out(rank_devices, demand.workers, demand.gpus))

    async def _reference_sync(
        self, policy: PolicyGroup, reference: ReferencePool | None, shared: SharedDevices | None
    ) -> ReferenceSync | None:
        config = self._config
        if reference is None or not config.reference.refresh_every:
            return None
        mix, timeout_s = config.reference.refresh_mix, config.cluster.timeouts.sync_s
        return await ReferenceSync.connect(
            policy,
            reference,
            config.weight_sync,
            mix=mix,
            colocated_ranks=range(len(shared.ranks)) if shared else None,
            timeout_s=timeout_s,
        )

    async def start_evaluation(self, model_dir: Path) -> SamplingActors:
        """Start only rollout and reward workers, with the weights in ``model_dir``."""
        await self._reserve(training=False)
        samplers = self._create_samplers(model_dir, None)
        await self._ready()
        return samplers

    async def stop_workers(self) -> None:
        """End every actor that this cluster started and release the reservation; safe to call twice."""
        try:
            await self._end_workers()
        finally:
            self._factory.reservation.release()

    async def _end_workers(self) -> None:
        """End all actors; keep the reservation, as other jobs may be waiting for its devices."""
        handles, self._handles = self._handles, []
        if handles:
            with stage("workers", "all actors end"):
                await gather(handle.shutdown() for handle in reversed(handles))

    async def _ready(self, colocation: Colocation | None = None, sharing: Sequence[Any] = ()) -> None:
        """Wait until all actors are loaded: the roles in ``sharing`` in sequence, all others at once.

        Raises UserError for errors such as an unloadable model.
        """
        models = [m for pool in self._handles if isinstance(pool, RewardPool) for m in pool.models]
        separate = [handle for handle in [*self._handles, *models] if handle not in sharing]
        with as_user_errors():
            starts = [self._with_kernels(partial(_wait_until_ready, handle), [handle]) for handle in separate]
            if colocation:
                starts.append(self._with_kernels(partial(_start_colocated, colocation, sharing), sharing))
            await gather(starts)

    async def _with_kernels(self, start: Callable[[], Awaitable[None]], handles: Sequence[Any]) -> None:
        """Await ``start()``. If ``handles`` include policy ranks and the cluster is this machine, compile
        DeepSpeed's kernels first, while other actors load; on other clusters each node's first rank compiles
        them. Raises UserError if one cannot be built.
        """
        if not self._shared and any(isinstance(handle, PolicyGroup) for handle in handles):
            await self._build_kernels()
        await start()

    async def _build_kernels(self) -> None:
        # torch's kernel build module imports setuptools.
        from grpo_dist.policy.extensions import build_kernels_here, list_kernels, unbuilt

        device = "cuda" if self._factory.demands["policy"].gpus else "cpu"
        if missing := unbuilt(list_kernels(self._config.policy, device)):
            what = f"DeepSpeed's {', '.join(missing)} are compiled, once on a machine; this can take minutes"
            with stage("kernels", what):
                await build_kernels_here(missing)

    def _create_policy(self, model_dir: Path) -> PolicyGroup:
        policy = self._factory.policy(model_dir, generation=self._generation)
        self._handles.insert(0, policy)
        return policy

    def _create_samplers(self, model_dir: Path, shared: SharedDevices | None) -> SamplingActors:
        environments = self._factory.environments()
        if environments is not None:
            self._handles.append(environments)
        rollouts = self._factory.rollouts(model_dir, shared, environments)
        self._handles.append(rollouts)
        rewards = self._factory.rewards(model_dir, shared)
        self._handles.append(rewards)
        return SamplingActors(rollouts, rewards, environments)

    async def _reserve(self, *, training: bool) -> None:
        config = self._config
        if self._factory.reservation.is_held:  # from workers that were lost or ended
            await self._factory.reservation.wait_ready(config.cluster)
            return
        with stage("placement", "GPUs and CPUs are reserved for all actors"):
            demands = await self._placed(training)
            reservation = await Reservation.acquire(demands, config.cluster, name=config.name)
        self._factory = Factory(config, demands, reservation)

    async def _placed(self, training: bool) -> dict[str, Demand]:
        """Return the demands of all roles once the cluster is large enough for them.

        Raises UserError at once on the first start. A restart waits: a lost node may be replaced.
        """
        again = self._generation > 0
        end = time.monotonic() + (self._config.cluster.timeouts.placement_timeout_s if again else 0.0)
        while True:
            try:
                has = expected(self._config.cluster)
                resources = resources_of(has, shared=self._shared)
                demands = placement(self._config, resources, training=training)
                if problem := too_large(bundles(demands), has):
                    raise UserError(f"cluster: {problem}")
                return demands
            except UserError as error:
                if time.monotonic() >= end:
                    raise
                if again:
                    logger.warning("waiting for a replacement of a lost node: %s", error)
                    again = False
            await asyncio.sleep(_POLL_S)


# By handle class: the name of the role's startup stage, and what its actors do in it.
_STAGES: dict[type, tuple[str, str]] = {
    RolloutPool: ("engines", "load the model, compile, and answer a first request"),
    EnvironmentPool: ("environments", "start their sandbox"),
    RewardPool: ("reward workers", "start grader processes"),
    RewardModelPool: ("reward models", "load"),
    ReferencePool: ("reference and teachers", "load their models"),
    PolicyGroup: ("policy ranks", "join, load the model and set up DeepSpeed"),
}


async def _wait_until_ready(handle: Any) -> None:
    """Wait for the actors of one role, and log this as a stage."""
    name, what = next(words for kind, words in _STAGES.items() if isinstance(handle, kind))
    if isinstance(handle, RolloutPool) and handle.role == "evaluation":
        name = "evaluation engines"
    with stage(name, what, lambda: join_names(sorted(handle.team.starting))):
        await handle.ready()


async def _start_colocated(colocation: Colocation, handles: Sequence[Any]) -> None:
    def waits_for() -> str:
        return join_names(sorted(name for handle in handles for name in handle.team.starting))

    with stage(
        "engines, policy ranks and models", "they load one after the other, on the same devices", waits_for
    ):
        await colocation.start()


class SupervisedCluster(Cluster):
    """Starts and ends the ranks of a `SupervisedConfig`. After a loss, all ranks restart."""

    async def _start_training(self, model_dir: Path) -> Workers:
        await self._reserve(training=True)
        policy = self._create_policy(model_dir)
        await self._ready()
        limit_s = self._config.cluster.timeouts.sync_s
        usage = ActorUsage({"policy": [policy.team]}, queueing=QUEUEING, timeout_s=limit_s)
        leaving = await leaving_nodes(policy.team, limit_s)
        return Workers(
            NO_SAMPLING, NO_SAMPLING, None, policy, NO_SAMPLING, usage=usage, where_stuck=self.where_stuck,
            leaving_nodes=leaving,
        )  # fmt: skip
