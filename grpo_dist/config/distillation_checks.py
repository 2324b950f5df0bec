"""Checks of teachers and demonstrations against the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.distillation import DemonstrationStreamConfig, DistillationConfig
from grpo_dist.config.sections import Sections


def distillation_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for settings that contradict each other, and for settings that a run would ignore."""
    dynamic, environments = config.dynamic_sampling.enabled, config.has_environments
    yield from _of_teachers(config.distillation, dynamic=dynamic, environments=environments)
    if config.demonstrations is not None:
        yield from _of_demonstrations(config.demonstrations, config.batch.updates_per_step, config.max_length)


def _of_teachers(own: DistillationConfig, *, dynamic: bool, environments: bool) -> Iterator[str]:
    defaults = DistillationConfig()
    if not own.teachers:
        for key in ("coef", "kl_as", "estimator", "reward_coef"):
            if getattr(own, key) != getattr(defaults, key):
                yield (
                    f"`distillation.{key}` has no effect without a teacher; add one to "
                    f"`distillation.teachers`, or remove `distillation.{key}`"
                )
        return
    if own.kl_as == "advantage" and own.estimator != defaults.estimator:
        yield (
            f"`distillation.estimator` = {own.estimator} is that of a term of the loss; set "
            "`distillation.kl_as` = loss, or remove `distillation.estimator`"
        )
    if dynamic:
        yield (
            "`dynamic_sampling.enabled` drops groups of equal rewards, but `distillation.teachers` teach "
            "from them; set `dynamic_sampling.enabled` to false"
        )
    for teacher in own.teachers:
        if teacher.prompt is not None and environments:
            yield (
                f"`distillation.teachers` {teacher.name}: `prompt` replaces the problem, but an environment "
                "begins and rewrites its episodes itself; remove `prompt`, or train without environments"
            )
        if not teacher.has_workers and teacher.revision is not None:
            yield (
                f"`distillation.teachers` {teacher.name}: `revision` = {teacher.revision} is one of a hub "
                "model, but its model is the reference; remove it"
            )


def _of_demonstrations(own: DemonstrationStreamConfig, updates: int, longest: int) -> Iterator[str]:
    if own.rows_per_step % updates:
        yield (
            f"`demonstrations.rows_per_step` = {own.rows_per_step} must be divisible by "
            f"`batch.updates_per_step` = {updates}; use {own.rows_per_step // updates * updates or updates}"
        )
    if own.max_length is not None and own.max_length > longest:
        yield (
            f"`demonstrations.max_length` = {own.max_length} is above the run's longest sequence, "
            f"{longest} tokens; lower it, or raise `model.max_length`"
        )
