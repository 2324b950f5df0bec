"""A real pretrained model in engine and trainer: 49,152 tokens, a tied head, prompts of its chat template."""

from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_dist.batch.rows import make_batch
from grpo_dist.batch.shared_prefixes import needed_tokens
from grpo_dist.config import OptimizerConfig, PolicyConfig
from grpo_dist.data.prompts import PromptFormat
from grpo_dist.policy.attention import block_spans
from grpo_dist.policy.model import TokenLogprobs, load_causal_lm
from grpo_dist.policy.packing import packed, padded
from grpo_dist.types import Group, Prompt
from tests.support import made_groups
from tests.support.real_engine import World, differences_of_tokens
from tests.support.real_ranks import UpdatedWorker
from tests.support.smollm2 import real_model

pytestmark = [pytest.mark.machine, pytest.mark.slow]

MEAN, MOST = 1e-5, 2e-4  # nats, engine and trainer in float32 over a vocabulary of 49,152
QUESTIONS = ["What is 17 + 25?", "Name three primes.", "How many days has a leap year?"]


def prompts_of(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [np.array(PromptFormat().token_ids(question, tokenizer), np.int32) for question in QUESTIONS]
    return [Prompt(f"p{i}", tokens, "1", "asked") for i, tokens in enumerate(ids)]


def batch_of(groups):
    advantages = [np.array([-1, 0.5, 1], np.float32)] * len(groups)
    return make_batch(groups, advantages, ref_logprobs=None, max_new_tokens=16)


def test_engine_and_trainer_are_the_same_model_before_and_after_an_update(ray_cluster):
    directory = real_model()
    prompts = prompts_of(directory)
    settings = PolicyConfig(zero_stage=0, optimizer=OptimizerConfig(lr=1e-4, schedule="constant"))
    world = World(directory, settings, UpdatedWorker, enforce_eager=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

        def gaps(sampled):
            pairs = zip(prompts, sampled, strict=True)
            return np.concatenate([differences_of_tokens(model, *pair) for pair in pairs])

        sampled = world.sample_all(prompts, max_new_tokens=16)
        before = gaps(sampled)
        rewards = np.arange(3, dtype=np.float32), {}, ("",) * 3
        batch = batch_of([Group(p, tuple(r), *rewards) for p, r in zip(prompts, sampled, strict=True)])
        weights = ray.get(world.policy.ranks[0].updated.remote(batch))
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        world.push()
        moved, after = gaps(sampled), gaps(world.sample_all(prompts, max_new_tokens=16))
    finally:
        world.close()
    for gap in (before, after):
        assert len(gap) > 20 and gap.mean() < MEAN and gap.max() < MOST
    assert moved.mean() > 100 * MEAN


def test_packed_rows_behind_one_system_prompt_have_the_numbers_of_rows_alone():
    """The chat template puts the same system prompt before every prompt; the packed stream has it once."""
    directory = real_model()
    prompts, rng = prompts_of(directory), np.random.default_rng(0)
    groups = [replace(made_groups.group(i, rng, samples=3), prompt=p) for i, p in enumerate(prompts)]
    batch, results = batch_of(groups), []
    for layout in (packed(batch, batch.wanted, block_spans), padded(batch.tokens, batch.policy.mask)):
        packing = layout.spans is not None
        how = {"dtype": torch.float32, "attention": "auto", "trust_remote_code": False}
        module = TokenLogprobs(
            load_causal_lm(str(directory), packing=packing, **how), temperature=1.0, chunk_mib=8
        )
        logprobs = module(layout)[0]
        logprobs.sum().backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        results.append((layout.tokens.numel(), logprobs.detach(), gradients))
    (size, ours, gradients), (_, expected, theirs) = results
    assert size == needed_tokens([batch]) < int(batch.lengths.sum()) - 20 * 2
    assert float((ours - expected).abs().sum() / batch.policy.mask.sum()) < MEAN
    for name, gradient in gradients.items():
        assert float((gradient - theirs[name]).norm() / theirs[name].norm()) < 1e-4, name
