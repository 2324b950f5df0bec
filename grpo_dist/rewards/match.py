"""Plain comparisons with the gold answer: as text, and as a number. Cheap, and nothing is parsed as algebra;
`math` is the grader that knows algebra.
"""

from __future__ import annotations

import math
import re
import unicodedata

from grpo_dist.rewards.text import boxes

_LONGEST = 20_000  # characters of a completion that are searched, from its end
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
# No number of an exponent, an index or a name: x_1, 10^{5}, cm^2, a2.
_NUMBER = re.compile(
    rf"(?<![\w^.])(?<!\^\{{)(?<!_\{{)(?P<sign>[-−+])?"
    rf"(?:\\[dt]?frac\s*\{{\s*(?P<above>-?\d+)\s*\}}\s*\{{\s*(?P<below>\d+)\s*\}}"
    rf"|(?P<plain>{_PLAIN})(?:[eE](?P<power>[-+]?\d{{1,3}})(?![\w]))?(?:\s*/\s*(?P<divisor>{_PLAIN}))?)"
    rf"(?:\s*\\?(?P<percent>%))?"
)


def final_answer(completion: str) -> str:
    """The answer that a completion ends with: its last box, else what stands between its last answer tags,
    else its last line that is not blank; "" for blank text.
    """
    tail = completion[-_LONGEST:]
    if found := boxes(tail):
        return found[-1]
    before, closing, _ = tail.rpartition("</answer>")
    if closing and "<answer>" in before:
        return before.rpartition("<answer>")[2].strip()
    lines = tail.strip().splitlines()
    return lines[-1].strip() if lines else ""


def exact_match(completion: str, gold: str, *, ignore_case: bool) -> float:
    """1.0 where the final answer and ``gold`` are the same text, habits of writing aside; else 0.0.

    Not compared: Unicode compatibility forms, dollar signs and LaTeX parentheses around the whole, runs of
    white space, a last full stop; and letter case, if asked.

        "so \\boxed{New  York.}" and "new york", ignore_case   1.0
        "so \\boxed{0.50}" and "0.5"                           0.0
    """
    ours, theirs = (_light(text, ignore_case) for text in (_gold(gold), final_answer(completion)))
    return float(ours == theirs != "")


def numeric_match(completion: str, gold: str, *, relative: float, absolute: float) -> float:
    """1.0 where the last number of the final answer is that of ``gold``, within a tolerance; else 0.0. NaN
    where the gold holds no number.

    |answer - gold| <= max(relative * |gold|, absolute). Thousands separators, fractions (``3/4``,
    ``\\frac{3}{4}``), powers of ten (``1e-3``) and percent signs (``50\\%`` is 50) are read. Without a box or
    tags it is the last number of the whole completion, wherever it stands.

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
    """The last finite number in ``text``; None without one.

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
