"""Teachers of a plan: reference workers with models of their own."""

from __future__ import annotations

from dataclasses import replace

from grpo_dist.config import TeacherConfig
from grpo_dist.runtime.hardware import micro_batch_tokens
from grpo_dist.tools.plan.memory import Footprint, Sizes, reference_worker
from grpo_dist.tools.plan.models import ModelShape, model_of
from grpo_dist.tools.plan.rates import Rates
from grpo_dist.tools.plan.workload import Workload


def role_of(teacher: TeacherConfig) -> str:
    """Return its row in a table of memory."""
    return f"teacher {teacher.name}"


def teacher_worker(
    teacher: TeacherConfig, max_length: int, shape: ModelShape, sizes: Sizes, workload: Workload
) -> Footprint:
    """Return the memory of a worker: whole weights, and forward passes that keep nothing."""
    tokens = micro_batch_tokens(teacher.micro_batch_tokens, "cuda" if sizes.gpu else "cpu")
    own = replace(sizes, reference_micro_batch=tokens)
    return reference_worker(max_length, shape, own, workload)


def rates_of(teacher: TeacherConfig, rates: Rates) -> Rates:
    """Return ``rates`` for the teacher's model."""
    shape = model_of(teacher.model_section(rates.config.model), rates.config.sft, rates.config.seed)
    return Rates(rates.config, shape, rates.sizes, rates.peaks, rates.reached)
