"""Checks of teachers and demonstrations against the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.distillation import DemonstrationStreamConfig, DistillationConfig, TeacherConfig
from grpo_dist.config.sections import Sections


def distillation_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for settings that contradict each other, and for settings that a run would ignore."""
    own = config.distillation
    if own.teachers:
        yield from _of_teachers(own, config)
        yield from _of_the_rewards(own, config)
    else:
        yield from _without_teachers(own)
    if config.demonstrations is not None:
        yield from _of_demonstrations(config.demonstrations, config.batch.updates_per_step, config.max_length)


def _without_teachers(own: DistillationConfig) -> Iterator[str]:
    defaults = DistillationConfig()
    for key in ("coef", "kl_as", "estimator", "top_k", "divergence", "reward_coef"):
        if getattr(own, key) != getattr(defaults, key):
            yield (
                f"`distillation.{key}` has no effect without a teacher; add one to "
                f"`distillation.teachers`, or remove `distillation.{key}`"
            )


def _of_the_rewards(own: DistillationConfig, config: Sections) -> Iterator[str]:
    """Look at the weight of the rewards' advantages."""
    algorithm = config.algorithm
    if own.reward_coef != 1.0 and algorithm.whitens and algorithm.add_token_level_kl:
        yield (
            f"`distillation.reward_coef` = {own.reward_coef:g} weighs the advantages of rewards, but "
            "whitening mixes them with the KL of `algorithm.add_token_level_kl`; set "
            "`algorithm.add_token_level_kl` or `algorithm.whiten_advantages` to false, or remove "
            "`distillation.reward_coef`"
        )
    if own.reward_coef:
        return
    if config.data.order in ("pass_rate", "pools"):
        yield (
            f"`data.order` = {config.data.order} draws prompts by their rewards, but "
            "`distillation.reward_coef` = 0, so nothing is learned from rewards; set `data.order` to epochs, "
            "or raise `distillation.reward_coef`"
        )
    if config.data.drop_solved is not None:
        yield (
            f"`data.drop_solved` = {config.data.drop_solved:g} leaves out prompts that are solved, but "
            "`distillation.reward_coef` = 0, so what the teachers would still change of them is lost; remove "
            "it, or raise `distillation.reward_coef`"
        )
    # The reference begins as the policy, and follows it at most, so that both stay what they are.
    alone = all(not teacher.has_workers and teacher.prompt is None for teacher in own.teachers)
    if alone and config.demonstrations is None and not algorithm.entropy_coef:
        yield (
            f"`distillation.teachers` {own.teachers[0].name}: with `distillation.reward_coef` = 0 the "
            "initial policy teaches itself, so nothing is learned; give it a `prompt`, add another "
            "teacher or `demonstrations`, or raise `distillation.reward_coef`"
        )


def _of_teachers(own: DistillationConfig, config: Sections) -> Iterator[str]:
    defaults = DistillationConfig()
    if own.kl_as == "advantage" and own.estimator != defaults.estimator:
        yield (
            f"`distillation.estimator` = {own.estimator} is that of a term of the loss; set "
            "`distillation.kl_as` = loss, or remove `distillation.estimator`"
        )
    yield from _of_likeliest_tokens(own)
    if config.dynamic_sampling.enabled:
        yield (
            "`dynamic_sampling.enabled` drops groups of equal rewards, but `distillation.teachers` teach "
            "from them; set `dynamic_sampling.enabled` to false"
        )
    for teacher in own.teachers:
        if teacher.prompt is not None and config.has_environments:
            yield (
                f"`distillation.teachers` {teacher.name}: `prompt` replaces the problem, but an environment "
                "begins and rewrites its episodes itself; remove `prompt`, or train without environments"
            )
        if not teacher.has_workers:
            yield from _of_the_reference(teacher)


def _of_likeliest_tokens(own: DistillationConfig) -> Iterator[str]:
    """Look at `top_k` and what depends on it."""
    defaults = DistillationConfig()
    if not own.top_k:
        if own.divergence != defaults.divergence:
            yield (
                f"`distillation.divergence` = {own.divergence} compares distributions; set "
                "`distillation.top_k`, e.g. to 16, or remove `distillation.divergence`"
            )
        return
    if own.kl_as == "advantage":
        yield (
            f"`distillation.top_k` = {own.top_k} compares distributions, which an advantage of the sampled "
            "token cannot; set `distillation.kl_as` = loss, or remove `distillation.top_k`"
        )
    elif own.estimator != defaults.estimator:
        yield (
            f"`distillation.estimator` = {own.estimator} is one from sampled tokens alone, and has no effect "
            f"with `distillation.top_k` = {own.top_k}; remove it, and choose `distillation.divergence`"
        )
    for i, teacher in enumerate(own.teachers):
        for other in own.teachers[i + 1 :]:
            common = sorted(set(teacher.sources) & set(other.sources))
            if common or not teacher.sources or not other.sources:
                yield (
                    f"`distillation.top_k` = {own.top_k}: `distillation.teachers` {teacher.name} and "
                    f"{other.name} both teach {common[0] if common else 'the same source'}, but their "
                    "likeliest tokens differ; name other `sources` for each, or remove `distillation.top_k`"
                )


def _of_the_reference(teacher: TeacherConfig) -> Iterator[str]:
    if teacher.revision is not None:
        yield (
            f"`distillation.teachers` {teacher.name}: `revision` = {teacher.revision} is one of a hub "
            "model, but its model is the reference; remove it"
        )
    for key in ("num_workers", "threads", "micro_batch_tokens"):
        if (value := getattr(teacher, key)) != TeacherConfig.model_fields[key].default:
            yield (
                f"`distillation.teachers` {teacher.name}: `{key}` = {value} is that of workers of its own, "
                f"but its model is the reference; remove it, or set `reference.{key}`"
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
