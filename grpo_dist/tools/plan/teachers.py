"""Teachers of a plan: reference workers with models of their own."""

from __future__ import annotations

from dataclasses import replace

from grpo_dist.config import Config, TeacherConfig
from grpo_dist.runtime.hardware import micro_batch_tokens
from grpo_dist.tools.plan.memory import Footprint, Sizes, reference_worker
from grpo_dist.tools.plan.models import ModelShape, model_of
from grpo_dist.tools.plan.rates import Rates
from grpo_dist.tools.plan.workload import Workload


def role_of(teacher: TeacherConfig) -> str:
    """Return its row in a table of memory."""
    return f"teacher {teacher.name}"


def shape_of(teacher: TeacherConfig, config: Config) -> ModelShape:
    """Return the sizes of its model. Raises UserError where they are unknown."""
    model = config.model.model_copy(update={"path": teacher.model, "revision": teacher.revision})
    return model_of(config.model_copy(update={"model": model}))


def teacher_worker(teacher: TeacherConfig, config: Config, sizes: Sizes, workload: Workload) -> Footprint:
    """Return the memory of a worker: whole weights, and forward passes that keep nothing."""
    tokens = micro_batch_tokens(teacher.micro_batch_tokens, "cuda" if sizes.gpu else "cpu")
    own = replace(sizes, reference_micro_batch=tokens)
    return reference_worker(config.max_length, shape_of(teacher, config), own, workload)


def rates_of(teacher: TeacherConfig, rates: Rates) -> Rates:
    """Return ``rates`` for the teacher's model."""
    return Rates(rates.config, shape_of(teacher, rates.config), rates.sizes, rates.peaks, rates.reached)
