"""Compares an answer with the gold as text or as a number, cheaply.

`math` is the grader that parses algebra.
"""

from __future__ import annotations

import math
import re
import unicodedata

from grpo_dist.rewards.text import boxes, tagged_answer

_LONGEST = 20_000  # last characters of a completion that are searched
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# Not the number of an exponent, an index or a name: x_1, 10^{5}, cm^2, a2.
_NUMBER = re.compile(
    rf"(?<![\w^.])(?<!\^\{{)(?<!_\{{)(?P<sign>[-−+])?"
    rf"(?:\\[dt]?frac\s*\{{\s*(?P<above>-?\d+)\s*\}}\s*\{{\s*(?P<below>\d+)\s*\}}"
    rf"|(?P<plain>{_PLAIN})(?:[eE](?P<power>[-+]?\d{{1,3}})(?![\w]))?(?:\s*/\s*(?P<divisor>{_PLAIN}))?)"
    rf"(?:\s*\\?(?P<percent>%))?"
)


def final_answer(completion: str) -> str:
    """Return the final answer: the last box, else the last tagged answer, else the last non-blank line.

    "" for blank text.
    """
    tail = completion[-_LONGEST:]
    if found := boxes(tail):
        return found[-1]
    if (tagged := tagged_answer(tail)) is not None:
        return tagged
    lines = tail.strip().splitlines()
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
    """Return 1.0 if the last number of the final answer equals that of ``gold`` within tolerance, else 0.0.

    The tolerance is |answer - gold| <= max(relative * |gold|, absolute). NaN if the gold holds no number.
    Thousands separators, fractions (``3/4``, ``\\frac{3}{4}``), powers of ten (``1e-3``) and percent signs
    (``50\\%`` is 50) are parsed. Without a box or tags, the last number of the whole completion counts.

        "that makes 1,234 apples in all", "1234"   1.0
        "\\boxed{\\frac{1}{3}}", "0.3333", relative 1e-3   1.0
    """
    expected = last_number(_gold(gold))
    if expected is None:
        return math.nan
    tail = completion[-_LONGEST:]
    found = last_number(final_answer(tail))
    if found is None and not boxes(tail):
        found = last_number(tail)
    if found is None:
        return 0.0
    return float(abs(found - expected) <= max(relative * abs(expected), absolute))


def last_number(text: str) -> float | None:
    """Return the last finite number in ``text``; None without one.

    ``10\\text{ cm}^2`` -> 10, ``x_1 = -3/4`` -> -0.75
    """
    plain = text.replace("{,}", ",").replace("\\!", "")
    for match in reversed(list(_NUMBER.finditer(plain))):
        value = _value(match)
        if value is not None:
            return value
    return None


def _value(match: re.Match[str]) -> float | None:
    if match["above"] is not None:
        above, below = float(match["above"]), float(match["below"])
    else:
        above = float(match["plain"].replace(",", "") + (f"e{match['power']}" if match["power"] else ""))
        below = float((match["divisor"] or "1").replace(",", ""))
    value = above / below if below else math.inf
    if not math.isfinite(value):
        return None
    return -value if match["sign"] in ("-", "−") else value


def _gold(gold: str) -> str:
    found = boxes(gold)
    return found[-1] if found else gold


def _light(text: str, ignore_case: bool) -> str:
    plain = unicodedata.normalize("NFKC", text).strip().rstrip(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if plain.startswith(opening) and plain.endswith(closing) and len(plain) > len(opening + closing) - 1:
            plain = plain[len(opening) : -len(closing)].strip()
    plain = re.sub(r"\s+", " ", plain.rstrip("."))
    return plain.casefold() if ignore_case else plain
