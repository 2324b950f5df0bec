"""Algorithm settings and batches for tests of advantages and the loss."""

from dataclasses import fields, replace

import torch

from grpo_dist.batch.credit_assignment import AdvantageSettings
from grpo_dist.config import AlgorithmConfig, DistillationConfig
from grpo_dist.config.base import member_called, members
from grpo_dist.policy.loss import Objective
from grpo_dist.types import Denominators, PolicyStream, TensorRecord, TrainBatch


def objective(*, distillation=None, demonstration_coef=0.0, supervised=False, code_paths=(), **algorithm):
    """Return an objective with these settings of `algorithm`, by default without a correction."""
    return Objective(
        AlgorithmConfig(**{"correction": "none"} | algorithm),
        DistillationConfig(**distillation or {}),
        demonstration_coef=demonstration_coef, code_paths=code_paths, supervised=supervised,
    )  # fmt: skip


def choose(key, name, **settings):
    """Return `algorithm.<key>` for the member ``name``, with the ``settings`` that it has."""
    member = member_called(members(AlgorithmConfig.model_fields[key].annotation), name)
    return {member.tag: name, **{key: value for key, value in settings.items() if key in member.model_fields}}


def algorithm(advantage="grpo", **settings):
    """Return `algorithm`. ``settings``: its keys, and settings of the estimator, if it has them."""
    keys = {name: value for name, value in settings.items() if name in AlgorithmConfig.model_fields}
    return AlgorithmConfig(advantage=choose("advantage", advantage, **settings), **keys)


def credit(advantage="grpo", **settings):
    """Return advantage settings. ``settings``: their fields, or keys of `algorithm`."""
    names = {field.name for field in fields(AdvantageSettings)} & set(settings)
    return AdvantageSettings(algorithm(advantage, **settings), **{name: settings[name] for name in names})


def train_batch(mask, *, tokens=None, lengths=None, teacher=None, demonstrated=None, sizes=None, **policy):
    """Return rows that share nothing, whose tokens of the policy loss are in ``mask`` [B, T].

    Args:
        sizes: denominators that replace the counts of ``mask``.
        policy: fields of `PolicyStream`; by default advantages and the engine's log-probs are 0.
    """
    rows, width = mask.shape
    zeros = torch.zeros(mask.shape)
    counts = {"tokens": float(mask.sum()), "sequences": float(mask.any(dim=1).sum())} | (sizes or {})
    stream = {"advantages": zeros, "rollout_logprobs": zeros, "ref_logprobs": None, "max_tokens": width}
    return TrainBatch(
        tokens=torch.zeros(mask.shape, dtype=torch.long) if tokens is None else tokens,
        lengths=torch.full((rows,), width) if lengths is None else lengths,
        group_ids=torch.arange(rows), prompt_lengths=torch.zeros(rows, dtype=torch.long), temperatures=None,
        routes=None, kept=None, row_ids=torch.arange(rows), policy=PolicyStream(mask, **stream | policy),
        denominators=Denominators(**counts), teacher=teacher, demonstrated=demonstrated,
    )  # fmt: skip


def change(batch, **changes):
    """Return ``batch`` with other fields; a dict has fields of a stream: ``policy={"advantages": ...}``."""
    return replace(
        batch,
        **{
            name: replace(getattr(batch, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        },
    )


def check_equal(actual, expected):
    """Assert that two records have equal tensors, also in dtype, and equal other values."""
    for field in fields(expected):
        ours, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), field.name
        elif isinstance(theirs, TensorRecord):
            check_equal(ours, theirs)
        else:
            assert ours == theirs, field.name


def nothing_trained(batch):
    """Return ``batch`` without tokens in the policy loss."""
    mask = torch.zeros_like(batch.policy.mask)
    return change(batch, policy={"mask": mask}, denominators={"tokens": 0.0, "sequences": 0.0})
