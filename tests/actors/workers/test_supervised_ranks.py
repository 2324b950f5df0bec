"""Supervised training on real DeepSpeed ranks: loss and gradient of a step match the whole batch in float64,
however it is split, and so does the validation loss.
"""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.lifecycle.team import ActorSpec
from actors.workers.policy import PolicyGroup, PolicySpec
from grpo_dist.batch.rows import batch_of
from grpo_dist.config import SupervisedConfig, TimeoutsConfig
from grpo_dist.data.demonstrations import Demonstration
from grpo_dist.loop.supervised import validation_loss
from grpo_dist.runtime.hardware import thread_environment
from tests.support import fakes
from tests.support.made_groups import shard
from tests.support.real_ranks import AdaptedWorker, flat, relative
from tests.support.tiers import slow_after

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def demonstrations():
    """Return 11; every third has tokens in its completion that are not learned, such as tool output."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(11):
        prompt, completion = (rng.integers(11, 108, int(rng.integers(*r))) for r in ((3, 9), (1, 12)))
        sampled = np.arange(len(completion)) % 4 != 1 if i % 3 == 0 else None
        ids = {"token_ids": prompt.astype(np.int32), "completion_ids": completion.astype(np.int32)}
        rows.append(Demonstration(f"d{i}", answer="", source="made", sampled=sampled, **ids))
    assert sum(int((~row.sampled).sum()) for row in rows if row.sampled is not None) > 4
    return rows


def whole(demonstrations):
    return batch_of([row.to_group() for row in demonstrations], 32)


def nats(model, demonstrations):
    """Yield -log p of the learned completion tokens, from the logits of one row at a time."""
    for row in demonstrations:
        tokens = torch.from_numpy(np.concatenate([row.token_ids, row.completion_ids]).astype(np.int64))[None]
        logprobs = torch.log_softmax(model(tokens).logits[0, :-1], -1)
        token_logprobs = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
        learned = slice(None) if row.sampled is None else torch.from_numpy(row.sampled)
        yield -token_logprobs[len(row.token_ids) - 1 :][learned]


@pytest.fixture(scope="module")
def reference(tiny_model, demonstrations):
    """Return loss and gradient of the whole batch in float64, without any code of the trainer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    loss = torch.cat(list(nats(model, demonstrations))).mean()
    loss.backward()
    return float(loss.detach()), flat({name: p.grad for name, p in model.named_parameters()})


def config(*, ranks, stage, tokens=10_000, shared=1, packing=True, dtype="float32", **policy):
    return SupervisedConfig.from_config(
        fakes.config(
            model={"path": "sft", "dtype": dtype, "packing": packing},
            policy={"num_workers": ranks, "zero_stage": stage, "sequence_parallel": shared, **policy},
            batch={"prompts_per_step": 4, "samples_per_prompt": 4, "micro_batch_tokens": tokens},
            sft={"model": "demo:tiny", "data": "demo:add3", "max_length": 32, "batch_size": 4},
        )
    )


def group_of(settings, model_dir):
    options = {"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}}
    spec = PolicySpec.from_config(settings, model_dir)
    return PolicyGroup(spec, ActorSpec(options), timeouts=TimeoutsConfig(), worker=AdaptedWorker)


async def gradients_of(settings, model_dir, batch):
    group = group_of(settings, model_dir)
    await group.ready()
    shared = settings.policy.sequence_parallel
    shards = [s for s in shard(batch, settings.policy.replicas) for _ in range(shared)]
    results = await asyncio.gather(*(r.gradients.remote(s) for r, s in zip(group.ranks, shards, strict=True)))
    await group.shutdown()
    return results[0]


@pytest.mark.parametrize(
    ("ranks", "stage", "how"),
    [
        *slow_after([(1, 0, {}), (1, 2, {"tokens": 40, "packing": False})], 1),
        *slow_after([(2, 1, {}), (2, 2, {"tokens": 40})], 1),
        (2, 3, {"tokens": 40}),
        (2, 2, {"shared": 2, "tokens": 40}),
    ],
)
def test_loss_and_gradient_are_the_token_mean_over_the_whole_batch(
    forked_ranks, tiny_model, demonstrations, reference, ranks, stage, how
):
    """Over ranks, ZeRO stages, micro-batches, padded and packed rows, and ranks that share sequences."""
    settings = config(ranks=ranks, stage=stage, **how)
    gradients, metrics = asyncio.run(gradients_of(settings, tiny_model, whole(demonstrations)))
    loss, expected = reference
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-6)
    assert relative(flat(gradients), expected) < 1e-5
    assert metrics["policy/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-3)


def test_bfloat16_ranks_approximate_that_gradient(forked_ranks, tiny_model, demonstrations, reference):
    settings = config(ranks=2, stage=2, tokens=40, dtype="bfloat16")
    gradients, metrics = asyncio.run(gradients_of(settings, tiny_model, whole(demonstrations)))
    loss, expected = reference
    assert metrics["loss/total"] == pytest.approx(loss, rel=1e-2)
    assert relative(flat(gradients), expected) < 0.05


def test_adapters_alone_are_trained_with_the_same_gradient_on_one_rank_and_on_two(
    forked_ranks, tiny_model, demonstrations
):
    lora = {"lora": {"rank": 4, "alpha": 8.0}}
    batch = whole(demonstrations)
    one, _ = asyncio.run(gradients_of(config(ranks=1, stage=0, **lora), tiny_model, batch))
    two, _ = asyncio.run(gradients_of(config(ranks=2, stage=2, tokens=40, **lora), tiny_model, batch))
    assert all("lora" in name for name in one) and one.keys() == two.keys()
    assert relative(flat(two), flat(one)) < 1e-5


@pytest.mark.parametrize(
    ("ranks", "stage", "how"), slow_after([(2, 2, {"tokens": 40}), (2, 3, {"shared": 2})], 1)
)
def test_validation_loss_matches_float64_and_changes_neither_weights_nor_gradients(
    forked_ranks, tiny_model, demonstrations, ranks, stage, how
):
    settings = config(ranks=ranks, stage=stage, **how)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    with torch.no_grad():
        expected = float(torch.cat(list(nats(model, demonstrations))).mean())

    async def measure():
        group = group_of(settings, tiny_model)
        await group.ready()
        losses = [await validation_loss(group, demonstrations, settings.sft) for _ in range(2)]
        await group.shutdown()
        return losses

    first, again = asyncio.run(measure())
    assert first == pytest.approx(expected, rel=1e-6) and again == first
