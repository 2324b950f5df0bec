"""Clusters of several nodes on this machine, with fictional GPUs. `test_reservation` runs each scenario as a
process: ``python -m tests.support.several_nodes reservations``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from actors.connection import started_in_time
from tests.support.patience import HANG_S

_UP_S = 180.0  # for nodes that an autoscaler adds


class PatientCluster(Cluster):
    """Nodes on a machine that may be busy: Ray gives each 30 s to start and 30 s to join."""

    def add_node(self, wait: bool = True, **node_args: Any) -> Any:
        return started_in_time(lambda: Cluster.add_node(self, wait, **node_args))

    def _wait_for_node(self, node: Any, timeout: float = 30) -> None:
        super()._wait_for_node(node, HANG_S)


@contextmanager
def nodes_of(*nodes, head=None):
    """Join a cluster with ``nodes``, each as for `add_node`. ``head``: default: without CPUs and GPUs."""
    cluster = PatientCluster(initialize_head=True, head_node_args=head or {"num_cpus": 0, "num_gpus": 0})
    try:
        for node in nodes:
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


@ray.remote(num_cpus=0)
class Actor:
    def where(self):
        return ray.get_runtime_context().get_node_id()

    def gpus(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def two_ranks_and_an_engine(grows_to=None, **timeouts):
    """Return a configuration of two ranks and an engine of two GPUs."""
    from tests.support.plans import shape

    wanted = shape(2, 1, 2, where="separate")
    changes = {"timeouts": wanted.cluster.timeouts.model_copy(update=timeouts), "grows_to": grows_to}
    return wanted.model_copy(update={"cluster": wanted.cluster.model_copy(update=changes)})


def actors_of(reservation, role):
    return [Actor.options(**place).remote() for place in reservation.options(role)]


async def reservations():
    """A cluster of two nodes that another job shares: a reservation waits, loses a node, and is released."""
    from actors.placement.demands import Resources, placement
    from actors.placement.fitting import Bundle, too_large
    from actors.placement.reservation import nodes
    from grpo_dist.errors import UserError
    from tests.support.plans import reserved

    def demands(wanted):
        return placement(wanted, Resources(8, 4, 4, shared=True), training=True)

    node = {"num_cpus": 4, "num_gpus": 2}
    with nodes_of(node, node) as cluster:
        wanted = two_ranks_and_an_engine(placement_timeout_s=1)
        tenant = Actor.options(num_gpus=1).remote()
        there = ray.get(tenant.where.remote())
        try:
            await reserved(wanted, demands(wanted))
        except UserError as error:
            print(error, flush=True)
        assert [g["state"] for g in placement_group_table().values()] == ["REMOVED"]

        # Another job releases its GPU while the run waits.
        waits = two_ranks_and_an_engine(placement_timeout_s=60)
        taking = asyncio.create_task(reserved(waits, demands(waits)))
        await asyncio.sleep(3.0)
        assert not taking.done() and ray.get(tenant.where.remote()) == there
        ray.kill(tenant)
        reservation = await taking
        ranks, (engine,) = actors_of(reservation, "policy"), actors_of(reservation, "rollout")
        homes = ray.get([rank.where.remote() for rank in ranks])
        assert homes[0] == homes[1] != ray.get(engine.where.remote())
        assert [len(gpus) for gpus in ray.get([a.gpus.remote() for a in (*ranks, engine)])] == [1, 1, 2]
        print("placed", flush=True)

        # The node of the ranks is lost; its replacement takes their bundles, and the engine stays.
        at = ray.get(engine.where.remote())
        (lost,) = (node for node in cluster.worker_nodes if node.node_id == homes[0])
        cluster.remove_node(lost)
        cluster.add_node(**node)
        replaced = actors_of(reservation, "policy")
        async with asyncio.timeout(HANG_S):
            news = [await rank.where.remote() for rank in replaced]
        assert news[0] == news[1] != homes[0] and ray.get(engine.where.remote()) == at
        print("replaced", flush=True)

        reservation.release()
        reservation.release()
        async with asyncio.timeout(HANG_S):
            while sum(node.free_gpus for node in nodes()) < 4:
                await asyncio.sleep(0.1)
        print("given back", flush=True)
        print(too_large([Bundle("rollout", 4, 0)], nodes()).splitlines()[0], flush=True)


async def assignment():
    """Two nodes of 8 GPUs, over which Ray mixes equal bundles: each role gets a whole node."""
    from actors.placement.demands import Resources, placement
    from tests.support.plans import reserved, shape

    def indices(role):
        places = reservation.options(role)
        return [place["scheduling_strategy"].placement_group_bundle_index for place in places]

    def homes():
        strategy = reservation.options("policy")[0]["scheduling_strategy"]
        return placement_group_table(strategy.placement_group)["bundles_to_node_id"]

    def nodes(role):
        return {homes()[index] for index in indices(role)}

    node = {"num_cpus": 20, "num_gpus": 8}
    with nodes_of(node, node) as cluster:
        wanted = shape(8, 8, where="separate")
        reservation = await reserved(wanted, placement(wanted, Resources(40, 16, 20), training=True))
        mixed = homes()
        letters = dict(zip(dict.fromkeys(mixed.values()), "abc", strict=False))
        print("bundles on", "".join(letters[mixed[i]] for i in range(len(mixed))), flush=True)
        (ours,), (theirs,) = nodes("policy"), nodes("rollout")
        assert ours != theirs
        places = [reservation.options(role)[i] for role in ("policy", "rollout") for i in (0, 7)]
        actors = [Actor.options(**place).remote() for place in places]
        at = ray.get([actor.where.remote() for actor in actors], timeout=HANG_S)
        assert at == [ours, ours, theirs, theirs]
        print("whole nodes", flush=True)

        (lost,) = (node for node in cluster.worker_nodes if node.node_id == ours)
        cluster.remove_node(lost)
        async with asyncio.timeout(HANG_S):
            while reservation.is_placed():
                await asyncio.sleep(0.1)
        cluster.add_node(**node)
        kept = indices("rollout")
        await reservation.wait_ready(wanted.cluster, only="policy")
        (news,) = nodes("policy")
        assert news not in (ours, theirs) and indices("rollout") == kept
        assert nodes("rollout") == {theirs}
        await reservation.wait_ready(wanted.cluster)
        assert nodes("policy") != nodes("rollout")
        assert len(nodes("policy")) == len(nodes("rollout")) == 1
        print("whole nodes again", flush=True)
        reservation.release()


_NODE = {"CPU": 4, "GPU": 2}
# Required keys of a cluster description for machines that commands set up.
_COMMANDS = (
    "cluster_synced_files", "initialization_commands", "setup_commands", "head_setup_commands",
    "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
)  # fmt: skip


def start_growing_head(directory: Path, mark: str) -> str:
    """Start a cluster that grows by up to two nodes and return its address. Ray's fake node provider replaces
    the cloud: its nodes are processes of this machine.
    """
    from tests.chaos.find import MARK
    from tests.support.processes import free_port

    port, for_clients = free_port("127.0.0.1"), free_port("127.0.0.1")
    head = {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0}
    settings = {
        "cluster_name": "grows",
        "max_workers": 2,
        "idle_timeout_minutes": 30,
        "upscaling_speed": 10.0,
        "provider": {"type": "fake_multinode", "gcs_address": f"127.0.0.1:{port}", "launch_multiple": True},
        "available_node_types": {
            "ray.head.default": head,
            "gpu": {"resources": _NODE, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
    }
    settings |= {name: {} for name in ("auth", "docker", "file_mounts")} | {name: [] for name in _COMMANDS}
    (directory / "grows.json").write_text(json.dumps(settings))
    head_id = "f" * 51 + "00000"  # the provider expects this id for the head
    environment = os.environ | {
        MARK: mark, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": head_id, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head_id,
    }  # fmt: skip
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--node-ip-address=127.0.0.1",
        f"--port={port}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false",
        f"--ray-client-server-port={for_clients}", f"--temp-dir={directory}/ray", "--disable-usage-stats",
        f"--autoscaling-config={directory}/grows.json",
    ]  # fmt: skip
    subprocess.run(command, env=environment, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    return f"127.0.0.1:{port}"


async def growth():
    """A cluster whose head has no GPU and whose autoscaler adds GPU nodes."""
    from actors.cluster import Cluster as RunCluster
    from actors.placement.reservation import nodes
    from grpo_dist.config import AutoscalingConfig
    from grpo_dist.errors import UserError
    from tests.chaos.find import Family
    from tests.support.plans import reserved

    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="grows-", dir="/tmp") as directory:
        try:
            ray.init(address=start_growing_head(Path(directory), mark), log_to_driver=False)
            assert [node.gpus for node in nodes()] == [0]
            try:
                await RunCluster(two_ranks_and_an_engine(placement_timeout_s=60))._placed(training=True)
            except UserError as error:
                print(error, flush=True)
            to = AutoscalingConfig(nodes=2, cpus=_NODE["CPU"], gpus=_NODE["GPU"])
            wanted = two_ranks_and_an_engine(to, placement_timeout_s=_UP_S)
            demands = await RunCluster(wanted)._placed(training=True)
            assert demands["policy"].gpus == 1 and demands["rollout"].gpus == 2
            reservation = await reserved(wanted, demands)
            (engine,) = actors_of(reservation, "rollout")
            assert len(ray.get(engine.gpus.remote(), timeout=HANG_S)) == 2
            print(f"grown to {sum(node.gpus == 2 for node in nodes())} nodes", flush=True)
            reservation.release()
        finally:
            ray.shutdown()
            Family(mark).kill()


async def spilling(store_mb=80, count=6, batch_mb=40):
    """Batches larger than any object store, staged for a rank on another node."""
    import torch
    from ray._private.internal_api import memory_summary

    from actors.lifecycle.team import ActorSpec
    from actors.workers.policy import PolicyGroup, PolicySpec, PolicyWorker
    from grpo_dist.config import ModelConfig, PolicyConfig, TimeoutsConfig
    from grpo_dist.policy.loss import Objective
    from grpo_dist.policy.trainer import TrainerSettings
    from tests.support import made_groups

    class Adding(PolicyWorker):
        """A rank that reports its batch and its node."""

        def start(self, *_):
            self._where = ray.get_runtime_context().get_node_id()
            return "cpu", 0.0

        def update(self, updates, *_):
            return {"sum": float(sum(int(b.tokens.sum()) for b in updates.batches)), "node": self._where}

    def batches():
        """Yield batches of about ``batch_mb`` each: five arrays of 4 to 8 bytes per token."""
        base = made_groups.batch(groups=2, samples=2)
        repeats = batch_mb * 10**6 // (base.tokens.numel() * 25)
        for seed in range(count):
            rows = base.select([i % len(base) for i in range(len(base) * repeats)])
            values = torch.randint(0, 9, rows.tokens.shape, generator=torch.Generator().manual_seed(seed))
            is_token = torch.arange(rows.tokens.shape[1]) < rows.lengths[:, None]  # no padding is sent
            rows.tokens.add_(values * is_token)
            yield rows

    settings = TrainerSettings(
        objective=Objective(), temperature=1.0, token_budget=None, epochs=1, total_updates=1, seed=0,
    )  # fmt: skip
    spec = PolicySpec(PolicyConfig(num_workers=1), ModelConfig(path="none"), "none", settings)
    store = {"num_cpus": 2, "object_store_memory": store_mb * 10**6}
    with nodes_of(store | {"resources": {"elsewhere": 1}}, head=store):
        home = ray.get_runtime_context().get_node_id()
        actors = ActorSpec({"num_cpus": 1, "resources": {"elsewhere": 1}})
        group = PolicyGroup(spec, actors, timeouts=TimeoutsConfig(), worker=Adding)
        await group.ready()
        staged, expected = [], []
        for batch in batches():
            expected.append(float(batch.tokens.sum()))
            staged.append(group.stage([batch]))
        for updates, total in zip(staged, expected, strict=True):
            answer = await group.update(updates)
            assert answer["sum"] == total and answer["node"] != home, (answer, total)
        await group.shutdown()
        spilled = re.search(r"Spilled (\d+) MiB, (\d+) objects", memory_summary(stats_only=True))
        assert spilled, memory_summary(stats_only=True)
        print(f"spilled {spilled[1]} MiB, {spilled[2]} objects", flush=True)


async def shared_gpu():
    """Reward models that share a GPU."""
    from actors.placement.demands import Resources, placement
    from tests.support.plans import reserved, shape

    models = [
        {"name": "small", "path": "x", "gpu_share": 0.25, "num_workers": 2},
        {"name": "large", "path": "y", "tensor_parallel_size": 2},
        {"name": "half", "path": "z", "gpu_share": 0.5},
    ]
    ray.init(address="local", num_cpus=8, num_gpus=5, include_dashboard=False, log_to_driver=False)
    wanted = shape(1, 1, where="separate", rewards={"models": models})
    reservation = await reserved(wanted, placement(wanted, Resources(8, 5, 8), training=True))
    workers = actors_of(reservation, "reward_models")
    small, again, large, half = ray.get([worker.gpus.remote() for worker in workers], timeout=HANG_S)
    assert small == again == half and len(small) == 1, (small, again, half)
    assert len(large) == 2 and not set(large) & set(small), large
    assert Counter(ray.available_resources())["GPU"] == 0  # reserved as a whole
    reservation.release()
    print("shared", flush=True)


if __name__ == "__main__":
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray would count the GPUs that it leaves visible: none
    asyncio.run(globals()[sys.argv[1]]())
