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

    ``10\\text{ cm}`` -> ``cm``, ``10\\text{ cm}^2`` -> ``cm^2``, ``\\$5`` -> ``dollar``,
    ``30^\\circ`` -> ``deg``, ``28\\%`` -> ``%``, ``52_8`` -> ``base``
    """
    plain = tidy(answer)
    if percent(plain) is not None:
        return "%"
    if subscripts(plain):
        return "base"
    measured = quantity(plain)
    if measured is None:
        return None
    if not measured[1]:
        return "dollar" if plain.startswith("\\$") else None
    return "deg" if re.fullmatch(DEGREES, measured[1]) else _unit_named(normalise(measured[1]).lower())


def _unit_named(text: str) -> str | None:
    """Return the name of a unit: ``centimeters`` -> ``cm``, ``squarefeet`` -> ``ft^2``, ``mph`` -> ``mi/h``.

    What costs dollars an hour is a number of dollars.
    """
    text = _COMPOUNDS.get(text, text)
    parts = text.split("/") if "/" in text else _PER.split(text, maxsplit=1)
    names = [_power_named(part) for part in parts]
    known = [name for name in names if name is not None]
    if len(known) < len(names):
        return None
    return known[0] if known[0] in ("dollar", "cent") else "/".join(known)


def _power_named(text: str) -> str | None:
    raised = _POWER.fullmatch(text)
    if raised is None or (name := _UNIT_NAMES.get(raised["name"])) is None:
        return None
    power = raised["power"] or {"sq": "2", "cu": "3"}.get((raised["word"] or "")[:2], "1")
    return name if power == "1" else f"{name}^{power}"


_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "fps": "ft/s"}
_PER = re.compile(r"(?<=[a-z\d}])per(?=[a-z])")
_POWER = re.compile(r"(?P<word>square|sq\.?|cubic|cu\.?)?(?P<name>[a-z]+?)\.?(?:\^\{?(?P<power>\d)\}?)?")
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
