"""Environments called by tags in the text, as in Search-R1. A subclass has a method for each tag:

class Search(TextTags):
    results = {"search": "information"}

    def search(self, text):                  <search>who wrote Emma</search>        the action ends here
        return find(text)                    <information>Jane Austen ...</information>
                                             <answer>Jane Austen</answer>           the episode ends here
    def answer(self, text):
        return float(text == self.problem.answer)
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar

from grpo_dist.environments.base import Environment, Problem, Step
from grpo_dist.environments.program import awaited

ANSWER = "answer"


class TextTags(Environment):
    """Passes the content of an action's last tag to the method of that name.

    Attributes:
        results: maps a tag that the policy calls to the tag around its method's result.
        invalid: answer to an action without a tag; "": a sentence with the tag names.
    """

    results: ClassVar[Mapping[str, str]] = {}
    invalid: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.stop = tuple(f"</{tag}>" for tag in (*cls.results, ANSWER))

    def start(self, problem: Problem) -> Any:
        self.problem = problem
        return problem.text

    def answer(self, text: str) -> float | Awaitable[float | None] | None:
        """Return the reward of an answer, which ends the episode; None: only the run's rewards score it."""
        return None

    async def step(self, action: str) -> Step:
        names = (*self.results, ANSWER)
        calls = re.findall(rf"<({'|'.join(map(re.escape, names))})>(.*?)</\1>", action, re.DOTALL)
        if not calls:
            tags = " or ".join(f"<{name}>...</{name}>" for name in names)
            return Step(f"\n{self.invalid or f'That was no valid action. Write {tags}.'}\n")
        tag, text = calls[-1]
        result = await awaited(getattr(self, tag)(text.strip()))
        if tag == ANSWER:
            return Step(reward=result, done=True)
        return Step(f"\n<{self.results[tag]}>{result}</{self.results[tag]}>\n")
