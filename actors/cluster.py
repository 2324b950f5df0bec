"""From a configuration to running workers and back: placement, start, teardown.

    async with Cluster(config) as cluster:
        workers = await cluster.start_training(model_dir)

A Ray cluster that was running before is joined and left running; a private local one is started otherwise,
and ends with the block. No actor is created before the whole placement is known to fit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import ObjectLostError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.colocation import ColocatedPolicy, ColocatedReferenceSync, ColocatedSync, Turns
from actors.lifecycle.calls import LOST
from actors.lifecycle.supervisor import Team, reason
from actors.lifecycle.usage import ActorUsage
from actors.lifecycle.watchdog import where_stuck
from actors.placement.demands import (
    Demand,
    Devices,
    Resources,
    describe,
    is_colocated,
    placement,
    ranks_beside,
    share_out,
)
from actors.placement.fitting import Node, bundles, too_large
from actors.placement.reservation import Room, expected
from actors.private_ray import close_session, prepare_token
from actors.reference_sync import ReferenceSync
from actors.sync_probe import EngineProbe
from actors.weight_sync import WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.policy import PolicyGroup
from actors.workers.reference import ReferencePool
from actors.workers.reward import RewardPool
from actors.workers.reward_model import RewardModelPool
from actors.workers.rollout import RolloutPool
from grpo_dist.config import Config
from grpo_dist.errors import (
    SamplesLost,
    StateLost,
    TransferLost,
    UserError,
    WorkerLost,
    cause_of,
    refusals,
)
from grpo_dist.policy.offload import check_offload
from grpo_dist.runtime.concurrency import deadline, gather
from grpo_dist.runtime.hardware import available_cpus, device_type, thread_environment, transfer_backend
from grpo_dist.runtime.stage_log import names_of, stage
from grpo_dist.workers import Workers

logger = logging.getLogger("grpo_dist")

_LOOK_S = 1.0  # between two looks for a node that joins

# Of the role that a handle is for: its name as a stage of the start, and what it does then.
_STARTS: dict[type, tuple[str, str]] = {
    RolloutPool: ("engines", "load the model, compile, and answer a first request"),
    RewardPool: ("reward workers", "start grader processes and load reward models"),
    ReferencePool: ("reference", "loads the model"),
    PolicyGroup: ("policy ranks", "join, load the model and set up DeepSpeed"),
}

# An engine on the policy's GPUs finds room for its start only in its turn, which may not come again before
# its samples are there.
_SHARES = "it shares GPUs with the policy, and all start anew together"


@dataclass(frozen=True)
class Samplers:
    rollouts: RolloutPool
    rewards: RewardPool


@dataclass(frozen=True)
class Parts:
    """Of a training run."""

    policy: PolicyGroup
    samplers: Samplers
    reference: ReferencePool | None


@dataclass(frozen=True)
class SharedDevices:
    """GPUs of each engine, and for each process of the engines the policy rank on its GPU."""

    engines: list[Devices]
    beside: list[int]


class Fit(NamedTuple):
    """``words``: the placement of a run. ``gpus``: those of the whole cluster."""

    words: str
    gpus: int


def check_fits(config: Config, *, training: bool = True) -> str:
    """`fit` in words."""
    return fit(config, training=training).words


def fit(config: Config, *, training: bool = True) -> Fit:
    """Raises UserError when a training run, or an evaluation, takes more than the cluster has, before
    anything is started.
    """
    if address_of(config) == "local" and not ray.is_initialized():
        _check_grows_no_more(config)
        found, here, has = None, True, _local_resources(config)
    else:
        owns = _connect(config)
        found = expected(config)
        here, has = _is_this_machine() and config.cluster.grows_to is None, _resources(found, shared=True)
        if owns:
            ray.shutdown()
    if training and here:
        check_offload(config.policy)  # of another cluster, every rank looks at its own machine
    demands = placement(config, has, training=training)
    if found is not None and (problem := too_large(bundles(demands), found)):
        raise UserError(f"cluster: {problem}")
    if training and has.gpus and config.weight_sync.backend == "ipc":
        colocated = is_colocated(config, has)
        transfer_backend("ipc", "cuda", one_host=True, colocated=colocated)  # refuses where they are apart
    return Fit(describe(demands, has), has.gpus)


def local_demands(config: Config) -> dict[str, Demand]:
    """What every role of a training run would take of this machine alone."""
    return placement(config, _local_resources(config), training=True)


class Cluster:
    """The actors of one run. Use as an async context manager."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._handles: list[Any] = []
        self._own_connection = self._shared = False
        self._demands: dict[str, Demand] = {}
        self._room = Room([], None)
        self._generation = 0  # of policy groups
        self._parts: Parts | None = None

    async def __aenter__(self) -> Cluster:
        address = address_of(self._config)
        with stage("Ray", "a cluster starts here" if address == "local" else f"joins {address}"):
            self._own_connection = _connect(self._config)
        self._shared = not self._own_connection or address_of(self._config) != "local"
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.stop_workers()
        finally:
            if self._own_connection:
                ray.shutdown()

    async def start_training(self, model_dir: Path) -> Workers:
        """Every worker of the loop, ready, the engines connected to the policy. Raises UserError when they do
        not fit, StateLost when one is lost before that.
        """
        try:
            return await self._start_training(model_dir)
        except LOST as error:
            raise StateLost(f"a worker is lost while it starts ({reason(error)})") from error

    async def _start_training(self, model_dir: Path) -> Workers:
        config = self._config
        await self._take_room(training=True)
        policy = self._create_policy(model_dir)
        shared = await self._shared_devices(policy)
        samplers = self._create_samplers(model_dir, shared)
        reference = self._create_reference(model_dir)
        parts = Parts(policy, samplers, reference)
        limit_s = config.cluster.timeouts.sync_s
        turns = (
            Turns(policy, samplers.rollouts, timeout_s=limit_s, where_stuck=self.where_stuck)
            if shared
            else None
        )
        await self._ready(turns, policy, samplers.rollouts)
        workers = await self._connected(parts, shared)
        if turns is None:
            self._parts = parts
            return workers
        await turns.to_sampling()
        colocated = ColocatedPolicy(policy, turns)
        return replace(
            workers,
            policy=colocated,
            probe=EngineProbe(colocated, samplers.rollouts),
            sync=ColocatedSync(workers.sync, turns),
            reference_sync=workers.reference_sync and ColocatedReferenceSync(workers.reference_sync, turns),
        )

    async def where_stuck(self) -> str:
        """Where each actor is in its code."""
        return await where_stuck({name: w for team in self._teams() for name, w in team.named().items()})

    def _teams(self) -> list[Team]:
        models = [m.team for pool in self._handles if isinstance(pool, RewardPool) for m in pool.models]
        return [handle.team for handle in self._handles] + models

    @asynccontextmanager
    async def losses_told(self) -> AsyncIterator[None]:
        """Within, a loss that whoever met it could not make good, and a deadline that has passed, is a
        StateLost, after which all workers start anew.
        """
        try:
            yield
        except (RayError, SamplesLost, TimeoutError) as error:
            # A transfer that broke off twice, or half of a reference, cannot be mended where it was met.
            lost = (*LOST, ObjectLostError, SamplesLost, TransferLost, TimeoutError)
            if not isinstance(cause_of(error), lost):
                raise
            self._parts = None  # nobody knows what else waits for whom
            first, line, stacks = str(error).partition("\n")
            raise StateLost(f"{first}: all workers start anew{line}{stacks}") from error

    async def start_again(self, model_dir: Path) -> Workers:
        """Workers after the loss of one that cannot be replaced alone; the policy is as when the run began.
        What has devices of its own and lost nothing stays as it is: engines, rewards, a frozen reference.
        """
        self._generation += 1
        if self._parts is not None and not self._config.reference.refresh_every:
            try:
                return await self._with_new_policy(self._parts, model_dir)
            except (RayError, WorkerLost, TimeoutError) as error:  # another was lost meanwhile
                logger.warning("%s: all workers start anew", reason(error))
        self._parts = None
        await self._end_workers()
        return await self.start_training(model_dir)

    async def _with_new_policy(self, old: Parts, model_dir: Path) -> Workers:
        self._handles.remove(old.policy)
        await old.policy.shutdown()
        parts = replace(old, policy=self._create_policy(model_dir))
        await gather([_up(parts.policy), old.samplers.rollouts.abandon()])
        if not old.samplers.rollouts.team.is_whole:
            raise WorkerLost("an engine is being replaced")
        workers = await self._connected(parts, None)
        self._parts = parts
        return workers

    async def _connected(self, parts: Parts, shared: SharedDevices | None) -> Workers:
        """All of them are ready."""
        policy, samplers, reference = parts.policy, parts.samplers, parts.reference
        with stage("weight transfer", "policy ranks and engines connect"):
            sync = await WeightSync.connect(
                policy,
                samplers.rollouts,
                self._config.weight_sync,
                beside=shared.beside if shared else None,
                timeout_s=self._config.cluster.timeouts.sync_s,
            )
        reference_sync = await self._reference_sync(policy, reference)
        usage = self._usage(parts)
        return Workers(
            samplers.rollouts,
            samplers.rewards,
            reference,
            policy,
            sync,
            reference_sync,
            usage,
            self.where_stuck,
            EngineProbe(policy, samplers.rollouts),
        )

    def _usage(self, parts: Parts) -> ActorUsage:
        rewards, reference = parts.samplers.rewards, parts.reference
        teams = {
            "rollout": [parts.samplers.rollouts.team],
            "reward": [rewards.team],
            "reward_model": [model.team for model in rewards.models],
            "reference": [reference.team] if reference else [],
            "policy": [parts.policy.team],
        }
        return ActorUsage(
            teams,
            queueing={"reference", "reward_model", "policy"},
            timeout_s=self._config.cluster.timeouts.sync_s,
        )

    async def _shared_devices(self, policy: PolicyGroup) -> SharedDevices | None:
        """Of the engines, where they have no GPUs of their own."""
        if not self._demands["rollout"].shared:
            return None
        async with deadline(self._config.cluster.timeouts.start_s, "start: policy ranks get their GPUs"):
            held = await policy.devices()
        engines = share_out(held, self._config.rollout.tensor_parallel_size)
        return SharedDevices(engines, ranks_beside(held, engines))

    async def _reference_sync(
        self, policy: PolicyGroup, reference: ReferencePool | None
    ) -> ReferenceSync | None:
        config = self._config
        if reference is None or not config.reference.refresh_every:
            return None
        return await ReferenceSync.connect(
            policy,
            reference,
            config.weight_sync,
            mix=config.reference.refresh_mix,
            timeout_s=config.cluster.timeouts.sync_s,
        )

    async def start_evaluation(self, model_dir: Path) -> Samplers:
        """Rollout and reward workers alone, on the weights in ``model_dir``."""
        await self._take_room(training=False)
        samplers = self._create_samplers(model_dir, None)
        await self._ready(None)
        return samplers

    async def stop_workers(self) -> None:
        """End every actor this cluster started, and give their room back; safe to call twice."""
        try:
            await self._end_workers()
        finally:
            self._room.give_back()

    async def _end_workers(self) -> None:
        """Their room stays: others wait for it, too."""
        handles, self._handles = self._handles, []
        if handles:
            with stage("workers", "all actors end"):
                await gather(handle.shutdown() for handle in reversed(handles))

    async def _ready(self, turns: Turns | None, *in_turns: Any) -> None:
        """All actors load at once, but for those that take turns; what they refuse (a model they cannot
        load) is the user's to mend.
        """
        own = [handle for handle in self._handles if turns is None or handle not in in_turns]
        together = [_up_in_turns(turns, in_turns)] if turns else []
        with refusals():
            await gather([*(_up(handle) for handle in own), *together])

    def _create_policy(self, model_dir: Path) -> PolicyGroup:
        config = self._config
        policy = PolicyGroup(
            config.policy,
            model=config.model,
            model_dir=str(model_dir),
            algorithm=config.algorithm,
            temperature=config.sampling.temperature,
            token_budget=config.batch.micro_batch_tokens,
            epochs=config.batch.epochs_per_batch,
            total_updates=config.total_updates,
            timeouts=config.cluster.timeouts,
            seed=config.seed,
            options=self._options("policy"),
            places=self._room.of("policy"),
            restarts=config.cluster.restarts,
            generation=self._generation,
            profile=config.profile,
        )
        self._handles.insert(0, policy)
        return policy

    def _create_samplers(self, model_dir: Path, shared: SharedDevices | None) -> Samplers:
        config = self._config
        spec = EngineSpec.of(config, model_dir, colocated=shared is not None)
        options, places = self._options("rollout"), self._room.of("rollout")
        if shared is not None:
            places = [_place(options, devices) for devices in shared.engines]
        restarts = self._restarts
        rollouts = self._keep(
            RolloutPool(
                spec,
                options=options,
                places=places,
                irreplaceable=_SHARES if shared else None,
                **restarts,
            )
        )
        rewards = RewardPool(
            config.rewards,
            max_new_tokens=config.sampling.max_new_tokens,
            models=self._create_reward_models(model_dir),
            options=self._options("rewards"),
            places=self._room.of("rewards"),
            **restarts,
        )
        return Samplers(rollouts, self._keep(rewards))

    def _create_reward_models(self, model_dir: Path) -> list[RewardModelPool]:
        places, made = self._room.of("reward_models"), []
        left = iter(places or ())
        for model in self._config.rewards.models:
            own = None if places is None else list(islice(left, model.num_workers))
            pool = RewardModelPool(
                model,
                policy=self._config.model,
                policy_dir=str(model_dir),
                options=self._options("reward_models"),
                places=own,
                **self._restarts,
            )
            made.append(pool)
        return made

    def _create_reference(self, model_dir: Path) -> ReferencePool | None:
        config = self._config
        if not config.needs_reference:
            return None
        return self._keep(
            ReferencePool(
                config.reference,
                model=config.model,
                model_dir=str(model_dir),
                temperature=config.sampling.temperature,
                chunk_mib=config.policy.logprob_chunk_mib,
                options=self._options("reference"),
                places=self._room.of("reference"),
                **self._restarts,
            )
        )

    @property
    def _restarts(self) -> dict[str, Any]:
        """What the pools are told of it."""
        cluster = self._config.cluster
        return {"restarts": cluster.restarts, "start_s": cluster.timeouts.start_s}

    def _keep(self, handle: Any) -> Any:
        self._handles.append(handle)
        return handle

    async def _take_room(self, *, training: bool) -> None:
        if self._room.is_held:  # of workers that were all lost or ended
            await self._room.whole(self._config)
            return
        with stage("placement", "GPUs and CPUs are reserved for all actors"):
            self._demands = await self._placed(training)
            self._room = await Room.take(self._config, self._demands)

    async def _placed(self, training: bool) -> dict[str, Demand]:
        """What the cluster is too small for is refused at once, but for a run that was there before: in the
        place of a node that it lost another may be on its way.
        """
        again = self._generation > 0
        end = time.monotonic() + (self._config.cluster.timeouts.room_s if again else 0.0)
        while True:
            try:
                has = expected(self._config)
                resources = _resources(has, shared=self._shared)
                demands = placement(self._config, resources, training=training)
                if problem := too_large(bundles(demands), has):
                    raise UserError(f"cluster: {problem}")
                return demands
            except UserError as error:
                if time.monotonic() >= end:
                    raise
                if again:
                    logger.warning("waiting for a node in the place of one that is lost: %s", error)
                    again = False
            await asyncio.sleep(_LOOK_S)

    def _options(self, role: str) -> dict[str, Any]:
        """Ray options of an actor that has no place of its own. CPUs are divided by thread counts, not by
        Ray: actors that take turns share them.
        """
        demand = self._demands[role]
        return {
            "num_cpus": 0,
            "num_gpus": 0 if demand.shared else demand.gpus,
            "runtime_env": {"env_vars": thread_environment(demand.threads)},
        }


async def _up(handle: Any) -> None:
    """Wait for the actors of one role."""
    found = (words for kind, words in _STARTS.items() if isinstance(handle, kind))
    name, what = next(found, ("actors", ""))
    with stage(name, what, lambda: names_of(_starting([handle]))):
        await handle.ready()


async def _up_in_turns(turns: Turns, handles: Sequence[Any]) -> None:
    what = "they load one after the other, on the same GPUs"
    with stage("engines and policy ranks", what, lambda: names_of(_starting(handles))):
        await turns.start()


def _starting(handles: Sequence[Any]) -> list[str]:
    """Names of the actors that are not up yet."""
    teams = [handle.team for handle in handles]
    teams += [model.team for handle in handles for model in getattr(handle, "models", ())]
    return sorted(name for team in teams for name in team.starting)


def _place(options: dict[str, Any], devices: Devices) -> dict[str, Any]:
    """Options of an actor on ``devices`` that Ray has given to others: it sees them, and Ray counts none."""
    environment = options["runtime_env"]["env_vars"] | {"CUDA_VISIBLE_DEVICES": ",".join(devices.gpus)}
    return {
        "runtime_env": {"env_vars": environment},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(devices.node, soft=False),
    }


def address_of(config: Config) -> str:
    """Of the Ray cluster that is joined; `local`: a private one on this machine."""
    return config.cluster.address or os.environ.get("RAY_ADDRESS") or "local"


def _local_resources(config: Config) -> Resources:
    return Resources(config.cluster.num_cpus or available_cpus(), torch.cuda.device_count())


def _resources(has: Sequence[Node], *, shared: bool) -> Resources:
    """Of all nodes of a cluster; ``shared``: see `Resources`."""
    cpus, gpus = int(sum(node.cpus for node in has)), int(sum(node.gpus for node in has))
    most = int(max(node.cpus for node in has))
    return Resources(max(cpus, 1), gpus, max(most, 1), shared)


def _check_grows_no_more(config: Config) -> None:
    """A cluster that is the run's own."""
    if config.cluster.grows_to is not None:
        raise UserError(
            "`cluster.grows_to` is set, and the run has a cluster of its own, which is this machine; set "
            "`cluster.address` (or RAY_ADDRESS) to the one that grows, or remove it"
        )


def _is_this_machine() -> bool:
    """Whether the cluster is this machine alone, so that what is missing here is missing there."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return alive == {ray.get_runtime_context().get_node_id()}


def _connect(config: Config) -> bool:
    """Join the cluster, or start a private local one; whether the connection is ours to close."""
    if ray.is_initialized():
        return False
    address = address_of(config)
    # Ray would run its workers at the lowest priority, where any other program of this machine starves them.
    # They are the job. Read when a cluster starts, so one that is joined keeps its own.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # A group that failed has two results, and whoever waits for it is told by the first of them.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    local: dict[str, Any] = {}
    if address == "local":
        _check_grows_no_more(config)
        local = {"num_cpus": config.cluster.num_cpus, "include_dashboard": False}
    if local and device_type() == "cpu":
        local["num_gpus"] = 0  # Ray counts GPUs also where torch is the CPU build
    if local:
        prepare_token()
    try:
        ray.init(address=address, namespace=None, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError) as error:  # the latter: an address of another kind, as Ray says
        raise UserError(
            f"cluster.address = {address}: no Ray cluster answers there ({error}); start one with `ray start "
            "--head`, or leave cluster.address and RAY_ADDRESS unset for a private local one"
        ) from error
    if local:
        close_session(Path(ray._private.worker._global_node.get_session_dir_path()))
    return True
