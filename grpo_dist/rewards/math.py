"""Is the answer of a completion the gold answer? math-verify, with what it gets wrong mended around it.

1. The answer is the last box. (math-verify merges all boxes of a response into one set.) A response without a
   box is read whole; the boxes of one with several are read together where the gold is a list.
2. Text that is equal after light normalisation is right without further ado; so a gold that no parser reads
   still counts.
3. Gold and answer are parsed as ``$...$``; the answer as a box too.
4. What math-verify calls equal is refused when the numbers differ relatively (its rounding is absolute:
   1.6e-19 = 1.7e-19) or the answer is written in another base (it ignores subscripts: 52_8 = 52_9), in
   another unit or as another variable.

Runs without any time limit of its own: `pool.GraderPool` keeps the clock from outside, in processes that it
can kill. No text of a model is evaluated as Python; see `reading`.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from grpo_dist.rewards.arithmetic import is_unsolved
from grpo_dist.rewards.marks import label, subscripts, unit, without_percent, worded_numbers
from grpo_dist.rewards.reading import Reading, read
from grpo_dist.rewards.text import boxes, normalise, percent, same_list, spellings, tidy
from grpo_dist.rewards.thought import outside_thought
from grpo_dist.rewards.wording import (
    is_introduced_otherwise,
    numbers_apart,
    says_otherwise,
    with_what_follows,
)

Outcome = Literal["correct", "wrong", "no_answer", "timeout", "error"]
_LONGEST_ANSWER = 1500  # characters; a longer box is wrong, unless the gold is as long
_LONGEST_PHRASE = 100  # characters of a tagged answer that is one phrase, all of which is meant
_LONGEST_RESPONSE = 20_000  # characters of a response without a box that are searched, from its end
_LONGEST_COMPLETION = 200_000  # characters in which boxes are looked for, from the end
_RELATIVE = 1e-4  # numbers further apart than this are different, whatever absolute rounding says
_ROUNDING = 1e-12  # of arithmetic on decimals in double precision

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


def grade(completion: str, answer: str, *, accept_arithmetic: bool = False) -> Grade:
    """Compare the answer that ``completion`` gives with the gold ``answer`` (text or LaTeX, boxed or not).

    ``accept_arithmetic``: ``\\boxed{3+5}`` is right for a gold of 8. What an unclosed thought says is no
    answer.

        grade("so it is \\boxed{8}.", "8")         correct
        grade("so it is \\boxed{7}.", "8")         wrong
        grade("I do not know.", "8")               no_answer: no box, and nothing else that reads as one

    Never gives ``timeout`` or ``error``: those are the pool's. Raises only MemoryError.
    """
    completion = outside_thought(completion)[-_LONGEST_COMPLETION:]
    found = boxes(completion)
    gold = gold_text(answer)
    if found:
        return Grade.of("correct" if _box_is_right(found, gold, accept_arithmetic) else "wrong")
    tagged = _tagged_answer(completion)
    tail = tagged or completion[-_LONGEST_RESPONSE:]
    if tail.strip() and len(tail) <= 4 * len(gold) + 40 and _same_text(tail, gold):
        return Grade.of("correct")
    reading = read(tail)
    if reading is None:
        return Grade.of("no_answer")
    if tagged and len(tagged) <= _LONGEST_PHRASE and says_otherwise(tidy(gold), tidy(tagged)):
        return Grade.of("wrong")
    return Grade.of("correct" if _reading_is_right(reading, gold, accept_arithmetic) else "wrong")


def answer_found(completion: str) -> str | None:
    """The text that `grade` compares with the gold: the last box, else what it reads as an answer; None
    without.

        "so 3 or \\boxed{7}." -> "7"      "The final answer is $8$." -> "8"      "I do not know." -> None

    Raises only MemoryError.
    """
    completion = outside_thought(completion)[-_LONGEST_COMPLETION:]
    if found := boxes(completion):
        return found[-1]
    tagged = _tagged_answer(completion)
    reading = read(tagged or completion[-_LONGEST_RESPONSE:])
    return reading.text if reading is not None else tagged or None


def gold_text(answer: str) -> str:
    """The answer itself: what is boxed, where the gold is boxed or a whole solution."""
    return ", ".join(boxes(answer)) or answer


def gold_is_parsable(answer: str) -> bool:
    """Whether ``answer`` is understood as mathematics; otherwise it is only ever compared as text."""
    return bool(_readings_of_gold(gold_text(answer)))


def _box_is_right(found: list[str], gold: str, accept_arithmetic: bool) -> bool:
    last = found[-1]
    if len(last) > max(_LONGEST_ANSWER, 4 * len(gold)):
        return False
    if _same_text(last, gold) or same_list(gold, last):
        return True
    if len(last) > _LONGEST_ANSWER or _is_otherwise(gold, last, accept_arithmetic):
        return False
    for ours, theirs in without_percent(gold, last, share=lambda: _is_share(gold)):
        known = _readings_of_gold(ours)
        # As a formula first; as a box, where math-verify is more lenient, for what did not read as one.
        for text in (f.format(spelling) for spelling in spellings(theirs) for f in ("${}$", "\\boxed{{{}}}")):
            if (reading := read(text)) is not None and _equal(ours, known, [reading]):
                return True
    if len(found) == 1 or "," not in gold:
        return False
    merged = read(" and ".join(f"$\\boxed{{{box}}}$" for box in found)[-_LONGEST_RESPONSE:])
    return merged is not None and _equal(gold, _readings_of_gold(gold), [merged])


def _reading_is_right(reading: Reading, gold: str, accept_arithmetic: bool) -> bool:
    """Of an answer that is not in a box."""
    if is_introduced_otherwise(reading.before) and not is_introduced_otherwise(gold):
        return False
    whole = with_what_follows(reading.text, reading.after)
    if whole != reading.text or percent(tidy(whole)) is not None or numbers_apart(whole) != whole:
        return _box_is_right([whole], gold, accept_arithmetic)
    if _is_otherwise(gold, reading.text, accept_arithmetic):
        return False
    return _equal(gold, _readings_of_gold(gold), [reading])


def _is_otherwise(gold: str, answer: str, accept_arithmetic: bool) -> bool:
    """Not the gold for what it says beside its value, or for not being worked out."""
    if _written_otherwise(gold, answer) or says_otherwise(tidy(gold), tidy(answer)):
        return True
    return not accept_arithmetic and is_unsolved(gold, answer)


def _same_text(answer: str, gold: str) -> bool:
    return normalise(answer) == normalise(gold) != ""


def _written_otherwise(gold: str, answer: str) -> bool:
    """In another base or unit, of another variable, or counting other things: math-verify overlooks these."""
    marks = [(mark(gold), mark(answer)) for mark in (subscripts, unit, label, worded_numbers)]
    return any(ours and theirs and ours != theirs for ours, theirs in marks)


def _equal(gold: str, known: tuple[Reading, ...], answers: list[Reading]) -> bool:
    from math_verify import verify

    # An inequality may stand for the interval that is asked for, but not where the gold is "x \\in ...".
    lenient = re.search(r"\\in(?![A-Za-z])", gold) is None
    for ours, theirs in product(known, answers):
        try:
            equal = verify(
                ours.expression,
                theirs.expression,
                timeout_seconds=None,
                raise_on_error=True,
                allow_set_relation_comp=lenient,
            )
            if equal and _close(ours.expression, theirs.expression):
                return True
            if _same_number(ours.expression, theirs.expression):
                return True
        except MemoryError:
            raise
        except Exception:  # sympy has many ways to fail on odd input; none of them makes an answer right
            continue
    return False


def _same_number(ours: Any, theirs: Any) -> bool:
    """Equal but for the rounding of decimals: math-verify finds 0.3 - 0.2 and 0.1 different. Exact numbers
    do not round: 10^100 and 10^100 + 1 stay apart.
    """
    from sympy import Float

    if not any(getattr(number, "has", lambda _: False)(Float) for number in (ours, theirs)):
        return False
    ours_value, theirs_value = _value(ours), _value(theirs)
    if ours_value is None or theirs_value is None:
        return False
    return abs(ours_value - theirs_value) <= _ROUNDING * max(abs(ours_value), abs(theirs_value))


def _close(ours: Any, theirs: Any) -> bool:
    """False where two numbers lie apart relatively, alone or at one place of a tuple, set or interval."""
    ours_value, theirs_value = _value(ours), _value(theirs)
    if ours_value is not None and theirs_value is not None:
        # math-verify reads 28% as 28/100 and lets it equal 28: so do we.
        scales = (1.0, 100.0, 0.01)
        return any(
            abs(ours_value - theirs_value * s) <= _RELATIVE * max(abs(ours_value), abs(theirs_value * s))
            for s in scales
        )
    ours_parts, theirs_parts = _parts(ours), _parts(theirs)
    if not ours_parts or len(ours_parts) != len(theirs_parts):
        return True
    return all(_close(a, b) for a, b in zip(ours_parts, theirs_parts, strict=True))


def _value(expression: Any) -> complex | None:
    if not getattr(expression, "is_number", False):
        return None
    try:
        value = complex(expression.doit().evalf(15))
    except TypeError:  # a number that sympy has no digits for, as gcd(18, 3) is to it
        return None
    return value if math.isfinite(value.real) and math.isfinite(value.imag) else None


def _parts(expression: Any) -> list[Any]:
    """Elements of a tuple, ends of an interval, elements of a set of real numbers by size; else []."""
    from sympy import FiniteSet, Interval, Tuple

    if isinstance(expression, Interval):
        return [expression.start, expression.end]
    if isinstance(expression, Tuple):
        return list(expression.args)
    if not isinstance(expression, FiniteSet):
        return []
    values = [(_value(part), part) for part in expression.args]
    if any(value is None or value.imag for value, _ in values):
        return []
    return [part for _, part in sorted(values, key=lambda pair: pair[0].real if pair[0] is not None else 0.0)]


@lru_cache(maxsize=4096)
def _readings_of_gold(gold: str) -> tuple[Reading, ...]:
    """Readings of every spelling of the gold; an answer may equal any of them."""
    readings = (read(f"${text}$") for text in spellings(gold))
    return tuple(reading for reading in readings if reading is not None)


def _is_share(gold: str) -> bool:
    """Whether ``gold`` is a number of at most 1, or no number at all."""
    values = (_value(reading.expression) for reading in _readings_of_gold(gold))
    first = next((value for value in values if value is not None), None)
    return first is None or abs(first) <= 1


def _tagged_answer(completion: str) -> str:
    """The text between the last pair of answer tags, "" without one."""
    before, closing, _ = completion.rpartition("</answer>")
    return before.rpartition("<answer>")[2].strip() if closing and "<answer>" in before else ""
