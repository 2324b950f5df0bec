"""What DeepSpeed is told and given on GPUs, up to the call of a device."""

import torch

from grpo_dist.policy.deepspeed_engine import measure_memory_by_torch


def test_gpus_named_by_uuid_have_free_memory(monkeypatch):
    """DeepSpeed's own way reads numbers, also of parts of a GPU."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    made = CUDA_Accelerator()
    monkeypatch.setattr("deepspeed.accelerator.real_accelerator.ds_accelerator", made)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-4b9a,GPU-17")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (7, 9))
    measure_memory_by_torch()
    assert made.available_memory() == 7
