"""Finds boxes in answers as text, and normalises notation. Nothing is evaluated."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

# Words of scale, struck-out text, separators


_SCALES = {
    "dozen": 12, "score": 20, "hundred": 10**2, "gross": 144, "thousand": 10**3, "thou": 10**3,
    "myriad": 10**4, "lakh": 10**5, "million": 10**6, "mln": 10**6, "mil": 10**6, "mill": 10**6,
    "crore": 10**7, "billion": 10**9, "bn": 10**9, "bil": 10**9, "trillion": 10**12, "quadrillion": 10**15,
    "quintillion": 10**18, "sextillion": 10**21, "septillion": 10**24,
}  # fmt: skip
_PLURALS = {f"{name}s": value for name, value in _SCALES.items() if name not in ("score", "gross", "thou")}
_SHARES = {
    "per thousand": "0.001", "per mille": "0.001", "per mill": "0.001", "per ten thousand": "0.0001",
    "per million": "0.000001", "ppm": "0.000001", "per billion": "0.000000001", "ppb": "0.000000001",
}  # fmt: skip
_FACTORS = {name: Decimal(value) for name, value in (_SCALES | _PLURALS | _SHARES).items()}
_PER_MILLE = re.compile(r"‰|\\(?:text)?per(?:thousand|mil(?:le?)?)(?![A-Za-z])")
_SPACE = r"(?:\s|\\[,;:! ]|~|\\quad|\\qquad|\\enspace|\\thinspace|\\hspace\*?\{[^{}]*\}|\\text\s*\{\s*\})"
TEXT = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mathit|operatorname|mbox)"
# Not K (kelvin), M and B (molar, bytes), nor 5k outside text (a product).
_KILO = re.compile(r"(?<![\w.^])(\d{1,15}(?:\.\d{1,15})?)\s*\\text\s*\{\s*k\s*\}")
SCALE_WORDS = "|".join(sorted(_FACTORS, key=len, reverse=True)).replace(" ", r"\s+")
_SCALED = re.compile(
    rf"(?<![\w.^])(\d{{1,15}}(?:(?:,|\{{,\}})\d{{3}}){{0,6}}(?:\.\d{{1,15}})?){_SPACE}*"
    rf"({TEXT}\s*\{{\s*)?({SCALE_WORDS})(?![A-Za-z])(\s*\}})?",
    re.IGNORECASE,
)
_STRUCK = re.compile(r"~~[^~]*~~|<(s|del|strike)>.*?</\1>")
_STRIKES = re.compile(
    r"\\(?:[bx]?cancel|hcancel|(?P<two>cancelto)|sout|xout|st|[hv]?phantom)(?![A-Za-z])"
    r"|\\enclose\s*\{[^{}]*strike[^{}]*\}"
)
_STRUCK_CHARACTER = re.compile(r"\w[\u0335-\u0338\u20d2\u20d3\u20e5]")  # after "=" it forms another sign
_LISTED = re.compile(rf"{TEXT}\s*\{{([\s,;]*(?:or\b|and\b|,|;|=)[^{{}}]*\d[^{{}}]*)\}}")
_SEPARATED = re.compile(rf"{TEXT}\s*\{{\s*[,;&]\s*\}}|\\&")
_CONNECTIVE = re.compile(
    rf"(?:,\s*)?{TEXT}\s*\{{[\s,]*(?P<words>or|and)\s*\}}|(?:,\s*)?(?<=[\d\s)}}\],])\s(?P<plain>or|and)\s"
    r"|(?<=\d)(?P<tight>or|and)(?=[A-Z\d\\(])"
)
_INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?(?:slant)?|[lg]t|neq?|in)(?![A-Za-z])")
# math-verify adds or joins numbers that are separated only by a space.
_APART = re.compile(rf"(?<=\d)(?<!frac\d)(?<!frac\s\d){_SPACE}+(?=\d|\(\s*-?\d[\d.]*\s*\)\s*$)")
_MODULUS = re.compile(
    rf"{TEXT}\s*\{{\s*\(?\s*mod(?:ulo)?\s+(\w+)\s*\)?\s*\}}"
    rf"|\(\s*{TEXT}\s*\{{\s*mod(?:ulo)?\s*\}}\s*(\w+)\s*\)|{TEXT}\s*\{{\s*mod(?:ulo)?\s*\}}\s*(\w+)"
    r"|\(\s*mod(?:ulo)?\s+(\w+)\s*\)|(?<![\\A-Za-z{(])mod(?:ulo)?\s+(\w+)"
)
_FAR_APART = re.compile(
    r"(?<=[\d)}])\s*(?:\\quad|\\qquad)(?![A-Za-z])\s*(?=-?(?:\d|\(|\\[dt]?frac|\\sqrt)|[a-z]\s*=)"
)


def rewrite_words(text: str) -> str:
    """Evaluate words of scale, drop struck-out text, and replace other separators of numbers by commas.

    2\\text{ (mod 5)}  2\\pmod{5}
    5\\text{ million}  5000000     \\cancel{4} 5   5     3\\text{, }4   3,4     2\\quad 3   2,3
    """
    text = _MODULUS.sub(lambda match: f"\\pmod{{{match[match.lastindex or 0]}}}", text)
    text = _PER_MILLE.sub(" per thousand ", _STRUCK_CHARACTER.sub("", text))
    text = _KILO.sub(r"\1 thousand", _STRUCK.sub(" ", remove_commands(text, _STRIKES)))
    for _ in range(3):  # 2 hundred thousand
        text, count = _SCALED.subn(_scaled, text)
        if not count:
            break
    return _SEPARATED.sub(",", _LISTED.sub(r" \1 ", text))


def replace_connectives(text: str) -> str:
    """Replace "and" and "or" between values by commas, and between inequalities by their signs.

    x=1\\text{ or }x=2   x=1,x=2     x<1\\text{ or }x>2   x<1 \\lor x>2
    """
    if not _INEQUALITY.search(text):
        return _CONNECTIVE.sub(",", text)

    return _CONNECTIVE.sub(lambda match: f" \\l{match['words'] or match['plain'] or match['tight']} ", text)


def _scaled(match: re.Match[str]) -> str:
    number, opened, word, closed = match.groups()
    value = Decimal(re.sub(r"[^\d.]", "", number)) * _FACTORS[" ".join(word.lower().split())]
    words = opened or "" if opened and not closed else "" if opened else closed or ""
    return f"{value.normalize():f}{words}"


def separate_numbers(text: str) -> str:
    """Turn numbers separated only by a space into a list: ``2\\ 3`` is 2,3, neither a number nor a sum."""
    return _APART.sub(",", _FAR_APART.sub(", ", text))


# Balanced braces of LaTeX, and commands with their arguments


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_ARGUMENT = re.compile(r"\s*(?:(?P<opening>\{)|(?P<command>\\(?:[A-Za-z]+|.))|\d[\d.]*|[^\s{}])", re.DOTALL)


def matching_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to the position of its closing brace."""
    pairs, waiting = {}, []
    for match in _BRACES.finditer(text):
        if match.group() == "{":
            waiting.append(match.start())
        elif match.group() == "}" and waiting:
            pairs[waiting.pop()] = match.start()
    return pairs


def remove_commands(text: str, commands: re.Pattern[str], replacement: str = " ") -> str:
    """Replace each match of ``commands`` and its arguments.

    A match takes one argument, or two if its group ``two`` matches. An argument is a pair of braces, however
    deep, or a token without braces: a number, a character, or a command with its arguments. A command without
    an argument stays.

        \\cancel{\\frac{1}{2}} 3 -> 3      \\cancel 5 -> ""      \\cancelto{0}{x} -> ""
    """
    if not commands.search(text):
        return text
    closed = matching_braces(text)
    parts, done = [], 0
    for match in commands.finditer(text):
        if match.start() < done:
            continue
        end: int | None = match.end()
        for _ in range(2 if match.groupdict().get("two") else 1):
            end = _end_of_argument(text, end, closed) if end is not None else None
        if end is not None:
            parts += [text[done : match.start()], replacement]
            done = end
    return "".join([*parts, text[done:]])


_SYMBOL = r"[A-Za-z]|\\(?:circ|prime|top|pi|infty|alpha|beta|gamma|theta|lambda|mu|phi|omega)(?![A-Za-z])"
_BARE = re.compile(  # the argument of an index, an exponent or a root
    rf"\\(?:text[a-z]*|mathrm)\s*\{{[^{{}}]*\}}|(\\log\s*_)\s*(\d)|([\^_])\s*(\d+(?:\.\d+)?|{_SYMBOL})"
    r"|(\\sqrt(?:\s*\[[^\[\]]*\])?)\s*(\d+|(?<=[\s\]])[A-Za-z])"
)
_ONE_DEEP = r"((?:[^{}]|\{[^{}]*\})*)"
_INFIX = re.compile(rf"(?:\{{|\A){_ONE_DEEP}\\(choose|over)(?![A-Za-z])\s*{_ONE_DEEP}(?:\}}|\Z)")
_TWO_PARTS = re.compile(r"\\(?:[dtc]?frac|[dt]?binom)(?![A-Za-z])\s*")
_PART = re.compile(rf"\s*(\d|{_SYMBOL})")


def add_braces(text: str) -> str:
    """Put braces around bare arguments of indices, exponents, roots and fractions.

        x_i^2 -> x_{i}^{2}     \\log_2 8 -> \\log_{2} 8     \\frac1{23}, {1\\over 23} -> \\frac{1}{23}

    An exponent, an index or a root takes a whole number (x^10 is meant as x^{10}); a fraction and the base of
    a logarithm take one digit.
    """
    text = _INFIX.sub(lambda m: f"\\{'frac' if m[2] == 'over' else 'binom'}{{{m[1]}}}{{{m[3]}}}", text)
    text = _BARE.sub(
        lambda match: "{}{{{}}}".format(*filter(None, match.groups())) if match.lastindex else match.group(),
        text,
    )
    for match in reversed(list(_TWO_PARTS.finditer(text))):
        position, parts = match.end(), list[str]()
        while len(parts) < 2:
            if (part := _PART.match(text, position)) is not None:
                parts.append(f"{{{part[1]}}}")
                position = part.end()
            elif (end := matching_braces(text).get(position)) is not None:
                parts.append(text[position : end + 1])
                position = end + 1
            else:
                break
        text = "".join([text[: match.end()].rstrip(), *parts, text[position:]])
    return text


def strip_outer_braces(text: str) -> str:
    """Remove braces around the whole: ``{(2,3)}`` -> ``(2,3)``."""
    begin, end = 0, len(text)
    if text.startswith("{"):
        closed = matching_braces(text)
        while begin < end and closed.get(begin) == end - 1:
            begin, end = begin + 1, end - 1
    return text[begin:end].strip()


def _end_of_argument(text: str, begin: int, closed: dict[int, int]) -> int | None:
    """Return the end of the argument that begins at or after ``begin``; None without an argument."""
    token = _ARGUMENT.match(text, begin)
    if token is None:
        return None
    if token["opening"]:
        end = closed.get(token.end() - 1)
        return None if end is None else end + 1
    position = token.end()
    while token["command"] and text.startswith("{", position) and position in closed:
        position = closed[position] + 1
    return position


# Answers


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
_IN_TEXT = r"\\(?:text|mathrm|mbox)\s*\{(?:[^{}\d?+~&]|(?<=[A-Za-z^])\d|\^\s*\{-?\d\})*\}"
_UNIT_IN_TEXT = r"\\(?:text|mathrm|mbox)\s*\{(?:[A-Za-z .~/]|\\(?:cdot|[,;: ])|\^\s*(?:\{-?\d\}|-?\d))+\}"
_ORDINAL = rf"(?:st|nd|rd|th)(?:{_WORDS})?"
# Without a space m/s may be a quotient of variables.
_QUOTIENT = rf"(?:(?<=\s)|(?=[A-Za-z]{{2}}))(?:{_SYMBOLS})\s*/\s*(?:{_SYMBOLS})"
_SHORT = rf"(?:{_QUOTIENT}|{_SYMBOLS})(?![A-Za-z])\.?"
_POWER = r"(?:\s*\^\s*\{?-?\d\}?)?"


def _chain(part: str) -> str:
    """Return the pattern of units of several parts: ``\\mathrm{km} / \\mathrm{h}``, ``^\\circ\\text{C}``."""
    return rf"(?:{DEGREES}\s*)?{part}{_POWER}(?:\s*(?:(?:/|\\cdot(?![A-Za-z]))\s*)?{part}{_POWER})*"


_UNIT = rf"(?:{_SHORT}|{_ORDINAL}|{_WORDS}){_POWER}|{_chain(_IN_TEXT)}"
_MEASURED = re.compile(rf"(.*\S)\s*({_chain(_UNIT_IN_TEXT)})", re.DOTALL)
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
_SYSTEM = re.compile(
    r"(?:(?:\\left\s*)?\\\{\s*)?\\begin\{(cases|aligned|array)\}(?:\{[lcr]+\})?(?P<rows>.*)\\end\{\1\}"
    r"(?:\s*\\right\s*\.)?",
    re.DOTALL,
)
_ROW = re.compile(r"([^=&<>]+)&?\s*=\s*&?([^=&<>]+)")
_VECTOR = re.compile(r"\\(?:nabla|vec|mathbf|boldsymbol)(?![A-Za-z])")
_VECTOR_OF_LETTER = re.compile(r"(\\(?:vec|mathbf|boldsymbol))\s*(?:\{\s*([A-Za-z])\s*\}|\s([A-Za-z]))")
_SIZED_BRACE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)\s*(?=\\[{}])")
_IN_DOLLARS = re.compile(r"\\(?:text|mbox)\s*\{\s*\$([^$]*)\$\s*\}")
_QUOTED = re.compile(r"^(['\"])(.*)\1$", re.DOTALL)
_TWICE_NEGATED = re.compile(r"-\s*\(\s*-([^()+\-=<>,]*)\)(?!\s*[\^!])")
_STATEMENTS = (  # phrases before an answer
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


def text_after_boxes(text: str) -> str:
    """Return the text after the last box; all text without a box."""
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
            yield _strip_inner_boxes(text[match.end() : end].strip()), position


def alternatives(gold: str) -> list[str]:
    """Return the golds, each of which is right: the texts of a JSON list, else ``gold`` itself.

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


def translate_statements(text: str) -> str:
    """Translate phrases that state an answer: ``答案是：12。`` -> ``The final answer is 12. ``"""
    if not text.isascii():
        text = _STOP.sub(". ", _BEFORE_HAN.sub(" ", _CHOSEN.sub(" The answer is ", text)))
    return _STATED.sub(" The final answer is ", text)


def _strip_inner_boxes(box: str) -> str:
    """Remove inner boxes and the braces that remain around the whole: ``\\boxed{5}`` -> ``5``."""
    bare = _INNER_BOX.sub("", box)
    if bare == box:
        return box
    return strip_outer_braces(bare)


@lru_cache(maxsize=4096)
def tidy(answer: str) -> str:
    """Rewrite notation that math-verify cannot parse as LaTeX that it can parse."""
    text = rewrite_words(latex(rewrite_words(answer.strip())) if not answer.isascii() else answer.strip())
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = _OTHER_NAMES.sub(lambda match: _SAME_AS[match.group().strip()], re.sub(r"\\!\s*", "", text))
    text = _HTML.sub(lambda match: f"{'^' if match[1] == 'p' else '_'}{{{match[2]}}}", text)
    text = _IN_DOLLARS.sub(r"\1", text)
    text = _QUOTED.sub(r"\2", re.sub(r"\\[\[\]()]|(?<!\\)\$", "", text).strip())
    text = strip_outer_braces(add_braces(_SIZED_BRACE.sub("", _list_equations(text))))
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
    text = separate_numbers(replace_connectives(text))
    text = re.sub(r"^\\\{\s*[a-z]\s*(?:\||\\mid|:)\s*(.*)\\\}$", r"\1", text)
    text = re.sub(r"\+\s*\\infty", r"\\infty", text)
    text = re.sub(r"(?<=[\w})])\.$", "", text)
    return text.lstrip("+").strip()


def _list_equations(text: str) -> str:
    """Replace a system by its equations: ``\\begin{cases}x=1\\\\y=2\\end{cases}`` -> ``x=1, y=2``."""
    if (system := _SYSTEM.fullmatch(text)) is None:
        return text
    rows = [_ROW.fullmatch(row.strip().rstrip(",;.")) for row in system["rows"].split("\\\\") if row.strip()]
    return ", ".join(f"{row[1]}={row[2]}" for row in rows if row) if all(rows) else text


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
    if not _VECTOR.search(text):  # vectors have two different products
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
    candidates = [plain]
    if plain.count("=") == 1:
        candidates.append(_DERIVATIVE_LABEL.sub("", LABEL.sub("", plain)))
    if (unlabelled := _WORD_LABEL.sub("", plain)) != plain:
        candidates.append(unlabelled)
    if (measured := quantity(plain)) is not None:
        candidates.append(measured[0])
    if (hundredths := percent(plain)) is not None:
        candidates += [hundredths, f"\\frac{{{hundredths}}}{{100}}"]
    if re.search(DEGREES, plain):
        candidates.append(re.sub(rf"(\d+(?:\.\d+)?)\s*{DEGREES}", r"(\\frac{\1 \\pi}{180})", plain))
    column = re.fullmatch(r"\\begin\{[pb]?matrix\}([^&]*?)(?:\\\\)?\s*\\end\{[pb]?matrix\}", plain, re.DOTALL)
    if column is not None and "\\\\" in column.group(1):
        candidates.append("(" + ",".join(column.group(1).split("\\\\")) + ")")
    return list(dict.fromkeys(_protect_last_variable(s.strip()) for s in candidates if s.strip()))


def _protect_last_variable(text: str) -> str:
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


def measured(plain: str) -> tuple[str, str] | None:
    """Split any value from its unit in text: ``5\\sqrt{2}\\text{ m}`` -> (``5\\sqrt{2}``, ``\\text{ m}``).

    None without such a unit.
    """
    match = _MEASURED.fullmatch(plain)
    return None if match is None or _NOT_A_UNIT.search(match[2]) else (match[1], match[2])


def labelled_list(answer: str) -> tuple[tuple[str, str], ...]:
    """Split a list into names ("" if unnamed) and values: ``x=1, y=10`` -> (("X", "1"), ("Y", "10"))."""
    parts = []
    for part in re.split(r",(?![^()\[\]]*[)\]])", tidy(answer)):
        label = LABEL.match(part)
        name = normalise(label.group(1)) if label else ""
        parts.append((name, normalise(part[label.end() :] if label else part)))
    return tuple(parts)


def same_list(gold: str, answer: str) -> bool:
    """Return whether two lists agree: by name if all elements have names, else by position."""
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
