"""Evaluation engines sample from an adapter snapshot as from the merged model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_dist.config import LoRAConfig, PolicyConfig
from tests.support.engines import EvaluatedWorld

pytestmark = pytest.mark.machine


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_snapshot_of_adapters_is_the_model_with_them(ray_cluster, tiny_model, tmp_path, sync):
    world = EvaluatedWorld(tiny_model, PolicyConfig(zero_stage=2, lora=LoRAConfig(rank=4, sync=sync)))
    try:
        world.move(7)
        sampled = world.run(world.load(tmp_path, 1)) or world.run(world.sample_all())
        world.run(world.policy.export(tmp_path / "model", tokenizer_dir=tiny_model))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        assert world.difference(sampled, exported.state_dict()) < 1e-5
    finally:
        world.close()
