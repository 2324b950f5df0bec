"""Engines of evaluation, and a real policy rank whose snapshots they load."""

import asyncio
import os
from dataclasses import replace

import ray
import torch
from transformers import AutoModelForCausalLM

from actors.evaluation_engines import EvaluationEngines
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutWorker
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import ModelConfig, PolicyConfig, RestartsConfig, RolloutConfig
from grpo_dist.config import WeightSyncConfig as SyncConfig
from grpo_dist.types import Sampling
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, PROMPTS, OnALoop, difference, one_rank

SEEDS, SAMPLING = [1, 2, 3], Sampling(max_new_tokens=48)


class KillableWorker(RolloutWorker):
    """An engine that says which process it is."""

    async def process(self):
        return os.getpid()


class World(OnALoop):
    def __init__(self, model_dir, settings=PolicyConfig(zero_stage=2)):  # noqa: B008
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.run(self._start(model_dir, settings))

    async def _start(self, model_dir, settings):
        model = ModelConfig(path="tiny")
        rollout = RolloutConfig(max_num_seqs=16, enforce_eager=True, kv_cache_gib=0.25)
        spec = EngineSpec(rollout, SyncConfig(), model, str(model_dir), max_length=256, seed=0)
        actors = replace(ACTORS, restarts=RestartsConfig(backoff_s=0.1), start_s=HANG_S)
        self.rollouts = RolloutPool(spec, actors, worker=KillableWorker, role="evaluation")
        self.policy = one_rank(model, model_dir, settings)
        await asyncio.gather(self.rollouts.ready(), self.policy.ready())
        self.engines = EvaluationEngines(self.policy, self.rollouts, None, timeout_s=HANG_S)

    async def sample_all(self):
        return await self.groups_of(PROMPTS, SEEDS, SAMPLING)

    def move(self, seed):
        return ray.get(self.policy.ranks[0].move.remote(seed))

    def difference(self, sampled, weights):
        self.model.load_state_dict(weights, strict=False)
        return max(difference(self.model, p, rollouts) for p, rollouts in zip(PROMPTS, sampled, strict=True))

    async def load(self, directory, version):
        await self.engines.snapshot(directory, version)
        await self.engines.written()
        assert await self.engines.load(directory)
