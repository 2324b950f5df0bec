"""Parses text into expressions, by math-verify's patterns and its LaTeX parser.

math-verify finds answers in text by patterns of decreasing priority (boxes, "the final answer is", any
formula, any number). The same patterns are used here, with one difference: a match outside LaTeX (``3*4+1``)
goes to the LaTeX parser, too. math-verify passes it to sympy's parse_expr, which evaluates Python. Through
the LaTeX grammar, parse_expr only ever receives one number at a time: digits and a point.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from grpo_dist.rewards.formula import MORE_THAN_ALGEBRA, is_word

_IN_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{[^{}]*\}")
_RELATION = r"(?:[<>]|!\s*=|\\(?:n?[lg]eq?(?:slant)?|[lg]t|neq?|not|in)(?![A-Za-z]))"
_DROPPED = re.compile(  # signs that it skips, and a formula that begins or ends with an operator
    rf"['’?&]|[^\x00-\x7f]|=/=|\.\.\.|\\[lcd]?dots|\^\s*\{{?\s*(?:\\prime|[-+]\s*(?:\}}|$))|\\\\|^\s*{_RELATION}|[-+*/^_=<>]\s*$"
)
_VALUE_IN_TEXT = re.compile(r"\\text[a-z]*\s*\{[^{}A-Za-z=]*[\d?][^{}A-Za-z=]*\}")
_BARS = re.compile(r"\||\\[lr]?vert(?![a-z])")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_MATRIX = re.compile(r"\\begin\{[a-z]+\}.*?\\end\{[a-z]+\}", re.DOTALL)
_READ = frozenset(  # commands of its grammar
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
_LONGEST = 1500  # characters, besides digits, of a formula that is parsed
_CONTEXT = 40  # characters that are kept on each side of a match


@dataclass(frozen=True, slots=True)
class Reading:
    """A sympy expression, the text it was parsed from, and the text on both sides."""

    expression: Any
    text: str
    before: str = ""
    after: str = ""


def is_known_to_math_verify(text: str) -> bool:
    """Return whether math-verify reads every sign of a formula.

    It drops commands, primes and marks that it does not know: ``\\dim 3`` would be 3. Words in ``\\text{}``
    are not looked at.
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
    if not text.isascii():  # digits of other scripts match \d and are names to Python
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    for patterns in _patterns():
        matches = [(m, target) for pattern, target in patterns for m in pattern.finditer(text)]
        for match, target in sorted(
            matches, key=lambda pair: (pair[0].end(), -pair[0].start()), reverse=True
        ):
            expression, source = _parsed(match, target)
            if expression is not None and not isinstance(expression, str):
                begin = text.rfind(source, match.start(), match.end())
                # A text that the parser rewrote (.5 to 0.5) is somewhere in the match.
                begin, end = (begin, begin + len(source)) if begin >= 0 else match.span()
                before, after = text[max(0, begin - _CONTEXT) : begin], text[end : end + _CONTEXT]
                return Reading(_imaginary(expression), source, before, after)
    return None


@lru_cache(maxsize=1)
def _patterns() -> list[list[tuple[re.Pattern[str], Any]]]:
    """Return math-verify's (pattern, kind of match), highest priority first, grouped by priority."""
    # heavy: only where answers are graded
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify.parser import get_extraction_regexes

    kinds = get_extraction_regexes([LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    ranked = [(priority, pattern, kind) for patterns, kind in kinds for pattern, priority in patterns]
    ranked.sort(key=lambda entry: entry[0])
    return [
        [(pattern, kind) for _, pattern, kind in group]
        for _, group in groupby(ranked, key=lambda entry: entry[0])
    ]


def _parsed(match: re.Match[str], kind: Any) -> tuple[Any, str]:
    """Parse one match. Returns the expression, None if it does not parse, and its text."""
    from math_verify.parser import extract_match, parse_latex_cached  # heavy, as in `_patterns`

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


def _imaginary(expression: Any) -> Any:
    """Replace i by the imaginary unit if it is the only symbol; math-verify keeps a symbol in 1/i."""
    from sympy import I  # heavy, as in `_patterns`

    symbols: set[Any] = getattr(expression, "free_symbols", set())
    if [str(symbol) for symbol in symbols] == ["i"]:
        return expression.subs(dict.fromkeys(symbols, I))
    return expression
