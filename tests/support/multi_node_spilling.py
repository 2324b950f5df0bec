"""Batches larger than any object store, staged for a rank on another node; `test_reservation` runs it."""

import asyncio
import re

import ray
import torch
from ray._private.internal_api import memory_summary

from actors.lifecycle.team import ActorSpec
from actors.workers.policy import PolicyWorker
from actors.workers.policy_group import PolicyGroup, PolicySpec
from grpo_dist.config import ModelConfig, PolicyConfig, TimeoutsConfig
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.trainer import TrainerSettings
from tests.support import made_groups
from tests.support.patient_cluster import PatientCluster

STORE_MB, BATCHES, BATCH_MB = 80, 6, 40


class Adding(PolicyWorker):
    """A rank that reports its batch and its node."""

    def start(self, *_):
        self._where = ray.get_runtime_context().get_node_id()
        return "cpu", 0.0

    def update(self, updates, *_):
        return {"sum": float(sum(int(own.tokens.sum()) for own in updates.batches)), "node": self._where}


def batches():
    """Yield batches of about BATCH_MB each: five arrays of 4 to 8 bytes per token."""
    made = made_groups.batch(groups=2, samples=2)
    repeats = BATCH_MB * 10**6 // (made.tokens.numel() * 25)
    for seed in range(BATCHES):
        rows = made.select([i % len(made) for i in range(len(made) * repeats)])
        random = torch.Generator().manual_seed(seed)
        rows.tokens.add_(torch.randint(0, 9, rows.tokens.shape, generator=random))
        yield rows


async def session(home):
    spec = PolicySpec(
        PolicyConfig(num_workers=1),
        ModelConfig(path="none"),
        "none",
        TrainerSettings(
            objective=Objective(),
            temperature=1.0,
            token_budget=None,
            epochs=1,
            total_updates=1,
            seed=0,
        ),
    )
    actors = ActorSpec({"num_cpus": 1, "resources": {"elsewhere": 1}})
    group = PolicyGroup(spec, actors, timeouts=TimeoutsConfig(), worker=Adding)
    await group.ready()
    staged, expected = [], []
    for batch in batches():
        expected.append(float(batch.tokens.sum()))
        staged.append(group.stage([batch]))
    for own, total in zip(staged, expected, strict=True):
        found = await group.update(own)
        assert found["sum"] == total, (found, total)
        assert found["node"] != home
    await group.shutdown()


def main():
    cluster = PatientCluster()
    try:
        for resources in ({}, {"elsewhere": 1}):
            cluster.add_node(num_cpus=2, object_store_memory=STORE_MB * 10**6, resources=resources)
        ray.init(address=cluster.address, log_to_driver=False)
        asyncio.run(session(ray.get_runtime_context().get_node_id()))
        spilled = re.search(r"Spilled (\d+) MiB, (\d+) objects", memory_summary(stats_only=True))
        assert spilled, memory_summary(stats_only=True)
        print(f"spilled {spilled[1]} MiB, {spilled[2]} objects", flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
