"""Variable name, unit and number base of an answer, all of which math-verify ignores."""

from __future__ import annotations

import re
from collections.abc import Callable

from grpo_dist.rewards.text import DEGREES, LABEL, latex, normalise, percent, quantity, tidy

_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def label(answer: str) -> str | None:
    """Return the left-hand side of a single equation: ``x = 5`` -> ``X``, ``f(t) = t^2`` -> ``F``."""
    plain = tidy(answer)
    match = LABEL.match(plain) if plain.count("=") == 1 else None
    return normalise(re.sub(r"\(.*", "", match.group(1))) if match else None


def unit(answer: str) -> str | None:
    """Return the unit of a number; None without a known unit.

    ``10\\text{ cm}`` -> ``cm``, ``30^\\circ`` -> ``deg``, ``28\\%`` -> ``%``, ``52_8`` -> ``base``
    """
    plain = tidy(answer)
    if percent(plain) is not None:
        return "%"
    if subscripts(plain):
        return "base"
    measured = quantity(plain)
    if measured is None:
        return None
    return "deg" if re.fullmatch(DEGREES, measured[1]) else _UNIT_NAMES.get(normalise(measured[1]).lower())


_UNIT_NAMES = {
    alias: names.split()[0]
    for names in (
        "mm millimeter millimetre", "cm centimeter centimetre", "m meter metre", "km kilometer kilometre",
        "in inch inches", "ft foot feet", "yd yard", "mi mile", "mg milligram", "g gram", "kg kilogram kilo",
        "oz ounce", "lb lbs pound", "ml milliliter millilitre", "l liter litre", "gal gallon", "s sec second",
        "min minute", "h hr hrs hour", "day", "week", "month", "year", "deg degree", "rad radian",
        "dollar", "cent",
    )
    for name in names.split()
    for alias in (name, name + "s" * (len(name) > 2))
}  # fmt: skip


def worded_numbers(answer: str) -> tuple[str, ...]:
    """Return the numbers of an answer with nouns: ``4\\text{ cats}, 6\\text{ dogs}`` -> ("4", "6")."""
    numbers = tuple(re.findall(r"\d+(?:\.\d+)?", answer))
    return numbers if len(numbers) > 1 and re.search(r"\\text\s*\{[^{}]*[A-Za-z]{3}", answer) else ()


def subscripts(answer: str) -> tuple[str, ...]:
    """Return the number bases of an answer: ``52_8``, ``52_{\\text{eight}}`` -> ("8",)."""
    found = re.findall(r"\d\)?\s*_\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(\d+|[a-z]+)", latex(answer))
    return tuple(_BASES.get(base, base) for base in found)


def without_percent(gold: str, answer: str, *, share: Callable[[], bool]) -> list[tuple[str, str]]:
    """Return (gold, answer) pairs without the answer's percent sign; the answer is right if one pair is
    equal.

    28\\% is 28 if the gold is a percentage or omits the sign ("what percent?"), and 28/100 if the gold is a
    fraction of at most 1. So 500\\% is 500 and never 5.

        28\\%, 28\\%   28, 28        28, 28\\%   28, 28        0.28, 28\\%   0.28, 28 or 0.28, 28/100

    ``share``: whether the gold is a number of at most 1, or not a number.
    """
    ours, theirs = percent(tidy(gold)), percent(tidy(answer))
    if theirs is None:
        return [(gold, answer)]
    if ours is not None:
        return [(ours, theirs)]
    return [(gold, theirs), *([(gold, f"\\frac{{{theirs}}}{{100}}")] if share() else [])]
