"""The device memory of a rank: all tensors are found, and moved in two steps."""

import pytest
import torch

from grpo_dist.policy import rank_memory
from grpo_dist.policy.rank_memory import RankMemory, tensors_in

pytestmark = pytest.mark.usefixtures("frozen_heap")

CPU = torch.device("cpu")


def bytes_held(*tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_tensors_are_found_in_nested_containers_once():
    a, b, c = (torch.zeros(1) for _ in range(3))
    b.grad = c
    container = {"list": [a, {"inner": (b,)}], "number": 1, "again": a}
    container["itself"] = container
    assert [id(t) for t in tensors_in(container)] == [id(a), id(b), id(c)]


def test_the_weights_can_stay_while_everything_else_is_offloaded():
    """Without DeepSpeed: a torch optimizer, and frozen weights next to trained ones."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(module[1].parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    engine = type("Engine", (), {"module": module, "optimizer": optimizer})()
    memory, weights = RankMemory(engine, CPU), list(module.parameters())
    state = [t for s in optimizer.state.values() for t in s.values()]
    state += [p.grad for p in module[1].parameters()]
    before = [t.detach().clone() for t in weights + state]
    memory.offload(keep_weights=True)
    assert bytes_held(*state) == 0 and all(bytes_held(p) for p in weights)
    memory.offload()
    assert bytes_held(*weights, *state) == 0
    memory.reload()
    assert all(torch.equal(a, b) for a, b in zip(before, weights + state, strict=True))


def test_the_cache_is_emptied_after_the_memory_is_free_and_while_the_weights_stay(monkeypatch):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    engine = type("Engine", (), {"module": module, "optimizer": optimizer})()
    held = []
    moments = [s["exp_avg"] for s in optimizer.state.values()]
    monkeypatch.setattr(
        rank_memory, "release_cache", lambda _: held.append((bytes_held(*moments), bytes_held(module.weight)))
    )
    memory = RankMemory(engine, CPU)
    memory.offload(keep_weights=True)
    memory.offload()
    assert held == [(0, 16), (0, 0)]


def test_a_frozen_weight_that_zero3_gathers_again_comes_back_unchanged():
    """ZeRO-3 keeps small parameters whole. After a push or a checkpoint it gathers them again, perhaps at
    the address of another parameter.
    """
    norms = torch.nn.ParameterList(torch.full((4,), float(i)) for i in range(8)).requires_grad_(False)
    for norm in norms:
        norm.ds_tensor = norm.detach().clone()
    engine = type("Engine", (), {"module": norms, "optimizer": None})()
    memory = RankMemory(engine, CPU)
    for first in (0, 10, 20):
        for i, norm in enumerate(norms):
            norm.data = torch.empty(0)
            norm.data = torch.full((4,), float(first + i))
        memory.offload()
        assert bytes_held(*norms, *(norm.ds_tensor for norm in norms)) == 0
        memory.reload()
        assert [norm[0].item() for norm in norms] == [first + i for i in range(8)]
        assert [norm.ds_tensor[0].item() for norm in norms] == list(range(8))
