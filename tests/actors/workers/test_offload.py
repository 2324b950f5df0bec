"""Optimiser state and weights outside the accelerator, on real ranks: the same numbers as without."""

import asyncio

import pytest
import torch
from test_lora import AdaptedWorker
from test_policy_ranks import ALGORITHM, TEMPERATURE, flat, relative

from actors.workers.policy import PolicyGroup
from grpo_dist.batch.sharding import shard
from grpo_dist.config import (
    LoRAConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    PolicyConfig,
    TimeoutsConfig,
)
from grpo_dist.policy.deepspeed_config import deepspeed_config
from grpo_dist.policy.offload import check_offload, size_buffers
from grpo_dist.runtime.hardware import thread_environment
from tests.support import made_groups

pytestmark = pytest.mark.machine

FIRST, SECOND = (made_groups.batch(seed=seed) for seed in (1, 2))


def start(model_dir, **policy):
    return PolicyGroup(
        PolicyConfig(**{"num_workers": 2, "optimizer": OptimizerConfig(lr=1e-3)} | policy),
        model=ModelConfig(path="tiny"),
        model_dir=str(model_dir),
        algorithm=ALGORITHM,
        temperature=TEMPERATURE,
        token_budget=40,
        epochs=1,
        total_updates=10,
        timeouts=TimeoutsConfig(),
        seed=0,
        options={"num_cpus": 0, "runtime_env": {"env_vars": thread_environment(1)}},
        worker=AdaptedWorker,
    )


async def two_updates(model_dir, directory=None, **policy):
    """Gradients of the first, weights after the second; the same again from a checkpoint between the two."""
    group = start(model_dir, **policy)
    await group.ready()
    shards = zip(group.ranks, shard(FIRST, len(group.ranks)), strict=True)
    (gradients, metrics), *_ = await asyncio.gather(*(r.gradients.remote(s) for r, s in shards))
    if directory is not None:
        await group.save(directory)
    await group.update(group.stage([SECOND]))
    weights, *_ = await asyncio.gather(*(rank.weights.remote() for rank in group.ranks))
    await group.shutdown()
    if directory is not None:
        again = start(model_dir, **policy)
        await again.ready()
        await again.load(directory)
        await again.update(again.stage([SECOND]))
        same, *_ = await asyncio.gather(*(rank.weights.remote() for rank in again.ranks))
        await again.shutdown()
        assert relative(flat(same), flat(weights)) < 1e-7
    return gradients, metrics, weights


@pytest.fixture(scope="module")
def without(ranks_parent, tiny_model):
    """Of all weights, and of adapters."""
    with ranks_parent.in_the_place_of_ray():
        kinds = (None, LoRAConfig(rank=4))
        return [asyncio.run(two_updates(tiny_model, zero_stage=2, lora=lora)) for lora in kinds]


def agree(ours, theirs):
    (gradients, metrics, weights), (expected, expected_metrics, expected_weights) = ours, theirs
    assert relative(flat(gradients), flat(expected)) < 1e-5
    assert metrics["policy/grad_norm"] == pytest.approx(expected_metrics["policy/grad_norm"], rel=1e-4)
    # A step is 1e-3. Adam divides by the gradient's size: rounding shows where a gradient is all but 0.
    gap = (flat(weights) - flat(expected_weights)).abs()
    assert float(gap.mean()) < 1e-6
    assert float(gap.max()) < 1e-3


CPU = {
    "optimiser, ZeRO-1": {"zero_stage": 1, "offload": OffloadConfig(optimizer="cpu")},
    "optimiser, ZeRO-2": {"zero_stage": 2, "offload": OffloadConfig(optimizer="cpu")},
    "optimiser, ZeRO-3": {"zero_stage": 3, "offload": OffloadConfig(optimizer="cpu")},
    "all, ZeRO-3": {"zero_stage": 3, "offload": OffloadConfig(optimizer="cpu", parameters="cpu")},
    "adapters, ZeRO-3": {
        "zero_stage": 3,
        "offload": OffloadConfig(optimizer="cpu", parameters="cpu"),
        "lora": LoRAConfig(rank=4),
    },
    "the user's own section": {
        "zero_stage": 2,
        "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    },
}


@pytest.mark.evidence
@pytest.mark.parametrize("name", CPU)
def test_offload_to_the_cpu_trains_as_without(forked_ranks, without, tiny_model, tmp_path, name):
    directory = tmp_path / "policy" if name in ("optimiser, ZeRO-2", "all, ZeRO-3") else None
    result = asyncio.run(two_updates(tiny_model, directory, **CPU[name]))
    agree(result, without["lora" in CPU[name]])


def test_nvme_without_libaio_is_refused_in_one_message(tmp_path, monkeypatch):
    from deepspeed.ops.op_builder import AsyncIOBuilder

    monkeypatch.setattr(AsyncIOBuilder, "is_compatible", lambda self: False)
    policy = PolicyConfig(zero_stage=3, offload=OffloadConfig(parameters="nvme", nvme_path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"`policy\.offload` = nvme.*install libaio-dev.*or use cpu instead"):
        check_offload(policy)


def test_an_optimiser_on_the_cpu_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"no C\+\+ compiler 'no-such-compiler' here; install g\+\+"):
        check_offload(PolicyConfig(offload=OffloadConfig(optimizer="cpu")))
    check_offload(PolicyConfig())


def test_what_deepspeed_is_told(tmp_path):
    policy = PolicyConfig(
        zero_stage=3,
        offload=OffloadConfig(optimizer="cpu", parameters="nvme", nvme_path="/disk"),
        deepspeed={"zero_optimization": {"offload_optimizer": {"pin_memory": False}}},
    )
    settings = deepspeed_config(policy, dtype=torch.float32)
    zero = settings["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk"}
    size_buffers(settings, 12345)
    assert zero["offload_param"]["buffer_size"] == 12345
    own = {"offload_param": {"buffer_size": 7}}
    chosen = deepspeed_config(
        policy.model_copy(update={"deepspeed": {"zero_optimization": own}}), dtype=torch.float32
    )
    size_buffers(chosen, 12345)
    assert chosen["zero_optimization"]["offload_param"]["buffer_size"] == 7
