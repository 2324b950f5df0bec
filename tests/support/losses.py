"""Objectives for tests of the loss."""

from grpo_dist.config import AlgorithmConfig, DistillationConfig
from grpo_dist.config.base import member_called, members
from grpo_dist.policy.loss import Objective


def objective(*, distillation=None, demonstration_coef=0.0, supervised=False, code_paths=(), **algorithm):
    """Return an objective with these settings of `algorithm`, by default without a correction."""
    return Objective(
        AlgorithmConfig(**{"correction": "none"} | algorithm),
        DistillationConfig(**distillation or {}),
        demonstration_coef=demonstration_coef, code_paths=code_paths, supervised=supervised,
    )  # fmt: skip


def choose(key, name, **settings):
    """Return `algorithm.<key>` for the member ``name`` with those of ``settings`` that it has."""
    member = member_called(members(AlgorithmConfig.model_fields[key].annotation), name)
    return {member.tag: name, **{key: value for key, value in settings.items() if key in member.model_fields}}
