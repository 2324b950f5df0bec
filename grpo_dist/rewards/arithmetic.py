"""Detects unevaluated arithmetic in an answer: ``123+456`` where the gold is 579, ``\\max(3, 5)`` for 5."""

from __future__ import annotations

import re

from grpo_dist.rewards.text import latex, quantity, tidy

_SPACES = re.compile(r"\s|\\[,;:! ]|~|\\(?:left|right|quad|qquad|displaystyle)(?![A-Za-z])")
_NUMBER = r"-?(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)?(?:\.\d+)?"
_PLAIN = re.compile(rf"\+?(?=[-.\d]){_NUMBER}")
_TAIL = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit)\{.*$|\^\{?\\circ\}?|\\?%|\\?\$", re.DOTALL)
_POWER_OF_TEN = re.compile(rf"(?<![\d.])({_NUMBER})(?:\\times|\\cdot|\*)10\^(?:\{{[-+]?\d+\}}|\d)$")
_MIXED = re.compile(r"[-+]?\(?\d+(?:\+?\\frac\{\d+\}\{\d+\}|\s+\d+/\d+)\)?")
_GROUPED = r"(?:\d{1,3}(?:,\d{3})+|[\d.]+)"
_FRACTION = re.compile(rf"[-+]?(?:\\frac(?:\{{-?[\d.]+\}}\{{-?[\d.]+\}}|\d\d)|{_GROUPED}/{_GROUPED})")
_END, _BEGIN = r"[\d.][)}\]!]*", r"[({\[]*-?[({\[]*(?:\\sqrt|\\frac|\\binom)?[({\[]*-?[\d.]"
_OPERATION = re.compile(rf"{_END}(?:[-+*]|\\times|\\cdot|\\ast|\\div){_BEGIN}|[\d.]\)?\(\s*-?[\d.]")
_QUOTIENT = re.compile(rf"\\frac(?:\{{[^{{}}A-Za-z\\]*\}}\{{[^{{}}A-Za-z\\]*\}}|\d\d)|{_END}/{_BEGIN}")
# A root of a power, and a power of a root, are operations; a root of a number is a notation.
_FUNCTION = re.compile(
    r"\\(?:sum|prod|i{1,3}nt|oint|max|min|gcd|lcm|log|ln|lg|exp|det|lim|[lr]?floor|[lr]?ceil|[dt]?binom|choose)"
    r"(?![A-Za-z])|\\sqrt.*(?:\^|\\sqrt)|\^.*\\sqrt",
    re.DOTALL,
)
_NAMED = re.compile(
    r"\\(?:operatorname\*?|text|mathrm|mbox)\s*\{\s*(gcd|lcm|max|min|log|ln|floor|ceil|exp|det)\s*\}(?=\s*[_({\\])"
)
_BOUND = re.compile(r"_\s*\{[^{}]*=[^{}]*\}")  # of a sum, no equation
_SIDES = re.compile(r"=|\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])")


def is_unsolved(gold: str, answer: str) -> bool:
    """Return whether ``gold`` is a plain number and ``answer`` an unevaluated operation on numbers.

    Notation of a single number is evaluated: ``1.5\\times 10^3``, ``2\\frac{3}{4}``, a fraction (reduced or
    not, also ``1158/2``), a power, a root, ``5!``, an absolute value, ``\\sin\\frac{\\pi}{2}``. An equation
    is solved when one side is: ``2+3=5``.

        579, 123+456    true          145, 29\\cdot 5    true          3, \\frac{6}{2}    false
        5, \\max(3,5)   true          123, \\sqrt{123^2} true         5, \\sqrt{25}     false
    """
    wanted = tidy(gold)
    measured = quantity(wanted)
    wanted = _SPACES.sub("", measured[0] if measured else wanted)
    if not _PLAIN.fullmatch(wanted):
        return False
    text = _TAIL.sub("", _NAMED.sub(r"\\\1 ", _BOUND.sub("", latex(answer.strip()))))
    sides = [side.strip().rstrip(".") for side in _SIDES.split(text)]
    sides = [side for side in sides if side]
    return bool(sides) and not any(_is_solved(side, whole="." not in wanted) for side in sides)


def _is_solved(side: str, *, whole: bool) -> bool:
    if _MIXED.fullmatch(side.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip()):
        return True
    text = re.sub(r"\\[dt]frac", r"\\frac", _SPACES.sub("", side))
    if re.fullmatch(r"[A-Za-z]\w*|\\[a-z]+|[A-Za-z]\(\w+\)", text):  # the variable on the left of an equation
        return False
    if _FRACTION.fullmatch(text):
        return True
    text = _POWER_OF_TEN.sub(r"\1", text)
    if _OPERATION.search(text) or _FUNCTION.search(side):
        return False
    return not (whole and _QUOTIENT.search(text))
