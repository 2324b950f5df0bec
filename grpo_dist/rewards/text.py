"""Answers as text: finds boxes and normalises notation. Nothing is evaluated."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

from grpo_dist.rewards.braces import matching_braces, with_braces, without_outer_braces
from grpo_dist.rewards.wording import as_meant, connected, numbers_apart

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|(?=[^\s{]))")
_INNER_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_UNBRACED = re.compile(r"(?!\\(?:boxed|fbox))\\?[\w.\-]+")  # a box there is a separate box

_SPACES = re.compile(r"\\[,;:!> ]|~|\\quad|\\qquad")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|operatorname|mbox|rm|bf)\s*\{([^{}]*)\}")
DEGREES = r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)"
_FRACTION = r"\\[dt]?frac\s*\{-?\d+\}\s*\{\d+\}"
_VALUE = rf"(?:\d+(?:\.\d+)?|\.\d+|{_FRACTION}|\d+\s*/\s*\d+)"
_SYMBOLS = "mm cm km dm mg kg ml mL ft in yd mi lb lbs oz hr hrs min sec pm am Hz kW m g s l h L".replace(
    " ", "|"
)
_WORDS = r"\s[A-Za-z]{3,}[A-Za-z .]*"  # without a space it is a product: 12xyz
_IN_TEXT = r"\\(?:text|mathrm|mbox)\s*\{(?:[^{}\d?+~&]|(?<=[A-Za-z^])\d)*\}"
_ORDINAL = rf"(?:st|nd|rd|th)(?:{_WORDS})?"
# Without a space m/s may be a quotient of variables.
_QUOTIENT = rf"(?:(?<=\s)|(?=[A-Za-z]{{2}}))(?:{_SYMBOLS})\s*/\s*(?:{_SYMBOLS})"
_SHORT = rf"(?:{_QUOTIENT}|{_SYMBOLS})(?![A-Za-z])\.?"
_UNIT = rf"(?:{_SHORT}|{_ORDINAL}|{_WORDS}|{_IN_TEXT})(?:\s*\^\s*\{{?\d\}}?)?"
CURRENCY = r"(?:\\?\$|[€£¥₹₩₽]|\\(?:euro|pounds|yen)(?![A-Za-z]))"
_QUANTITY = re.compile(
    rf"(?:{CURRENCY}\s*)?(-?\s*(?:\d+,\d{{1,2}}(?=\s*€)|{_VALUE}))\s*(?:({_UNIT}|{DEGREES})|{CURRENCY})?\s*\.?"
)
# Words after a number that change its value: 3 million is not 3.
_NOT_A_UNIT = re.compile(
    r"(?<![A-Za-z])(?:hundred|thousand|million|billion|trillion|dozen|half|halves|(?:third|quarter|fourth|fifth|sixth|seventh"
    r"|eighth|ninth|tenth|hundredth|thousandth)s?|squared|cubed|factorial|root|power|pi|or|and|more|less|fewer|most|least|not"
    r"|mod|modulo|choose|plus|minus|times|over|divided|infinity|a?sin|a?cos|a?tan|log|ln|exp|sqrt)(?![A-Za-z])",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"(?<![\d.])(?!0,)\d{1,3}(?:(?:\{,\}|,|\\,|\s)\d{3})+(?!\d)")
_REPEATING = re.compile(r"(?<!\d)(-?\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?(?!\\dot)")
_DOTTED = re.compile(r"(?<![\d.])(-?\d{0,20})\.(\d{0,9}?)(\d{1,9}?)\3{2,9}(?:\.\.\.|\\l?dots|…)")
LABEL = re.compile(
    r"^\s*(?!\\not(?![a-z]))((?:[A-Za-z]|\\[a-z]+)(?:_(?:\{(?:\\text\s*\{\w+\}|[^{}=])+\}|\w))?\s*'{0,3}\s*(?:\(\s*[\w+-]+\s*\))?)"
    r"\s*=(?!=)(?!\s*[A-Za-z]\s*$)"
)
_DERIVATIVE_LABEL = re.compile(r"^\\[dt]?frac\s*\{\s*d[^{}=]*\}\s*\{\s*d[^{}=]*\}\s*=")
_MIXED = re.compile(r"(?<![\w.}^/])(-?)(\d+)(?:\s*(" + _FRACTION + r")|\s+(\d+/\d+))(?![\d.^])")
_SAME_AS = {
    "\\exponentialE": "e ", "\\imaginaryI": "i ", "\\imaginaryJ": "i ", "\\mleft": "", "\\mright": "",
    "\\differentialD": "d ", "\\lnot": "\\neg ", "\\leqq": "\\le ", "\\geqq": "\\ge ",
    "\\lbrace": "\\{", "\\rbrace": "\\}",
}  # fmt: skip
_OTHER_NAMES = re.compile("(?:" + "|".join(map(re.escape, _SAME_AS)) + r")(?![A-Za-z])\s*")
_HTML = re.compile(r"<su([pb])>(.*?)</su\1>")
_WORD_LABEL = re.compile(
    r"(?:\\text\s*\{\s*)?\b[A-Z][a-z]{2,}(?:\s+[a-z]{2,})?\s*(?:\}\s*)?[:=]\s*(?=-?[\d\\])"
)
_VECTOR = re.compile(r"\\(?:nabla|vec|mathbf|boldsymbol)(?![A-Za-z])")
_VECTOR_OF_LETTER = re.compile(r"(\\(?:vec|mathbf|boldsymbol))\s*(?:\{\s*([A-Za-z])\s*\}|\s([A-Za-z]))")
_SIZED_BRACE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)\s*(?=\\[{}])")
_QUOTED = re.compile(r"^(['\"])(.*)\1$", re.DOTALL)
_TWICE_NEGATED = re.compile(r"-\s*\(\s*-([^()+\-=<>,]*)\)(?!\s*[\^!])")

_STATEMENTS = (  # that an answer follows
    r"答案\s*(?:应该?)?(?:[是为]|等于|[:：])\s*[:：]?", r"答えは?\s*[:：]?", r"(?:정답|답)(?:은|\s*[:：])",
    r"\bla\s+respuesta\s+(?:final\s+)?es\b:?", r"\bla\s+réponse\s+(?:finale\s+)?est\b:?",
    r"\bdie\s+(?:endgültige\s+)?antwort\s+(?:ist|lautet)\b:?", r"\ba\s+resposta\s+(?:final\s+)?é\b:?",
    r"\bla\s+risposta\s+(?:finale\s+)?è\b:?", r"\bответ\s*[:—–-]",
)  # fmt: skip
_STATED = re.compile("|".join(_STATEMENTS), re.IGNORECASE)
_CHOSEN = re.compile(
    r"(?<![不没未非勿])(?<!不能)(?<!不应)(?<!不会)选(?:择|项)?(?:是|为)?\s*[:：]?\s*(?=[(（\\$*]*[A-J](?![A-Za-z]))"
)  # "故选：B"
_HAN = r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"
_BEFORE_HAN = re.compile(rf"(?<=[\dA-Za-z$}}])(?={_HAN})|(?:です|입니다)")
_STOP = re.compile(r"[。｡]")
_NOTHING = re.compile(
    r"(?:thereare)?no(?:real|integer|positive|such|valid|rational|complex)*(?:solutions?|roots?)(?:exists?)?"
    r"|\\varnothing|emptyset|(?:the)?emptyset|\{\}|∅"
)

_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "⁄": "/", "…": r"\ldots ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi ", "°": r"^{\circ}",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "±": r"\pm ", "√": r"\sqrt ",
    "∀": r"\forall ", "∃": r"\exists ",
}  # fmt: skip
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_GREEK = re.compile("[Α-Ωα-ω]")
_VULGAR = re.compile("[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]")


def boxes(text: str) -> list[str]:
    """Return the contents of every ``\\boxed{...}`` and ``\\fbox{...}`` with balanced braces, in order.

    A box that is never closed does not count. ``\\boxed 5`` is a box around 5. The outer of nested boxes
    counts.
    """
    return [content for content, _ in _boxes(text)]


def behind_boxes(text: str) -> str:
    """Return the text behind the last box; all of it without a box."""
    return text[max((end for _, end in _boxes(text)), default=0) :]


def _boxes(text: str) -> Iterator[tuple[str, int]]:
    """Yield the content and the end of each box."""
    closed = matching_braces(text)
    position = 0
    while match := _BOX.search(text, position):
        if match.group(1) != "{":
            token = _UNBRACED.match(text, match.end())
            position = token.end() if token else match.end()
            if token:
                yield token.group(), position
        elif (end := closed.get(match.end() - 1)) is None:
            position = match.end()
        else:
            position = end + 1
            yield _without_inner_boxes(text[match.end() : end].strip()), position


def alternatives(gold: str) -> list[str]:
    """Return the golds of which each is right: those of a JSON list of texts, else ``gold`` alone.

    '["1/2", "50%"]' -> 1/2, 50%      "[1, 2]" -> [1, 2]
    """
    if not gold.startswith('["'):
        return [gold]
    try:
        golds = json.loads(gold)
    except (ValueError, RecursionError):
        return [gold]
    return golds if all(isinstance(text, str) for text in golds) else [gold]


def tagged_answer(text: str) -> str | None:
    """Return the stripped text between the last pair of answer tags; None without a pair."""
    before, closing, _ = text.rpartition("</answer>")
    return before.rpartition("<answer>")[2].strip() if closing and "<answer>" in before else None


def in_english(text: str) -> str:
    """Replace what states an answer in other languages: ``答案是：12。`` -> ``The final answer is 12. ``"""
    if not text.isascii():
        text = _STOP.sub(". ", _BEFORE_HAN.sub(" ", _CHOSEN.sub(" The answer is ", text)))
    return _STATED.sub(" The final answer is ", text)


def _without_inner_boxes(box: str) -> str:
    """Remove inner boxes and the braces that remain around the whole: ``\\boxed{5}`` -> ``5``."""
    bare = _INNER_BOX.sub("", box)
    if bare == box:
        return box
    return without_outer_braces(bare)


@lru_cache(maxsize=4096)
def tidy(answer: str) -> str:
    """Rewrite notation that math-verify cannot parse in LaTeX that it can."""
    text = as_meant(latex(as_meant(answer.strip())) if not answer.isascii() else answer.strip())
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = _OTHER_NAMES.sub(lambda match: _SAME_AS[match.group().strip()], re.sub(r"\\!\s*", "", text))
    text = _HTML.sub(lambda match: f"{'^' if match[1] == 'p' else '_'}{{{match[2]}}}", text)
    text = _QUOTED.sub(r"\2", re.sub(r"\\[\[\]()]|(?<!\\)\$", "", text).strip())
    text = without_outer_braces(with_braces(_SIZED_BRACE.sub("", text)))
    text = _ungroup(text)
    text = _REPEATING.sub(lambda m: _fraction(*m.groups()), text)
    text = _DOTTED.sub(lambda m: _fraction(*m.groups()), text)
    text = re.sub(r"(\.\d+)\s*(?:\.\.\.|\\l?dots|…)$", r"\1", text)
    text = re.sub(r"(?<=\d)i\b", r" i", text)  # 2i: complex to math-verify only when i stands alone
    text = re.sub(r"\\mathrm\s*\{\s*([ei])\s*\}", r"\1", text)
    text = re.sub(r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi ", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<=\d)\s+per\s?cent\b", r"\\%", text)
    text = _MIXED.sub(lambda m: f"{m[1]}({m[2]}+{m[3] or m[4]})", text)
    text = re.sub(r"^(-?\d+(?:\.\d+)?)[eE]([+-]?\d+)$", r"\1 \\times 10^{\2}", text)
    text = _TWICE_NEGATED.sub(r"+(\1)", text)
    text = re.sub(r"(?:\\left)?\\langle", "(", text)
    text = re.sub(r"(?:\\right)?\\rangle", ")", text)
    text = numbers_apart(connected(text))
    text = re.sub(r"^\\\{\s*[a-z]\s*(?:\||\\mid|:)\s*(.*)\\\}$", r"\1", text)
    text = re.sub(r"\+\s*\\infty", r"\\infty", text)
    text = re.sub(r"(?<=[\w})])\.$", "", text)
    return text.lstrip("+").strip()


def _ungroup(text: str) -> str:
    """1,234 -> 1234 if the comma cannot separate elements: a lone number, or a list with ", "."""
    listed = re.search(r"[(\[{]\s*-?\d", text.replace("{,}", ",")) or len(_GROUPED.findall(text)) != 1
    if listed and (not re.search(r"\d,\s+-?\d", text) or re.search(r"\d,-?\d(?!\d\d(?!\d))", text)):
        return text
    grouped = re.compile(_GROUPED.pattern.replace(r"|\s)", ")")) if listed else _GROUPED
    return grouped.sub(lambda m: re.sub(r"\D", "", m.group()), text)


@lru_cache(maxsize=4096)
def normalise(answer: str) -> str:
    """Remove variations of notation. Equal results imply equal answers; different results imply nothing."""
    text = tidy(answer).strip("$ ")
    text = _SPACES.sub(" ", text)
    for _ in range(3):
        text = _WRAPPED.sub(r" \1 ", text)
    text = re.sub(r"\\(?:left|right|displaystyle|limits|[bB]igg?)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\([gl])eq(?:slant)?(?![A-Za-z])", r"\\\1e", text)
    text = re.sub(r"\\?\$", "", text)
    text = re.sub(r"^\s*(?:the|an?(?=\s+[A-Za-z]{4,}))\s+", "", text, flags=re.IGNORECASE)
    text = re.sub(r"(?<=[A-Za-z]{3}),?\s+(?:and|or)\s+(?=[A-Za-z]{3})", ",", text)
    text = text.replace("\\%", "%").replace("\\{", "{").replace("\\}", "}")
    text = _VECTOR_OF_LETTER.sub(lambda match: f"{match[1]}{{{match[2] or match[3]}}}", text)
    if not _VECTOR.search(text):  # whose products differ
        text = re.sub(r"\\(?:cdot|times)(?![A-Za-z])", "*", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # "2 3" is neither 23 nor a product
    text = text if text.endswith("...") else text.rstrip(".")
    if re.fullmatch(r"\(?[A-Za-z]\)?", text):
        return text.strip("()").upper()
    if re.fullmatch(r"-?\d*\.\d*0+|-?\d+\.", text):
        text = text.rstrip("0").rstrip(".")
    if text.isalpha():
        text = text.lower()
    if text in ("infinitelymany", "infinite", "infinity"):
        return "\\infty"
    return "\\emptyset" if _NOTHING.fullmatch(text) else text


def spellings(answer: str) -> list[str]:
    """Return ``answer`` tidied, and alternatives: without its label or unit, in radians, as a tuple."""
    plain = tidy(answer)
    found = [plain]
    if plain.count("=") == 1:
        found.append(_DERIVATIVE_LABEL.sub("", LABEL.sub("", plain)))
    if (unlabelled := _WORD_LABEL.sub("", plain)) != plain:
        found.append(unlabelled)
    if (measured := quantity(plain)) is not None:
        found.append(measured[0])
    if (hundredths := percent(plain)) is not None:
        found += [hundredths, f"\\frac{{{hundredths}}}{{100}}"]
    if re.search(DEGREES, plain):
        found.append(re.sub(rf"(\d+(?:\.\d+)?)\s*{DEGREES}", r"(\\frac{\1 \\pi}{180})", plain))
    column = re.fullmatch(r"\\begin\{[pb]?matrix\}([^&]*?)(?:\\\\)?\s*\\end\{[pb]?matrix\}", plain, re.DOTALL)
    if column is not None and "\\\\" in column.group(1):
        found.append("(" + ",".join(column.group(1).split("\\\\")) + ")")
    return list(dict.fromkeys(_last_variable_kept(s.strip()) for s in found if s.strip()))


def _last_variable_kept(text: str) -> str:
    """``3n+2m`` -> ``3n+2{m}``: math-verify drops a final m, g, s, ... as a unit even among variables."""
    match = re.fullmatch(r"(.*[\d}]\s*)([A-Za-z])", text, re.DOTALL)
    if match is None or not re.search(
        r"[A-Za-z]", re.sub(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+", "", match[1])
    ):
        return text
    return f"{match[1]}{{{match[2]}}}"


def percent(plain: str) -> str | None:
    """Return ``28`` for a tidied ``28\\%``; None if it is not a percentage."""
    if not plain.endswith("%"):
        return None
    number = plain[:-1].removesuffix("\\").rstrip()
    return number if re.search(r"\d", number) else None


def quantity(plain: str) -> tuple[str, str] | None:
    """Split a tidied number into (number, unit), "" for no unit; None if it is not a quantity."""
    match = _QUANTITY.fullmatch(_SPACES.sub(" ", plain).strip("$ "))
    if match is None or _NOT_A_UNIT.search(match.group(2) or ""):
        return None
    return match.group(1), match.group(2) or ""


def labelled_list(answer: str) -> tuple[tuple[str, str], ...]:
    """Split a list into names ("" for none) and values: ``x=1, y=10`` -> (("X", "1"), ("Y", "10"))."""
    found = []
    for part in re.split(r",(?![^()\[\]]*[)\]])", tidy(answer)):
        label = LABEL.match(part)
        name = normalise(label.group(1)) if label else ""
        found.append((name, normalise(part[label.end() :] if label else part)))
    return tuple(found)


def same_list(gold: str, answer: str) -> bool:
    """Return whether two lists agree: by name if all elements have one, else by position."""
    ours, theirs = labelled_list(gold), labelled_list(answer)
    if any(not value for _, value in ours) or len(ours) != len(theirs):
        return False
    if all(name for name, _ in ours + theirs):
        return sorted(ours) == sorted(theirs)
    if any(name for name, _ in ours) and any(name for name, _ in theirs):
        return ours == theirs
    return [value for _, value in ours] == [value for _, value in theirs]


def latex(text: str) -> str:
    """Convert Unicode digits, fractions, superscripts and symbols to LaTeX; drop invisible characters."""
    if text.isascii():
        return text
    text = "".join(c for c in text if unicodedata.category(c) != "Cf")
    text = _RAISED.sub(lambda m: "^{" + unicodedata.normalize("NFKC", m.group()) + "}", text)
    text = _LOWERED.sub(lambda m: "_{" + unicodedata.normalize("NFKC", m.group()) + "}", text)
    text = _VULGAR.sub(
        lambda m: "\\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m.group()).split("⁄")), text
    )
    text = "".join(_UNICODE.get(c, c) for c in text)
    text = unicodedata.normalize("NFKC", text)
    text = "".join(_UNICODE.get(c, c) for c in text)
    text = "".join(str(unicodedata.digit(c)) if c.isdigit() and not c.isascii() else c for c in text)
    text = _GREEK.sub(_greek_command, text)
    return re.sub(r"\\sqrt (\d+|[a-z])", r"\\sqrt{\1}", text)


def _greek_command(match: re.Match[str]) -> str:
    """θ -> \\theta, Δ -> \\Delta"""
    size, _, name = unicodedata.name(match.group(), "").removeprefix("GREEK ").partition(" LETTER ")
    name = {"LAMDA": "LAMBDA"}.get(name, name)
    return (
        f"\\{name.capitalize() if size == 'CAPITAL' else name.lower()} " if name.isalpha() else match.group()
    )


def _fraction(whole: str, fixed: str, period: str) -> str:
    """Return a repeating decimal as an exact fraction: 0.1(6) -> \\frac{1}{6}."""
    value = Fraction(int(whole.lstrip("-") or 0)) + Fraction(int(fixed or 0), 10 ** len(fixed))
    value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return f"{'-' if whole.startswith('-') else ''}\\frac{{{value.numerator}}}{{{value.denominator}}}"
