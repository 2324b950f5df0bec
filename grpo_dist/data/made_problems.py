"""Generates three-digit addition with worked carries from a seed.

    problem        964+494=
    demonstration  <think>4+4+0=8,6+9+0=15,9+4+1=14</think>\\boxed{1458}
                   digit + digit + carry, lowest digits first

A demonstration may contain one slip, a sum that is off by one, whose error propagates to the answer. A model
trained on them knows the algorithm but answers correctly only about as often as the demonstrations do.
Reinforcement learning can close that gap.

A problem belongs to the test split if md5(problem) % 20 == 0, so no test problem is ever trained on.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import Literal

Split = Literal["train", "test"]
_SIZES: dict[str, int] = {"train": 8000, "test": 1000}


def problems(name: str, split: str) -> list[dict[str, str]]:
    """Return problems and answers of a split, always the same.

    Raises ValueError for an unknown name or split.
    """
    if name != "add3":
        raise ValueError(f"demo:{name}: no such data set; expected demo:add3")
    if split not in _SIZES:
        raise ValueError(f"demo:{name}: no split `{split}`; expected train or test")
    return [{"problem": f"{a}+{b}=", "answer": str(a + b)} for a, b in _pairs(split, _SIZES[split])]


def demonstrations(name: str, count: int, *, noise: float, seed: int) -> list[dict[str, str]]:
    """Generate ``count`` pairs of ``prompt`` and ``completion`` on training problems from ``seed``."""
    if name != "add3":
        raise ValueError(f"demo:{name}: no such demonstrations; expected demo:add3")
    rng = random.Random(f"demonstrations {seed}")
    out: list[dict[str, str]] = []
    while len(out) < count:
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        if split_of(a, b) == "train":
            out.append({"prompt": f"{a}+{b}=", "completion": demonstration(a, b, rng, noise=noise)})
    return out


def demonstration(a: int, b: int, rng: random.Random, *, noise: float) -> str:
    """Write the worked solution of a + b. With probability ``noise`` one sum is wrong and propagates."""
    wrong = rng.randrange(3) if rng.random() < noise else None
    steps, digits, carry = [], [], 0
    for place in range(3):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        if place == wrong:
            total = rng.choice([t for t in (total - 1, total + 1) if 0 <= t < 20])
        steps.append(f"{x}+{y}+{carry}={total}")
        digits.append(total % 10)
        carry = total // 10
    answer = carry * 1000 + sum(d * 10**i for i, d in enumerate(digits))
    return f"<think>{','.join(steps)}</think>\\boxed{{{answer}}}"


def split_of(a: int, b: int) -> Split:
    """Return the split of the problem a + b."""
    digest = hashlib.md5(f"{a}+{b}=".encode()).digest()
    return "test" if int.from_bytes(digest, "big") % 20 == 0 else "train"


@lru_cache
def _pairs(split: str, size: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random(f"add3 {split}")
    found: dict[tuple[int, int], None] = {}
    while len(found) < size:
        pair = rng.randint(100, 999), rng.randint(100, 999)
        if split_of(*pair) == split:
            found[pair] = None
    return tuple(found)
