"""Episodes on real engines, with a real policy rank and workers of toy environments."""

import asyncio
from dataclasses import replace

import numpy as np
import torch

from actors.weight_sync import WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.environment import EnvironmentPool
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.config import (
    DataConfig,
    EnvironmentsConfig,
    ModelConfig,
    RestartsConfig,
    RolloutConfig,
    WeightSyncConfig,
)
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.packing import padded
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Prompt, Sampling, Task
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, OnALoop, one_rank
from tests.support.toy_environments import ToyWorker

DATA = DataConfig(train=[{"path": "demo:add3"}], environment="toy", chat_template="none")


def prompt(name, *, tokens=12, **kwargs):
    """Return a prompt whose episodes have three turns, or ``turns``."""
    rng = np.random.default_rng(tokens + len(name))
    ids = rng.integers(11, 260, tokens).astype(np.int32)
    return Prompt(name, ids, "1", "test", text=f"<{name}>", task=Task("toy", {"turns": 3} | kwargs))


def norm_implementations(worker):
    from vllm import ir

    return ir.ops.rms_norm.get_priority(), ir.ops.fused_add_rms_norm.get_priority()


class OpenEngine(RolloutWorker):
    """An engine that can be paused, and reports its process id."""

    async def generate(self, token_ids, stop=()):
        """Return the completion of one request, its text, and its text without the last token, in which stop
        strings are searched. Texts lack special tokens.
        """
        generation = await self._generate(token_ids, 1, Sampling(), 60, stop=stop)
        ids = (generation.token_ids, generation.token_ids[:-1])
        return generation, *(self._tokenizer.decode(part, skip_special_tokens=True) for part in ids)

    async def norms(self):
        """Return the implementations of the norms in each worker process, by preference."""
        return await self._engine.in_workers(norm_implementations)

    async def pause(self, drain):
        await self._engine.pause(drain=drain)

    async def resume(self):
        await self._engine.resume()

    async def process(self):
        import os

        return os.getpid()


class EpisodeWorld(OnALoop):
    """Starts engines, environment workers and, with ``trains``, a rank that feeds the engines. ``restarts``:
    of engines, and of environments without ``of_environments``.
    """

    def __init__(
        self, model_dir, *, engines=1, workers=2, trains=True, max_length=512, restarts=None,
        of_environments=None, max_turn_tokens=16, **environments,
    ):  # fmt: skip
        super().__init__()
        self.settings = EnvironmentsConfig(
            num_workers=workers, max_turn_tokens=max_turn_tokens, **environments
        )
        self.restarts = restarts or RestartsConfig(backoff_s=0.05)
        self.of_environments = of_environments or self.restarts
        self.version = 0
        self.run(self._start(model_dir, engines, trains, max_length))

    async def _start(self, model_dir, engines, trains, max_length):
        model, sync = ModelConfig(path="tiny"), WeightSyncConfig(bucket_mb=1, mode="keep")
        settings = RolloutConfig(num_workers=engines, max_num_seqs=64, enforce_eager=True, kv_cache_gib=0.25)
        spec = EngineSpec(
            settings, sync, model, str(model_dir), max_length, 0, environments=self.settings, data=DATA
        )
        # Two threads: with more than one, an engine's arithmetic could depend on its batch.
        environment = {"runtime_env": {"env_vars": thread_environment(2)}}
        actors = replace(ACTORS, options=ACTORS.options | environment, restarts=self.restarts, start_s=HANG_S)
        environment_actors = replace(actors, restarts=self.of_environments)
        self.environments = EnvironmentPool(self.settings, environment_actors, worker=ToyWorker)
        self.rollouts = RolloutPool(spec, actors, environments=self.environments, worker=OpenEngine)
        parts = [self.environments.ready(), self.rollouts.ready()]
        self.policy = one_rank(model, model_dir) if trains else None
        await asyncio.gather(*parts, *([self.policy.ready()] if trains else []))
        if trains:
            self.sync = await WeightSync.connect(self.policy, self.rollouts, sync, timeout_s=HANG_S)

    def run(self, coroutine):
        return super().run(asyncio.wait_for(coroutine, HANG_S))

    async def sample(self, prompt, seeds=(1, 2, 3, 4), **sampling):
        how = Sampling(**{"max_new_tokens": 200} | sampling)
        return await (await self.rollouts.sample(prompt, seeds=list(seeds), sampling=how))

    async def sample_all(self, prompts, seeds=(1, 2, 3, 4), **sampling):
        return await asyncio.gather(*(self.sample(prompt, seeds, **sampling) for prompt in prompts))

    async def move(self, seed):
        """Change the policy's weights; return them."""
        return await self.policy.ranks[0].move.remote(seed)

    async def push(self):
        self.version += 1
        return await self.sync.push(self.version)

    async def hold(self, held=True):
        """Block all environments' answers until the hold ends."""
        await asyncio.gather(*(worker.hold.remote(held) for worker in self.environments.workers))

    async def running(self):
        """Return the turns of all running episodes."""
        per_worker = await asyncio.gather(*(w.running.remote() for w in self.environments.workers))
        return [turns for episodes in per_worker for turns in episodes.values()]

    async def until_waiting(self, episodes, turns):
        """Wait until this many ``episodes`` have called their environment at least ``turns`` times."""
        while sum(count >= turns for count in await self.running()) < episodes:
            await asyncio.sleep(0.02)

    async def usage(self):
        """Return the counts of engine 0 since the last call."""
        return (await self.rollouts.workers[0].usage.remote()).counts

    def close(self):
        self.run(self.rollouts.shutdown())
        self.run(self.environments.shutdown())
        if self.policy is not None:
            self.run(self.policy.shutdown())
        self.loop.close()


@torch.no_grad()
def trainer_logprobs(model, prompt, rollout):
    """Return the log-probs of all tokens of an episode's first row under ``model``."""
    ids = np.concatenate([prompt.token_ids, rollout.completion_ids]).astype(np.int64)
    tokens = torch.from_numpy(ids)[None]
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, len(prompt.token_ids) :] = True
    values = TokenLogprobs(model, temperature=1.0, chunk_mib=8)(padded(tokens, mask))[0][0]
    return values[len(prompt.token_ids) :].numpy()


def equal(ours, theirs):
    """Return whether two groups of episodes are bit-identical."""
    return len(ours) == len(theirs) and all(
        np.array_equal(a.completion_ids, b.completion_ids)
        and np.array_equal(a.logprobs, b.logprobs)
        and np.array_equal(a.sampled, b.sampled)
        and (a.turns, a.finish_reason, a.text) == (b.turns, b.finish_reason, b.text)
        for a, b in zip(ours, theirs, strict=True)
    )
