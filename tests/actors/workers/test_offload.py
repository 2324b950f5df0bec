"""Optimiser state and weights offloaded from the accelerator, on real ranks: the same numbers as without."""

import asyncio

import pytest

from grpo_dist.config import LoRAConfig, OffloadConfig, PolicyConfig
from grpo_dist.policy.deepspeed_config import deepspeed_config, size_buffers
from tests.support.real_ranks import agree, two_updates

pytestmark = pytest.mark.machine


@pytest.fixture(scope="module")
def without(ranks_parent, tiny_model):
    """Return the results without offload, for all weights and for adapters."""
    with ranks_parent.in_the_place_of_ray():
        kinds = (None, LoRAConfig(rank=4))
        return [asyncio.run(two_updates(tiny_model, stage=2, lora=lora)) for lora in kinds]


CPU = {
    "optimiser, ZeRO-1": {"stage": 1, "offload": OffloadConfig(optimizer="cpu")},
    "optimiser, ZeRO-2": {"stage": 2, "offload": OffloadConfig(optimizer="cpu")},
    "optimiser, ZeRO-3": {"stage": 3, "offload": OffloadConfig(optimizer="cpu")},
    "all, ZeRO-3": {"stage": 3, "offload": OffloadConfig(optimizer="cpu", parameters="cpu")},
    "adapters, ZeRO-3": {
        "stage": 3,
        "offload": OffloadConfig(optimizer="cpu", parameters="cpu"),
        "lora": LoRAConfig(rank=4),
    },
    "user-supplied section": {
        "stage": 2,
        "offload": OffloadConfig(optimizer="cpu"),
        "deepspeed": {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CPU)
def test_offload_to_the_cpu_trains_as_without(forked_ranks, without, tiny_model, tmp_path, name):
    directory = tmp_path / "policy" if name in ("optimiser, ZeRO-2", "all, ZeRO-3") else None
    result = asyncio.run(two_updates(tiny_model, directory, **CPU[name]))
    agree(result, without["lora" in CPU[name]])


def test_offload_settings_become_deepspeed_settings(tmp_path):
    policy = PolicyConfig(
        zero_stage=3,
        offload=OffloadConfig(optimizer="cpu", parameters="nvme", nvme_path="/disk"),
        deepspeed={"zero_optimization": {"offload_optimizer": {"pin_memory": False}}},
    )
    settings = deepspeed_config(policy, bfloat16=False)
    zero = settings["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/disk"}
    size_buffers(settings, 12345)
    assert zero["offload_param"]["buffer_size"] == 12345
    zero_section = {"offload_param": {"buffer_size": 7}}
    chosen = deepspeed_config(
        policy.model_copy(update={"deepspeed": {"zero_optimization": zero_section}}), bfloat16=False
    )
    size_buffers(chosen, 12345)
    assert chosen["zero_optimization"]["offload_param"]["buffer_size"] == 7
