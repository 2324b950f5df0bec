"""Answers as text: finding boxes, and spelling the same thing the same way. Regular expressions only, nothing evaluated."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
_SPACES = re.compile(r"\\[,;:!> ]|~|\\quad|\\qquad")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox|rm|bf)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree")
_FRACTION = r"\\[dt]?frac\s*\{-?\d+\}\s*\{\d+\}"
_VALUE = rf"(?:\d+(?:\.\d+)?|\.\d+|{_FRACTION}|\d+\s*/\s*\d+)"
_UNIT = r"(?:[A-Za-z]{2,}[A-Za-z .]*|[mgslhL]|\\text\s*\{[^{}]*\}|\\mathrm\s*\{[^{}]*\})(?:\^\{?\d\}?)?"
_QUANTITY = re.compile(rf"(?:\\?\$|€|£)?\s*(-?\s*{_VALUE})\s*({_UNIT}|\^\s*\{{?\s*\\circ\s*\}}?|\\degree)?\s*\.?")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\{,\}|,|\\,|\s)\d{3})+(?!\d)")
_REPEATING = re.compile(r"(-?\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_DOTTED = re.compile(r"(-?\d*)\.(\d*?)(\d+?)\3{2,}(?:\.\.\.|\\l?dots|…)")
_LABEL = re.compile(r"^\s*(?:[A-Za-z]|\\[a-z]+)(?:_\{?(?:\\max|\\min|\\text\{\w+\}|\w+)\s*\}?)?\s*(?:\(\s*\w\s*\))?\s*=(?!=)")
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∞": r"\infty ", "π": r"\pi ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "°": r"^{\circ}", "…": r"\ldots ",
    "∈": r"\in ", "±": r"\pm ", "√": r"\sqrt ",
}  # fmt: skip
_SUPERSCRIPT = {c: f"^{i}" for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}


def boxes(text: str) -> list[str]:
    """Contents of every ``\\boxed{...}`` and ``\\fbox{...}``, outermost braces balanced, in order of appearance.

    A box that is never closed is not one. ``\\boxed 5`` is a box around 5. Of nested boxes only the outer counts.
    """
    found, position = [], 0
    while match := _BOX.search(text, position):
        if match.group(1) != "{":
            token = re.compile(r"\\?[\w.\-]+").match(text, match.end())
            position = token.end() if token else match.end() + 1
            if token:
                found.append(token.group())
            continue
        end = _closing(text, match.end())
        if end is None:
            break
        found.append(text[match.end() : end].strip())
        position = end + 1
    return [re.sub(r"\\(?:boxed|fbox)\s*(?=\{)", "", box) for box in found]


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def _closing(text: str, start: int) -> int | None:
    depth = 1
    for match in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def tidy(answer: str) -> str:
    """Spellings that math-verify stumbles over, in the one it knows; still LaTeX."""
    text = _ascii(answer.strip())
    text = re.sub(r"\\[\[\]()]", "", text).strip().strip("$").strip()
    text = _ungroup(text)
    text = _REPEATING.sub(lambda m: _fraction(*m.groups()), text)
    text = _DOTTED.sub(lambda m: _fraction(*m.groups()), text)
    text = re.sub(r"(?<=\d)i\b", r" i", text)  # 2i: complex to math-verify only when i stands alone
    text = re.sub(r"\\mathrm\s*\{\s*e\s*\}", "e", text)
    text = re.sub(r"(?<![\w.}])(-?)(\d+)\s*(" + _FRACTION + ")", r"\1(\2+\3)", text)  # mixed number
    text = re.sub(r"^(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1 \\times 10^{\2}", text)
    text = re.sub(r"-\s*\(\s*-([^()]*)\)", r"+(\1)", text)
    text = re.sub(r"(?:\\left)?\\langle", "(", text)
    text = re.sub(r"(?:\\right)?\\rangle", ")", text)
    text = re.sub(r"\\(?:text|mathrm|mbox)\s*\{[\s,]*(?:or|and)\s*\}|(?<=[\d\s)}\]])\s(?:or|and)\s", ",", text)
    text = re.sub(r"^\\\{\s*[a-z]\s*(?:\||\\mid|:)\s*(.*)\\\}$", r"\1", text)
    text = re.sub(r"\+\s*\\infty", r"\\infty", text)
    text = re.sub(r"(?<=[\w})])\.$", "", text)
    return text.lstrip("+").strip()


def _ungroup(text: str) -> str:
    """1,234 -> 1234, where the comma cannot separate elements: a lone number, or a list that separates by ", "."""
    listed = re.search(r"[(\[{]\s*-?\d", text.replace("{,}", ",")) or len(_GROUPED.findall(text)) != 1
    if listed and not re.search(r"\d,\s+-?\d", text):
        return text
    grouped = re.compile(_GROUPED.pattern.replace(r"|\s)", ")")) if listed else _GROUPED
    return grouped.sub(lambda m: re.sub(r"\D", "", m.group()), text)


def normalise(answer: str) -> str:
    """What is left when writing habits are taken away. Equal results mean equal answers; different ones mean nothing."""
    text = tidy(answer).strip("$ .")
    text = _SPACES.sub(" ", text)
    for _ in range(3):
        text = _WRAPPED.sub(r" \1 ", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits|[bB]igg?)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\?\$", "", text)
    text = re.sub(r"^\s*(?:an?|the)\s+", "", text, flags=re.IGNORECASE)
    text = text.replace("\\%", "%").replace("\\cdot", "*").replace("\\times", "*").replace("\\{", "{").replace("\\}", "}")
    text = re.sub(r"\s+", "", text).rstrip(".")
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return text.strip("()").upper()
    if re.fullmatch(r"-?\d*\.\d*0+|-?\d+\.", text):
        text = text.rstrip("0").rstrip(".")
    return "\\emptyset" if text.lower() in ("nosolution", "nosolutions", "\\varnothing", "emptyset") else text


def spellings(answer: str) -> list[str]:
    """``answer`` tidied, and what else it may be meant as: without its label, as a bare quantity, in radians, as a tuple."""
    plain = tidy(answer)
    found = [plain, _LABEL.sub("", plain)]
    if (quantity := _QUANTITY.fullmatch(_SPACES.sub(" ", plain).strip("$ "))) is not None:
        found.append(quantity.group(1))
    if (percent := re.fullmatch(r"(.*\d.*?)\s*\\?%", plain)) is not None:
        found += [percent.group(1), f"\\frac{{{percent.group(1)}}}{{100}}"]
    if (function := re.fullmatch(r"[a-zA-Z]\s*\(\s*([a-z])\s*\)\s*=([^=]*)", plain)) is not None:
        name, body = function.groups()
        if "x" not in body:
            found.append(re.sub(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])", "x", body))
    if _DEGREES.search(plain):
        found.append(re.sub(rf"(\d+(?:\.\d+)?)\s*(?:{_DEGREES.pattern})", r"(\\frac{\1 \\pi}{180})", plain))
    column = re.fullmatch(r"\\begin\{[pb]?matrix\}([^&]*?)(?:\\\\)?\s*\\end\{[pb]?matrix\}", plain, re.DOTALL)
    if column is not None and "\\\\" in column.group(1):
        found.append("(" + ",".join(column.group(1).split("\\\\")) + ")")
    return list(dict.fromkeys(s.strip() for s in found if s.strip()))


def labelled_list(answer: str) -> tuple[str, ...]:
    """``x=1000, y=10`` -> ("1000", "10"): the values of a comma-separated list, in order, without their names."""
    parts = re.split(r",(?![^()\[\]]*[)\]])", tidy(answer))
    return tuple(normalise(_LABEL.sub("", part)) for part in parts)


def unit(answer: str) -> str | None:
    """The unit of a quantity in the metric system, None where there is none: ``10\\text{ cm}`` -> ``cm``."""
    quantity = _QUANTITY.fullmatch(_SPACES.sub(" ", tidy(answer)).strip("$ "))
    name = normalise(quantity.group(2) or "").lower() if quantity else ""
    return _METRIC.get(name)


_METRIC = {
    alias: short
    for short, aliases in {
        "mm": "mm millimeters millimetres", "cm": "cm centimeters centimetres", "m": "m meters metres meter metre",
        "km": "km kilometers kilometres", "mg": "mg milligrams", "g": "g grams gram", "kg": "kg kilograms kilogram",
        "s": "s seconds second sec", "min": "min minutes minute", "h": "h hours hour hr", "l": "l liters litres liter",
        "ml": "ml milliliters millilitres",
    }.items()
    for alias in aliases.split()
}  # fmt: skip


def worded_numbers(answer: str) -> tuple[str, ...]:
    """The numbers of an answer that names what it counts, () for any other: ``40 \\text{ a}, 60 \\text{ b}`` -> ("40", "60")."""
    numbers = tuple(re.findall(r"\d+(?:\.\d+)?", answer))
    return numbers if len(numbers) > 1 and re.search(r"\\text\s*\{[^{}]*[A-Za-z]{3}", answer) else ()


def subscripts(answer: str) -> tuple[str, ...]:
    """Bases that numbers are written in: ``52_8`` -> ("8",)."""
    return tuple(re.findall(r"\d\)?_\{?(\d+)\}?", answer))


def _ascii(text: str) -> str:
    """Digits of any script, vulgar fractions, superscripts and mathematical signs in LaTeX; no invisible characters."""
    if text.isascii():
        return text
    text = "".join(_SUPERSCRIPT.get(c, c) for c in text if unicodedata.category(c) != "Cf")
    text = "".join(f"{{{c}}}" if c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞" else c for c in text)
    text = unicodedata.normalize("NFKC", text)
    digits = "".join(str(unicodedata.digit(c)) if c.isdigit() and not c.isascii() else c for c in text)
    text = "".join(_UNICODE.get(c, c) for c in digits)
    return re.sub(r"\\sqrt (\d+|[a-z])", r"\\sqrt{\1}", text)


def _fraction(whole: str, fixed: str, period: str) -> str:
    """0.1(6) -> \\frac{1}{6}, exactly."""
    value = Fraction(int(whole.lstrip("-") or 0)) + Fraction(int(fixed or 0), 10 ** len(fixed))
    value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return f"{'-' if whole.startswith('-') else ''}\\frac{{{value.numerator}}}{{{value.denominator}}}"
