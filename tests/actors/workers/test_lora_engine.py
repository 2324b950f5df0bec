"""Syncs of adapters or merged weights into a real engine: it samples as the trainer computes."""

from dataclasses import replace

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from actors.weight_sync import WeightSync
from actors.workers.policy import PolicyWorker
from grpo_dist.config import LoRAConfig, PolicyConfig
from tests.support.real_engine import PROMPTS, World, difference

pytestmark = pytest.mark.machine


class MovingAdapters(PolicyWorker):
    """A rank whose adapters can be moved."""

    def move(self, seed):
        """Move the adapters at random; return the merged weights."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._trainer.engine.module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return {name: t.clone() for bucket in self._trainer.weights.buckets(1 << 20) for name, t in bucket}

    def logits(self, ids):
        """Return the logits of the model with unmerged adapters, as it trains."""
        model = self._trainer.engine.module.model
        model.set_attn_implementation("sdpa")  # rows are not packed
        with torch.no_grad():
            return model(ids).logits


@pytest.fixture(scope="module")
def world(ray_cluster, tiny_model):
    settings = PolicyConfig(zero_stage=2, lora=LoRAConfig(rank=4, alpha=8, sync="adapter"))
    # Eager: `test_engine` covers compilation, which takes most of a minute.
    world = World(tiny_model, settings, MovingAdapters, enforce_eager=True)
    yield world
    world.close()


@pytest.fixture
def merged_sync(world):
    """Have the same rank send whole weights to the same engine."""
    world.sync, adapter_sync = merged(world), world.sync
    yield
    world.sync = adapter_sync
    world.policy._settings = world.policy._settings.model_copy(
        update={"lora": LoRAConfig(rank=4, alpha=8, sync="adapter")}
    )


def merged(world):
    world.policy._settings = world.policy._settings.model_copy(update={"lora": LoRAConfig(rank=4, alpha=8)})
    specs = ray.get(world.policy.ranks[0].parameter_specs.remote())
    group = world.sync._group
    group = replace(group, parameters=specs, spec=replace(group.spec, adapters_only=False))
    return WeightSync(group, world.rollouts, 60)


def samples_as_the_trainer(world, tiny_model, seed):
    """Move, push, sample; return the bytes sent."""
    weights = world.move(seed)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    ids = torch.arange(11, 43)[None]
    trained = ray.get(world.policy.ranks[0].logits.remote(ids))
    assert torch.allclose(model(ids).logits, trained, atol=1e-5)
    before = world.sample_all()
    sent = world.push()["sync/bytes"]
    for prompt, old, new in zip(PROMPTS, before, world.sample_all(), strict=True):
        assert difference(model, prompt, new) < 1e-5
        assert difference(model, prompt, old) > 0.1
    return sent


@pytest.mark.parametrize("seed", [21, 22])
def test_only_adapters_are_sent_and_the_engine_matches_the_trainer(world, tiny_model, seed):
    """Twice: the second merge starts from the checkpoint again, not from the first."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    linear = {m.weight.shape for n, m in model.named_modules() if n.endswith("_proj")}
    assert len(linear) > 2
    sizes = [m.in_features + m.out_features for n, m in model.named_modules() if n.endswith("_proj")]
    assert samples_as_the_trainer(world, tiny_model, seed) == sum(sizes) * 4 * 4


def test_merged_weights_are_sent_and_the_engine_matches_the_trainer(world, tiny_model, merged_sync):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert samples_as_the_trainer(world, tiny_model, 23) == sum(p.numel() * 4 for p in model.parameters())
