"""Fills the question to a judge with texts of a model, none of which can bring in another.

"{problem}: {completion}", completion "{answer}" -> "1+1: {answer}"
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Any other use of braces, such as LaTeX's, stays as it is.
_NAMED = re.compile(r"\{([a-z_][a-z0-9_]*)\}|%\((expression[12])\)s")
# Braces of formulas: \boxed{x}, \sqrt [n] {x}, \frac{a}{b}, a^{n}, a_{n}, and all between dollars.
_LATEX = re.compile(
    r"\\[A-Za-z]+\s*(?:\[[^\]]*\])?(?:\s*\{[^{}]*\})+|(?<![A-Za-z0-9])\w?[_^]\{[^{}]*\}|\$[^$\n]*\$"
)
_SIMPLE_EVALS = {"expression1": "reference", "expression2": "candidate"}


def placeholders(template: str) -> set[str]:
    """Return the names in ``template``: "{a} %(expression1)s" -> {"a", "reference"}."""
    return {_name(found) for found in _NAMED.finditer(template)}


def asked_for(template: str) -> set[str]:
    """Return the names in ``template`` that somebody must supply: `placeholders` but for arguments in LaTeX.

    "{rubric}: $\\frac{a}{b}$, \\boxed{x}" -> {"rubric"}
    """
    return placeholders(_LATEX.sub(" ", template))


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each placeholder of ``template`` that ``values`` has, in one pass; others stay."""
    return _NAMED.sub(lambda found: values.get(_name(found), found[0]), template)


def _name(found: re.Match[str]) -> str:
    return found[1] or _SIMPLE_EVALS[found[2]]
