"""What an engine compiles is kept for later starts, also for the same model at another path."""

import asyncio
import os
import shutil

import pytest

from actors.lifecycle.team import ActorSpec
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout_pool import RolloutPool
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Sampling
from tests.support.real_engine import PROMPTS, same

pytestmark = [pytest.mark.machine, pytest.mark.slow]


def started(model_dir, environment):
    """Start an engine, and end it; return graphs compiled, phases of the start and samples."""
    sync, model = WeightSyncConfig(), ModelConfig(path="tiny")
    spec = EngineSpec(RolloutConfig(max_num_seqs=16), sync, model, str(model_dir), max_length=256, seed=0)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}

    async def run():
        pool = RolloutPool(spec, ActorSpec(options))
        await pool.ready()
        sampling = Sampling(max_new_tokens=8)
        rollouts = [await (await pool.sample(p, seeds=[1, 2], sampling=sampling)) for p in PROMPTS]
        worker = pool.workers[0]
        compiled, health = await worker.compiled.remote(), await worker.health.remote()
        await pool.shutdown()
        return compiled, [name for name, _ in health.phases], rollouts

    return asyncio.run(run())


def built(directory):
    """Return the names of the compiled kernels under ``directory``."""
    return sorted(name for _, _, files in os.walk(directory) for name in files if name.endswith(".so"))


def test_a_second_start_compiles_nothing_also_from_another_path(ray_cluster, tiny_model, tmp_path):
    other = tmp_path / "the same model elsewhere"
    shutil.copytree(tiny_model, other)
    cache = tmp_path / "cache"
    # Named here: an earlier test's engine settings may be in the environment that the actors inherit.
    environment = thread_environment(1) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    compiled, phases, first = started(tiny_model, environment)
    kernels = built(cache)
    assert compiled > 0 and kernels
    assert phases == ["imports", "model", "compilation", "first request"]
    compiled, phases, second = started(other, environment)
    assert compiled == 0 and built(cache) == kernels
    assert phases == ["imports", "model", "compilation (cached)", "first request"]
    for a, b in zip(first, second, strict=True):
        assert same(a, b)
