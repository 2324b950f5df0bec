"""Checks of step rewards: of the estimator `process`, and of their advantages next to those of outcomes."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.sections import Sections


def step_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for each setting of step rewards that has none, or that another one excludes."""
    a, data, rewards = config.algorithm, config.data, config.rewards
    single = [source for source in data.train if data.environment_of(source) is None]
    by_default = [source for source in single if source.label not in rewards.by_source]
    without = [str(source.path) for source in by_default if not rewards.of(source.label).scores_steps]
    if (a.process_coef or a.advantage == "process") and without:
        key, value = ("process_coef", a.process_coef) if a.process_coef else ("advantage", "process")
        yield (
            f"`algorithm.{key}` = {value} needs scores of reasoning steps or turns, but `rewards` has no "
            f"model or function of `kind: process`, and source {without[0]} of `data.train` no environment; "
            "add one of them"
        )
    if a.process_coef and a.advantage in ("process", "turn"):
        yield (
            f"`algorithm.process_coef` = {a.process_coef} adds the advantages of steps to those of outcomes, "
            f"but `algorithm.advantage` = {a.advantage} is made of step or turn rewards itself; use an "
            "estimator of outcomes such as grpo, or remove `algorithm.process_coef`"
        )
    if a.process_coef and a.gamma < 1.0:
        yield (
            f"`algorithm.gamma` = {a.gamma:g} discounts the reward at the end of a sample, but "
            f"`algorithm.process_coef` = {a.process_coef} adds rewards at the ends of steps; set one of them"
        )
    if a.outcome_coef != 1.0 and not a.process_coef:
        yield (
            f"`algorithm.outcome_coef` = {a.outcome_coef} weighs outcomes against steps, but "
            "`algorithm.process_coef` = 0; set it, or remove `algorithm.outcome_coef`"
        )
    if a.process_coef and not a.outcome_coef:
        yield (
            "`algorithm.outcome_coef` = 0 leaves only the advantages of steps; set `algorithm.advantage` = "
            "process and remove both weights"
        )
