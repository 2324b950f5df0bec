"""Majority votes among the samples of one problem: their expected outcome, and which answers are equal.

maj@k is the chance that the most frequent answer of k samples is right (self-consistency; Wang et al. 2023,
arXiv:2203.11171). From n samples it is the exact mean over all subsets of k, as for pass@k, not over random
subsets. Tied answers have equal chances. A sample without an answer does not vote; without any vote, the
result is wrong.

cons@n is the vote of all n samples, as DeepSeek-R1 reports it ("consensus (majority vote)
results [...] using 64 samples, denoted as cons@64"; arXiv:2501.12948, section 3): maj@n. The name says that
it averages over no subsets.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.text import boxes, normalise, percent, tidy
from grpo_dist.rewards.thought import final_text

NO_ANSWER = -1
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")  # comparable without algebra


def majority_at_k(correct: Sequence[float] | np.ndarray, answers: Sequence[int], k: int) -> float:
    """Compute the expected result of a majority vote of ``k`` of n samples; all subsets are equally likely.

    ``correct``: [n], 1 or 0; ``answers``: [n], the number of each sample's answer, -1 for none. Needs k <= n.

        correct [1, 1, 0, 0, 0], answers [0, 0, 1, 1, 2]
            k = 5: 0 and 1 lead with two votes each -> 1/2
            k = 3: of 10 subsets {0, 0, *} wins in 3, {1, 1, *} loses in 3, four are three-way ties -> 13/30
    """
    if k > len(answers):
        raise ValueError(f"maj@{k} cannot be estimated from {len(answers)} samples")
    counts = Counter(answer for answer in answers if answer != NO_ANSWER)
    right = {a for a, c in zip(answers, correct, strict=True) if c and a != NO_ANSWER}
    silent = len(answers) - counts.total()
    return math.fsum(
        _wins(counts[answer], tuple(sorted(n for a, n in counts.items() if a != answer)), silent, k)
        for answer in right
    )


@lru_cache(maxsize=65536)
def _wins(size: int, others: tuple[int, ...], silent: int, k: int) -> float:
    """Return the chance that an answer of ``size`` samples wins a vote of ``k``; ties are shared.

    Counts of answers drawn without replacement are multivariate hypergeometric: independent binomial counts
    of share k / n, given that they add up to k. So the sums are over products of binomial probabilities, none
    of which overflows.
    """
    n = size + sum(others) + silent
    share = k / n
    total = 0.0
    for votes in range(1, min(size, k) + 1):
        table = np.zeros((1, k - votes + 1))  # [tied answers, samples drawn of the others]
        table[0, : min(silent, k - votes) + 1] = _binomial(silent, share)[: k - votes + 1]
        for count in others:
            table = _add_answer(table, _binomial(count, share), votes)
        ties = np.arange(1, len(table) + 1)
        total += float(_binomial(size, share)[votes] * (table[:, -1] / ties).sum())
    return min(1.0, total / float(_binomial(n, share)[k]))


def _add_answer(table: np.ndarray, chances: np.ndarray, votes: int) -> np.ndarray:
    """Add an answer to ``table``. ``chances``: of each of its counts; above ``votes`` it would lead."""
    grown = np.zeros((len(table) + 1, table.shape[1]))
    for draws in range(min(len(chances) - 1, votes, table.shape[1] - 1) + 1):
        row = slice(1, None) if draws == votes else slice(0, -1)
        grown[row, draws:] += chances[draws] * table[:, : table.shape[1] - draws]
    return grown if grown[-1].any() else grown[:-1]


@lru_cache(maxsize=4096)
def _binomial(count: int, share: float) -> np.ndarray:
    """Return the probabilities of 0 ... ``count`` successes."""
    if share == 1.0:
        return np.eye(1, count + 1, count)[0]
    factorials = np.array([math.lgamma(i + 1) for i in range(count + 1)])
    successes = np.arange(count + 1)
    logs = factorials[-1] - factorials - factorials[::-1]
    return np.exp(logs + successes * math.log(share) + (count - successes) * math.log1p(-share))


def final_answers(completions: Sequence[str], pool: GraderPool) -> list[str]:
    """Return the answer that the math grader sees in each completion, "" for none.

    That is the last box, after a closed thought if something follows it; else the text that reads as an
    answer, extracted in a process of ``pool`` that can be killed. ``completions``: without unclosed thoughts,
    ``</think>`` as the closing tag.

        "maybe \\boxed{3}</think>It is 7."  ->  "7"
    """
    boxed = [boxes(final_text(text)) for text in completions]
    unboxed = [text for text, inside in zip(completions, boxed, strict=True) if not inside]
    extracted = iter(pool.extract(unboxed) if unboxed else [])
    return [inside[-1] if inside else next(extracted) or "" for inside in boxed]


def numbered(answers: Sequence[str], correct: Sequence[float], pool: GraderPool) -> list[int]:
    """Number the answers: each gets the index of the first mathematically equal one; -1 for "".

    All right answers have one number: they equal the gold answer. The others are compared as text, as plain
    numbers, and then by the math grader, in both directions; an answer on which it times out equals nothing.
    A percentage is a share: 50\\% votes with 0.5 and not with 50, so that equality is transitive.

        ["0.5", "\\frac12", "", "3", "x"], correct [1, 1, 0, 0, 0]  ->  [0, 0, -1, 3, 4]
    """
    numbers: list[int] = []
    wrong_answers: dict[int, str] = {}  # number -> the first wrong answer that has it
    first_right: int | None = None
    for i, (answer, is_right) in enumerate(zip(answers, correct, strict=True)):
        if is_right == 1.0:
            first_right = i if first_right is None else first_right
            number = first_right
        elif not answer.strip():
            number = NO_ANSWER
        else:
            same = _find_equal(answer, wrong_answers, pool)
            number = i if same is None else same
            wrong_answers.setdefault(number, answer)
        numbers.append(number)
    return numbers


def _find_equal(answer: str, wrong_answers: dict[int, str], pool: GraderPool) -> int | None:
    """Return the number of the answer in ``wrong_answers`` that equals ``answer``, or None."""
    plain, value = normalise(answer), _number(answer)
    candidates = []
    for number, other in wrong_answers.items():
        if normalise(other) == plain != "":
            return number
        other_value = _number(other)
        if value is None or other_value is None:
            candidates.append(number)
        elif value == other_value:
            return number
    if not candidates:
        return None
    pairs = [(_read_share(answer), _read_share(wrong_answers[number])) for number in candidates]
    both_ways = [(f"\\boxed{{{a}}}", b) for pair in pairs for a, b in (pair, pair[::-1])]
    equal = [grade.outcome == "correct" for grade in pool.grade(both_ways)]
    return next((n for n, *ways in zip(candidates, equal[::2], equal[1::2], strict=True) if all(ways)), None)


def _read_share(answer: str) -> str:
    """Turn ``50\\%`` into ``\\frac{50}{100}``: a gold may mean 50 or 1/2 by it, a vote only one of them."""
    number = percent(tidy(answer))
    return answer if number is None else f"\\frac{{{number}}}{{100}}"


def _number(answer: str) -> Fraction | None:
    text = answer.strip().strip("$")
    return Fraction(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
