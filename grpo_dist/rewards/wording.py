"""Detects words, marks and signs of an answer that change its value and that math-verify drops or misreads
(it reads 5 million as 5).

These are words around a value, units, number bases, times of day, variable names, and unevaluated arithmetic.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from math import gcd
from string import ascii_uppercase

from grpo_dist.rewards.text import (
    CURRENCY,
    DEGREES,
    LABEL,
    SCALE_WORDS,
    TEXT,
    latex,
    measured,
    normalise,
    percent,
    quantity,
    replace_connectives,
    tidy,
)


def _any_of(*phrases: str) -> str:
    """Return the pattern of any word of ``phrases``; underscores join the words of a phrase."""
    words = [word.replace("_", r"\s+") for phrase in phrases for word in phrase.split()]
    return f"(?:{'|'.join(words)})"


# Words, by their effect on a value next to them.
_NEGATIONS = "not never neither nor"
_DOUBTS = "maybe perhaps possibly probably"
_DENIALS = "cannot none wrong incorrect false except unless guess unsure mod modulo below_zero"
_BOUNDS = "at_least at_most"
_RANGES = "up_to between"
_COMPARATIVES = "more less fewer greater smaller larger bigger higher lower other"
_TIMES = "earlier later"
_OR_ELSE = "more less fewer so greater higher lower above below over under another other something"
_BEFORE_ANOTHER_VALUE = "over under above below minus negative twice half_of double"
_NUMBER_NAMES = """
    two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety zero
    """
_OPERATIONS = "or and to plus minus times over out_of vs versus"
_PARTS = "halves thirds fourths fifths sixths sevenths eighths ninths tenths hundredths thousandths"
_FRACTIONS = "half thirds? quarters? fourths?"
# Squared or cubed, these are units.
_AREAS = "unit inch feet foot yard mile met centimet decimet kilomet millimet"
_HELPING_VERBS = "do does did could can am is was"
_KNOWING = "know tell say sure certain determined? solved? answer(?:ed)? find found decided? right correct"
_NO_ANSWERS = (
    "unable unsure uncertain unknown wrong incorrect maybe perhaps guess no_idea no_answer gives?_up"
)
_SIGNS_OF_RELATIONS = r"[<>≠≤≥≮≯≰≱≲≳≪≫≺≻≼≽⩽⩾⪅⪆]|&(?:lt|gt|le|ge|ne);|=/="
_COMMANDS_OF_RELATIONS = r"""
    n?[lg]eq?q? n?[lg]eqslant lt gt neq? not(?![a-z]) lll? ggg? [lg](?:vert)?neqq? [lg]n(?:sim|approx)
    [a-z]{0,8}(?:less|gtr|prec|succ|eqslant)[a-z]{0,8}
    """

_RELATION = rf"(?:{_SIGNS_OF_RELATIONS}|\\{_any_of(_COMMANDS_OF_RELATIONS)}(?![A-Za-z]))"
_BEFORE_A_NUMBER = r"(?=[\s$}\\,]*[-+]?(?:\d|\\[dt]?frac|\\sqrt|\.\d))"
_NUMBER_WORD = rf"{_any_of(_NUMBER_NAMES)}\b(?!-)"  # not two-digit
_WORDS = re.compile(
    rf"\b{_any_of(_NEGATIONS, _DOUBTS, _DENIALS, _BOUNDS)}\b|n't\b|\bor\s+{_any_of(_OR_ELSE)}\b"
    rf"|\b(?:{_any_of(_COMPARATIVES, _TIMES)}\s+than|{_any_of(_RANGES, _BEFORE_ANOTHER_VALUE)})"
    rf"{_BEFORE_A_NUMBER}"
)
_LISTED_IN_WORDS = re.compile(
    rf"[\d)}}]\W*(?:(?:or|and)\b(?!\W*\d)|{_any_of('plus minus to_one')}\b|{_NUMBER_WORD})"
    rf"|[\d)}}][^\d{{}}()]*(?:\b{_any_of(_OPERATIONS)}\s|[,;:/&+~-])\s*{_NUMBER_WORD}"
)
_BEHIND_A_NUMBER = re.compile(
    rf"[\d)}}]\W*(?:(?:squared|cubed)(?!\s+{_any_of(_AREAS)})|factorial|{_any_of(_PARTS)}"
    rf"|and\s+(?:a|one|two|three)(?:\s|-)+{_any_of(_FRACTIONS)}|{SCALE_WORDS})(?![a-z])"
)
_NUMBERS = re.compile(r"(?<![A-Za-z])\d[\d,]*(?:\.\d+)?")
_OPERATORS = re.compile(r"[-+*^\\π√±!|<>()\[\]{}=~%²³]")
_NUMBER_IN_WORDS = re.compile(r"(?<![\w^{.,])\d")
_TEXTS = re.compile(rf"{TEXT}\s*\{{([^{{}}]*)\}}")
# Text right before and right after an answer without a box.
_BEFORE_AN_ANSWER = re.compile(
    rf"(?:\b(?:{_any_of(_NEGATIONS, _DOUBTS, _BOUNDS, _RANGES, 'or')}|{_any_of(_COMPARATIVES)}\s+than)\b"
    r"|n't\b|=/=|~~|(?:\$|[\w)]\s)\s*(?:[<>]=?|!=)|\b\d+\s+to\b|\d\s+and\b"
    rf"|\\(?:neg|lnot)(?![a-z])|(?![<>]){_RELATION})[\s$({{]*$",
    re.IGNORECASE,
)
_AFTER_AN_ANSWER = re.compile(
    rf"(?:[\s$)}}]|\\[,;:! ]|{TEXT}\s*\{{)*"
    rf"(?:\\?%|per\s?cent\b|‰|{SCALE_WORDS}\b|\?|{_any_of('squared cubed halves thirds')}\b|\(?\s*or\b|~~"
    rf"|(?:and|to)\s+(?:\$?-?\d|{_NUMBER_WORD})"
    r"|,\s*\$?-?\d+(?:\.\d+)?\$?\s*(?:$|[.,\n]|or\b|and\b))[^.\n]*",
    re.IGNORECASE,
)
# A factor that adjoins a number, and a list that ends with a number without a box.
_FACTOR = re.compile(r"(?:[a-z](?!\.?[A-Za-z])|π|\\pi(?![A-Za-z])|√|\\sqrt(?![A-Za-z]))[^\s.,;$]*")
_LIST_BEFORE = re.compile(r"(?:^|\b(?:is|are)\b|[:#])[\s$]*([(\[{]?\s*(?:-?\d[\d.]*\s*[,;]\s*)+)$")
_LIST_END = re.compile(r"\s*([)\]}]?)[\s$*]*(?:[.;]|$)")
# Words of a sentence around a value. A capital after a number may be a unit: 18 V.
_SENTENCE = re.compile(
    r"[A-Za-z]{3}|[A-Za-z]\s+[A-Za-z]{2}|(?<![A-Za-z])[A-Za-z]{2}\s+\d|\d\s*[A-Z](?![A-Za-z])\W*$"
)
_COMMAND = re.compile(rf"{TEXT}\s*\{{[^{{}}]*\}}|\\[A-Za-z]+")
# A response that gives no answer, or takes an answer back.
_NO_ANSWER = re.compile(
    rf"\b{_any_of(_HELPING_VERBS)}(?:\s+not|not|n['’]t)\s+(?:\w+\s+)?{_any_of(_KNOWING)}\b|\b{_any_of(_NO_ANSWERS)}\b",
    re.IGNORECASE,
)
_NOT_WORDS = rf"{TEXT}\s*\{{|[$)}}]|</"


def is_negated_before(before: str) -> bool:
    """Return whether the words before a value rule it out as answer: ``the answer is not``, ``x >``."""
    return _BEFORE_AN_ANSWER.search(before) is not None


def extend_by_context(before: str, text: str, after: str) -> str:
    """Add parts of the value from the text ``before`` and ``after`` it to ``text``.

    ``5``, `` million.`` -> 5 million    ``18``, ``x.`` -> 18x    ``is (17, ``, ``18``, ``).`` -> (17, 18)
    """
    if (listed := _LIST_BEFORE.search(before)) and (end := _LIST_END.match(after)):
        return f"{listed[1]}{text}{end[1]}"
    if text[-1:].isdigit() and (factor := _FACTOR.match(after)):
        return f"{text}{factor.group()}"
    match = _AFTER_AN_ANSWER.match(after)
    return f"{text} {re.sub(_NOT_WORDS, ' ', match.group())}".strip() if match else text


def is_one_quantity(text: str) -> bool:
    """Return whether ``text`` is one number with words or a unit: "18 °C", "x: 18", "$18/hr".

    Not "x + 18", "18x", "2 i", "2 pi" or "17, 18".
    """
    before, *numbers = _NUMBERS.split(text)
    if len(numbers) != 1 or _OPERATORS.search(re.sub(r"=\s*[A-Za-z]\s*$", "", text)):
        return False
    after = numbers[0]
    stands_alone = re.fullmatch(r"(?:.*[\s$€£₹¥₩])?", before) and re.match(r"[\s°/=.]|$", after)
    letters = re.sub(r"=\s*[A-Za-z]\s*$|°\s*[CFK]\b|/\s*[hs]\b", "", after)
    return bool(stands_alone) and not re.search(r"\b(?:[A-Za-z]|pi|or|and)\b", letters)


def is_sentence(answer: str) -> bool:
    """Return whether a tidied ``answer`` holds words besides a value and its unit: ``Tom has 18``.

    Words in ``\\text{}`` and commands do not count; ``2\\pi``, ``x=1, y=2`` and ``5 cm`` are no sentences.
    """
    return _SENTENCE.search(_COMMAND.sub(" ", answer)) is not None


def gives_no_answer(text: str) -> bool:
    """Return whether ``text`` says that it has no answer, or that an answer is wrong: ``I do not know``."""
    return _NO_ANSWER.search(text) is not None


def changes_value(gold: str, answer: str) -> bool:
    """Return whether words or signs of ``answer``, absent from ``gold``, change its value.

    These are a negation, a doubt, another number in words, or a modifier (5 squared).
    """
    ours, theirs = _worded(gold), _worded(answer)
    if theirs == answer.lower() and not re.search("[a-z]{2}|n't", re.sub(r"\\[a-z]+", "", theirs)):
        return False
    if any(_adds(pattern, ours, theirs) for pattern in (_WORDS, _LISTED_IN_WORDS, _BEHIND_A_NUMBER)):
        return True
    alone = not re.search(r"\d", _TEXTS.sub(" ", answer))  # \text{The answer is 5}: the value is in the text
    return _numbers_in_words(answer) > max(_numbers_in_words(gold), int(alone))


def _adds(pattern: re.Pattern[str], gold: str, answer: str) -> bool:
    """Return whether ``pattern`` has a match in ``answer`` that is not in ``gold``."""
    matches = {match.group() for match in pattern.finditer(answer)}
    return bool(matches) and not matches <= {match.group() for match in pattern.finditer(gold)}


def _worded(text: str) -> str:
    """Lower-case ``text`` and remove the commands around words."""
    return _TEXTS.sub(r" \1 ", text).lower()


def _numbers_in_words(text: str) -> int:
    worded = (words for words in _TEXTS.findall(text) if re.search("[A-Za-z]", words))
    return sum(len(_NUMBER_IN_WORDS.findall(words)) for words in worded)


# Variable name, unit, number base and time of day


_BASES = {
    "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9",
    "ten": "10", "eleven": "11", "twelve": "12", "sixteen": "16",
}  # fmt: skip


def label(answer: str) -> str | None:
    """Return the name of the value of a single equation, or of the elements of a set.

    ``x = 5``, ``x \\in \\{5\\}`` -> ``X``, ``f(t) = t^2`` -> ``F``
    """
    plain = tidy(answer)
    match = LABEL.match(plain) if plain.count("=") == 1 else _ELEMENT.match(plain)
    return normalise(re.sub(r"\(\s*[A-Za-z]\s*\)", "", match.group(1))) if match else None


_ELEMENT = re.compile(r"\s*([A-Za-z])\s*\\in(?![A-Za-z])")


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
    _, name = quantity(plain) or measured(plain) or ("", "")
    return "deg" if re.fullmatch(DEGREES, name) else _unit_named(normalise(name).lower())


def _unit_named(text: str) -> str | None:
    """Return a unit in base units: ``squarefeet`` -> ``145161/1562500 m^2``, ``g/cc``, ``kg/l`` -> the same.

    A price per hour counts as a number of dollars.
    """
    parts = _PER.split(_COMPOUNDS.get(text, text))
    factors = [parsed for part in parts if (parsed := _factor(part)) is not None]
    if len(factors) < len(parts) or len(parts) > _LONGEST_UNIT:
        return None
    if factors[0][1] == "dollar":
        factors = factors[:1]
    size, powers = Fraction(1), Counter[str]()
    for place, (factor, base, power) in enumerate(factors):
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
        ("gal gallon", "1", "gal", 1),  # there are several gallons
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
    match = _HALF_OF_DAY.search(normalise(answer).lower())
    return match[2] if match else None


def same_between_colons(gold: str, answer: str) -> bool | None:
    """Compare times, and ratios of three or more numbers: math-verify reads 3:4:5 as 3/4/5.

    None unless both are numbers with colons, and ``gold`` is a time or has at least three numbers. A time has
    a.m. or p.m., or a number with a leading zero; ratios are equal up to a common factor.

        8:34\\text{ p.m.}, 8:34   True      5:00, 05:00   True       2:3:5, 4:6:10   True
        8:34\\text{ p.m.}, 16:68  False     19:60, 19/60  None       2:3:5, 2:5:3    False
    """
    ours, theirs = _split_at_colons(gold), _split_at_colons(answer)
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


def _split_at_colons(answer: str) -> list[str] | None:
    plain = _HALF_OF_DAY.sub(r"\g<before>", normalise(answer).lower()).rpartition("=")[2]
    return plain.split(":") if re.fullmatch(r"\d{1,9}(?::\d{1,9})+", plain) else None


_HALF_OF_DAY = re.compile(r"(?P<before>\d)([ap])\.?m\.?(?![a-z])")


def rename_capitals(gold: str, answer: str) -> tuple[str, str]:
    """Rename the capitals of letters that occur in both cases, which math-verify reads as one variable.

    ``R-r`` and ``r-R`` become ``v-r`` and ``r-v``. A letter in one case stays: 3r^2 may mean 3R^2. Letters of
    commands and of ``\\text{}`` do not count.
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
_SPARE = "vwzux"  # letters in no unit: math-verify drops a final qr or yr as a unit


def worded_numbers(answer: str) -> tuple[str, ...]:
    """Return the numbers of an answer with nouns: ``4\\text{ cats}, 6\\text{ dogs}`` -> ("4", "6")."""
    numbers = tuple(re.findall(r"\d+(?:\.\d+)?", answer))
    return numbers if len(numbers) > 1 and re.search(r"\\text\s*\{[^{}]*[A-Za-z]{3}", answer) else ()


def subscripts(answer: str) -> tuple[str, ...]:
    """Return the number bases of an answer: ``52_8``, ``52_{\\text{eight}}`` -> ("8",)."""
    bases = re.findall(r"\d\)?\s*_\s*\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(\d+|[a-z]+)", latex(answer))
    return tuple(_BASES.get(base, base) for base in bases)


def strip_percent(gold: str, answer: str, *, share: Callable[[], bool]) -> list[tuple[str, str]]:
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


# Unevaluated arithmetic: ``123+456`` where the gold is 579, ``\max(3, 5)`` for 5


_SPACES = re.compile(r"\s|\\[,;:! ]|~|\\(?:left|right|quad|qquad|displaystyle)(?![A-Za-z])")
_DIGITS = r"-?(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)?(?:\.\d+)?"
_PLAIN = re.compile(rf"\+?(?=[-.\d]){_DIGITS}")
_UNIT_BEHIND = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit)\{.*$|\^\{?\\circ\}?|\\?%|\\?\$", re.DOTALL)
_POWER_OF_TEN = re.compile(rf"(?<![\d.])({_DIGITS})(?:\\times|\\cdot|\*)10\^(?:\{{[-+]?\d+\}}|\d)$")
_MIXED = re.compile(r"[-+]?\(?\d+(?:\+?\\frac\{\d+\}\{\d+\}|\s+\d+/\d+)\)?")
_GROUPED = r"(?:\d{1,3}(?:,\d{3})+|[\d.]+)"
_FRACTION = re.compile(rf"[-+]?(?:\\frac(?:\{{-?[\d.]+\}}\{{-?[\d.]+\}}|\d\d)|{_GROUPED}/{_GROUPED})")
_OPERAND_END, _OPERAND = r"[\d.][)}\]!]*", r"[({\[]*-?[({\[]*(?:\\sqrt|\\frac|\\binom)?[({\[]*-?[\d.]"
_E_NOTATION = r"(?<=[\d.])[eE][-+]\d"
_LETTER = rf"(?:(?<![A-Za-z\\])(?!{_E_NOTATION})[A-Za-z](?![A-Za-z])|\\(?:pi|arc|sin|cos|tan|cot|sec|csc))"
_OPERATION = re.compile(
    rf"(?:{_OPERAND_END}|{_LETTER}[)}}\]!|]*)(?:[-+*]|\\times|\\cdot|\\ast|\\div)"
    rf"(?:{_OPERAND}|[({{\[|]*{_LETTER})|[\d.]\)?\(\s*-?[\d.]"
)
_QUOTIENT = re.compile(
    rf"\\frac(?:\{{[^{{}}A-Za-z\\]*\}}\{{[^{{}}A-Za-z\\]*\}}|\d\d)|{_OPERAND_END}/{_OPERAND}"
)
# A root of a power, and a power of a root, are operations; a root of a number is a notation.
_FUNCTION = re.compile(
    r"\\(?:max|min|gcd|lcm|log|ln|lg|exp|[lr]?floor|[lr]?ceil|[dt]?binom|choose)"
    r"(?![A-Za-z])|\\sqrt.*(?:\^|\\sqrt)|\^.*\\sqrt",
    re.DOTALL,
)
# Signs of a computation, which an answer may have only where the gold has the text of the group, too.
_COMPUTATION = re.compile(
    r"\\(?:i{1,2}|o|b)?(int|sum|prod|lim|det|mod)(?![A-Za-z])|(vmatrix)"
    r"|(matrix\}\s*(?:\\cdot\s*|\\times\s*)?(?:\\begin|\^\{?-?\d))"
)
_NAMED = re.compile(
    r"\\(?:operatorname\*?|text|mathrm|mbox)\s*\{\s*(gcd|lcm|max|min|log|ln|floor|ceil|exp|det)\s*\}(?=\s*[_({\\])"
)
_BOUND = re.compile(r"_\s*\{[^{}]*=[^{}]*\}")  # the bound of a sum is no equation
_SIDES = re.compile(r"=|\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])")
_NAME = re.compile(r"[A-Za-z]\w*(?:\{\w+\})?|\\[a-z]+|[A-Za-z]\(\w+\)")
_IN_BRACKETS = re.compile(r"\s*(?:\\left\s*)?\\?[({\[](.*?)(?:\\right\s*)?\\?[)}\]]\s*", re.DOTALL)
_COMMA = re.compile(r",(?![^()\[\]]*[)\]])")


def is_unsolved(gold: str, answer: str) -> bool:
    """Return whether ``answer`` is an unevaluated operation on numbers, and ``gold`` a plain number or a list
    of plain numbers; or whether ``answer`` is a sum, an integral, a limit, ... that ``gold`` lacks.

    Notation of a single number is evaluated: ``1.5\\times 10^3``, ``2\\frac{3}{4}``, a fraction (reduced or
    not, also ``1158/2``), a power, a root, ``5!``, an absolute value, ``\\sin\\frac{\\pi}{2}``. An equation
    is solved when one side is: ``2+3=5``.

        579, 123+456    true          145, 29\\cdot 5    true          3, \\frac{6}{2}    false
        5, \\max(3,5)   true          123, \\sqrt{123^2} true         5, \\sqrt{25}     false
        x=5, x=2+3      true          (5,4), (2+3,4)    true          \\frac13, \\int_0^1 x^2 dx   true
    """
    text = _NAMED.sub(r"\\\1 ", _BOUND.sub("", latex(answer.strip())))
    plain = tidy(gold)
    numbers = [_unlabelled_number(part) for part in _elements(plain)]
    if not all(_PLAIN.fullmatch(number) for number in numbers):
        return _computes(text, plain) and all(_NAME.fullmatch(s) or _computes(s, plain) for s in _sides(text))
    whole = "." not in "".join(numbers)
    parts = [text] if len(numbers) == 1 else _elements(replace_connectives(text))
    return any(
        sides and not any(_is_solved(side, whole=whole) for side in sides)
        for sides in (_sides(_UNIT_BEHIND.sub("", part)) for part in parts)
    )


def _elements(text: str) -> list[str]:
    """Split a list, a set or a tuple."""
    inside = _IN_BRACKETS.fullmatch(text)
    return _COMMA.split(inside[1] if inside else text)


def _unlabelled_number(element: str) -> str:
    element = LABEL.sub("", element).strip()
    split = quantity(element)
    return _SPACES.sub("", split[0] if split else element)


def _sides(text: str) -> list[str]:
    sides = (side.strip().rstrip(".") for side in _SIDES.split(text))
    return [side for side in sides if side]


def _computes(text: str, gold: str) -> bool:
    """Return whether ``text`` has the sign of a computation that ``gold`` lacks."""
    return any(match[match.lastindex or 0] not in gold for match in _COMPUTATION.finditer(text))


def _is_solved(side: str, *, whole: bool) -> bool:
    if _MIXED.fullmatch(side.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").strip()):
        return True
    text = re.sub(r"\\[dt]frac", r"\\frac", _SPACES.sub("", side))
    if _NAME.fullmatch(text):  # the variable on the left of an equation
        return False
    if _FRACTION.fullmatch(text):
        return True
    text = _POWER_OF_TEN.sub(r"\1", text)
    if any(pattern.search(side) for pattern in (_FUNCTION, _COMPUTATION)) or _OPERATION.search(text):
        return False
    return not (whole and _QUOTIENT.search(text))
