"""Compares an answer with the gold as text or as a number, cheaply.

`math` is the grader that parses algebra.
"""

from __future__ import annotations

import math
import re
import unicodedata

from grpo_dist.rewards.text import boxes, latex, tagged_answer
from grpo_dist.rewards.thought import final_text

_LONGEST = 20_000  # last characters of a completion that are searched
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# 1\,234, and the Unicode characters of this space. Other spaces may separate two numbers.
_GROUPED = re.compile(r"(?<![\w^.])\d{1,3}(?:(?:\\,|[\u2009\u202f])\d{3})+(?!\d)")
_SPACE = r"(?:\s|\\[,;: ]|~)"
_GAP = rf"{_SPACE}*"
_GAP_IN_LINE = r"(?:[ \t]|\\[,;: ]|~)*"  # a number and a fraction on the next line are two answers


def _exponent(name: str) -> str:
    number = r"[-+]?\d{1,3}"
    return rf"\s*\^\s*(?:\{{\s*(?P<{name}>{number})\s*\}}|(?P<{name}_bare>{number}))"


def _braced(name: str) -> str:
    """Return the pattern of an argument of a fraction, ``{3.5}`` or ``3``."""
    return rf"\s*(?:\{{\s*(?P<{name}>-?(?:{_PLAIN}))\s*\}}|(?P<{name}_bare>\d))"


# Excludes numbers in exponents, indices and names: x_1, 10^{5}, cm^2, a2.
_NUMBER = re.compile(
    rf"(?<![\w^.])(?<!\^\{{)(?<!_\{{)(?:(?P<sign>[-+])(?P<apart>{_GAP}(?:(?:\\?\$|[€£]){_GAP})?))?"
    rf"(?:10{_exponent('alone')}"
    rf"|(?:(?P<whole>\d+){_GAP_IN_LINE})?\\[dtc]?frac{_braced('above')}{_braced('below')}"
    rf"|(?P<whole_slash>\d+)[ \t]+(?P<above_slash>\d+)/(?P<below_slash>\d+)(?![\d.])"
    rf"|(?P<plain>{_PLAIN})(?:[eE](?P<power>[-+]?\d{{1,3}})(?![\w]))?"
    rf"(?:\s*/\s*(?:10{_exponent('under')}|(?P<divisor>{_PLAIN})))?)"
    rf"(?:{_GAP}(?:\\(?:times|cdot)(?![A-Za-z])|[*x]){_GAP}10{_exponent('ten')})?"
    rf"(?:\s*\\?(?P<percent>%))?"
)
_SUBTRACTED_FROM = re.compile(rf"(?:[\w)\]}}%]|\S\$){_GAP}\Z")
_SPACE_AT_END, _SPACE_AT_START = re.compile(rf"{_SPACE}\Z"), re.compile(_SPACE)


def final_answer(completion: str) -> str:
    """Return the final answer: the last box, else the last tagged answer, else the last non-blank line.

    After a closed thought, only the text after it is searched, if there is any. "" for blank text.
    """
    text = final_text(completion)[-_LONGEST:]
    if contents := boxes(text):
        return contents[-1]
    if (tagged := tagged_answer(text)) is not None:
        return tagged
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def exact_match(completion: str, gold: str, *, ignore_case: bool) -> float:
    """Return 1.0 if the final answer and ``gold`` are the same text after light normalisation, else 0.0.

    Ignored are Unicode compatibility forms, dollar signs and LaTeX parentheses around the whole, runs of
    white space, a final full stop and, with ``ignore_case``, letter case.

        "so \\boxed{New  York.}" and "new york", ignore_case   1.0
        "so \\boxed{0.50}" and "0.5"                           0.0
    """
    ours, theirs = (_light(text, ignore_case) for text in (_gold(gold), final_answer(completion)))
    return float(ours == theirs != "")


def numeric_match(completion: str, gold: str, *, relative: float, absolute: float) -> float:
    """Return 1.0 if the last number of the final answer equals ``gold``'s within tolerance, else 0.0.

    The tolerance is |answer - gold| <= max(relative * |gold|, absolute). NaN if the gold holds no number.
    Thousands separators, fractions (``3/4``, ``\\frac{3}{4}``), mixed numbers (``3 1/2``), powers of ten
    (``1e-3``, ``3 \\times 10^{8}``) and percent signs (``50\\%`` is 50) are parsed. Without a box or tags,
    the last number of the text after a closed thought counts, or of all text if there is none.

        "that makes 1,234 apples in all", "1234"   1.0
        "\\boxed{\\frac{1}{3}}", "0.3333", relative 1e-3   1.0
    """
    expected = last_number(_gold(gold))
    if expected is None:
        return math.nan
    text = final_text(completion)[-_LONGEST:]
    boxed = bool(boxes(text))
    number = last_number(final_answer(text), prose=not boxed and tagged_answer(text) is None)
    if number is None and not boxed:
        number = last_number(text, prose=True)
    if number is None:
        return 0.0
    return float(abs(number - expected) <= max(relative * abs(expected), absolute))


def last_number(text: str, *, prose: bool = False) -> float | None:
    """Return the last finite number in ``text``; None without one.

    ``10\\text{ cm}^2`` -> 10, ``x_1 = -3/4`` -> -0.75, ``a loss of -\\$5`` -> -5, ``10 - \\$3`` -> 3,
    ``3 1/2`` -> 3.5, ``5 7/2`` -> 3.5: a mixed number has a proper fraction, on the same line

    ``prose``: "- 3" at the beginning of a line is an item of a list, not a negative number.
    """
    ungrouped = _GROUPED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    plain = latex(ungrouped.replace("{,}", ",").replace("\\!", ""))
    for match in reversed(list(_NUMBER.finditer(plain))):
        try:
            parts = _parts(match)
            value = _value(parts)
        except (OverflowError, ZeroDivisionError):
            continue
        if math.isfinite(value):
            return -value if "sign" in parts and _is_negative(match, prose) else value
    return None


def _parts(match: re.Match[str]) -> dict[str, str]:
    """Return the parts of a number by name, the same for all its notations: ``3 1/2``, ``3\\frac{1}{2}``.

    Drops the number before an improper fraction, with its sign: it is a separate number.
    """
    parts = {
        name.partition("_")[0]: text.replace(",", "") for name, text in match.groupdict().items() if text
    }
    if "whole" in parts and not 0 < float(parts["above"]) < float(parts["below"]):
        del parts["whole"]
        parts.pop("sign", None)
    return parts


def _value(parts: dict[str, str]) -> float:
    """Return the value without its sign. Raises OverflowError and ZeroDivisionError."""
    ten = int(parts.get("ten", 0))
    if "alone" in parts:
        return float(f"1e{parts['alone']}") * 10.0**ten
    if "above" in parts:
        value = float(parts.get("whole", 0)) + float(parts["above"]) / float(parts["below"])
        return value * 10.0**ten
    below = float(f"1e{parts['under']}") if "under" in parts else float(parts.get("divisor", 1))
    return float(f"{parts['plain']}e{int(parts.get('power', 0)) + ten}") / below


def _is_negative(match: re.Match[str], prose: bool) -> bool:
    """Return whether the sign before a number negates it: it may also subtract, or begin an item."""
    if match["sign"] != "-" or not match["apart"]:
        return match["sign"] == "-"
    before = match.string[: match.start()]
    if prose and match["apart"][0].isspace() and not before.rpartition("\n")[2].strip():
        return False
    if _SPACE_AT_END.search(before[-2:]) and not _SPACE_AT_START.match(match["apart"]):
        return True  # "a profit of -$5"; "10 - $3" and "10-$3" subtract
    return _SUBTRACTED_FROM.search(before[-100:]) is None


def _gold(gold: str) -> str:
    contents = boxes(gold)
    return contents[-1] if contents else gold


def _light(text: str, ignore_case: bool) -> str:
    plain = unicodedata.normalize("NFKC", text).strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if plain.startswith(opening) and plain.endswith(closing) and len(plain) > len(opening + closing) - 1:
            plain = plain[len(opening) : -len(closing)].strip()
    plain = re.sub(r"\s+", " ", plain.rstrip("."))
    return plain.casefold() if ignore_case else plain
