"""Thoughts in tags: what a completion says outside of one that it never closes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from grpo_dist.types import NO_THOUGHT, Thought

if TYPE_CHECKING:  # a grader process needs no configuration
    from grpo_dist.config import RewardsConfig


def thought_for(found: Thought, settings: RewardsConfig) -> Thought:
    """What the settings say of a thought, and where they are silent what was ``found`` in the prompt."""
    opening, closing = settings.thought_tags or (found.opening, found.closing)
    prompt = found.prompt
    if settings.prompt_opens_thought is not None:
        prompt = "opens" if settings.prompt_opens_thought else ""
    return Thought(opening, closing, prompt)


def shown_by(completions: Sequence[str], settings: RewardsConfig) -> Thought:
    """The thought of completions whose prompt is not known: it was opened there where one of them closes a
    thought that it has not opened.
    """
    thought = thought_for(Thought(), settings)
    if settings.prompt_opens_thought is None:
        opening, closing = _patterns(thought.opening, thought.closing)
        for completion in completions:
            closed = closing.search(completion)
            if closed and not opening.search(completion[: closed.start()]):
                return Thought(thought.opening, thought.closing, "opens")
    return thought


def outside_thought(completion: str, thought: Thought = NO_THOUGHT) -> str:
    """``completion`` without a thought that is never closed, "" where the prompt opened that thought.

    A closing tag closes every thought opened before it. ``<think>`` is found in any letter case.

        "<think>2+2 \\\\boxed{4}"                    ""
        "<think>2+2</think>\\\\boxed{4}"             unchanged
        "2+2 \\\\boxed{4}", the prompt opens it      ""
    """
    opening, closing = _patterns(thought.opening, thought.closing)
    closed_until = max((match.end() for match in closing.finditer(completion)), default=None)
    if closed_until is None and thought.prompt == "opens":
        return ""
    unclosed = opening.search(completion, closed_until or 0)
    return completion[: unclosed.start()] if unclosed else completion


@lru_cache(maxsize=64)
def _patterns(opening: str, closing: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return re.compile(re.escape(opening), re.IGNORECASE), re.compile(re.escape(closing), re.IGNORECASE)
