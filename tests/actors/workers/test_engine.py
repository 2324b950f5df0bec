"""One real vLLM engine, fed by one real DeepSpeed rank: what is sampled, and what a weight sync leaves
behind.

The engine runs in mode ``keep``, so that weights can change under requests in flight; between requests that
is the same as ``drain``.
"""

import asyncio
import socket

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from actors.weight_sync import WeightSync
from actors.workers.policy import PolicyGroup, PolicyWorker
from actors.workers.rollout import EngineSpec, RolloutPool, RolloutWorker
from grpo_dist.config import (
    AlgorithmConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    TimeoutsConfig,
    WeightSyncConfig,
)
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Prompt, Sampling
from tests.support.patience import HANG_S

pytestmark = pytest.mark.machine

OPTIONS = {"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}}
PROMPTS = [Prompt(f"p{i}", np.arange(11 + i, 20 + 2 * i, dtype=np.int32), "1", "test") for i in range(4)]


class MovingWorker(PolicyWorker):
    """A rank whose weights can be pushed somewhere else, and whose transfers can be corrupted and cut."""

    _cuts = 0

    def move(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._trainer.engine.module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
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
        """In the next so many groups the connection to an engine breaks behind the first bucket."""
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
    """An engine that says of how many prompt tokens each request found keys and values computed."""

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


def one_rank(model, model_dir, settings=PolicyConfig(zero_stage=2), worker=MovingWorker):  # noqa: B008
    return PolicyGroup(
        settings, model=model, model_dir=str(model_dir), algorithm=AlgorithmConfig(),
        temperature=1.0, token_budget=1000, epochs=1, total_updates=1, timeouts=TimeoutsConfig(), seed=0,
        options=OPTIONS, worker=worker,
    )  # fmt: skip


class OnALoop:
    """``rollouts`` and ``policy``, handles of actors that are used on an event loop of their own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def close(self):
        self.run(self.rollouts.shutdown())
        self.run(self.policy.shutdown())
        self.loop.close()


class World(OnALoop):
    """The engine, the rank and their sync."""

    def __init__(self, model_dir, settings=PolicyConfig(zero_stage=2), worker=MovingWorker, **rollout):  # noqa: B008
        super().__init__()
        self.rollouts, self.policy, self.sync = self.run(self._start(model_dir, settings, worker, rollout))
        self.version = 0

    async def _start(self, model_dir, policy_settings, worker, rollout):
        model = ModelConfig(path="tiny")
        settings = RolloutConfig(max_num_seqs=16, **rollout)
        sync = WeightSyncConfig(bucket_mb=1, mode="keep")
        spec = EngineSpec(settings, sync, model, str(model_dir), max_length=256, seed=0)
        rollouts = RolloutPool(spec, options=OPTIONS, worker=CountingWorker)
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


@pytest.fixture(scope="module")
def world(ray_cluster, tiny_model):
    world = World(tiny_model)
    yield world
    world.close()


@pytest.fixture(scope="module")
def trainer_model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@torch.no_grad()
def difference(model, prompt, rollouts, temperature=1.0):
    """Largest |engine - trainer| log-prob, nats, over the tokens of ``rollouts``."""
    module = TokenLogprobs(model, temperature=temperature, chunk_mib=8)
    worst = 0.0
    for rollout in rollouts:
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, rollout.completion_ids]).astype(np.int64))[
            None
        ]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(prompt.token_ids) :] = True
        got = module(padded(ids, mask))[0][0, len(prompt.token_ids) :].numpy()
        worst = max(worst, float(np.abs(got - rollout.logprobs).max()))
    return worst


def same(a, b):
    return all(
        np.array_equal(x.completion_ids, y.completion_ids) and np.array_equal(x.logprobs, y.logprobs)
        for x, y in zip(a, b, strict=True)
    )


def test_rollouts_are_complete_records(world):
    for prompt, rollouts in zip(PROMPTS, world.sample_all(), strict=True):
        assert [r.sample for r in rollouts] == [0, 1, 2]
        for rollout in rollouts:
            assert rollout.prompt_uid == prompt.uid
            length = len(rollout.completion_ids)
            assert len(rollout.logprobs) == len(rollout.policy_versions) == length
            assert rollout.finish_reason == (
                "length" if length == 24 and rollout.completion_ids[-1] != 1 else "stop"
            )
            assert (rollout.logprobs < 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_at_the_sampling_temperature(world, trainer_model, temperature):
    for prompt, rollouts in zip(PROMPTS, world.sample_all(temperature=temperature), strict=True):
        assert difference(trainer_model, prompt, rollouts, temperature) < 1e-5


def test_samples_follow_from_their_seeds_alone(world):
    together = world.sample_all()
    alone = [world.sample_all([p], seeds=(1, 2, 3))[0] for p in reversed(PROMPTS)][::-1]
    for a, b in zip(together, alone, strict=True):
        assert same(a, b)
    other = world.sample_all(seeds=(4, 5, 6))
    assert not any(same(a, b) for a, b in zip(together, other, strict=True))


def test_a_prompt_longer_than_one_prefill_is_sampled_with_its_seed(world):
    """Prompts cut into pieces would kill a CPU engine with seeded requests; many long ones exceed one
    prefill.
    """
    prompts = [Prompt(f"long{i}", np.full(200, 11 + i, np.int32), "1", "test") for i in range(20)]
    assert all(len(rollouts) == 3 for rollouts in world.sample_all(prompts, max_new_tokens=2))


def test_the_samples_of_a_group_share_one_prefill_of_their_prompt(world):
    """A prompt of 200 tokens: the first sample computes it, the other 7 find its 6 full blocks of 32 tokens,
    though all are scheduled at once.
    """
    prompt = Prompt("shared", np.arange(200, dtype=np.int32) % 50 + 11, "1", "test")
    world.cached()
    [group] = world.sample_all([prompt], seeds=range(8))
    assert sorted(world.cached()) == [0] + [192] * 7
    alone = [world.sample_all([prompt], seeds=(seed,))[0][0] for seed in range(8)]
    assert world.cached() == [192] * 8
    assert same(group, alone)
    world.push()  # drops what was computed under other weights
    assert same(group, world.sample_all([prompt], seeds=range(8))[0])
    assert sorted(world.cached()) == [0] + [192] * 7


def test_a_sample_has_exactly_the_length_asked_for(world):
    lengths = (1, 7, 100)
    [group] = world.sample_all(PROMPTS[:1], lengths=lengths, max_new_tokens=100)
    assert tuple(len(r.completion_ids) for r in group) == lengths
    assert [r.finish_reason for r in group] == ["length"] * 3


def test_one_long_sample_keeps_no_place_of_its_finished_siblings(world):
    """Two groups of 16 fill the pool's room, each with one sample of 200 tokens. The next batch is sampled
    while those two run: the engine does not wait for the longest.
    """
    lengths, order = (200, *[2] * 15), []

    async def named(prompt, **sampling):
        await world.sample(prompt, list(range(16)), **sampling)
        order.append(prompt.uid)

    async def batches():
        skewed = [named(p, lengths=lengths, max_new_tokens=200) for p in PROMPTS[:2]]
        await asyncio.gather(*skewed, *(named(p, lengths=(2,) * 16) for p in PROMPTS[2:]))

    world.run(batches())
    assert set(order[:2]) == {"p2", "p3"} and set(order[2:]) == {"p0", "p1"}


def test_after_a_sync_the_engine_samples_from_the_moved_weights(world, trainer_model):
    """Tied embeddings included: the head must follow the embedding, also the second time."""
    for seed in (11, 12):
        weights = world.move(seed)
        before = world.sample_all()
        metrics = world.push()
        after = world.sample_all()
        trainer_model.load_state_dict(weights, strict=False)
        trainer_model.tie_weights()
        assert metrics["sync/bytes"] == sum(w.numel() * 4 for w in weights.values())
        for prompt, old, new in zip(PROMPTS, before, after, strict=True):
            assert difference(trainer_model, prompt, new) < 1e-5
            assert difference(trainer_model, prompt, old) > 0.1
            assert all((r.policy_versions == world.version).all() for r in new)


def test_requests_in_flight_go_on_under_the_new_weights_and_say_so(world, trainer_model):
    old_weights = {n: p.detach().clone() for n, p in trainer_model.named_parameters()}
    new_weights = world.move(13)

    async def sync_under_way():
        running = [asyncio.create_task(world.sample(p, list(range(64)), max_new_tokens=200)) for p in PROMPTS]
        await asyncio.sleep(0.5)
        world.version += 1
        await world.sync.push(world.version)
        return await asyncio.gather(*running)

    groups = world.run(sync_under_way())
    mixed = [r for g in groups for r in g if len(set(r.policy_versions.tolist())) == 2]
    assert mixed, "no request was in flight; nothing was tested"
    models = {}
    for version, weights in ((world.version - 1, old_weights), (world.version, new_weights)):
        models[version] = AutoModelForCausalLM.from_config(trainer_model.config).float().eval()
        models[version].load_state_dict(weights, strict=False)
        models[version].tie_weights()
    by_uid = {p.uid: p for p in PROMPTS}
    for rollout in mixed[:8]:
        assert (np.diff(rollout.policy_versions) >= 0).all()
        prompt = by_uid[rollout.prompt_uid]
        ids = torch.from_numpy(np.concatenate([prompt.token_ids, rollout.completion_ids]).astype(np.int64))[
            None
        ]
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(prompt.token_ids) :] = True
        for version, model in models.items():
            with torch.no_grad():
                values = TokenLogprobs(model, temperature=1.0, chunk_mib=8)(padded(ids, mask))[0][0].numpy()
            here = rollout.policy_versions == version
            gap = np.abs(values[len(prompt.token_ids) :] - rollout.logprobs)
            assert gap[here].max() < 1e-5
            assert gap[~here].max() > 0.01
    trainer_model.load_state_dict(new_weights, strict=False)
    trainer_model.tie_weights()


def test_a_transfer_that_changed_on_the_way_ends_the_run(world):
    """Last in this file: the engine is of no use afterwards."""
    ray.get(world.policy.ranks[0].corrupt_next_transfer.remote())
    with pytest.raises(Exception, match=r"received bytes with checksum \d+, the policy sent \d+"):
        world.push()
