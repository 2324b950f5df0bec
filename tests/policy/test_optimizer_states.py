"""The 8-bit optimiser: bitsandbytes' AdamW8bit, with the settings of the run."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_dist.config import PolicyConfig
from grpo_dist.policy import deepspeed_engine
from grpo_dist.policy.model import TokenLogprobs
from grpo_dist.policy.saved_state import SavedPolicy, Sharding, reshard
from grpo_dist.runs.start_checks import setting_problems
from tests.support import fakes


class AdamW8bit(torch.optim.Optimizer):
    """Stand-in for bitsandbytes' optimiser."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, settings)


def test_the_8_bit_optimiser_is_that_of_bitsandbytes_and_is_never_resharded(monkeypatch):
    class Engine:
        def __init__(self, optimizer):
            self.optimizer = optimizer

        def train(self):
            return None

    package = SimpleNamespace(
        initialize=lambda *, optimizer, **_: (Engine(optimizer),),
        utils=SimpleNamespace(logger=SimpleNamespace(setLevel=lambda level: None)),
    )
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", SimpleNamespace(AdamW8bit=AdamW8bit))
    monkeypatch.setattr(deepspeed_engine, "dist", SimpleNamespace(get_world_size=lambda: 2))
    settings = {"name": "adamw_8bit", "lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.01}
    policy = PolicyConfig.model_validate({"zero_stage": 0, "optimizer": settings})
    module = TokenLogprobs.__new__(TokenLogprobs)
    torch.nn.Module.__init__(module)
    module.add_module("layer", torch.nn.Linear(3, 2))
    engine = deepspeed_engine.initialize(module, policy, {})
    expected = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    assert engine.optimizer.defaults == expected == {k: engine.optimizer.param_groups[0][k] for k in expected}
    saved = SavedPolicy.__new__(SavedPolicy)
    saved._directory, saved.sharding = Path("state"), Sharding(2, 0, "none", "none")
    with pytest.raises(ValueError, match="averages of adamw_8bit cannot be resharded"):
        reshard(saved, engine, Sharding(1, 0, "none", "none"))


def test_the_8_bit_optimiser_is_refused_without_its_package(monkeypatch):
    assert importlib.util.find_spec("bitsandbytes") is None
    config = fakes.config(policy={"optimizer": {"name": "adamw_8bit"}})
    (problem,) = setting_problems(config, "cpu")
    assert problem.startswith("`policy.optimizer.name` = adamw_8bit needs the package bitsandbytes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert not [*setting_problems(config, "cpu")]
