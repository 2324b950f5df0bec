"""Differences between a real engine and the rank that feeds it, before and after updates."""

import ray
import torch
from transformers import AutoModelForCausalLM

from grpo_dist.config import OptimizerConfig, PolicyConfig
from tests.support import made_groups
from tests.support.real_engine import PROMPTS, World, difference
from tests.support.real_ranks import UpdatedWorker

LIMIT = 1e-5  # nats, engine and trainer in float32


EAGER = {"enforce_eager": True}  # an engine that compiles nothing starts sooner


def largest(model, sampled):
    return max(difference(model, *pair) for pair in zip(PROMPTS, sampled, strict=True))


def differences(model_dir, settings, engine=EAGER):
    """Largest difference of engine and trainer from the checkpoint and after each of two updates with their
    syncs; and of what was sampled before each of these updates, nats.
    """
    world = World(model_dir, settings, UpdatedWorker, **engine)
    try:
        how = {"dtype": torch.float32, "attn_implementation": "eager"}  # caps attention's logits, too
        model = AutoModelForCausalLM.from_pretrained(model_dir, **how)
        sampled = world.sample_all()
        own, moved = [largest(model, sampled)], []
        for seed in (1, 2):
            batch = made_groups.batch(seed=seed, reference=False)
            model.load_state_dict(ray.get(world.policy.ranks[0].updated.remote(batch)), strict=False)
            model.tie_weights()
            world.push()
            moved.append(largest(model, sampled))
            sampled = world.sample_all()
            own.append(largest(model, sampled))
        return own, moved
    finally:
        world.close()


def trained(**settings):
    return PolicyConfig(zero_stage=2, optimizer=OptimizerConfig(lr=3e-3, schedule="constant"), **settings)
