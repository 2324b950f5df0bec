"""A GPU counts if CUDA starts on it; a driver that only lists it is refused by name."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_dist.errors import UserError
from grpo_dist.runtime.hardware import resolve_dtype, usable_gpus

BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update it.\nMore."


class NvmlError(Exception):
    pass


@pytest.fixture
def old_driver(monkeypatch):
    """NVML lists two GPUs and the CUDA runtime none, as with torch for CUDA 13 on a driver for 12.2."""
    calls = []

    def init():
        raise RuntimeError(TOO_OLD)

    monkeypatch.delenv(BY_NVML, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: os.environ.get(BY_NVML) == "1")
    monkeypatch.setattr(torch.cuda, "init", init)
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append(1), nvmlShutdown=lambda: calls.append(-1),
        nvmlSystemGetDriverVersion=lambda: "535.54.03", nvmlSystemGetCudaDriverVersion=lambda: 12020,
        NVMLError=NvmlError,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    yield nvml
    assert sum(calls) == 0


def test_a_driver_too_old_for_cuda_is_refused_with_its_version_and_the_remedy(old_driver):
    with pytest.raises(UserError) as refusal:
        usable_gpus()
    message = str(refusal.value)
    assert message.startswith(
        "the driver lists 2 GPUs, and CUDA does not start: driver 535.54.03 for CUDA up to 12.2"
    )
    assert "built for CUDA 13.0: The NVIDIA driver on your system is too old (found version 12020)" in message
    assert "update the driver" in message and "CUDA_VISIBLE_DEVICES" in message and "\n" not in message


def test_the_refusal_needs_no_package_for_nvml(old_driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(UserError, match=r"a driver of unknown version .*built for CUDA 13\.0"):
        usable_gpus()

    def fails():
        raise NvmlError("Driver/library version mismatch")

    monkeypatch.setattr(old_driver, "nvmlInit", fails)
    monkeypatch.setitem(sys.modules, "pynvml", old_driver)
    with pytest.raises(UserError, match=r"a driver of unknown version \(Driver/library version mismatch\)"):
        usable_gpus()


def test_deepspeed_and_vllm_do_not_hide_it(old_driver, monkeypatch):
    """They set a variable that makes `torch.cuda.is_available` count with NVML."""
    monkeypatch.setenv(BY_NVML, "1")
    assert torch.cuda.is_available()
    with pytest.raises(UserError, match="CUDA does not start"):
        usable_gpus()
    assert os.environ[BY_NVML] == "1"


def test_a_run_and_a_check_refuse_such_a_driver(old_driver, monkeypatch):
    import ray

    from actors.connection import connect, local_resources
    from grpo_dist.config import ClusterConfig
    from grpo_dist.tools.check import this_machine

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for call in (
        lambda: local_resources(ClusterConfig()),
        lambda: connect(ClusterConfig(address="local")),
        this_machine,
    ):
        with pytest.raises(UserError, match=r"driver 535\.54\.03"):
            call()


@pytest.mark.parametrize(("capability", "dtype"), [(7, torch.float32), (8, torch.bfloat16)])
def test_auto_is_bfloat16_only_where_the_gpu_computes_in_it(monkeypatch, capability, dtype):
    """Turing GPUs hold tensors in bfloat16, and engines refuse it there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=capability))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert resolve_dtype("auto") == dtype
    assert resolve_dtype("auto", "cpu") == torch.float32
