"""Offloading to host memory and back: what is copied, and what happens to views."""

import gc

import pytest
import torch

from grpo_dist.runtime import memory as host_copies
from grpo_dist.runtime.memory import HostCopies, release_cache

pytestmark = pytest.mark.usefixtures("frozen_heap")

CPU = torch.device("cpu")


def test_views_of_a_storage_lose_their_memory_together_and_get_it_back_bit_by_bit(monkeypatch):
    monkeypatch.setattr(host_copies, "_CHUNK", 24)  # tensors lie across chunks
    flat, other = torch.arange(10.0), torch.tensor([1, -2, 3], dtype=torch.bfloat16)
    flat[3] = torch.nan
    view, expected = flat[4:].view(2, 3), flat.clone()
    copies = HostCopies(CPU)
    for _ in range(2):
        copies.offload([view, other])
        assert sum(tensor.untyped_storage().nbytes() for tensor in (flat, view, other)) == 0
        copies.reload()
        assert torch.equal(flat.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(view, flat[4:].view(2, 3)) and view.data_ptr() == flat.data_ptr() + 16
        assert other.tolist() == [1, -2, 3]
        view += 1
        expected[4:] += 1


def test_zeros_take_no_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(host_copies, "_CHUNK", 64)
    zeros, ones = torch.zeros(1000), torch.ones(8)
    copies = HostCopies(CPU)
    copies.offload([zeros, ones])
    assert sum(map(len, copies._chunks)) == 64
    copies.reload()
    assert zeros.shape == (1000,) and not zeros.any() and ones.sum() == 8


def test_host_memory_is_kept_for_the_next_time(monkeypatch):
    monkeypatch.setattr(host_copies, "_CHUNK", 64)
    copies, value = HostCopies(CPU), torch.ones(40)
    copies.offload([value])
    chunks = list(copies._chunks)
    copies.reload()
    copies.offload([value])
    assert [c.data_ptr() for c in copies._chunks] == [c.data_ptr() for c in chunks] and len(chunks) == 3


@pytest.mark.parametrize("constant", [False, True])
def test_a_failed_offload_can_be_repeated(monkeypatch, constant):
    copies, value = HostCopies(CPU, constant=constant), torch.arange(40.0)
    grow = copies._grow

    def fails(_):
        monkeypatch.setattr(copies, "_grow", grow)
        raise RuntimeError("made: no memory can be pinned")

    monkeypatch.setattr(copies, "_grow", fails)
    with pytest.raises(RuntimeError, match="made"):
        copies.offload([value])
    assert torch.equal(value, torch.arange(40.0))
    copies.offload([value])
    copies.reload()
    assert torch.equal(value, torch.arange(40.0))


def test_what_never_changes_is_copied_once_and_again_when_it_changed():
    frozen = torch.arange(5.0)
    copies = HostCopies(CPU, constant=True)
    copies.offload([frozen])
    copies.reload()
    frozen += 1
    copies.offload([frozen])
    copies.reload()
    assert frozen.tolist() == [0, 1, 2, 3, 4]
    frozen += 1
    copies.forget()
    copies.offload([frozen])
    copies.reload()
    assert frozen.tolist() == [1, 2, 3, 4, 5]


def test_no_other_tensor_is_taken_for_one_that_was_copied():
    copies = HostCopies(CPU, constant=True)
    for value in range(20):
        tensor = torch.full((5,), float(value))  # at the address of the previous one, if that is freed
        copies.offload([tensor])
        copies.reload()
        assert tensor.tolist() == [value] * 5


def test_offloading_twice_changes_nothing():
    value = torch.ones(4)
    copies = HostCopies(CPU)
    copies.offload([value])
    copies.offload([value])
    copies.reload()
    assert value.tolist() == [1, 1, 1, 1]


def test_the_allocators_cache_is_emptied_after_garbage_is_collected(monkeypatch):
    """The engine maps its weights next, and cannot use memory in torch's cache, nor buffers that it has
    unmapped and torch has not noticed.
    """
    calls = []
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    for library in (torch.accelerator, torch.cuda):
        monkeypatch.setattr(library, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("ipc_collect"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty_cache"))
    release_cache()
    assert calls == ["collect", "ipc_collect", "empty_cache"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_every_bit_pattern_survives(dtype):
    bits = torch.randint(0, 256, (256,), dtype=torch.uint8)
    value = (bits > 127) if dtype is torch.bool else bits.view(dtype)
    expected = value.view(torch.uint8).clone()
    copies = HostCopies(CPU)
    copies.offload([value])
    copies.reload()
    assert torch.equal(value.view(torch.uint8), expected)
