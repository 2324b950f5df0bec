"""The optimiser's states are made before the first update, which then takes as long as the others."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_dist.config import PolicyConfig
from grpo_dist.policy import deepspeed_engine
from grpo_dist.policy.deepspeed_engine import make_states
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.saved_state import SavedPolicy, Sharding, reshard
from grpo_dist.runs.start_checks import setting_problems
from tests.support import fakes


def trained(made, steps=3):
    """Return weights and states after some steps, and how many elements the states had before the first."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 7, generator=generator).requires_grad_() for n in (3, 40)]
    weights[0].data[0, 0] = -0.0
    optimizer = torch.optim.AdamW(weights, lr=1e-2, betas=(0.5, 0.95), weight_decay=0.1, fused=True)
    first = [w.detach().clone() for w in weights]
    if made:
        make_states(optimizer)
        assert all(torch.equal(w, old) and w.grad is None for w, old in zip(weights, first, strict=True))
        assert torch.equal(weights[0].signbit(), first[0].signbit())
    before = sum(state["exp_avg"].numel() + state["exp_avg_sq"].numel() for state in optimizer.state.values())
    for _ in range(steps):
        for w in weights:
            w.grad = torch.randn(w.shape, generator=generator)
        optimizer.step()
    return [w.detach() for w in weights], [optimizer.state[w] for w in weights], before


def test_states_made_beforehand_change_no_bit_of_a_step():
    (weights, states, before), (expected, theirs, none) = trained(True), trained(False)
    assert (before, none) == (2 * 43 * 7, 0)
    for ours, other in zip(weights, expected, strict=True):
        assert torch.equal(ours, other)
    for ours, other in zip(states, theirs, strict=True):
        assert ours.keys() == other.keys() and float(ours["step"]) == 3.0
        assert all(torch.equal(ours[name], other[name]) for name in other)


class AdamW8bit(torch.optim.Optimizer):
    """bitsandbytes' optimiser (0.50.2) as far as states are made: their steps are numbers, no tensors."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p] |= {"step": 0, "state1": torch.zeros_like(p, dtype=torch.uint8)}
            self.state[p]["step"] += 1

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)


def test_an_optimiser_in_8_bits_is_that_of_bitsandbytes_and_is_never_resharded(monkeypatch):
    class Engine:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def train(self):
            return None

    made = SimpleNamespace(
        initialize=lambda *, optimizer, **_: (Engine(optimizer),),
        utils=SimpleNamespace(logger=SimpleNamespace(setLevel=lambda level: None)),
    )
    monkeypatch.setitem(sys.modules, "deepspeed", made)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=AdamW8bit))
    monkeypatch.setattr(deepspeed_engine, "dist", SimpleNamespace(get_world_size=lambda: 2))
    settings = {"name": "adamw_8bit", "lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.01}
    policy = PolicyConfig.model_validate({"zero_stage": 0, "optimizer": settings})
    module = TokenLogprobs.__new__(TokenLogprobs)
    torch.nn.Module.__init__(module)
    module.add_module("layer", torch.nn.Linear(3, 2))
    engine = deepspeed_engine.initialize(module, policy, {})
    states = engine.optimizer.state.values()
    given = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    assert engine.optimizer.defaults == given == {k: engine.optimizer.param_groups[0][k] for k in given}
    assert [state["step"] for state in states] == [0, 0]
    saved = SavedPolicy.__new__(SavedPolicy)
    saved._directory, saved.sharding = Path("state"), Sharding(2, 0, "none", "none")
    with pytest.raises(ValueError, match="averages of adamw_8bit cannot be resharded"):
        reshard(saved, engine, Sharding(1, 0, "none", "none"))


def test_an_optimiser_in_8_bits_is_refused_without_its_package(monkeypatch):
    assert importlib.util.find_spec("bitsandbytes") is None
    config = fakes.config(policy={"optimizer": {"name": "adamw_8bit"}})
    (problem,) = setting_problems(config, "cpu")
    assert problem.startswith("`policy.optimizer.name` = adamw_8bit needs the package bitsandbytes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert not [*setting_problems(config, "cpu")]
