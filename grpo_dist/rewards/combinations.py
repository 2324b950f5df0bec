"""Rewards that do not go together, though each can be used by itself."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.registry import REWARDS, reward_specs


def combination_problems(settings: RewardsConfig) -> Iterator[str]:
    """Yield a message for every source that tests code, where a length reward asks the math grader.

    The math grader finds no gold answer in code: it would call every solution wrong, for the length reward as
    in evaluations. With `math` or `judge` among the rewards, its verdicts are asked for.
    """
    for source, own in settings.variants.items():
        built_in = [spec for spec in reward_specs(own) if spec.function in REWARDS]
        tests = next((s.name for s in built_in if not REWARDS[s.function].knows_right_answers), None)
        if tests is None or {"math", "judge"} & {spec.function for spec in built_in}:
            continue
        key = f"rewards.by_source.{source}.functions" if source else "rewards.functions"
        for spec in built_in:
            if REWARDS[spec.function].asks_math_grader:
                yield (
                    f"{key} {spec.name} takes right and wrong from the math grader, which calls all code "
                    f"that `{tests}` runs wrong, also in evaluations; expected a length reward that does "
                    f"not, e.g. `overlong` with `gate: {tests}`"
                )
