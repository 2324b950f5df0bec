"""Inputs of rewards: the completions of one problem, their steps, the turns of episodes, the math grader's
verdicts, and the scores of reward models.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int32

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.math import Grade
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.thought import (
    normalise_tags,
    resolve_thought,
    strip_unclosed_thought,
    thought_of_answer,
)
from grpo_dist.runtime.files import record_to_dict
from grpo_dist.types import NO_THOUGHT, Prompt, Rollout, Thought, Turn

Turns = Sequence[Mapping[str, Any]]  # one episode, see `turns_for_rewards`


def turns_for_rewards(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return plain values for users' functions, which run in processes without this package's types.

    [{"action": "2*3?", "observation": "6", "reward": None,
      "calls": [{"name": "calculator", "arguments": "2*3", "result": "6", "outcome": "ok", "seconds": 0.1}]}]
    """
    return [
        {
            "action": turn.text,
            "observation": turn.observation,
            "calls": [record_to_dict(call) for call in turn.calls],
            "reward": turn.reward,
        }
        for turn in turns
    ]


def sum_of_turns(turns: Turns) -> float:
    """Sum the rewards of turns; NaN if no turn has a reward, or a reward is not finite."""
    rewards = [turn["reward"] for turn in turns if turn["reward"] is not None]
    return math.fsum(rewards) if rewards and all(map(math.isfinite, rewards)) else math.nan


def sum_rewarded_turns(turns: Turns, finish_reason: str, rewarded_ends: Collection[str]) -> float:
    """Return `sum_of_turns`, but 0 for an episode without rewards if `environments.outcome_rewards` has a
    reward for its end, which could not be added to NaN.
    """
    if finish_reason in rewarded_ends and turns and all(turn["reward"] is None for turn in turns):
        return 0.0
    return sum_of_turns(turns)


def describe_failure(turns: Turns) -> str:
    """Return why the environment of an episode that ended with "error" failed."""
    return (turns[-1]["observation"] if turns else "") or "it failed"


# Arguments available in every call of a user's function; all others are columns of the data, or `kwargs`.
OF_CALLS = frozenset(
    (
        "problem", "answer", "source", "completion", "completions", "finish_reason", "group", "token_ids",
        "turns", "steps",
    )
)  # fmt: skip


def named_columns(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``columns``, nested ones also under their last part, which can be an argument name, unless that
    name is taken.

    {"extra_info.index": 3} -> {"extra_info.index": 3, "index": 3}
    """
    last = {name.rpartition(".")[2]: value for name, value in columns.items() if "." in name}
    last = {name: value for name, value in last.items() if name.isidentifier() and name not in OF_CALLS}
    return {**last, **columns} if last else columns


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Scores of G completions by one reward model. NaN: could not be scored."""

    rewards: np.ndarray  # float32 [G]
    step_rewards: tuple[np.ndarray, ...] | None = None  # process: G arrays float32 [S_i]
    step_ends: tuple[np.ndarray, ...] | None = None  # process: G arrays int32 [S_i], last token of each step


@dataclass(frozen=True, slots=True)
class CompletionGroup:
    """The G completions of one problem, with its gold answer and columns."""

    completions: tuple[str, ...]  # [G]; for an episode, the last action
    token_ids: tuple[np.ndarray, ...]  # G arrays int32 [C], the sampled tokens
    finish_reasons: tuple[str, ...]  # [G], as in `Rollout`
    gold: str
    columns: Mapping[str, Any]  # `problem` and the further columns of the data
    max_new_tokens: int  # length limit of the completions
    # [G] tags around each thought, and which part stands before the completion; (): the usual tags, no part
    thoughts: tuple[Thought, ...] = ()
    turns: tuple[Turns, ...] = ()  # [G], see `turns_for_rewards`; (): no environment
    given: tuple[int, ...] = ()  # [G] number of tokens from the environment; (): none
    source: str = ""  # name of the problem's source

    @classmethod
    def from_rollouts(
        cls,
        prompt: Prompt,
        rollouts: Sequence[Rollout],
        *,
        max_new_tokens: int,
        max_length: int | None = None,
        settings: RewardsConfig | None = None,
    ) -> CompletionGroup:
        """Collect the completions of ``prompt``.

        ``max_new_tokens``: limit of samples that have none. ``max_length``: limit of prompt plus completion;
        None: unknown. ``settings`` may override the thought detected in the prompt.
        """
        thought = resolve_thought(prompt.thought, settings) if settings else prompt.thought
        longest = next((r.max_new_tokens for r in rollouts if r.max_new_tokens), max_new_tokens)
        return cls(
            completions=tuple(r.text for r in rollouts),
            token_ids=tuple(r.sampled_ids for r in rollouts),
            finish_reasons=tuple(r.finish_reason for r in rollouts),
            gold=prompt.answer,
            source=prompt.source,
            columns={"problem": prompt.text, **named_columns(prompt.columns)},
            max_new_tokens=min(longest, max_length - len(prompt.token_ids)) if max_length else longest,
            thoughts=tuple(thought_of_answer(r, thought) for r in rollouts),
            turns=tuple(turns_for_rewards(r.turns) for r in rollouts),
            given=tuple(r.num_tokens - r.num_sampled for r in rollouts),
        )

    @property
    def with_thoughts(self) -> list[tuple[str, Thought]]:
        """Completions, each with its entry of ``thoughts``. [G]"""
        thoughts = self.thoughts or (NO_THOUGHT,) * len(self.completions)
        return list(zip(self.completions, thoughts, strict=True))

    @property
    def outside_thoughts(self) -> list[str]:
        """Completions without an unclosed thought, which contains no answer. [G]"""
        return [strip_unclosed_thought(completion, thought) for completion, thought in self.with_thoughts]

    @property
    def graded_texts(self) -> list[str]:
        """`outside_thoughts` with ``</think>`` as the closing tag, which the graders expect. [G]"""
        return [
            normalise_tags(strip_unclosed_thought(completion, thought), thought)
            for completion, thought in self.with_thoughts
        ]

    @property
    def lengths(self) -> list[int]:
        """Tokens after the prompt of each sample, sampled (EOS included) and given. [G]"""
        given_tokens = self.given or (0,) * len(self.token_ids)
        return [len(ids) + more for ids, more in zip(self.token_ids, given_tokens, strict=True)]


class Verdicts:
    """Grades of one group by the math grader, computed on first use. ``rewarded_ends``: the finish reasons in
    `environments.outcome_rewards`.
    """

    def __init__(self, group: CompletionGroup, pool: GraderPool, rewarded_ends: Collection[str] = ()) -> None:
        self._group, self._pool, self.rewarded_ends = group, pool, rewarded_ends

    @cached_property
    def grades(self) -> list[Grade]:
        return self._pool.grade([(text, self._group.gold) for text in self._group.graded_texts])

    @property
    def correct(self) -> list[float]:
        """1 for correct, 0 for wrong or no answer, NaN if not graded. [G]"""
        return [grade.reward for grade in self.grades]

    @property
    def failures(self) -> list[str]:
        """Why each answer has no verdict; "" if it has a verdict, or no reward used the grades. [G]"""
        if "grades" not in vars(self):
            return [""] * len(self._group.completions)
        return [(g.detail or g.outcome) if math.isnan(g.reward) else "" for g in self.grades]

    @property
    def outcomes(self) -> list[str]:
        """Outcome of each grade; "" for all when no reward used the grades. [G]"""
        if "grades" not in vars(self):
            return [""] * len(self._group.completions)
        return [grade.outcome for grade in self.grades]


# Steps


_WINDOW = 64  # tokens; a larger one costs more per decoding, a smaller one more decodings
# Reduces the scores of steps, at least one, to the score of the completion.
REDUCE: dict[str, Callable[[Float[np.ndarray, " S"]], float]] = {
    "min": lambda scores: float(scores.min()),
    "mean": lambda scores: float(scores.mean()),
    "last": lambda scores: float(scores[-1]),
}


def split_steps(text: str, separator: str) -> list[tuple[str, int]]:
    """Split ``text`` into steps: (text of the step, character at which the next one begins).

    The steps cover ``text``: a separator and blank pieces belong to the preceding step, or to the first one.
    There is at least one step, which may be empty.

        "one\\n\\ntwo\\n\\n\\n\\nthree", "\\n\\n" -> ("one", 5), ("two", 12), ("three", 17)
    """
    steps: list[tuple[str, int]] = []
    begin = 0
    for piece in text.split(separator):
        begin = min(begin + len(piece) + len(separator), len(text))
        if piece.strip():
            steps.append((piece.strip(), begin))
        elif steps:
            steps[-1] = (steps[-1][0], begin)
    return steps or [("", len(text))]


def token_ends(
    char_ends: Sequence[int], num_tokens: int, decoded_length: Callable[[int], int]
) -> Int32[np.ndarray, " S"]:
    """Return the index of the last token of each step, non-decreasing.

    A step ends with the token that contains its last character, even if it continues into the next step.
    The last step ends with the last token of the completion, EOS included. Bisection needs about log2(C)
    decodings per step.

    Args:
        char_ends: character at which the following step begins, [S].
        num_tokens: C, at least 1.
        decoded_length: characters that the first n tokens decode to; must not decrease with n.
    """
    assert num_tokens > 0, "a completion has at least one token"
    ends, low = [], 0
    for char_end in char_ends[:-1]:
        low = bisect_left(
            range(num_tokens), char_end, lo=low, hi=num_tokens - 1, key=lambda n: decoded_length(n + 1)
        )
        ends.append(low)
    return np.array([*ends, num_tokens - 1], dtype=np.int32)


def decoded_length(tokenizer: Any, token_ids: Int32[np.ndarray, " C"]) -> Callable[[int], int]:
    """Return a function that counts the characters of the first n ``token_ids``, decoded as `Rollout.text`.

    A multi-byte character may span tokens. Incomplete, it decodes to replacement characters, which are not
    counted, so it belongs to its last token.

    Decodes windows of at most 2 * `_WINDOW` tokens where possible, not all n. The first `_WINDOW` tokens are
    context: the start of a text decodes differently, since a leading space may be dropped or a character cut.
    """
    ids = token_ids.tolist()
    windows = [(0, 0)]  # for each multiple of _WINDOW: first token, and the characters to add to its own

    def count(begin: int, end: int) -> int:
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return len(text.rstrip("\ufffd"))

    def length(n: int) -> int:
        while len(windows) <= n // _WINDOW:
            (begin, before), end = windows[-1], len(windows) * _WINDOW
            if context := count(end - _WINDOW, end):
                windows.append((end - _WINDOW, before + count(begin, end) - context))
            else:  # special tokens or parts of characters only: no context
                windows.append((begin, before))
        begin, before = windows[n // _WINDOW]
        return before + count(begin, n)

    return length
