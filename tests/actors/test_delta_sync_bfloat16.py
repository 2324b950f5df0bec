"""Weight deltas of a policy that trains in bfloat16, between real ranks and a real engine."""

import asyncio
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actors.weight_sync import WeightSync
from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutPool, RolloutWorker
from grpo_dist.config import ModelConfig, OptimizerConfig, PolicyConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.types import Sampling
from tests.support import made_groups
from tests.support.patience import HANG_S
from tests.support.real_engine import ACTORS, PROMPTS, OnALoop, one_rank, same

pytestmark = [pytest.mark.machine, pytest.mark.slow]

SETTINGS = WeightSyncConfig(bucket_mb=1, deltas=True)


@pytest.fixture(scope="module")
def wide_heads(tiny_model, tmp_path_factory):
    """The demo's model with heads of 64: the engine's CPU kernels have no bfloat16 for its heads of 32."""
    directory = tmp_path_factory.mktemp("models") / "wide"
    shutil.copytree(tiny_model, directory)
    config = AutoConfig.from_pretrained(tiny_model)
    config.num_attention_heads, config.num_key_value_heads = 2, 1
    config.dtype, config.head_dim = torch.bfloat16, 64
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


class World(OnALoop):
    async def start(self, model_dir):
        model = ModelConfig(path="tiny", dtype="bfloat16")
        settings = RolloutConfig(num_workers=1, max_num_seqs=16, enforce_eager=True, kv_cache_gib=0.25)
        spec = EngineSpec(settings, SETTINGS, model, str(model_dir), max_length=256, seed=0)
        self.rollouts = RolloutPool(spec, ACTORS, worker=RolloutWorker)
        ranks = PolicyConfig(zero_stage=2, optimizer=OptimizerConfig(lr=1e-6))
        self.policy = one_rank(model, model_dir, ranks)
        await asyncio.gather(self.rollouts.ready(), self.policy.ready())
        self.sync = await WeightSync.connect(self.policy, self.rollouts, SETTINGS, timeout_s=HANG_S)

    async def sample(self):
        worker = self.rollouts.workers[0]
        return await worker.sample.remote(PROMPTS[0], [1, 2, 3], Sampling(max_new_tokens=24))


def test_updates_in_bfloat16_change_few_bits_and_engines_sample_as_with_whole_weights(
    ray_cluster, wide_heads
):
    world = World()
    world.run(world.start(wide_heads))

    async def session():
        whole = await world.sync.push(1)
        shares = []
        for step in range(2, 5):
            await world.policy.update(world.policy.stage([made_groups.batch(seed=step)]))
            metrics = await world.sync.push(step)
            assert metrics["sync/whole"] == metrics["sync/mismatches"] == 0
            shares.append(metrics["sync/changed_share"])
            assert metrics["sync/bytes"] < 0.1 * whole["sync/bytes"]
        assert all(0 < share < 0.05 for share in shares)
        samples = await world.sample()
        deltas, world.sync._deltas = world.sync._deltas, None
        await world.sync.push(5)
        world.sync._deltas = deltas
        assert same(samples, await world.sample())

    world.run(session())
    world.close()
