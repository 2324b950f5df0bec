"""Built-in rewards.

The fields of a reward are its `kwargs` in `rewards.functions`: typed, with ranges; other names are rejected.
Each class wraps a plain function. Lengths are tokens of the policy, never characters.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, get_args

import numpy as np
from pydantic import Field, PositiveInt, PrivateAttr, field_validator

from grpo_dist.config import Fraction, NonNegative, Section
from grpo_dist.config.environments import BudgetOutcome
from grpo_dist.rewards.format import think_answer_format
from grpo_dist.rewards.group import CompletionGroup, Verdicts, sum_rewarded_turns
from grpo_dist.rewards.language import SCRIPTS, Script, script_share
from grpo_dist.rewards.match import exact_match, numeric_match
from grpo_dist.rewards.text import alternatives

Note = Callable[[str], None]  # receives the reason why a sample could not be scored


class Builtin(Section, ABC):
    """A reward of the registry. A reward with external resources overrides `start` and `close`.

    ``is_blind``: its score does not depend on whether the answer is right, so `grpo-dist check` expects equal
    scores for a right and a wrong answer. ``knows_right_answers``: the gold, written as an answer, is right;
    False where the data only has tests, so no right answer can be tried before a run. ``asks_math_grader``:
    it uses the math grader's verdicts, but is no grade itself.
    """

    is_blind: ClassVar[bool] = False
    knows_right_answers: ClassVar[bool] = True
    asks_math_grader: ClassVar[bool] = False

    @property
    def is_graded(self) -> bool:
        """Whether scores other than 0 and 1 are possible; if not, the reward is a `Binary`. Estimators like
        maxrl refuse graded rewards.
        """
        return True

    def check(self, *, max_new_tokens: int) -> None:
        """Raise ValueError for settings that do not fit the run.

        Called once on the driver, before the run.
        """

    @property
    def data_columns(self) -> tuple[str, ...]:
        """Columns of the data that the settings name."""
        return ()

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Raise ValueError for values of `data_columns` with which no completion can be scored."""

    def start(self, *, workers: int, note: Note) -> None:
        """Acquire resources. Called before the first `score`, once for each of ``workers`` in the run."""

    @abstractmethod
    def score(self, group: CompletionGroup, verdicts: Verdicts) -> Sequence[float]:
        """Score each completion; NaN: could not be scored. Thread-safe. Returns [G]."""

    def close(self) -> None:
        """Release what `start` acquired."""


class Binary(Builtin, ABC):
    """A reward with only the scores 0 and 1."""

    @property
    def is_graded(self) -> bool:
        return False


class Math(Binary):
    """1 if the answer equals the gold mathematically, else 0."""

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        return verdicts.correct


class Format(Binary):
    """1 for a thought in its tags followed by one answer, else 0."""

    is_blind: ClassVar[bool] = True

    answer_tags: tuple[str, str] = Field(("<answer>", "</answer>"), description="tags around an answer")

    @field_validator("answer_tags")
    @classmethod
    def _two_tags(cls, tags: tuple[str, str]) -> tuple[str, str]:
        if not all(tag.strip() for tag in tags) or tags[0] == tags[1]:
            raise ValueError("expected two different, non-empty tags, e.g. [<answer>, </answer>]")
        return tags

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        return [
            think_answer_format(completion, thought=thought, answer_tags=self.answer_tags)
            for completion, thought in group.with_thoughts
        ]


class Parity(Binary):
    """0, 1, 0, 1 ... over the samples of a group, independent of their text.

    For benchmarks: every group has a learning signal.
    """

    is_blind: ClassVar[bool] = True

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        return [float(i % 2) for i in range(len(group.completions))]


class Random(Binary):
    """1 with probability ``share``, else 0, for any completion: a negative control.

    The SHA-256 of seed, problem, gold and the sample's place in its group decides, so a resumed run draws the
    same rewards.
    """

    is_blind: ClassVar[bool] = True

    seed: int = 0
    share: Fraction = 0.5

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        problem: list[Any] = [self.seed, str(group.columns.get("problem", "")), group.gold]
        return [float(_uniform([*problem, place]) < self.share) for place in range(len(group.completions))]


def _uniform(key: list[Any]) -> float:
    """Hash ``key`` to a number in [0, 1)."""
    digest = hashlib.sha256(json.dumps(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class Exact(Binary):
    """1 if the final answer is the text of the gold, else 0."""

    ignore_case: bool = True

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        golds = alternatives(group.gold)
        return [
            max(exact_match(c, gold, ignore_case=self.ignore_case) for gold in golds)
            for c in group.graded_texts
        ]


class Numeric(Binary):
    """1 if the last number is within max(relative * |gold|, absolute) of the gold, else 0."""

    relative: NonNegative = 1e-4
    absolute: NonNegative = 1e-8

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        golds = alternatives(group.gold)
        scores = [
            [numeric_match(c, gold, relative=self.relative, absolute=self.absolute) for gold in golds]
            for c in group.graded_texts
        ]
        return [max(each, key=lambda score: -1.0 if math.isnan(score) else score) for each in scores]


class Repetition(Builtin):
    """Minus the share of repeated token n-grams, in (-1, 0]."""

    is_blind: ClassVar[bool] = True

    n: PositiveInt = Field(40, description="tokens")

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        return [-repeated_share(ids, n=self.n) for ids in group.token_ids]


class Language(Builtin):
    """Share of words in the wanted scripts, in [0, 1]."""

    is_blind: ClassVar[bool] = True

    scripts: tuple[Script, ...] = Field(min_length=1, description="one or more of: " + ", ".join(SCRIPTS))

    @field_validator("scripts", mode="before")
    @classmethod
    def _one_is_enough(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        return [script_share(completion, self.scripts) for completion in group.completions]


class Overlong(Builtin):
    """DAPO's soft length penalty: 0 to -1 over the last ``buffer_tokens`` of the length in force."""

    is_blind: ClassVar[bool] = True

    buffer_tokens: PositiveInt | None = Field(None, description="null: a fifth of the length in force")

    def check(self, *, max_new_tokens: int) -> None:
        if self.buffer_tokens and self.buffer_tokens > max_new_tokens:
            raise ValueError(
                f"kwargs.buffer_tokens = {self.buffer_tokens} is above `sampling.max_new_tokens` = "
                f"{max_new_tokens}, so every completion would be penalised; use a smaller buffer, e.g. "
                f"{max(1, max_new_tokens // 4)}"
            )

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        longest = group.max_new_tokens
        buffer = self.buffer_tokens or max(1, round(longest / 5))
        return [overlong_punishment(n, max_tokens=longest, buffer_tokens=buffer) for n in group.lengths]


class CosineLength(Builtin):
    """Length-dependent reward along half a cosine: falls for correct, rises for wrong answers."""

    asks_math_grader: ClassVar[bool] = True

    correct: tuple[float, float] = Field((1.0, 0.5), description="at length 0, at sampling.max_new_tokens")
    wrong: tuple[float, float] = Field((-1.0, 0.0), description="the same for a wrong answer")
    exceed: float = Field(-1.0, description="for a truncated completion")

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        samples = zip(verdicts.correct, group.lengths, group.finish_reasons, strict=True)
        return [
            cosine_length(
                correct,
                length,
                max_tokens=group.max_new_tokens,
                exceeded=reason == "length",
                correct_range=self.correct,
                wrong_range=self.wrong,
                exceed=self.exceed,
            )
            for correct, length, reason in samples
        ]


class RelativeLength(Builtin):
    """Kimi k1.5: 0.5 for the shortest completion of a group to -0.5 for the longest; wrong ones at most 0."""

    asks_math_grader: ClassVar[bool] = True

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        return relative_length(verdicts.correct, [len(ids) for ids in group.token_ids])


class EnvironmentSum(Builtin):
    """Sum of the environment's rewards of turns; not scored if there is none, or a NaN. An episode without
    rewards scores 0 if `environments.outcome_rewards` has its end.
    """

    _note: Note | None = PrivateAttr(None)

    def start(self, *, workers: int, note: Note) -> None:
        self._note = note

    def score(self, group: CompletionGroup, verdicts: Verdicts) -> list[float]:
        scores = []
        for turns, end in zip(
            group.turns or [()] * len(group.completions), group.finish_reasons, strict=True
        ):
            scores.append(sum_rewarded_turns(turns, end, verdicts.rewarded_ends))
            unrewarded = all(turn["reward"] is None for turn in turns)
            if self._note and unrewarded and math.isnan(scores[-1]) and end in get_args(BudgetOutcome):
                self._note(
                    f"episodes ended with {end} before a turn had a reward; to score them, set "
                    f"`environments.outcome_rewards: {{{end}: 0}}`"
                )
        return scores


# Length and repetition


def overlong_punishment(length: int, *, max_tokens: int, buffer_tokens: int) -> float:
    """Return 0 up to ``max_tokens - buffer_tokens``, then falling linearly to -1 at ``max_tokens``.

    Equation 13 of DAPO (Yu et al. 2025, arXiv:2503.14476): with L_max = ``max_tokens`` and L_cache =
    ``buffer_tokens``, (L_max - L_cache - length) / L_cache within the buffer, -1 beyond L_max.

        max_tokens 100, buffer_tokens 20:   80 -> 0   85 -> -0.25   90 -> -0.5   100 -> -1   120 -> -1
    """
    excess = length - (max_tokens - buffer_tokens)
    return -min(1.0, max(0.0, excess / buffer_tokens))


def cosine_length(
    correct: float,
    length: int,
    *,
    max_tokens: int,
    exceeded: bool,
    correct_range: tuple[float, float],
    wrong_range: tuple[float, float],
    exceed: float,
) -> float:
    """Return a reward that depends on correctness and length.

    Yeo et al. 2025, arXiv:2502.03373, section 4: r_L + (r_0 - r_L) (1 + cos(pi length / L_max)) / 2, and
    ``exceed`` for truncated completions. By default short correct answers are worth more than long ones, and
    long wrong answers more than short ones, so a model thinks longer where it does not know the answer.

        correct_range (1, 0.5), max_tokens 100:   0 -> 1   50 -> 0.75   100 -> 0.5

    Args:
        correct: 1 or 0; NaN gives NaN.
        exceeded: whether sampling was truncated at the limit.
        correct_range, wrong_range: (r_0 at length 0, r_L at ``max_tokens``) of correct and of wrong answers.
    """
    if math.isnan(correct):
        return math.nan
    if exceeded:
        return exceed
    first, last = correct_range if correct > 0.5 else wrong_range
    share = min(length / max_tokens, 1.0)
    return last + 0.5 * (first - last) * (1.0 + math.cos(math.pi * share))


def relative_length(correct: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Score length relative to the group: 0.5 for the shortest to -0.5 for the longest.

    Kimi k1.5 (arXiv:2501.12599), section 2.3.3: lambda = 0.5 - (length - shortest) / (longest - shortest);
    lambda for a correct answer, min(0, lambda) for a wrong one; 0 for all if all are equally long. A sample
    whose ``correct`` is NaN gets NaN, but its length still counts.

        correct [1, 1, 0, 0], lengths [10, 30, 20, 10] -> [0.5, -0.5, 0, 0]
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest == longest:
        return [math.nan if math.isnan(c) else 0.0 for c in correct]
    rewards = []
    for right, length in zip(correct, lengths, strict=True):
        value = 0.5 - (length - shortest) / (longest - shortest)
        rewards.append(math.nan if math.isnan(right) else value if right > 0.5 else min(0.0, value))
    return rewards


def repeated_share(token_ids: Sequence[int] | np.ndarray, *, n: int) -> float:
    """Return the share of token n-grams that repeat an earlier one: 1 - distinct / all, in [0, 1).

    The repetition penalty of Yeo et al. 2025 (arXiv:2502.03373, section 4.3 and its appendix) over whole
    completions. 0 for fewer than ``n`` tokens.

        [1, 2, 1, 2, 1], n = 2:   12 21 12 21 -> 1 - 2/4 = 0.5
    """
    ids = np.asarray(token_ids, dtype=np.int32)
    total = len(ids) - n + 1
    if total <= 0:
        return 0.0
    raw, width = ids.tobytes(), ids.itemsize
    distinct = {raw[width * i : width * (i + n)] for i in range(total)}
    return 1.0 - len(distinct) / total
