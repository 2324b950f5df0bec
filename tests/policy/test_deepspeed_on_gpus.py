"""The settings and patches that DeepSpeed gets on GPUs, up to the device call."""

import inspect

import pytest
import torch

from grpo_dist.config import PolicyConfig
from grpo_dist.policy.deepspeed_config import deepspeed_config
from grpo_dist.policy.deepspeed_engine import measure_memory_by_torch


def test_gpus_named_by_uuid_have_free_memory(monkeypatch):
    """DeepSpeed's method expects numbers, also for parts of a GPU."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    accelerator = CUDA_Accelerator()
    monkeypatch.setattr("deepspeed.accelerator.real_accelerator.ds_accelerator", accelerator)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4b9a,GPU-17")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (7, 9))
    measure_memory_by_torch()
    assert accelerator.available_memory() == 7


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_during_the_backward_pass_only_where_the_user_asks(stage):
    def chosen(**settings):
        policy = PolicyConfig(zero_stage=stage, deepspeed={"zero_optimization": settings})
        return deepspeed_config(policy, bfloat16=False)["zero_optimization"]["overlap_comm"]

    assert chosen() is False and chosen(overlap_comm=True) is True


def test_deepspeed_still_asks_whether_a_stream_uses_a_gradient():
    """`initialize` replaces its answer on GPUs."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    parameters = inspect.signature(DeepSpeedZeroOptimizer._record_gradient_stream).parameters
    assert list(parameters) == ["self", "tensor", "stream"]
    source = inspect.getsource(DeepSpeedZeroOptimizer.average_tensor)
    assert "self._record_gradient_stream(tensor, stream)" in source
