"""Samples that fail in an engine: the group keeps the others if enough are left."""

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from actors.workers.engine_settings import EngineSpec
from actors.workers.rollout import RolloutWorker, _generation
from grpo_dist.config import ModelConfig, RolloutConfig, WeightSyncConfig
from grpo_dist.environments.episode import Generation
from grpo_dist.errors import SamplesFailed
from grpo_dist.types import Prompt, Rollout, Sampling

PROMPT = Prompt("p", np.array([1, 2], np.int32), "1", "made")
FAILED = {11: SamplesFailed("rollout: the engine ended a request with 'error'")}


def sampled(failing, sampling, seeds=(10, 11, 12, 13)):
    model = ModelConfig(path="m")
    worker = RolloutWorker(EngineSpec(RolloutConfig(), WeightSyncConfig(), model, "m", 256, seed=0))
    worker._tokenizer = SimpleNamespace(decode=lambda ids, **_: "text")

    async def generate(ids, seed, *rest, **more):
        if seed in failing:
            raise failing[seed]
        return Generation([seed, 2], np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", 0)

    worker._generate = generate
    rollouts = asyncio.run(worker.sample(PROMPT, list(seeds), sampling))
    return worker.finished.sequences, [(r.sample, int(r.completion_ids[0])) for r in rollouts]


def test_the_other_samples_keep_their_numbers_and_all_count_as_finished(caplog):
    assert sampled(FAILED, Sampling(least=3)) == (4, [(0, 10), (2, 12), (3, 13)])
    assert [record.getMessage() for record in caplog.records if record.name == "grpo_dist"] == [
        "3 of 4 samples of p: rollout: the engine ended a request with 'error'; the group continues "
        "without the others"
    ]


@pytest.mark.parametrize("with_tokens", [False, True])
def test_only_a_sample_with_tokens_needs_the_masks_that_they_were_sampled_with(with_tokens):
    """An agent that ends before its first answer has none."""
    model = ModelConfig(path="m")
    spec = EngineSpec(RolloutConfig(), WeightSyncConfig(), model, "m", 64, seed=0, returns_masks=True)
    rollout = Rollout.without_tokens("p", 0)
    if with_tokens:
        rollout = replace(rollout, completion_ids=np.array([5], np.int32))
    with pytest.raises(AssertionError, match="lacks its sampling") if with_tokens else nullcontext():
        assert RolloutWorker(spec)._label(rollout, Sampling(top_p=0.9)).max_new_tokens is not None


@pytest.mark.parametrize("least", [None, 4])
def test_too_few_samples_fail_the_group(least):
    with pytest.raises(SamplesFailed, match="3 of 4 samples of p: rollout: the engine ended a request with"):
        sampled(FAILED, Sampling(least=least))


def test_an_engine_that_fails_as_a_whole_is_no_failed_sample():
    with pytest.raises(RuntimeError, match="the engine died"):
        sampled({11: RuntimeError("the engine died")}, Sampling(least=1))


def test_an_ending_that_is_no_completion_is_a_failed_sample():
    output = SimpleNamespace(finish_reason="repetition")
    with pytest.raises(SamplesFailed, match="ended a request with 'repetition'"):
        _generation(SimpleNamespace(outputs=[output]))
