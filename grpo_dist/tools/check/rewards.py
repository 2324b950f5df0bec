"""The check of the rewards: a right answer must score more than a wrong one."""

from __future__ import annotations

import numpy as np

from grpo_dist.runs.prepare import scoring_problems
from grpo_dist.tools.check.context import CheckFailed, CheckSkipped, Context, fail
from grpo_dist.tools.check.reward_trial import ENVIRONMENT, is_blind, try_rewards
from grpo_dist.types import Prompt


def check_reward(context: Context) -> str:
    """Score a right and a wrong answer to the first prompt with the graders of the run."""
    fail(scoring_problems(context.config.rewards, context.config.sampling))
    if not context.config.rewards.functions:
        raise CheckSkipped("`rewards.functions` is empty, and reward models are not asked before a run")
    if all(reward.function == ENVIRONMENT for reward in context.config.rewards.functions):
        return "the reward is the sum of what the environment gives for each turn"
    if (prompt := _first_prompt(context)) is None:
        raise CheckSkipped("the data cannot be read, so there is no problem to answer")
    trial = try_rewards(context.config.rewards, context.config.sampling, prompt)
    text = f"{trial}\n    reward models are not asked" if context.config.rewards.models else str(trial)
    if trial.unscored:
        raise CheckFailed(f"{text}\n    `{trial.unscored}` gave no score; {'; '.join(trial.reasons)}")
    if not trial.separates and not is_blind(context.config.rewards):
        raise CheckFailed(
            f"{text}\n    the right one must get more in all: look at the answer {prompt.answer!r} of the "
            "data, and at `rewards.functions`, their weights and the form in which they expect an answer"
        )
    return text if trial.separates else f"{text}\n    no reward here looks at whether an answer is right"


def _first_prompt(context: Context) -> Prompt | None:
    """Return the first prompt; the first row with made-up tokens where there is no tokenizer."""
    if context.prepared is not None:
        return context.prepared.prompts[0]
    if context.rows is None:
        return None
    row = context.rows[0][0][1][0]
    return Prompt("first", np.array([1], np.int32), row.answer, row.source, row.problem, dict(row.columns))
