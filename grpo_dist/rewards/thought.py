"""Thoughts in tags: resolves their settings and separates the final text from the thought."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from grpo_dist.types import NO_THOUGHT, Rollout, Thought

if TYPE_CHECKING:  # keeps the configuration out of grader processes
    from grpo_dist.config import RewardsConfig


def resolve_thought(thought: Thought, settings: RewardsConfig) -> Thought:
    """Override the tags of ``thought``, detected in the prompt, by the settings."""
    opening, closing = settings.thought_tags or (thought.opening, thought.closing)
    return Thought(opening, closing, thought.prompt)


def thought_of_answer(rollout: Rollout, thought: Thought) -> Thought:
    """Return ``thought`` of the prompt as ``rollout.text`` begins or continues it: in an episode, the last
    action, which may begin another thought where an earlier action of its message closed one.
    """
    part = rollout.turns[-1].thought if rollout.turns else None
    if part is None:
        return thought
    closed_earlier = part == "closes" and thought.prompt != "closes"
    if closed_earlier and rollout.text.lstrip().startswith(thought.opening):
        part = ""
    return replace(thought, prompt=part)


def infer_thoughts(groups: Sequence[Sequence[Rollout]], settings: RewardsConfig) -> list[Thought]:
    """Infer the thought of each of ``groups`` of one source, whose prompts are unknown.

    The prompt opened it if a completion of the group closes a thought that it did not open, or if most do of
    the source's completions that were not cut off: all of a group may be.
    """
    thought = resolve_thought(Thought(), settings)
    opening, closing = _patterns(thought.opening, thought.closing)

    def is_continued(rollout: Rollout) -> bool:
        closed = closing.search(rollout.text)
        return closed is not None and not opening.search(rollout.text, 0, closed.start())

    continued = [[is_continued(rollout) for rollout in group] for group in groups]
    whole = [
        is_one
        for group, of_group in zip(groups, continued, strict=True)
        for rollout, is_one in zip(group, of_group, strict=True)
        if rollout.finish_reason not in ("length", "error")
    ]
    opens = replace(thought, prompt="opens")
    most = 2 * sum(whole) > len(whole)
    return [opens if most or any(of_group) else thought for of_group in continued]


def strip_unclosed_thought(completion: str, thought: Thought = NO_THOUGHT) -> str:
    """Strip a thought that is never closed; "" if the prompt opened it.

    A closing tag closes every earlier opening tag. Letter case of tags is ignored.

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


def text_after_thought(completion: str) -> str | None:
    """Return the text after the last ``</think>``; None without one."""
    _, closing = _patterns(NO_THOUGHT.opening, NO_THOUGHT.closing)
    end = max((match.end() for match in closing.finditer(completion)), default=None)
    return None if end is None else completion[end:]


def final_text(completion: str) -> str:
    """Return the text after the last ``</think>``; all text without one, or if nothing follows.

    "<think>\\boxed{8}?</think>No, 7."     "No, 7."
    "<think>so \\boxed{8}</think>"         unchanged
    """
    after = text_after_thought(completion)
    return after if after is not None and after.strip() else completion


def normalise_tags(completion: str, thought: Thought) -> str:
    """Replace the closing tags of ``thought`` by ``</think>``, which the text graders expect."""
    if thought.closing.lower() == NO_THOUGHT.closing:
        return completion
    return _patterns(thought.opening, thought.closing)[1].sub(NO_THOUGHT.closing, completion)


@lru_cache(maxsize=64)
def _patterns(opening: str, closing: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return re.compile(re.escape(opening), re.IGNORECASE), re.compile(re.escape(closing), re.IGNORECASE)
