"""The answer in a completion, as its grader reads it, for display."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING

from grpo_dist.rewards.match import final_answer
from grpo_dist.rewards.text import boxes
from grpo_dist.rewards.thought import final_text

if TYPE_CHECKING:
    from grpo_dist.rewards.pool import GraderPool

_LONGEST_COMPLETION = 200_000  # characters searched for boxes, as in the grader
_SEARCHED = 2000  # completions without a box to parse as the grader does; each takes milliseconds


class AnswerReader:
    """Finds answers in completions. Thread-safe.

    A context manager: completions without a box are parsed in a killable process, started on first use.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._pool: GraderPool | None = None
        self._left = _SEARCHED
        self.not_searched = 0

    def read(self, completions: Sequence[str], outcomes: Sequence[str]) -> list[str | None]:
        """Return the answer of each completion; None: no answer, or not searched.

        This is the last box, behind a thought closed by ``</think>`` if something follows it, else what the
        math grader reads, or, if no math grader ran, the final answer for plain comparisons.
        """
        answers: list[str | None] = [None] * len(completions)
        unboxed = []
        for i, (completion, outcome) in enumerate(zip(completions, outcomes, strict=True)):
            if outcome == "no_answer":  # any box is inside an unclosed thought
                continue
            if boxed := boxes(final_text(completion[-_LONGEST_COMPLETION:])):
                answers[i] = boxed[-1]
            elif not outcome:
                answers[i] = final_answer(completion) or None
            elif outcome in ("correct", "wrong"):
                unboxed.append(i)
        with self._lock:
            searched = unboxed[: self._left]
            self._left -= len(searched)
            self.not_searched += len(unboxed) - len(searched)
            for i, answer in zip(searched, self._read([completions[i] for i in searched]), strict=True):
                answers[i] = answer
        return answers

    def __enter__(self) -> AnswerReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def _read(self, completions: list[str]) -> list[str | None]:
        if not completions:
            return []
        if self._pool is None:
            from grpo_dist.rewards.pool import GraderPool  # slow to import

            self._pool = GraderPool(1)
        return self._pool.extract(completions)
