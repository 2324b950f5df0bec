"""A real vLLM engine fed by one real DeepSpeed rank, and helpers that compare their numbers."""

import asyncio
import socket

import numpy as np
import ray
import torch

from actors.lifecycle.team import ActorSpec
from actors.weight_sync import WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.policy import PolicyGroup, PolicySpec, PolicyWorker
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.batch.rows import make_batch
from grpo_dist.config import (
    AlgorithmConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)
from grpo_dist.policy.loss import Objective
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from grpo_dist.policy.trainer import TrainerSettings
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Group, Prompt, Sampling
from tests.support.patience import HANG_S

ACTORS = ActorSpec({"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}})
PROMPTS = [Prompt(f"p{i}", np.arange(11 + i, 20 + 2 * i, dtype=np.int32), "1", "test") for i in range(4)]
# Longer than a block of the engine's cache, so that the samples of a group share blocks.
LONG_PROMPTS = [
    Prompt(f"p{i}", np.arange(11 + i, 51 + 3 * i, dtype=np.int32) % 97 + 11, "1", "test") for i in range(3)
]
SAME = 1e-6, 1e-5  # bounds of `mismatch`, float32, nats: mean, maximum; measured with routes: 7e-7, 2.4e-6


class MovingWorker(PolicyWorker):
    """A rank with methods that change its weights, and corrupt or cut its transfers."""

    _cuts = 0
    _first: list[torch.Tensor] | None = None

    def move(self, seed: int) -> dict[str, torch.Tensor]:
        """Move the trained weights, always from their initial values: they, and rounding, stay small."""
        parameters = [p for p in self._trainer.engine.module.parameters() if p.requires_grad]
        self._first = self._first or [p.detach().clone() for p in parameters]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter, first in zip(parameters, self._first, strict=True):
                parameter.copy_(first + torch.randn(first.shape, generator=generator) * 0.05)
        return {n: p.detach().clone() for n, p in self._trainer.engine.module.model.named_parameters()}

    def corrupt_next_transfer(self) -> None:
        transport = self._transports["rollout"]
        outgoing = transport.outgoing

        def flip_a_byte(sizes):
            for i, flat in enumerate(outgoing(sizes)):
                yield flat
                if i == 0:
                    flat[0] ^= 1

        transport.outgoing = flip_a_byte

    def cut_transfers(self, count: int) -> None:
        """In the next ``count`` groups, break the connection to an engine after the first bucket."""
        self._cuts = count

    def open_transfer(self, group, *seat) -> None:
        super().open_transfer(group, *seat)
        if self._cuts:
            self._cuts -= 1
            transport = self._transports[group]
            outgoing = transport.outgoing

            def broken(sizes):
                for i, flat in enumerate(outgoing(sizes)):
                    yield flat
                    if i == 0:
                        transport._connections._sockets[0].shutdown(socket.SHUT_RDWR)

            transport.outgoing = broken


class CountingWorker(RolloutWorker):
    """An engine that reports its steps, and the number of cached prompt tokens of each request."""

    async def start(self):
        await super().start()
        self._cached, generate = [], self._engine.generate

        async def counted(token_ids, params):
            output = await generate(token_ids, params)
            self._cached.append(output.num_cached_tokens)
            return output

        self._engine.generate = counted

    def cached(self):
        values, self._cached = self._cached, []
        return values

    def steps(self):
        """Return how many steps have begun; each samples a token of every request with a finished prompt."""
        return self._engine._steps


def one_rank(
    model,
    model_dir,
    settings=PolicyConfig(zero_stage=2),  # noqa: B008
    worker=MovingWorker,
    temperature=1.0,
):
    spec = PolicySpec(
        settings,
        model,
        str(model_dir),
        TrainerSettings(
            objective=Objective(), temperature=temperature, token_budget=1000, epochs=1, total_updates=1,
            seed=0,
        ),
    )  # fmt: skip
    return PolicyGroup(spec, ACTORS, timeouts=TimeoutsConfig(), worker=worker)


class OnALoop:
    """Handles ``rollouts`` and ``policy`` of actors, used on a private event loop."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, HANG_S))

    async def groups_of(self, prompts, seeds, sampling):
        async def one(prompt):
            return await (await self.rollouts.sample(prompt, seeds=seeds, sampling=sampling))

        return await asyncio.gather(*(one(p) for p in prompts))

    def close(self):
        self.run(self.rollouts.shutdown())
        self.run(self.policy.shutdown())
        self.loop.close()


class World(OnALoop):
    """Starts the engine, the rank and their sync. ``masks``: the engine returns sampling masks."""

    def __init__(
        self,
        model_dir,
        settings=PolicyConfig(zero_stage=2),  # noqa: B008
        worker=MovingWorker,
        *,
        masks=False,
        **rollout,
    ):
        super().__init__()
        self._masks = masks
        self.rollouts, self.policy, self.sync = self.run(self._start(model_dir, settings, worker, rollout))
        self.version = 0

    async def _start(self, model_dir, policy_settings, worker, rollout):
        model = ModelConfig(path="tiny")
        settings = RolloutConfig(max_num_seqs=16, **rollout)
        sync = WeightSyncConfig(bucket_mb=1, mode="keep")
        spec = EngineSpec(
            settings, sync, model, str(model_dir), max_length=256, seed=0,
            router_replay=policy_settings.router_replay, returns_masks=self._masks,
        )  # fmt: skip
        rollouts = RolloutPool(spec, ACTORS, worker=CountingWorker)
        policy = one_rank(model, model_dir, policy_settings, worker)
        await asyncio.gather(rollouts.ready(), policy.ready())
        return rollouts, policy, await WeightSync.connect(policy, rollouts, sync, timeout_s=HANG_S)

    async def sample(self, prompt, seeds, **sampling):
        reference = await self.rollouts.sample(
            prompt, seeds=seeds, sampling=Sampling(**{"max_new_tokens": 24} | sampling)
        )
        return await reference

    def sample_all(self, prompts=PROMPTS, seeds=(1, 2, 3), **sampling):
        async def together():
            return await asyncio.gather(*(self.sample(p, list(seeds), **sampling) for p in prompts))

        return self.run(together())

    def cached(self):
        return ray.get(self.rollouts.workers[0].cached.remote())

    def move(self, seed):
        return ray.get(self.policy.ranks[0].move.remote(seed))

    def push(self):
        self.version += 1
        return self.run(self.sync.push(self.version))


def difference(model, prompt, rollouts, temperature=1.0):
    """Return the largest |engine - trainer| log-prob, in nats, over the tokens of ``rollouts``."""
    return float(differences_of_tokens(model, prompt, rollouts, temperature).max())


@torch.no_grad()
def differences_of_tokens(model, prompt, rollouts, temperature=1.0):
    """Return |engine - trainer| of each token's log-prob, nats, each sample alone and without padding."""
    module = TokenLogprobs(model, temperature=temperature, chunk_mib=8)
    gaps = []
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, rollout.completion_ids]).astype(np.int64))
        mask = torch.zeros(1, len(ids), dtype=torch.bool)
        mask[:, len(prompt.token_ids) :] = True
        logprobs = module(padded(ids[None], mask))[0][0, len(prompt.token_ids) :].numpy()
        gaps.append(np.abs(logprobs - rollout.logprobs))
    return np.concatenate(gaps)


def same(a, b):
    return all(
        np.array_equal(x.completion_ids, y.completion_ids) and np.array_equal(x.logprobs, y.logprobs)
        for x, y in zip(a, b, strict=True)
    )


def batch_of(sampled):
    """Return a batch of the samples ``sampled`` for `LONG_PROMPTS`, with made-up advantages."""
    groups = [
        Group(prompt, rollouts, np.arange(len(rollouts), dtype=np.float32), {}, ("",) * len(rollouts))
        for prompt, rollouts in zip(LONG_PROMPTS, sampled, strict=True)
    ]
    advantages = [np.linspace(-1, 1, len(g.rollouts), dtype=np.float32) for g in groups]
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=24)


def mismatch(world, batch):
    """Return the mean and the largest |engine - trainer|, nats, as in an update's metrics."""
    _, metrics = ray.get(world.policy.ranks[0].gradients_with.remote(batch, Objective(AlgorithmConfig())))
    return metrics["mismatch/logprob_diff_mean"], metrics["mismatch/logprob_diff_max"]
