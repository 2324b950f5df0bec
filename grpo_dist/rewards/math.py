"""Math grader: compares the answer of a completion with the gold, by math-verify with corrections around it.

1. The answer is the last box. (math-verify merges all boxes of a response into one set.) A response without a
   box is parsed whole, or counts as a box if it is a phrase in answer tags; several boxes are parsed together
   if the gold is a list. After a closed thought, only the text after it is the response, if that gives an
   answer or says that there is none.
2. Text that is equal after light normalisation is correct, so a gold that no parser understands still counts.
3. Gold and answer are parsed as ``$...$``; the answer as a box too.
4. A match of math-verify is rejected when the numbers differ relatively (its rounding is absolute:
   1.6e-19 = 1.7e-19), when base (it ignores subscripts: 52_8 = 52_9), unit or variable differ, or when it
   left out a number.

The grader has no time limit: `pool.GraderPool` enforces deadlines from outside, in killable processes. No
text of a model is evaluated as Python. math-verify finds answers in text by patterns of decreasing priority
(boxes, "the final answer is", any formula, any number). It passes a match outside LaTeX (``3*4+1``) to
sympy's parse_expr, which evaluates Python; here its LaTeX parser reads such a match. Through the LaTeX
grammar, parse_expr only ever receives one number at a time: digits and a point.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, product
from typing import Any, Literal

from grpo_dist.rewards.choice import marked_option, stated_choice
from grpo_dist.rewards.equality import is_formula, same, value
from grpo_dist.rewards.formula import MORE_THAN_ALGEBRA, is_word
from grpo_dist.rewards.text import (
    alternatives,
    boxes,
    measured,
    normalise,
    quantity,
    same_list,
    spellings,
    tagged_answer,
    text_after_boxes,
    tidy,
    translate_statements,
)
from grpo_dist.rewards.thought import strip_unclosed_thought, text_after_thought
from grpo_dist.rewards.wording import (
    changes_value,
    extend_by_context,
    gives_no_answer,
    half_of_day,
    is_negated_before,
    is_one_quantity,
    is_sentence,
    is_unsolved,
    label,
    rename_capitals,
    same_between_colons,
    strip_percent,
    subscripts,
    unit,
    worded_numbers,
)

Outcome = Literal["correct", "wrong", "no_answer", "timeout", "error"]
_LONGEST_ANSWER = 1500  # characters; a longer box is wrong, unless the gold is as long
_LONGEST_PHRASE = 100  # characters of a tagged answer that counts as one phrase
_LONGEST_RESPONSE = 20_000  # last characters that are searched in a response without a box
_LONGEST_COMPLETION = 200_000  # last characters that are searched for boxes
_RELATIVE = 1e-4  # largest relative difference of equal numbers
_PROSE = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{3,}")
_FEW_WORDS = 25  # a gold with more words is a solution that ends in its answer
_FORMULA = re.compile(r"\$([^$]+)\$")
# A letter in text is a variable unless it is a unit: \text{x}, not \text{m}.
_VARIABLE_IN_TEXT = re.compile(r"\\[a-z]+\s*\{[~\s]*(?![mgshLNJWVACKFT])[A-Za-z][~\s]*\}(?:\s*\^.*)?")
_MONEY = re.compile(r"\\?\$\s*([^$]+)")
_WORDS_ALONE = re.compile(r"\\(?:text|mbox|mathrm)\s*\{[A-Za-z ,()]{2,}\}")
_RATIO = re.compile(r"(\d{1,9})\s*:\s*(\d{1,9})")
_DECIMAL_COMMA = re.compile(r"-?\d+,(?!\d{3}$)\d+|-?0,\d+")

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout; the pool has

# Wraps the first import of math-verify and sympy, half a second of CPU. A grader process charges neither its
# time nor its memory to the answer that needs it.
importing: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True, slots=True)
class Grade:
    """Result for one answer. ``reward`` is 1 or 0; NaN for timeout and error."""

    outcome: Outcome
    reward: float
    detail: str = ""

    @classmethod
    def from_outcome(cls, outcome: Outcome, detail: str = "") -> Grade:
        reward = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0}.get(outcome, math.nan)
        return cls(outcome, reward, detail)


def grade(
    completion: str, answer: str, *, accept_arithmetic: bool = False, require_box: bool = False
) -> Grade:
    """Compare the answer that ``completion`` gives with the gold ``answer`` (text or LaTeX, boxed or not).

    With ``accept_arithmetic``, ``\\boxed{3+5}`` is correct for a gold of 8; with ``require_box``, only a box
    is an answer. Text in an unclosed thought is not an answer. If there are several golds, see
    `alternatives`, any is right.

        grade("so it is \\boxed{8}.", "8")         correct
        grade("so it is \\boxed{7}.", "8")         wrong
        grade("I do not know.", "8")               no_answer: no box, and no other answer
        grade("\\boxed{8}</think>It is 7.", "8")   wrong: the text after the thought has an answer

    Only the pool returns ``timeout`` or ``error``. Raises only MemoryError.
    """
    if len(golds := alternatives(answer)) > 1:
        grades = [
            grade(completion, gold, accept_arithmetic=accept_arithmetic, require_box=require_box)
            for gold in golds
        ]
        return next((one for one in grades if one.outcome == "correct"), grades[0])
    completion = _response(completion)
    contents = boxes(completion)
    gold = gold_text(answer)
    if contents:
        if _is_option(gold) and (choice := _option_beside_box(completion, contents[-1])) is not None:
            return Grade.from_outcome("correct" if choice == normalise(gold) else "wrong")
        return Grade.from_outcome("correct" if _box_is_right(contents, gold, accept_arithmetic) else "wrong")
    if require_box:
        return Grade.from_outcome("no_answer")
    tagged = tagged_answer(completion) or ""
    response = tagged or completion[-_LONGEST_RESPONSE:]
    if response.strip() and len(response) <= 4 * len(gold) + 40 and _same_text(response, gold):
        return Grade.from_outcome("correct")
    if _is_option(gold):
        option = _marked(tagged)
        if choice := stated_choice(response) or (option and option[0]):
            return Grade.from_outcome("correct" if choice == normalise(gold) else "wrong")
    phrase = _phrase(tagged)
    if phrase and _box_is_right([phrase], gold, accept_arithmetic):
        return Grade.from_outcome("correct")
    reading = read(response)
    if reading is None:
        return Grade.from_outcome("no_answer")
    if phrase:
        return Grade.from_outcome("wrong")
    if tagged and len(tagged) <= _LONGEST_PHRASE and changes_value(tidy(gold), tidy(tagged)):
        return Grade.from_outcome("wrong")
    return Grade.from_outcome("correct" if _reading_is_right(reading, gold, accept_arithmetic) else "wrong")


def extract_answer(completion: str, *, require_box: bool = False) -> str | None:
    """Return the text that `grade` compares with the gold: the last box, else the parsed answer.

    None without an answer, and with ``require_box`` without a box.

        "so 3 or \\boxed{7}." -> "7"      "The final answer is $8$." -> "8"      "I do not know." -> None

    Raises only MemoryError.
    """
    completion = _response(completion)
    if contents := boxes(completion):
        return _option_beside_box(completion, contents[-1]) or contents[-1]
    if require_box:
        return None
    tagged = tagged_answer(completion) or ""
    if phrase := _phrase(tagged):
        formula = _FORMULA.fullmatch(phrase)
        return formula[1] if formula else phrase
    reading = read(tagged or completion[-_LONGEST_RESPONSE:])
    return reading.text if reading is not None else tagged or stated_choice(completion)


def _option_beside_box(completion: str, box: str) -> str | None:
    """Return the option that is stated after the last box, else before it, if the box holds no option.

    ``So \\boxed{12}. The answer is (C).`` -> C     ``Answer: C. No: \\boxed{D}`` -> None
    """
    if _is_option(box) or marked_option(box):
        return None
    return stated_choice(text_after_boxes(completion)) or stated_choice(completion)


def _phrase(tagged: str) -> str:
    """Return a tagged answer that counts as one phrase, like a box; "" for long text, sentences and a
    number with its unit."""
    phrase = tagged.strip("*` ")
    is_prose = is_sentence(tidy(phrase)) or is_one_quantity(phrase)
    return "" if len(phrase) > _LONGEST_PHRASE or is_prose else phrase


def _response(completion: str) -> str:
    """Return the text after the last closed thought if it decides, else all but an unclosed thought."""
    completion = translate_statements(strip_unclosed_thought(completion)[-_LONGEST_COMPLETION:])
    after = text_after_thought(completion)
    if after is None:
        return completion
    if boxes(after) or tagged_answer(after) or gives_no_answer(after):
        return after
    end = after[-_LONGEST_RESPONSE:]
    return after if stated_choice(end) is not None or read(end) is not None else completion


def marked_gold(answer: str) -> str:
    """Return the answer that a gold marks, by boxes or ``####``; the whole gold without a mark."""
    if contents := boxes(answer):
        return ", ".join(contents)
    if "\\boxed{" in answer:  # never closed
        return answer.rpartition("\\boxed{")[2].strip()
    if "####" in answer:
        return answer.rpartition("####")[2].strip()
    return answer


def gold_text(answer: str) -> str:
    """Return the answer in a gold, which may be boxed or a whole solution: ``... = 4\\n#### 4`` -> ``4``."""
    gold = marked_gold(answer)
    is_solution = len(gold) > _LONGEST_PHRASE and len(_PROSE.findall(gold)) > _FEW_WORDS
    if gold == answer and is_solution and (reading := read(answer)) is not None:
        return reading.text
    return gold


def gold_is_parsable(answer: str) -> bool:
    """Return whether ``answer`` parses as mathematics; otherwise it is only compared as text."""
    return all(
        any(is_formula(text) or _reading_of(text) for text in spellings(gold_text(gold)))
        for gold in alternatives(answer)
    )


def _is_option(gold: str) -> bool:
    """Return whether ``gold`` is the letter of an option; letters after J are more likely variables."""
    return re.fullmatch("[A-J]", normalise(gold)) is not None


def _marked(answer: str) -> tuple[str, str] | None:
    """Return letter and text of a short answer that begins with an option's mark, else None."""
    return marked_option(answer) if len(answer) <= _LONGEST_ANSWER else None


def _box_is_right(boxes: list[str], gold: str, accept_arithmetic: bool) -> bool:
    if (option := _marked(boxes[-1])) is not None:
        # Never both: another option's letter is wrong even if its text equals the gold.
        part = option[0] if _is_option(gold) else option[1]
        if part and _plain_box_is_right([part], gold, accept_arithmetic):
            return True
    return _plain_box_is_right(boxes, gold, accept_arithmetic)


def _plain_box_is_right(boxes: list[str], gold: str, accept_arithmetic: bool) -> bool:
    """Compare boxes; the last one does not begin with an option's mark."""
    last = boxes[-1]
    if len(last) > max(_LONGEST_ANSWER, 4 * len(gold)):
        return False
    if _same_text(last, gold) or same_list(gold, last) or _differ_in_decimal_comma(gold, last):
        return True
    if len(last) > _LONGEST_ANSWER or _is_disqualified(gold, last, accept_arithmetic):
        return False
    if (same := same_between_colons(gold, last)) is not None:
        return same
    for ours, theirs in strip_percent(gold, last, share=lambda: _is_share(gold)):
        if _same_spellings(ours, theirs):
            return True
    return len(boxes) > 1 and "," in gold and _same_spellings(gold, ", ".join(boxes)[-_LONGEST_ANSWER:])


def _same_spellings(gold: str, answer: str) -> bool:
    """Return whether a spelling of the answer equals a spelling of the gold.

    They are compared by value, or by math-verify where `equality` cannot read one of them and math-verify
    reads both whole.
    """
    undecided = []
    for ours, theirs in product(_formulas_of(gold), _formulas_of(answer)):
        equal = same(ours, theirs)
        if equal:
            return True
        if equal is None and _is_word_for_number(ours, theirs):
            continue
        if equal is None and is_known_to_math_verify(ours) and is_known_to_math_verify(theirs):
            undecided.append(rename_capitals(ours, theirs))
    # `_differs_in_marks` has compared all numbers of two lists in words.
    in_words = bool(worded_numbers(gold) and worded_numbers(answer))
    for ours, theirs in undecided:
        gold_reading = _reading_of(ours)
        # As a formula first, then as a box, which math-verify parses more leniently.
        for text in (f"${theirs}$", f"\\boxed{{{theirs}}}"):
            if (
                gold_reading is not None
                and (reading := read(text)) is not None
                and (in_words or not (_leaves_number_out(gold_reading) or _leaves_number_out(reading)))
                and _equal(gold, gold_reading, reading)
            ):
                return True
    return False


def _leaves_number_out(reading: Reading) -> bool:
    """Return whether a number or an equation is not in the reading of its text: of ``3\\text{ (at }x=7)``."""
    before = re.sub(r"^[^=\d]*=\s*$", "", reading.before)  # the other side of an equation
    return any(_LEFT_OUT.search(_WORDS.sub(" ", text)) for text in (before, reading.after))


@lru_cache(maxsize=4096)
def _formulas_of(answer: str) -> tuple[str, ...]:
    """Return the spellings without their units (``\\$3.50``, ``12\\sqrt{13}\\text{ feet}``), ratios as
    quotients; with and without a unit that is a letter, ``5\\sqrt{2}\\text{ m}``.
    """
    texts = []
    for spelling in spellings(answer):
        if (money := _MONEY.fullmatch(spelling)) and is_formula(money[1]):
            spelling = money[1]
        text = _RATIO.sub(r"\1/\2", spelling) if _RATIO.fullmatch(spelling) else spelling
        split = measured(text)
        if split and is_formula(split[0]):
            if not is_formula(text):
                text = split[0]
            elif value(split[0]) is not None and not _VARIABLE_IN_TEXT.fullmatch(split[1]):
                texts.append(split[0])
        texts.append(text)
    return tuple(dict.fromkeys(texts))


def _is_word_for_number(ours: str, theirs: str) -> bool:
    """Return whether one has only words, ``\\text{odd}``, and the other has numbers: they are never equal."""
    return any(
        _WORDS_ALONE.fullmatch(words) and is_formula(formula) and re.search(r"\d", formula)
        for words, formula in ((ours, theirs), (theirs, ours))
    )


def _reading_is_right(reading: Reading, gold: str, accept_arithmetic: bool) -> bool:
    """Compare an answer outside of a box."""
    if is_negated_before(reading.before) and not is_negated_before(gold):
        return False
    whole = extend_by_context(reading.before, reading.text, reading.after)
    return _box_is_right([whole], gold, accept_arithmetic)


def _differ_in_decimal_comma(gold: str, answer: str) -> bool:
    """Return whether one is ``2,74`` and the other ``2.74``."""
    texts = [_number_alone(text) for text in (gold, answer)]
    commas = [text for text in texts if _DECIMAL_COMMA.fullmatch(text)]
    return len(commas) == 1 and texts[0].replace(",", ".") == texts[1].replace(",", ".")


def _number_alone(answer: str) -> str:
    plain = tidy(answer)
    measured = quantity(plain)
    return measured[0] if measured else plain


def _is_disqualified(gold: str, answer: str, accept_arithmetic: bool) -> bool:
    """Return whether the words, marks or unevaluated arithmetic around the value make the answer wrong."""
    if _differs_in_marks(gold, answer) or changes_value(tidy(gold), tidy(answer)):
        return True
    return not accept_arithmetic and is_unsolved(gold, answer)


def _same_text(answer: str, gold: str) -> bool:
    return normalise(_plain_cases(answer)) == normalise(_plain_cases(gold)) != ""


_ARRAY = re.compile(
    r"\\left\s*\\\{\s*\\begin\{array\}\s*\{[lcr]+\}(.*)\\end\{array\}\s*\\right\s*\.", re.DOTALL
)
_CASE_MARKS = re.compile(r"[,;]?\s*&\s*(?:\\text\s*\{\s*(?:if|for|when)\s*\})?|[,;.](?=\s*(?:\\\\|\\end))")


def _plain_cases(text: str) -> str:
    """Drop commas and "if" of a piecewise function: ``x, & \\text{if } x>0`` is ``x & x>0``."""
    if "&" not in text:
        return text
    cases = _ARRAY.sub(r"\\begin{cases}\1\\end{cases}", text)
    return _CASE_MARKS.sub(lambda marks: "&" if "&" in marks[0] else "", cases)


def _differs_in_marks(gold: str, answer: str) -> bool:
    """Return whether base, unit, variable, half of the day or counted nouns differ, unseen by math-verify."""
    marks = [(mark(gold), mark(answer)) for mark in (subscripts, unit, label, half_of_day, worded_numbers)]
    return any(ours and theirs and ours != theirs for ours, theirs in marks)


def _equal(gold: str, ours: Reading, theirs: Reading) -> bool:
    from math_verify import verify  # heavy, as in `_parsed`

    # An inequality may stand for an interval, but not if the gold is "x \\in ...".
    lenient = re.search(r"\\in(?![A-Za-z])", gold) is None
    try:
        equal = verify(
            ours.expression,
            theirs.expression,
            timeout_seconds=None,
            raise_on_error=True,
            allow_set_relation_comp=lenient,
        )
        return bool(equal) and _close(ours.expression, theirs.expression)
    except MemoryError:
        raise
    except Exception:  # sympy fails in many ways on odd input; none makes an answer correct
        return False


def _close(ours: Any, theirs: Any) -> bool:
    """Return False if two numbers differ relatively, alone or as elements of a tuple, set or interval."""
    ours_value, theirs_value = _value(ours), _value(theirs)
    if ours_value is not None and theirs_value is not None:
        # math-verify parses 28% as 28/100 and accepts it for 28, too.
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
    except TypeError:  # a number that sympy cannot evaluate, such as gcd(18, 3)
        return None
    return value if math.isfinite(value.real) and math.isfinite(value.imag) else None


def _parts(expression: Any) -> list[Any]:
    """Return elements of a tuple, ends of an interval, or the sorted elements of a real set; else []."""
    from sympy import FiniteSet, Interval, Tuple  # heavy, as in `_parsed`

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
def _reading_of(spelling: str) -> Reading | None:
    return read(f"${spelling}$")


def _is_share(gold: str) -> bool:
    """Return whether ``gold`` is a number of at most 1, or not a number."""
    number = next((evaluated for text in spellings(gold) if (evaluated := value(text)) is not None), None)
    return number is None or abs(number) <= 1


# Texts to expressions, by the patterns and the LaTeX parser of math-verify


_IN_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{[^{}]*\}")
_RELATION = r"(?:[<>]|!\s*=|\\(?:n?[lg]eq?(?:slant)?|[lg]t|neq?|not|in)(?![A-Za-z]))"
_DROPPED = re.compile(  # signs that math-verify skips, and a formula that begins or ends with an operator
    rf"['’?&]|[^\x00-\x7f]|=/=|\.\.\.|\\[lcd]?dots|\^\s*\{{?\s*(?:\\prime|[-+]\s*(?:\}}|$))|\\\\|^\s*{_RELATION}|[-+*/^_=<>]\s*$"
)
_VALUE_IN_TEXT = re.compile(  # and a condition: 17\text{ when } x=18
    r"\\text[a-z]*\s*\{(?:[^{}A-Za-z=]*[\d?][^{}A-Za-z=]*\}|\s*\(?(?:when|where|if|for|with|at)\b[^{}]*\}[^{}]*=)"
)
_BARS = re.compile(r"\||\\[lr]?vert(?![a-z])")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_MATRIX = re.compile(  # math-verify reads one fragment of other environments, as of cases
    r"\\begin\{([pbvBV]?(?:small)?matrix)\}.*?\\end\{\1\}|\\begin\{array\}[^=<>]*?\\end\{array\}", re.DOTALL
)
_WORDS = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{[^{}]*(?:\}|$)")  # up to the end of the context
_LEFT_OUT = re.compile(r"(?<!_)(?<!_\{)(?<!_\{>)\d|=")  # not the number of an index
_READ = frozenset(  # commands in the grammar of math-verify
    re.findall(
        r"\w+",
        """
    frac dfrac tfrac cfrac sqrt binom dbinom tbinom sin cos tan cot sec csc arcsin arccos arctan sinh
    cosh tanh log ln exp gcd lcm max min int iint sum prod lim to infty pi alpha beta gamma delta
    epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi varphi chi
    psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega begin end left right cdot times
    div pm mp le leq leqslant ge geq geqslant lt gt ne neq in notin cup cap setminus emptyset varnothing
    mathbb mathbf overline bar lfloor rfloor lceil rceil langle rangle lvert rvert vert big Big bigl
    bigr displaystyle quad qquad circ degree mid subset subseteq approx mathcal vec boldsymbol limits
        """,
    )
)
_LONGEST = 1500  # characters, besides digits, of the longest parsed formula
_CONTEXT = 40  # characters of context on each side of a match


@dataclass(frozen=True, slots=True)
class Reading:
    """A sympy expression, the text it was parsed from, and the text on both sides."""

    expression: Any
    text: str
    before: str = ""
    after: str = ""


def is_known_to_math_verify(text: str) -> bool:
    """Return whether math-verify reads every sign of a formula.

    math-verify drops unknown commands, primes and marks: ``\\dim 3`` would be 3. Words in ``\\text{}`` are
    ignored here.
    """
    rest = _IN_TEXT.sub(" ", _MATRIX.sub(" ", text))
    if (
        len(_BARS.findall(rest)) % 2
        or _VALUE_IN_TEXT.search(text)
        or MORE_THAN_ALGEBRA.search(text)
        or any(is_word(letters) for letters in _RUN.findall(rest))
    ):
        return False
    return not _DROPPED.search(rest) and {match[1] for match in _COMMAND.finditer(rest)} <= _READ


def read(text: str) -> Reading | None:
    """Parse the answer in ``text``: a formula in ``$...$`` or ``\\boxed{...}``, or prose that contains one.

    Takes the last match of the first pattern with a match that parses; None without one. Raises MemoryError.
    """
    if not text.isascii():  # digits of other scripts match \d, but Python reads them as names
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    for patterns in _patterns():
        matches = [(m, target) for pattern, target in patterns for m in pattern.finditer(text)]
        for match, target in sorted(
            matches, key=lambda pair: (pair[0].end(), -pair[0].start()), reverse=True
        ):
            expression, source = _parsed(match, target)
            if expression is not None and not isinstance(expression, str):
                begin = text.rfind(source, match.start(), match.end())
                # Text that the parser rewrote (.5 to 0.5) is somewhere in the match.
                begin, end = (begin, begin + len(source)) if begin >= 0 else match.span()
                before, after = text[max(0, begin - _CONTEXT) : begin], text[end : end + _CONTEXT]
                return Reading(expression, source, before, after)
    return None


@lru_cache(maxsize=1)
def _patterns() -> list[list[tuple[re.Pattern[str], Any]]]:
    """Return math-verify's (pattern, kind of match), highest priority first, grouped by priority."""
    with importing():
        from math_verify import ExprExtractionConfig, LatexExtractionConfig
        from math_verify.parser import get_extraction_regexes, parse_latex_cached

        parse_latex_cached("1")  # builds the parser's tables

    kinds = get_extraction_regexes([LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    ranked = [(priority, pattern, kind) for patterns, kind in kinds for pattern, priority in patterns]
    ranked.sort(key=lambda entry: entry[0])
    return [
        [(pattern, kind) for _, pattern, kind in group]
        for _, group in groupby(ranked, key=lambda entry: entry[0])
    ]


def _parsed(match: re.Match[str], kind: Any) -> tuple[Any, str]:
    """Parse one match. Returns the expression, None if it does not parse, and its text."""
    from math_verify.parser import extract_match, parse_latex_cached  # heavy, imported by `_patterns`

    written = match.groupdict().get("expr")
    if len(re.sub(r"\d", "", match.group())) > _LONGEST:
        return None, ""
    try:
        if not written:
            return extract_match(match, kind)
        latex = written.replace("**", "^").replace("*", "\\cdot ").replace("×", "\\times ").replace("÷", "/")
        return parse_latex_cached(latex.replace("\n", " ").strip(" .")), written
    except MemoryError:
        raise
    except Exception:  # the parsers reject text in many ways
        return None, ""
