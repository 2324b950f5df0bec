"""A shop whose stock the policy looks up with a tool."""

import random
from collections.abc import Iterator

from grpo_dist.environments.base import Environment, Problem, Step

STOCK = {"apples": 12, "pears": 7, "plums": 31, "figs": 5, "melons": 3, "grapes": 48, "limes": 19}


def stock(item: str) -> str:
    """Look up how many of an item the shop has.

    Args:
        item: its name, e.g. apples
    """
    return str(STOCK[item]) if item in STOCK else f"no {item} here; there are {', '.join(STOCK)}"


class Shop(Environment):
    """The policy says how many of two items there are together."""

    tools = (stock,)

    def start(self, problem: Problem) -> str:
        self.answer = problem.answer
        return f"{problem.text} Look up each with the tool, then answer with the number alone."

    def step(self, action: str) -> Step:
        """Answer an action without a call of the tool."""
        return Step(reward=float(action.strip().rstrip(".") == self.answer), done=True)

    @classmethod
    def problems(cls, split: str, count: int | None) -> Iterator[dict[str, str]]:
        """Yield pairs of items; the split `test` shares none with other splits."""
        pairs = [(a, b) for a in STOCK for b in STOCK if a != b]
        random.Random(0).shuffle(pairs)
        for a, b in (pairs[:10] if split == "test" else pairs[10:])[:count]:
            yield {"problem": f"How many {a} and {b} are there?", "answer": str(STOCK[a] + STOCK[b])}


def questions(split: str, max_rows: int | None) -> Iterator[dict[str, str]]:
    """Yield the problems without the environment, for an agent with its own tool."""
    return Shop.problems(split, max_rows)
