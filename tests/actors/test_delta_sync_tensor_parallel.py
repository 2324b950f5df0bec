"""Weight deltas to an engine over two processes: each keeps a copy of all weights, and loads its own part."""

import itertools

import numpy as np
import pytest
import torch

from actors.workers.rollout import RolloutWorker
from grpo_dist.config import WeightSyncConfig
from grpo_dist.errors import TransferLost, find_cause
from grpo_dist.types import Sampling
from tests.actors.test_delta_sync import NudgedWorker
from tests.support.engines import TwoEngines, world_of
from tests.support.real_engine import PROMPTS, difference, same

pytestmark = [pytest.mark.machine, pytest.mark.slow, pytest.mark.long]

SETTINGS = WeightSyncConfig(bucket_mb=1, deltas=True)


class SplitEngine(RolloutWorker):
    """An engine whose processes return their weights."""

    async def weights(self):
        """Return the rank of each process, and its weights by name."""
        return await self._engine.in_workers(read_weights)

    async def spoil_copy(self, rank):
        await self._engine.in_workers(lambda worker: spoil(worker, rank))

    async def loads(self):
        """Return how many buckets each process has loaded since the first call."""
        return await self._engine.in_workers(counted_loads)

    async def lose_transfer(self):
        await self._engine.in_workers(lose)

    async def lose_next_transfer(self, rank):
        await self._engine.in_workers(lambda worker: lose_next(worker, rank))


@torch.no_grad()
def read_weights(worker):
    """Return the rank and its weights. Packed CPU weights cannot be read, but their product with the identity
    matrix has the values: all other terms of its sums are 0.
    """
    from vllm.model_executor.layers.linear import LinearBase

    model = worker.model_runner.model
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.numel()}
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            identity = torch.eye(getattr(layer, "input_size_per_partition", layer.input_size))
            weights[f"{name} applied"] = layer.quant_method.apply(layer, identity)
    return worker.rank, weights


def spoil(worker, rank):
    if worker.rank == rank:
        worker.weight_transfer_engine.held.slots[0][5] ^= 1


def counted_loads(worker):
    model = worker.weight_transfer_engine.model
    if not hasattr(model, "loads"):
        load, model.loads = model.load_weights, 0

        def counted(weights):
            model.loads += 1
            return load(weights)

        model.load_weights = counted
    return model.loads


def lose(worker):
    raise TransferLost(f"process {worker.rank}")


def lose_next(worker, rank):
    """Make process ``rank`` fail once it has received the next weights."""
    transfer = worker.weight_transfer_engine

    def receive_and_fail(info):
        del transfer.receive_weights
        transfer.receive_weights(info)
        raise TransferLost(f"process {rank}")

    if worker.rank == rank:
        transfer.receive_weights = receive_and_fail


class World(TwoEngines):
    def __init__(self, model_dir):
        super().__init__(
            model_dir, SETTINGS, [1, 2, 3], Sampling(max_new_tokens=24), engine=SplitEngine,
            rank=NudgedWorker, tensor_parallel=2,
        )  # fmt: skip
        self.version, self.engine = 0, self.rollouts.workers[0]

    async def nudge(self, seed, share=0.01, only=""):
        self.follow(await self.policy.ranks[0].nudge.remote(seed, share, only))

    async def push(self):
        self.version += 1
        return await self.sync.push(self.version)

    async def push_whole(self):
        """Send the same weights whole, as without deltas."""
        deltas, self.sync._deltas = self.sync._deltas, None
        metrics = await self.push()
        self.sync._deltas = deltas
        return metrics

    async def check(self):
        """Assert that the engine computes what the policy's weights compute; return what it samples and the
        weights of its processes.
        """
        (group,) = await self.groups_of(PROMPTS[:1], self.seeds, self.sampling)
        assert all((r.policy_versions == self.version).all() for r in group)
        assert difference(self.model, PROMPTS[0], group) < 1e-5
        return group, await self.engine.weights.remote()


world = world_of(World)


def equal(a, b):
    (samples, weights), (others, other_weights) = a, b
    pairs = zip(weights, other_weights, strict=True)
    parts = all(
        i == j and all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        for (i, before), (j, after) in pairs
    )
    return parts and same(samples, others)


def test_each_process_holds_its_part_and_after_changes_the_bits_of_a_whole_transfer(world):
    async def session():
        await world.nudge(0)
        assert (await world.push())["sync/whole"] == 1
        _, parts = await world.check()
        assert [rank for rank, _ in parts] == [0, 1]
        (_, first), (_, second) = parts
        same_in_both = {name for name in first if torch.equal(first[name], second[name])}
        assert same_in_both and all("norm" in name for name in same_in_both)
        for seed, only in ((1, ""), (2, ""), (3, "layers.1.mlp.gate_proj"), (4, "embed_tokens")):
            await world.nudge(seed, only=only)
            metrics = await world.push()
            assert metrics["sync/whole"] == metrics["sync/mismatches"] == 0
            assert 0 < metrics["sync/changed_share"] < 0.011
            with_changes = await world.check()
        await world.push_whole()
        whole = await world.check()
        assert equal(with_changes, whole)

    world.run(session())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_bit_in_the_copy_of_one_process_is_noticed_and_whole_weights_follow(world, rank):
    async def session():
        for seed in (5, 6):
            await world.nudge(seed)
            await world.push()
        counts = [await world.engine.loads.remote()]
        await world.engine.spoil_copy.remote(rank)
        await world.nudge(7 + rank)
        metrics = await world.push()
        assert metrics["sync/mismatches"] == 1 and metrics["sync/whole"] == 0
        counts.append(await world.engine.loads.remote())
        after = await world.check()
        await world.nudge(9)
        metrics = await world.push()
        assert metrics["sync/mismatches"] == metrics["sync/whole"] == 0
        counts.append(await world.engine.loads.remote())
        whole, changes = (np.subtract(b, a) for a, b in itertools.pairwise(counts))
        assert (whole == changes).all() and (whole > 0).all()  # after the wrong bit: only whole weights
        before = await world.check()
        await world.push_whole()
        assert equal(before, await world.check()) and not equal(after, before)

    world.run(session())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_transfer_that_one_process_loses_is_repeated_in_both(world, rank):
    async def session():
        await world.nudge(10 + rank)
        await world.engine.lose_next_transfer.remote(rank)
        await world.push_whole()
        repeated = await world.check()
        await world.push_whole()
        assert equal(repeated, await world.check())

    world.run(session())


def test_an_error_in_both_processes_keeps_its_type_and_disturbs_no_later_call(world):
    async def session():
        for _ in range(2):
            with pytest.raises(TransferLost, match="process 0") as raised:
                await world.engine.lose_transfer.remote()
            assert type(find_cause(raised.value)) is TransferLost
            assert [rank for rank, _ in await world.engine.weights.remote()] == [0, 1]

    world.run(session())
