"""Variable name, unit, number base and time of day of an answer, which math-verify ignores or misreads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import gcd
from string import ascii_uppercase

from grpo_dist.rewards.text import CURRENCY, DEGREES, LABEL, latex, normalise, percent, quantity, tidy

_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def label(answer: str) -> str | None:
    """Return the left-hand side of a single equation: ``x = 5`` -> ``X``, ``f(t) = t^2`` -> ``F``."""
    plain = tidy(answer)
    match = LABEL.match(plain) if plain.count("=") == 1 else None
    return normalise(re.sub(r"\(\s*[A-Za-z]\s*\)", "", match.group(1))) if match else None


def unit(answer: str) -> str | None:
    """Return the unit of a number in base units, the same for equal units; None without a known unit.

    ``10\\text{ cm}`` -> ``1/100 m``, ``10\\text{ mL}``, ``10\\text{ cm}^3`` -> ``1/1000000 m^3``,
    ``7\\text{ m/s/s}`` -> ``m s^-2``, ``\\$5`` -> ``dollar``, ``30^\\circ`` -> ``deg``, ``28\\%`` -> ``%``,
    ``52_8`` -> ``base``
    """
    plain = tidy(answer)
    if percent(plain) is not None:
        return "%"
    if subscripts(plain):
        return "base"
    if (sign := re.search(CURRENCY, plain)) is not None:
        return _unit_named(_CURRENCIES[sign.group().lstrip("\\")])
    measured = quantity(plain)
    if measured is None or not measured[1]:
        return None
    return "deg" if re.fullmatch(DEGREES, measured[1]) else _unit_named(normalise(measured[1]).lower())


def _unit_named(text: str) -> str | None:
    """Return a unit in base units: ``squarefeet`` -> ``145161/1562500 m^2``, ``g/cc``, ``kg/l`` -> the same.

    What costs dollars an hour is a number of dollars.
    """
    parts = _PER.split(_COMPOUNDS.get(text, text))
    factors = [_factor(part) for part in parts]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or len(parts) > _LONGEST_UNIT:
        return None
    if known[0][1] == "dollar":
        known = known[:1]
    size, powers = Fraction(1), Counter[str]()
    for place, (factor, base, power) in enumerate(known):
        size = size / factor if place else size * factor
        powers[base] += -power if place else power
    named = (base if power == 1 else f"{base}^{power}" for base, power in sorted(powers.items()) if power)
    return " ".join([*([str(size)] if size != 1 else []), *named]) or None


def _factor(text: str) -> tuple[Fraction, str, int] | None:
    """Return size, base unit and power of a unit without a quotient: ``cm^2`` -> (1/10000, ``m``, 2)."""
    raised = _POWER.fullmatch(text)
    if raised is None or raised["name"] not in _UNITS:
        return None
    size, base, power = _UNITS[raised["name"]]
    exponent = int(raised["power"] or {"sq": 2, "cu": 3}.get((raised["word"] or "")[:2], 1))
    return size**exponent, base, power * exponent


_CURRENCIES = {
    "$": "dollar", "€": "euro", "euro": "euro", "£": "pound", "pounds": "pound", "¥": "yen", "yen": "yen",
    "₹": "rupee", "₩": "won", "₽": "rouble",
}  # fmt: skip
_LONGEST_UNIT = 4  # parts of a quotient
_COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "fps": "ft/s"}
_PER = re.compile(r"/|(?<=[a-z\d}])per(?=[a-z])")
_POWER = re.compile(r"(?P<word>square|sq\.?|cubic|cu\.?)?(?P<name>[a-z]+?)\.?(?:\^\{?(?P<power>\d)\}?)?")
_UNITS = {
    alias: (Fraction(size), base, power)
    for names, size, base, power in (
        ("mm millimeter millimetre", "0.001", "m", 1), ("cm centimeter centimetre", "0.01", "m", 1),
        ("dm decimeter decimetre", "0.1", "m", 1), ("m meter metre", "1", "m", 1),
        ("km kilometer kilometre", "1000", "m", 1), ("in inch inches", "0.0254", "m", 1),
        ("ft foot feet", "0.3048", "m", 1), ("yd yard", "0.9144", "m", 1), ("mi mile", "1609.344", "m", 1),
        ("ml milliliter millilitre cc", "0.000001", "m", 3), ("l liter litre", "0.001", "m", 3),
        ("gal gallon", "1", "gal", 1),  # of several sizes
        ("mg milligram", "0.001", "g", 1), ("g gram", "1", "g", 1), ("kg kilogram kilo", "1000", "g", 1),
        ("oz ounce", "28.349523125", "g", 1), ("lb lbs pound", "453.59237", "g", 1),
        ("s sec second", "1", "s", 1), ("min minute", "60", "s", 1), ("h hr hrs hour", "3600", "s", 1),
        ("day", "86400", "s", 1), ("week", "604800", "s", 1), ("month", "1", "month", 1),
        ("year", "12", "month", 1), ("deg degree", "1", "deg", 1), ("rad radian", "1", "rad", 1),
        ("dollar usd", "1", "dollar", 1), ("cent", "0.01", "dollar", 1), ("euro eur", "1", "euro", 1),
        ("yen jpy", "1", "yen", 1), ("yuan rmb cny", "1", "yuan", 1), ("rupee inr rs", "1", "rupee", 1),
        ("won", "1", "won", 1), ("rouble ruble", "1", "rouble", 1),
    )
    for name in names.split()
    for alias in (name, name + "s" * (len(name) > 2))
}  # fmt: skip


def half_of_day(answer: str) -> str | None:
    """Return ``a`` or ``p`` for a time before or after noon: ``9\\text{ p.m.}`` -> ``p``; else None."""
    found = _HALF_OF_DAY.search(normalise(answer).lower())
    return found[2] if found else None


def same_between_colons(gold: str, answer: str) -> bool | None:
    """Compare times, and ratios of three or more numbers, which math-verify divides: 3:4:5 is 3/4/5 to it.

    None unless both are such numbers with colons, in the same number if ``gold`` is a time. A time has a half
    of the day or a number with a leading zero; ratios are equal up to a common factor.

        8:34\\text{ p.m.}, 8:34   True      5:00, 05:00   True       2:3:5, 4:6:10   True
        8:34\\text{ p.m.}, 16:68  False     19:60, 19/60  None       2:3:5, 2:5:3    False
    """
    ours, theirs = _between_colons(gold), _between_colons(answer)
    if ours is None or theirs is None:
        return None
    is_time = half_of_day(gold) is not None or any(re.match(r"0\d", number) for number in ours)
    if not is_time and len(ours) < 3:
        return None
    a, b = ([int(number) for number in numbers] for numbers in (ours, theirs))
    if is_time:
        return a == b
    common, other = gcd(*a) or 1, gcd(*b) or 1
    return [number // common for number in a] == [number // other for number in b]


def _between_colons(answer: str) -> list[str] | None:
    plain = _HALF_OF_DAY.sub(r"\g<before>", normalise(answer).lower()).rpartition("=")[2]
    return plain.split(":") if re.fullmatch(r"\d{1,9}(?::\d{1,9})+", plain) else None


_HALF_OF_DAY = re.compile(r"(?P<before>\d)([ap])\.?m\.?(?![a-z])")


def cases_apart(gold: str, answer: str) -> tuple[str, str]:
    """Rename the capitals of letters that occur in both cases, which are one variable to math-verify.

    ``R-r`` and ``r-R`` become ``v-r`` and ``r-v``. A letter in one case keeps it: 3R^2 may be meant by 3r^2.
    Letters of commands and of ``\\text{}`` do not count.
    """
    present = [set(_NO_VARIABLES.sub(" ", text)) for text in (gold, answer)]
    letters = {letter for text in present for letter in text & set(ascii_uppercase) if letter.lower() in text}
    free = (name for name in _SPARE if not {name, name.upper()} & (present[0] | present[1]))
    names = dict(zip(sorted(letters), free, strict=False))
    if not names:
        return gold, answer
    capitals = re.compile(f"{_NO_VARIABLES.pattern}|[{''.join(names)}]")
    renamed = [capitals.sub(lambda m: names.get(m[0], m[0]), text) for text in (gold, answer)]
    return renamed[0], renamed[1]


_NO_VARIABLES = re.compile(r"\\(?:text[a-z]*|math[a-z]+|mbox|operatorname\*?)\s*\{[^{}]*\}|\\[A-Za-z]+")
_SPARE = "vwzux"  # in no unit: a final qr or yr is dropped as one


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
