"""From text to the expressions it may stand for, by math-verify's patterns and its LaTeX parser.

math-verify finds answers in text by patterns of falling priority (boxes, "the final answer is", any formula, any number).
The same patterns are used here, with one difference: what they find outside LaTeX (``3*4+1``) goes to the LaTeX parser
too. math-verify hands it to sympy's parse_expr, which evaluates Python; no text of a model may come near that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Reading:
    """A sympy expression and the text that was understood so."""

    expression: Any
    text: str


def read(text: str) -> Reading | None:
    """The answer in ``text`` (a formula in ``$...$`` or ``\\boxed{...}``, or prose that has one); None when nothing is found.

    The last match of the first pattern that finds anything that parses. Raises MemoryError.
    """
    from math_verify.parser import extract_match

    for patterns in _patterns():
        matches = [(m, target) for pattern, target in patterns for m in pattern.finditer(text)]
        for match, target in sorted(matches, key=lambda found: (found[0].end(), -found[0].start()), reverse=True):
            written = match.groupdict().get("expr")
            if written:
                expression, source = _formula(written), written
            else:
                expression, source = extract_match(match, target)
            if expression is not None and not isinstance(expression, str):
                return Reading(_imaginary(expression), source)
    return None


@lru_cache(maxsize=1)
def _patterns() -> list[list[tuple[re.Pattern[str], Any]]]:
    """math-verify's (pattern, kind of match), highest priority first, those of equal priority together."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify.parser import get_extraction_regexes

    kinds = get_extraction_regexes([LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()])
    ranked = [(priority, pattern, kind) for patterns, kind in kinds for pattern, priority in patterns]
    ranked.sort(key=lambda entry: entry[0])
    return [[(pattern, kind) for _, pattern, kind in group] for _, group in groupby(ranked, key=lambda entry: entry[0])]


def _formula(text: str) -> Any:
    """Digits, operators and parentheses, as the patterns pick them, read as LaTeX; None when they do not parse."""
    from math_verify.parser import parse_latex_cached

    latex = text.replace("\n", " ").replace("**", "^").replace("×", "\\times ").replace("÷", "/").replace("*", "\\cdot ")
    try:
        return parse_latex_cached(latex.strip())
    except MemoryError:
        raise
    except Exception:  # the parser's many ways to say that this is no formula
        return None


def _imaginary(expression: Any) -> Any:
    """i is the imaginary unit where it is the only symbol: math-verify leaves it a symbol in e^{i\\pi} or 1/i."""
    from sympy import I

    symbols = getattr(expression, "free_symbols", set())
    if [str(symbol) for symbol in symbols] == ["i"]:
        return expression.subs(dict.fromkeys(symbols, I))
    return expression
