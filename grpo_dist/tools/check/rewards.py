"""The check of the rewards: a right answer must score more than a wrong one."""

from __future__ import annotations

import numpy as np

from grpo_dist.config import RewardsConfig, SamplingConfig
from grpo_dist.runs.prepare import scoring_problems
from grpo_dist.tools.check.inputs import CheckFailed, CheckSkipped, Inputs, fail
from grpo_dist.tools.check.reward_trial import (
    ENVIRONMENT,
    is_blind,
    try_rewards,
    without_right_answers,
)
from grpo_dist.types import Prompt


def check_reward(inputs: Inputs) -> str:
    """Score a right and a wrong answer to the first prompt with the graders of the run, and to the first of
    each source of training and evaluation, where sources have rewards of their own.
    """
    rewards, sampling = inputs.config.rewards, inputs.config.sampling
    fail(scoring_problems(rewards, sampling, inputs.config.algorithm.advantage))
    if not rewards.all_functions:
        raise CheckSkipped("`rewards.functions` is empty, and reward models are not asked before a run")
    if not rewards.by_source:
        return _check_source(rewards, sampling, _first_prompt(inputs))
    if inputs.prepared is None:
        raise CheckSkipped("the data cannot be read, so there is no problem of each source to answer")
    first: dict[str, Prompt] = {}
    for prompts in (inputs.prepared.prompts, *(own.prompts for own in inputs.prepared.eval_sets)):
        for prompt in prompts:
            first.setdefault(prompt.source, prompt)
    found, failed, skipped = [], [], []
    for source, prompt in first.items():
        try:
            found.append(f"source {source}: {_check_source(rewards.of(source), sampling, prompt)}")
        except CheckFailed as error:
            failed.append(f"source {source}: {error}")
        except CheckSkipped as reason:
            skipped.append(f"source {source}: {reason}")
    fail(failed)
    if not found:
        raise CheckSkipped("; ".join(skipped))
    return "\n    ".join([*found, *(f"not checked: {text}" for text in skipped)])


def _check_source(rewards: RewardsConfig, sampling: SamplingConfig, prompt: Prompt | None) -> str:
    if not rewards.functions:
        raise CheckSkipped("reward models are not asked before a run")
    if all(reward.function == ENVIRONMENT for reward in rewards.functions):
        raise CheckSkipped("the reward is the sum of what the environment gives for each turn")
    if prompt is None:
        raise CheckSkipped("the data cannot be read, so there is no problem to answer")
    trial = try_rewards(rewards, sampling, prompt)
    text = f"{trial}\n    reward models are not asked" if rewards.models else str(trial)
    if trial.unscored:
        raise CheckFailed(f"{text}\n    `{trial.unscored}` gave no score; {'; '.join(trial.reasons)}")
    unknown = without_right_answers(rewards)
    if unknown and not trial.separates and not trial.inverts:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise CheckSkipped(f"no right answer to {names} is known before a run, so it is not tried")
    if not trial.separates and not is_blind(rewards):
        raise CheckFailed(
            f"{text}\n    the right one must get more in all: look at the answer {prompt.answer!r} of the "
            "data, and at `rewards.functions`, their weights and the form in which they expect an answer"
        )
    return text if trial.separates else f"{text}\n    no reward here looks at whether an answer is right"


def _first_prompt(inputs: Inputs) -> Prompt | None:
    """Return the first prompt; the first row with made-up tokens where there is no tokenizer."""
    if inputs.prepared is not None:
        return inputs.prepared.prompts[0]
    if inputs.rows is None:
        return None
    row = inputs.rows[0][0][1][0]
    return Prompt("first", np.array([1], np.int32), row.answer, row.source, row.problem, dict(row.columns))
