"""What a reward is given: the completions of one problem, and the math grader's verdicts on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.math import Grade
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.thought import outside_thought, thought_for
from grpo_dist.types import NO_THOUGHT, Prompt, Rollout, Thought


@dataclass(frozen=True, slots=True)
class CompletionGroup:
    """The G completions of one problem, and what was asked."""

    completions: tuple[str, ...]  # [G]
    token_ids: tuple[np.ndarray, ...]  # G arrays int32 [C], of the policy's tokenizer
    finish_reasons: tuple[str, ...]  # [G] "stop" (EOS) or "length"
    gold: str
    columns: Mapping[str, Any]  # `problem` and the data's further columns
    max_new_tokens: int  # longest completion that training samples
    thought: Thought = NO_THOUGHT  # the tags around a thought, and whether the prompt opens it

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        rollouts: Sequence[Rollout],
        *,
        max_new_tokens: int,
        settings: RewardsConfig | None = None,
    ) -> CompletionGroup:
        """``settings`` of rewards, which may say more of thoughts than the prompt does."""
        return cls(
            completions=tuple(r.text for r in rollouts),
            token_ids=tuple(r.completion_ids for r in rollouts),
            finish_reasons=tuple(r.finish_reason for r in rollouts),
            gold=prompt.answer,
            columns={"problem": prompt.text, **prompt.columns},
            max_new_tokens=max_new_tokens,
            thought=thought_for(prompt.thought, settings) if settings else prompt.thought,
        )

    @property
    def outside_thoughts(self) -> list[str]:
        """[G]: the completions without a thought that is never closed, which is no place for an answer."""
        return [outside_thought(completion, self.thought) for completion in self.completions]

    @property
    def lengths(self) -> list[int]:
        """Completion tokens of each sample, EOS included."""
        return [len(ids) for ids in self.token_ids]


class Verdicts:
    """The math grader's grades of one group, made once, when the first reward asks for them."""

    def __init__(self, group: CompletionGroup, pool: GraderPool) -> None:
        self._group, self._pool = group, pool

    @cached_property
    def grades(self) -> list[Grade]:
        return self._pool.grade(
            [(completion, self._group.gold) for completion in self._group.outside_thoughts]
        )

    @property
    def correct(self) -> list[float]:
        """[G]: 1 right, 0 wrong or no answer, NaN not judged."""
        return [grade.reward for grade in self.grades]

    @property
    def outcomes(self) -> list[str]:
        """[G] outcomes, "" each where no reward has asked."""
        if "grades" not in vars(self):
            return [""] * len(self._group.completions)
        return [grade.outcome for grade in self.grades]
