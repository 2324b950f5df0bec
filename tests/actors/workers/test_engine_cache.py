"""What an engine compiles is kept for later starts, also for the same model at another path."""

import asyncio
import os
import shutil

import pytest

from actors.lifecycle.team import ActorSpec
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutPool
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.runtime.hardware import thread_environment
from grpo_dist.types import Sampling
from tests.support.real_engine import PROMPTS, same

pytestmark = [pytest.mark.machine, pytest.mark.slow]


def run_engine(model_dir, environment):
    """Start an engine, and end it; return how many graphs it compiled, and samples."""
    sync, model = WeightSyncConfig(), ModelConfig(path="tiny")
    spec = EngineSpec(RolloutConfig(max_num_seqs=16), sync, model, str(model_dir), max_length=256, seed=0)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}

    async def run():
        pool = RolloutPool(spec, ActorSpec(options))
        await pool.ready()
        sampling = Sampling(max_new_tokens=8)
        rollouts = [await (await pool.sample(p, seeds=[1, 2], sampling=sampling)) for p in PROMPTS]
        worker = pool.workers[0]
        compiled = await worker.__ray_call__.remote(compiled_graphs)
        await pool.shutdown()
        return compiled, rollouts

    return asyncio.run(run())


def compiled_graphs(_):
    """Return how many graphs this process has compiled, without those found in a cache."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    return int(counters["inductor"]["fxgraph_cache_miss"] + compilation_counter.num_aot_compiles)


def kernels_in(directory):
    """Return the names of the compiled kernels under ``directory``."""
    return sorted(name for _, _, files in os.walk(directory) for name in files if name.endswith(".so"))


def test_a_second_start_compiles_nothing_also_from_another_path(ray_cluster, tiny_model, tmp_path):
    other = tmp_path / "the same model elsewhere"
    shutil.copytree(tiny_model, other)
    cache = tmp_path / "cache"
    # Named here: an earlier test's engine settings may be in the environment that the actors inherit.
    environment = thread_environment(1) | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    compiled, first = run_engine(tiny_model, environment)
    kernels = kernels_in(cache)
    assert compiled > 0 and kernels
    compiled, second = run_engine(other, environment)
    assert compiled == 0 and kernels_in(cache) == kernels
    for a, b in zip(first, second, strict=True):
        assert same(a, b)
