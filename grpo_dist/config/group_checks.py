"""Checks of which groups a step samples and takes."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.algorithms.estimators import estimator_of
from grpo_dist.config.data import DataConfig
from grpo_dist.config.sampling import SamplingConfig, TemperatureSchedule
from grpo_dist.config.sections import Sections


def group_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for each contradiction between settings of groups, and for those without effect."""
    yield from _of_the_order(config)
    yield from _of_the_metric(config)
    yield from _of_the_sources(config.data, config.sampling)
    yield from _of_the_rewards(config)


def _of_the_order(config: Sections) -> Iterator[str]:
    batch, bound = config.batch, 1 + config.max_staleness
    if batch.order != "completion":
        if batch.oversample is not None:
            yield (
                "`batch.oversample` has no effect without batch.order=completion; set that, or remove "
                "`batch.oversample`"
            )
        return
    if config.max_staleness == 0:
        yield (
            "`batch.order` = completion carries slow groups over to later steps, but `max_staleness` = 0 "
            "allows no older samples; set `max_staleness` to 1 or more, or `batch.order` to launched"
        )
    elif batch.oversample is not None and batch.oversample > bound:
        yield (
            f"`batch.oversample` = {batch.oversample:g} is above 1 + `max_staleness` = {bound}, the steps "
            "that a group may be on its way; lower it or raise `max_staleness`"
        )
    if config.dynamic_sampling.oversample != 1.0:
        yield (
            f"`dynamic_sampling.oversample` = {config.dynamic_sampling.oversample:g} has no effect with "
            "`batch.order` = completion, which replaces each group by one; use `batch.oversample`"
        )


def _of_the_sources(data: DataConfig, sampling: SamplingConfig) -> Iterator[str]:
    labels = [source.label for source in data.train]
    own = [s for s in data.train if s.weight is not None or s.temperature is not None]
    if twice := [s.label for s in own if labels.count(s.label) > 1]:
        yield (
            f"`data.train`: several sources have the name {twice[0]}, and one of them a weight or a "
            "temperature; give each its own `name`"
        )
    weighted = [source.label for source in data.train if source.weight is not None]
    if weighted and len(weighted) < len(labels):
        lacking = next(label for label in labels if label not in weighted)
        yield (
            f"`data.train`: source {weighted[0]} has a `weight` and {lacking} has none; give each one, or "
            "none"
        )
    if weighted and data.order != "epochs":
        yield (
            f"`data.order` = {data.order} chooses the sources itself, so `weight` of {weighted[0]} has no "
            "effect; remove it, or set `data.order` to epochs"
        )
    steered = isinstance(sampling.temperature, TemperatureSchedule) and sampling.temperature.schedule is None
    if steered and data.temperatures:
        yield (
            "`sampling.temperature` follows the entropy of all samples, but source "
            f"{next(iter(data.temperatures))} has a `temperature` of its own; remove one of them"
        )
    for i, source in enumerate(data.eval):
        for key in ("weight", "temperature"):
            if getattr(source, key) is not None:
                yield (
                    f"`data.eval.{i}.{key}` has no effect: it is of training sources; remove it "
                    "(`evaluation.temperature` is of all evaluations)"
                )


def _of_the_rewards(config: Sections) -> Iterator[str]:
    """Yield what is wrong with the rewards of single sources."""
    rewards, algorithm = config.rewards, config.algorithm
    labels = [source.label for source in (*config.data.train, *config.data.eval)]
    if unknown := [name for name in rewards.by_source if name not in labels]:
        yield (
            f"`rewards.by_source` has {unknown[0]}, but no source of `data.train` and `data.eval` has that "
            f"name; expected one of {', '.join(dict.fromkeys(labels))}"
        )
    if not rewards.functions and not rewards.models:
        for label in dict.fromkeys(label for label in labels if label not in rewards.by_source):
            yield (
                f"source {label} has no rewards: `rewards.functions` and `rewards.models` are empty and "
                f"`rewards.by_source` does not have it; add rewards.by_source.{label}"
            )
    variants = list(rewards.variants.values())
    if "parts" in estimator_of(algorithm.advantage).inputs:
        for name in rewards.names:
            weights = {own.weights[name] for own in variants if name in own.weights}
            if len(weights) > 1:
                yield (
                    f"`algorithm.advantage` = {algorithm.advantage} weighs reward {name} alike in all "
                    f"sources, but `rewards.by_source` gives it {sorted(weights)}; give it one weight or "
                    "several names"
                )
    if algorithm.advantage == "process" or algorithm.process_coef:
        without = [s.label for s in config.data.train if config.data.environment_of(s) is None]
        lacking = [n for n in without if n in rewards.by_source and not rewards.of(n).scores_steps]
        if lacking:
            yield (
                "`algorithm.advantage` = process and `algorithm.process_coef` need step rewards of every "
                f"source, but rewards.by_source.{lacking[0]} has none; add a reward of `kind: process`"
            )


def _of_the_metric(config: Sections) -> Iterator[str]:
    metric, rewards = config.dynamic_sampling.metric, config.rewards
    if metric is None:
        return
    known = rewards.names
    if metric != "accuracy" and metric not in known:
        yield (
            f"`dynamic_sampling.metric` = {metric}: no such reward; expected accuracy or one of "
            f"{', '.join(known)}"
        )
    if not config.dynamic_sampling.enabled:
        yield (
            "`dynamic_sampling.metric` has no effect without dynamic_sampling.enabled=true; set that, or "
            "remove `dynamic_sampling.metric`"
        )
