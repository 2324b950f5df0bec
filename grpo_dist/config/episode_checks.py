"""Checks of settings that only episodes of an environment have, or that they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config.environments import check_environment_name
from grpo_dist.config.sections import Sections


def episode_contradictions(config: Sections) -> Iterator[str]:
    """Yield a message for each contradiction between estimator, rewards, sources and environments."""
    yield from _of_the_sources(config)
    yield from _of_the_sandbox(config)
    data, advantage, rewards = config.data, config.algorithm.advantage, config.rewards
    without = [str(source.path) for source in data.train if data.environment_of(source) is None]
    episodes = [source.label for source in data.train if data.environment_of(source) is not None]
    for label in dict.fromkeys(label for label in episodes if rewards.of(label).scores_steps):
        key = f"rewards.by_source.{label}" if label in rewards.by_source else "rewards"
        yield (
            f"`{key}` has a model or function of `kind: process`, which scores the steps of a single "
            f"completion, but the environment of source {label} makes episodes; remove it "
            "(`algorithm.advantage` = process then takes the rewards of turns) or the environment, or give "
            f"the source rewards without it in `rewards.by_source.{label}`"
        )
    if advantage == "turn" and without:
        yield (
            f"`algorithm.advantage` = turn compares turns of episodes, but source {without[0]} of "
            "`data.train` has no environment; set `data.environment`, or use another estimator"
        )
    if config.sampling.stop and len(without) < len(data.train):
        yield (
            f"`sampling.stop` = {list(config.sampling.stop)} ends single completions, but `data.environment` "
            "makes episodes, whose actions end where their call format says; remove one of the two"
        )
    if (tokens := config.rollout.speculation.tokens) and (config.sampling.stop or config.has_environments):
        ends = "`sampling.stop`" if config.sampling.stop else "`data.environment`"
        yield (
            f"`rollout.speculation.tokens` = {tokens} samples several tokens in a step of the engine, and "
            f"{ends} ends a sample at a text within such a step, for which it is not shown that samples stay "
            "the same. Set `rollout.speculation.tokens` to 0, or remove what ends samples"
        )
    sums = [r.weight for r in rewards.all_functions if r.function == "environment" and r.weight]
    if sums and without:
        yield (
            f"reward `environment` sums the rewards of turns, but source {without[0]} of `data.train` has no "
            "environment, so none of its samples would be scored; set `data.environment`, or the weight to 0"
        )
    if advantage == "turn" and sums:
        yield (
            "`algorithm.advantage` = turn adds the rewards of turns to the reward of the episode, and reward "
            f"`environment` of weight {sums[0]:g} is their sum, so each would count twice; set its weight to "
            "0, which only reports it"
        )
    environments, everywhere = config.environments, (*data.train, *data.eval)
    if not any(map(data.environment_of, everywhere)):
        for name in ("mask_outcomes", "outcome_rewards"):
            if getattr(environments, name):
                yield (
                    f"`environments.{name}` has no effect without an environment; set `data.environment`, or "
                    f"remove `environments.{name}`"
                )


def _of_the_sources(config: Sections) -> Iterator[str]:
    data = config.data
    named = [("data.environment", data.environment)] if data.environment != "none" else []
    for key, sources in (("train", data.train), ("eval", data.eval)):
        for number, source in enumerate(sources):
            where = f"data.{key}.{number}"
            if source.environment not in (None, "none"):
                named.append((f"{where}.environment", str(source.environment)))
            if data.environment_of(source) is not None:
                continue
            if source.path is None:
                yield (
                    f"`{where}` has neither `path` nor `environment`; set its `path`, or an environment that "
                    "brings its own problems"
                )
            if source.environment_kwargs:
                yield (
                    f"`{where}.environment_kwargs` has no effect without an environment; set "
                    f"`{where}.environment`, or remove it"
                )
    for key, name in named:
        try:
            check_environment_name(name)
        except ValueError as error:
            yield f"`{key}`: {error}"


def _of_the_sandbox(config: Sections) -> Iterator[str]:
    sandbox = config.environments.sandbox
    if sandbox.backend == "http" and sandbox.url is None:
        yield (
            "`environments.sandbox.backend` = http needs the address of the service; set "
            "`environments.sandbox.url`, or use backend process"
        )
    if sandbox.backend != "http" and sandbox.url is not None:
        yield (
            f"`environments.sandbox.url` = {sandbox.url} has no effect with backend {sandbox.backend}; set "
            "`environments.sandbox.backend` to http, or remove the url"
        )
    if sandbox.call_s > sandbox.episode_s:
        yield (
            f"`environments.sandbox.call_s` = {sandbox.call_s:g} is above `environments.sandbox.episode_s` = "
            f"{sandbox.episode_s:g}, the time of all calls; lower the first or raise the second"
        )
