"""Is the answer of a completion the gold answer? math-verify, with what it gets wrong mended around it.

1. The answer is the last box. (math-verify merges all boxes of a response into one set.) A response without a box, and as
   a second try one with several, is read whole.
2. Text that is equal after light normalisation is right without further ado; so a gold that no parser reads still counts.
3. Gold and answer are parsed as ``$...$``; the answer as a box too.
4. What math-verify calls equal is refused when the numbers differ relatively (its rounding is absolute: 1.6e-19 = 1.7e-19)
   or are written in different bases (it ignores subscripts: 52_8 = 52_9).

Runs without any time limit of its own: `pool.GraderPool` keeps the clock from outside, in processes it can kill. No text of
a model ever reaches sympify or eval; math-verify's own parsers see it after its patterns have picked digits and operators.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from grpo_dist.rewards.text import boxes, labelled_list, normalise, spellings, subscripts, unit, worded_numbers

Outcome = Literal["correct", "wrong", "no_answer", "timeout", "error"]
_LONGEST_ANSWER = 1500  # characters; what is longer is compared as text only
_LONGEST_RESPONSE = 20_000  # characters of a response without a box that are searched, from its end
_RELATIVE = 1e-4  # numbers further apart than this are different, whatever absolute rounding says

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no clock; ours is outside


@dataclass(frozen=True, slots=True)
class Grade:
    """``reward`` is 1 or 0; NaN for timeout and error, which say nothing about the answer."""

    outcome: Outcome
    reward: float
    detail: str = ""

    @classmethod
    def of(cls, outcome: Outcome, detail: str = "") -> Grade:
        reward = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0}.get(outcome, math.nan)
        return cls(outcome, reward, detail)


def grade(completion: str, answer: str) -> Grade:
    """Compare the answer that ``completion`` gives with the gold ``answer`` (text or LaTeX, boxed or not).

    ``no_answer``: there is neither a box nor anything else that reads as an answer. Raises only MemoryError.
    """
    found = boxes(completion)
    gold = gold_text(answer)
    if found:
        return Grade.of("correct" if _box_is_right(completion, found, gold) else "wrong")
    tail = _tagged_answer(completion) or completion[-_LONGEST_RESPONSE:]
    if tail.strip() and len(tail) <= 4 * len(gold) + 40 and normalise(tail) == normalise(gold):
        return Grade.of("correct")
    parsed = _parse(tail)
    if not parsed:
        return Grade.of("no_answer")
    return Grade.of("correct" if _equal(gold, parsed, tail) else "wrong")


def gold_text(answer: str) -> str:
    """The answer itself: what is boxed, where the gold is boxed or a whole solution."""
    return ", ".join(boxes(answer)) or answer


def gold_is_parsable(answer: str) -> bool:
    """Whether ``answer`` is understood as mathematics; otherwise it is only ever compared as text."""
    return any(not isinstance(p, str) for p in _parse_gold(gold_text(answer)))


def _box_is_right(completion: str, found: list[str], gold: str) -> bool:
    last = found[-1]
    if normalise(last) == normalise(gold) != "" or labelled_list(last) == labelled_list(gold) != ("",):
        return True
    if len(last) > _LONGEST_ANSWER:
        return False
    # As a formula first; as a box, where math-verify is more lenient, for what did not read as one.
    texts = [form.format(text) for text in spellings(last) for form in ("${}$", "\\boxed{{{}}}")]
    if any(_equal(gold, _parse(text), last) for text in texts):
        return True
    several = len(found) > 1 and "," in gold
    return several and _equal(gold, _parse(" ".join(f"\\boxed{{{b}}}" for b in found)), last)


def _equal(gold: str, parsed: list[Any], answer: str) -> bool:
    """``parsed``: math-verify's readings of ``answer``."""
    from math_verify import verify

    known = _parse_gold(gold)
    if not known or not parsed or _written_otherwise(gold, answer):
        return False
    try:
        equal = verify(
            known, parsed, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp="\\in" not in gold
        )
    except MemoryError:
        raise
    except Exception:  # sympy has many ways to fail on odd input; none of them makes an answer right
        return False
    return bool(equal) and _relatively_close(known, parsed)


def _written_otherwise(gold: str, answer: str) -> bool:
    """In another base, another unit, or counting other things: math-verify reads none of these."""
    marks = [(read(gold), read(answer)) for read in (subscripts, unit, worded_numbers)]
    return any(ours and theirs and ours != theirs for ours, theirs in marks)


def _relatively_close(known: list[Any], parsed: list[Any]) -> bool:
    """False where every pair of readings is a pair of numbers that lie apart relatively."""
    golds, answers = _numbers(known), _numbers(parsed)
    if not golds or not answers:
        return True
    return any(abs(g - a) <= _RELATIVE * max(abs(g), abs(a)) for g in golds for a in _with_percent(answers, golds))


def _with_percent(answers: list[float], golds: list[float]) -> list[float]:
    # math-verify reads 28% as 28/100 and lets it equal 28: so do we.
    return [scaled for a in answers for scaled in (a, a * 100, a / 100)] if golds else answers


def _numbers(readings: list[Any]) -> list[float]:
    values = []
    for reading in readings:
        if getattr(reading, "is_number", False) and getattr(reading, "is_extended_real", False):
            value = float(reading.evalf(15))
            if math.isfinite(value):
                values.append(value)
    return values


@lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    """Readings of every spelling of the gold; math-verify accepts an answer that equals any of them."""
    readings = [reading for text in spellings(gold) for reading in _parse(f"${text}$")]
    return [r for r in readings if not isinstance(r, str)] or readings


def _parse(text: str) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    return parse(text, [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()], parsing_timeout=None)


def _tagged_answer(completion: str) -> str | None:
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return found[-1].strip() if found else None
