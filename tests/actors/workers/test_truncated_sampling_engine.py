"""Truncated sampling with a real engine and a real rank: both take the softmax over the tokens that top_p,
top_k and min_p kept.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from actors.workers import rollout as rollout_module
from actors.workers.engine_settings import EngineSpec, engine_arguments
from actors.workers.rollout import RolloutWorker
from grpo_dist.config import (
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    PolicyConfig,
    RolloutConfig,
    SamplingConfig,
    WeightSyncConfig,
)
from grpo_dist.config.engine_arguments import mask_problems
from grpo_dist.errors import SamplesFailed, UserError
from grpo_dist.types import Sampling
from tests.support import fakes
from tests.support.models import architecture
from tests.support.real_engine import LONG_PROMPTS, SAME, World, batch_of, mismatch, same
from tests.support.real_ranks import OpenWorker

pytestmark = pytest.mark.machine

WAYS = {
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.02},
    "all, warm": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.005},
}


@pytest.mark.slow
def test_engine_and_trainer_have_the_softmax_over_the_same_tokens(ray_cluster, tmp_path):
    """With each setting, before and after an update with its sync, and with requests of all kinds in one
    batch of the engine. Without masks the mismatch is the share of the other tokens.
    """
    settings = PolicyConfig(zero_stage=2, optimizer=OptimizerConfig(lr=3e-3, schedule="constant"))
    world = World(architecture(tmp_path, "olmo2"), settings, OpenWorker, masks=True)
    try:
        alone = {name: world.sample_all(LONG_PROMPTS, **way) for name, way in WAYS.items()}
        for name, sampled in alone.items():
            batch = batch_of(sampled)
            rounding = np.divide(SAME, WAYS[name].get("temperature", 1.0))  # logits are divided by it
            assert np.all(np.less(mismatch(world, batch), rounding)), name
            mean, largest = mismatch(world, replace(batch, kept=None))
            assert mean > 0.01 and largest > 0.02, name
            counts = np.concatenate([kept.counts for kept in batch.kept])
            assert counts.min() > 0 and counts.max() < 272, name
        for way in ({"temperature": 0.0, "top_p": 0.9}, {}):
            greedy = world.sample_all(LONG_PROMPTS, **way)
            assert batch_of(greedy).kept is None

        async def together():
            ways = [*WAYS.values(), {}, {"temperature": 0.0}]
            return await asyncio.gather(
                *(world.sample(prompt, [1, 2, 3], **way) for way in ways for prompt in LONG_PROMPTS)
            )

        mixed = world.run(together())
        for one, other in zip(mixed, [group for groups in alone.values() for group in groups], strict=False):
            assert same(one, other)
            assert all(np.array_equal(a.kept.ids, b.kept.ids) for a, b in zip(one, other, strict=True))
        assert all(rollout.kept is None for group in mixed[-2 * len(LONG_PROMPTS) :] for rollout in group)

        metrics = world.run(world.policy.update(world.policy.stage([batch_of(alone["top_p"])])))
        assert metrics["mismatch/logprob_diff_max"] < SAME[1]
        world.push()
        again = world.sample_all(LONG_PROMPTS, **WAYS["top_p"])
        assert np.all(np.less(mismatch(world, batch_of(again)), SAME))
    finally:
        world.close()


def test_which_engines_return_masks():
    """vLLM's recorder on GPUs, ours elsewhere, which does not see other processes."""

    def arguments(device="cpu", masks=True, **rollout):
        spec = EngineSpec(
            RolloutConfig(kv_cache_gib=1, **rollout), WeightSyncConfig(), ModelConfig(path="m"), "m", 64, 0,
            returns_masks=masks,
        )  # fmt: skip
        made = engine_arguments(spec, None, device=device, free_memory=2**30)
        return made.get("return_sampling_mask"), made.get("worker_cls")

    assert arguments() == (None, None) and arguments("cuda", masks=False) == (None, None)
    assert arguments("cuda", tensor_parallel_size=2) == (True, None)
    with pytest.raises(UserError, match=r"`sampling\.top_p`.*`rollout\.tensor_parallel_size` = 2"):
        arguments(tensor_parallel_size=2)
    spec = EngineSpec.from_config(fakes.config(sampling={"max_new_tokens": 4, "min_p": 0.1}), Path("m"))
    assert spec.returns_masks and spec.sampling[0] == Sampling(1.0, min_p=0.1)
    assert not spec.make_evaluation_spec(EvaluationConfig(num_workers=1)).returns_masks
    assert not EngineSpec.from_config(fakes.config(), Path("m")).returns_masks


def test_on_gpus_greedy_and_unbounded_requests_are_what_vllm_accepts(monkeypatch):
    """It refuses temperature 0 and top_k 0 with masks. A mask of the whole vocabulary becomes None."""
    requests = []

    async def generate(ids, params):
        requests.append((params.temperature, params.top_k, params.top_p))
        output = SimpleNamespace(
            finish_reason="stop", token_ids=[5, 6], weight_versions=[], routed_experts=None,
            logprobs=SimpleNamespace(logprobs=[-1.0, -1.0], start_indices=[0, 1]),
            sampling_mask=SimpleNamespace(token_ids=[[4, 5], list(range(30))]),
        )  # fmt: skip
        return SimpleNamespace(outputs=[output], num_cached_tokens=0)

    monkeypatch.setattr(rollout_module, "device_type", lambda: "cuda")
    spec = EngineSpec(
        RolloutConfig(), WeightSyncConfig(), ModelConfig(path="m"), "m", 64, 0, returns_masks=True
    )
    worker = RolloutWorker(spec)
    worker._engine, worker._vocabulary = SimpleNamespace(generate=generate), 30

    def kept(**sampling):
        return asyncio.run(worker._generate([1], 1, Sampling(**sampling), 4)).kept

    assert kept(top_p=0.9).counts.tolist() == [2, 0]
    assert kept(temperature=0.0) is kept(temperature=0.5) is None
    assert requests == [(1.0, 30, 0.9), (1.0, 1, 1.0), (0.5, 30, 1.0)]
    worker._vocabulary = 31
    assert kept(top_k=3).counts.tolist() == [2, 30]


def test_a_mask_without_its_token_fails_the_sample(monkeypatch):
    output = SimpleNamespace(token_ids=[5, 6], sampling_mask=SimpleNamespace(token_ids=[[4, 5], [7]]))
    with pytest.raises(SamplesFailed, match="the sampling mask of token 1 does not contain it"):
        rollout_module._kept_tokens(output, 30)


def test_an_evaluation_of_the_whole_vocabulary_needs_separate_engines_on_gpus():
    def problems(device="cuda", **evaluation):
        settings = EvaluationConfig(**{"every": 5} | evaluation)
        return list(mask_problems(SamplingConfig(top_p=0.9), settings, device))

    assert "`evaluation.top_p` = 1, `evaluation.top_k` = 0" in problems()[0]
    assert not problems("cpu") and not problems(top_k=50) and not problems(temperature=0.0)
    assert not problems(num_workers=1) and not problems(every=0, before=False)
    assert not list(mask_problems(SamplingConfig(), EvaluationConfig(every=5), "cuda"))
