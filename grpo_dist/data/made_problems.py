"""Generates arithmetic problems and their demonstrations from a seed.

`demo:add3`, three-digit addition with worked carries:

    problem        964+494=
    demonstration  <think>4+4+0=8,6+9+0=15,9+4+1=14</think>\\boxed{1458}
                   digit + digit + carry, lowest digits first

A demonstration may contain one slip, a sum that is off by one, whose error propagates to the answer. A model
trained on them knows the algorithm but answers correctly only about as often as the demonstrations do.
Reinforcement learning can close that gap.

`demo:add2` and `demo:add4` are the same with two and with four digits: easier and harder problems of one
kind.

`demo:products`, five-digit products of a three-digit and a two-digit number, which a small model cannot do
in its head:

    problem        347*58=
    demonstration  \\boxed{29406}, a guess; or a calculator call, whose result is given:

                   ```calculator
                   347*58
                   ```
                   ```output
                   20126
                   ```
                   \\boxed{20126}

Results have equal length and position, so a small model soon learns to copy them. A model trained on these
demonstrations calls now and then. Reinforcement learning can teach it to call always.

`demo:sums2` and `demo:sums3`, sums of two numbers with two or three digits for a pretrained model, after
three worked examples, which are the same for all problems:

    problem        12 + 25 = 37
                   41 + 7 = 48
                   36 + 28 = 64
                   27 + 82 =

`demo:plain_sums2`, the problems of `demo:sums2` in the same order without the examples, for a prompt that
asks for another answer format:

    problem        27 + 82 =

A problem belongs to the test split if md5(problem) % 20 == 0, so no test problem is ever trained on. For sums
after examples, a problem and its swapped form (82 + 27) share a split, and no example is a test problem.
A plain sum belongs to the split of the same sum after examples.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Literal

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
_SIZES: dict[str, int] = {"train": 8000, "test": 1000}
_PLACES = {"add2": 2, "add3": 3, "add4": 4}
_SIZES_OF_SUMS2: dict[str, int] = {
    "train": 7000,
    "test": 360,
}  # there are 8100 problems, 363 in the test split
_OPERATORS = {"add3": "+", "products": "*", "add2": "+", "add4": "+"}
_EXAMPLES = {
    "sums2": "12 + 25 = 37\n41 + 7 = 48\n36 + 28 = 64\n",
    "sums3": "412 + 125 = 537\n641 + 137 = 778\n236 + 528 = 764\n",
}
_SUMS_AFTER_EXAMPLES = {"plain_sums2": "sums2"}  # plain sums -> the set with the same problems and splits


def problems(name: str, split: str) -> list[dict[str, str]]:
    """Return problems and answers of a split, the same on every call.

    Raises ValueError for an unknown name or split.
    """
    _check(name, "data set", (*_OPERATORS, *_EXAMPLES, *_SUMS_AFTER_EXAMPLES))
    if split not in _SIZES:
        raise ValueError(f"demo:{name}: no split `{split}`; expected train or test")
    problem_set = _SUMS_AFTER_EXAMPLES.get(name, name)
    sizes = _SIZES_OF_SUMS2 if problem_set in ("sums2", "add2") else _SIZES
    pairs = _pairs(problem_set, split, sizes[split])
    return [{"problem": write_problem(name, a, b), "answer": str(_answer(name, a, b))} for a, b in pairs]


def demonstrations(name: str, count: int, *, noise: float, seed: int) -> list[dict[str, Any]]:
    """Generate ``count`` rows of ``prompt`` and ``completion`` on training problems from ``seed``.

    ``noise``: for sums, the share with a slip; for products, the share of guesses.
    """
    _check(name, "demonstrations", (*_OPERATORS,))
    rng = random.Random(f"demonstrations {seed}")
    out: list[dict[str, Any]] = []
    while len(out) < count:
        a, b = _draw(name, rng)
        problem = write_problem(name, a, b)
        if split_of(problem) == "train":
            out.append({"prompt": problem, "completion": _DEMONSTRATIONS[name](a, b, rng, noise=noise)})
    return out


def demonstration(a: int, b: int, rng: random.Random, *, noise: float, places: int = 3) -> str:
    """Write the worked solution of a + b, both with ``places`` digits. With probability ``noise`` one sum is
    wrong and propagates.
    """
    wrong = rng.randrange(places) if rng.random() < noise else None
    steps, digits, carry = [], [], 0
    for place in range(places):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        if place == wrong:
            total = rng.choice([t for t in (total - 1, total + 1) if 0 <= t < 20])
        steps.append(f"{x}+{y}+{carry}={total}")
        digits.append(total % 10)
        carry = total // 10
    answer = carry * 10**places + sum(d * 10**i for i, d in enumerate(digits))
    return f"<think>{','.join(steps)}</think>\\boxed{{{answer}}}"


def product_demonstration(
    a: int, b: int, rng: random.Random, *, noise: float
) -> str | list[dict[str, str | bool]]:
    """Write an answer to a * b: with probability ``noise`` a guess, else a calculator call as segments with a
    given result. A guess has the first and the last digit of the product.
    """
    product = str(a * b)
    if rng.random() < noise:
        middle = "".join(rng.choice("0123456789") for _ in product[1:-1])
        return f"\\boxed{{{product[0]}{middle}{product[-1]}}}"
    return [
        {"text": f"```calculator\n{a}*{b}\n```\n"},
        {"text": f"```output\n{product}\n```\n", "given": True},
        {"text": f"\\boxed{{{product}}}"},
    ]


_DEMONSTRATIONS: Mapping[str, Callable[..., Any]] = {
    **{name: partial(demonstration, places=places) for name, places in _PLACES.items()},
    "products": product_demonstration,
}


def write_problem(name: str, a: int, b: int) -> str:
    if name in _EXAMPLES or name in _SUMS_AFTER_EXAMPLES:
        return f"{_EXAMPLES.get(name, '')}{a} + {b} ="
    return f"{a}{_OPERATORS[name]}{b}="


def split_of(problem: str) -> Split:
    """Return the split of a problem."""
    digest = hashlib.md5(problem.encode()).digest()
    return "test" if int.from_bytes(digest, "big") % 20 == 0 else "train"


def _check(name: str, what: str, names: tuple[str, ...]) -> None:
    if name not in names:
        choices = " or ".join(f"demo:{n}" for n in names)
        raise ValueError(f"demo:{name}: no such {what}; expected {choices}")


def _answer(name: str, a: int, b: int) -> int:
    return a * b if name == "products" else a + b


def _draw(name: str, rng: random.Random) -> tuple[int, int]:
    if name != "products":
        places = _PLACES.get(name, 2 if name == "sums2" else 3)
        low, high = 10 ** (places - 1), 10**places - 1
        return rng.randint(low, high), rng.randint(low, high)
    while True:
        a, b = rng.randint(100, 999), rng.randint(10, 99)
        if a * b >= 10_000:
            return a, b


@lru_cache
def _pairs(name: str, split: str, size: int) -> tuple[tuple[int, int], ...]:
    rng = random.Random(f"{name} {split}")
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < size:
        pair = _draw(name, rng)
        a, b = sorted(pair) if name in _EXAMPLES else pair
        if split_of(write_problem(name, a, b)) == split:
            pairs[pair] = None
    return tuple(pairs)
