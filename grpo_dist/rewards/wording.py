"""Words and signs that change a value. math-verify drops most of them: to it, 5 million is 5."""

from __future__ import annotations

import re
from decimal import Decimal

from grpo_dist.rewards.braces import without_commands

_NUMBERS = re.compile(r"(?<![A-Za-z])\d[\d,]*(?:\.\d+)?")
_OPERATORS = re.compile(r"[-+*^\\π√±!|<>()\[\]{}=~%²³]")
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
_WORD_NAMES = "|".join(sorted(_FACTORS, key=len, reverse=True)).replace(" ", r"\s+")
_SCALED = re.compile(
    rf"(?<![\w.^])(\d{{1,15}}(?:(?:,|\{{,\}})\d{{3}}){{0,6}}(?:\.\d{{1,15}})?){_SPACE}*"
    rf"({TEXT}\s*\{{\s*)?({_WORD_NAMES})(?![A-Za-z])(\s*\}})?",
    re.IGNORECASE,
)
_STRUCK = re.compile(r"~~[^~]*~~|<(s|del|strike)>.*?</\1>")
_STRIKES = re.compile(
    r"\\(?:[bx]?cancel|hcancel|(?P<two>cancelto)|sout|xout|st|[hv]?phantom)(?![A-Za-z])"
    r"|\\enclose\s*\{[^{}]*strike[^{}]*\}"
)
_STRUCK_CHARACTER = re.compile(r"\w[\u0335-\u0338\u20d2\u20d3\u20e5]")  # after "=" they form another sign
_LISTED = re.compile(rf"{TEXT}\s*\{{([\s,;]*(?:or\b|and\b|,|;)[^{{}}]*\d[^{{}}]*)\}}")
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

_RELATION = (
    r"(?:[<>≠≤≥≮≯≰≱≲≳≪≫≺≻≼≽⩽⩾⪅⪆]|&(?:lt|gt|le|ge|ne);|=/="
    r"|\\(?:n?[lg]eq?q?|n?[lg]eqslant|lt|gt|neq?|not(?![a-z])|lll?|ggg?|[lg](?:vert)?neqq?|[lg]n(?:sim|approx)"
    r"|[a-z]{0,8}(?:less|gtr|prec|succ|eqslant)[a-z]{0,8})(?![A-Za-z]))"
)
_BEFORE_A_NUMBER = r"(?=[\s$}\\,]*[-+]?(?:\d|\\[dt]?frac|\\sqrt|\.\d))"
_WORDS = re.compile(
    r"\b(?:not|never|neither|nor|cannot|none|wrong|incorrect|false|except|unless|maybe|perhaps|possibly|probably"
    r"|guess|unsure|mod|modulo|at\s+least|at\s+most|below\s+zero)\b|n't\b"
    r"|\bor\s+(?:more|less|fewer|so|greater|higher|lower|above|below|over|under|another|other|something)\b"
    r"|\b(?:(?:more|less|fewer|greater|smaller|larger|bigger|higher|lower|other|earlier|later)\s+than|up\s+to"
    rf"|between|over|under|above|below|minus|negative|twice|half\s+of|double){_BEFORE_A_NUMBER}"
)
_NUMBER_WORDS = (  # not two-digit
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen"
    r"|sixteen|seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety|zero)\b(?!-)"
)
_LISTED_IN_WORDS = re.compile(
    rf"[\d)}}]\W*(?:(?:or|and)\b(?!\W*\d)|(?:plus|minus|to\s+one)\b|{_NUMBER_WORDS})"
    r"|[\d)}][^\d{}()]*(?:\b(?:or|and|to|plus|minus|times|over|out\s+of|vs|versus)\s|[,;:/&+~-])\s*"
    rf"{_NUMBER_WORDS}"
)
_BEHIND_A_NUMBER = re.compile(
    r"[\d)}]\W*(?:(?:squared|cubed)(?!\s+(?:unit|inch|feet|foot|yard|mile|(?:centi|deci|kilo|milli)?met))|factorial|(?:hal|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|hundredth"
    r"|thousandth)(?:ve)?s|and\s+(?:a|one|two|three)(?:\s|-)+(?:half|thirds?|quarters?|fourths?)"
    rf"|{_WORD_NAMES})(?![a-z])"
)
_NUMBER_IN_WORDS = re.compile(r"(?<![\w^{.,])\d")
_TEXTS = re.compile(rf"{TEXT}\s*\{{([^{{}}]*)\}}")

# Text right before and right after an answer without a box.
_BEFORE_AN_ANSWER = re.compile(
    r"(?:\b(?:not|never|neither|nor|maybe|perhaps|possibly|probably|or|at\s+least|at\s+most|up\s+to|between"
    r"|(?:more|less|fewer|greater|smaller|larger|bigger|higher|lower|other)\s+than)\b|n't\b|=/=|~~"
    r"|(?:\$|[\w)]\s)\s*(?:[<>]=?|!=)|\b\d+\s+to\b|\d\s+and\b"
    rf"|\\(?:neg|lnot)(?![a-z])|(?![<>]){_RELATION})[\s$({{]*$",
    re.IGNORECASE,
)
_AFTER_AN_ANSWER = re.compile(
    rf"(?:[\s$)}}]|\\[,;:! ]|{TEXT}\s*\{{)*(?:\\?%|per\s?cent\b|‰|{_WORD_NAMES}\b|\?|squared\b"
    r"|cubed\b|halves\b|thirds\b|\(?\s*or\b|~~"
    rf"|(?:and|to)\s+(?:\$?-?\d|{_NUMBER_WORDS})"
    r"|,\s*\$?-?\d+(?:\.\d+)?\$?\s*(?:$|[.,\n]|or\b|and\b))[^.\n]*",
    re.IGNORECASE,
)
# A factor that adjoins a number, and the list that a number without a box ends.
_FACTOR = re.compile(r"(?:[a-z](?!\.?[A-Za-z])|π|\\pi(?![A-Za-z])|√|\\sqrt(?![A-Za-z]))[^\s.,;$]*")
_LIST_BEFORE = re.compile(r"(?:^|\b(?:is|are)\b|[:#])[\s$]*([(\[{]?\s*(?:-?\d[\d.]*\s*[,;]\s*)+)$")
_LIST_END = re.compile(r"\s*([)\]}]?)[\s$*]*(?:[.;]|$)")

# Words of a sentence around a value. A capital behind a number may be a unit: 18 V.
_SENTENCE = re.compile(
    r"[A-Za-z]{3}|[A-Za-z]\s+[A-Za-z]{2}|(?<![A-Za-z])[A-Za-z]{2}\s+\d|\d\s*[A-Z](?![A-Za-z])\W*$"
)
_COMMAND = re.compile(rf"{TEXT}\s*\{{[^{{}}]*\}}|\\[A-Za-z]+")

# A response that gives no answer, or takes one back.
_NO_ANSWER = re.compile(
    r"\b(?:do|does|did|could|can|am|is|was)(?:\s+not|not|n['’]t)\s+(?:\w+\s+)?"
    r"(?:know|tell|say|sure|certain|determined?|solved?|answer(?:ed)?|find|found|decided?|right|correct)\b"
    r"|\b(?:unable|unsure|uncertain|unknown|wrong|incorrect|maybe|perhaps|guess|no\s+(?:idea|answer)|gives?\s+up)\b",
    re.IGNORECASE,
)

_NOT_WORDS = rf"{TEXT}\s*\{{|[$)}}]|</"


def is_negated_before(before: str) -> bool:
    """Return whether the words before a value make it not the answer: ``the answer is not``, ``x >``."""
    return _BEFORE_AN_ANSWER.search(before) is not None


def in_context(before: str, text: str, after: str) -> str:
    """Add to ``text`` what belongs to its value in the text ``before`` and ``after`` it.

    ``5``, `` million.`` -> 5 million    ``18``, ``x.`` -> 18x    ``is (17, ``, ``18``, ``).`` -> (17, 18)
    """
    if (listed := _LIST_BEFORE.search(before)) and (end := _LIST_END.match(after)):
        return f"{listed[1]}{text}{end[1]}"
    if text[-1:].isdigit() and (factor := _FACTOR.match(after)):
        return f"{text}{factor.group()}"
    found = _AFTER_AN_ANSWER.match(after)
    return f"{text} {re.sub(_NOT_WORDS, ' ', found.group())}".strip() if found else text


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
    """Return whether ``text`` says that it has no answer, or that one is wrong: ``I do not know``."""
    return _NO_ANSWER.search(text) is not None


def as_meant(text: str) -> str:
    """Evaluate words of scale, drop struck-out text, and replace other separators of numbers by commas.

    2\\text{ (mod 5)}  2\\pmod{5}
    5\\text{ million}  5000000     \\cancel{4} 5   5     3\\text{, }4   3,4     2\\quad 3   2,3
    """
    text = _MODULUS.sub(lambda match: f"\\pmod{{{match[match.lastindex or 0]}}}", text)
    text = _PER_MILLE.sub(" per thousand ", _STRUCK_CHARACTER.sub("", text))
    text = _KILO.sub(r"\1 thousand", _STRUCK.sub(" ", without_commands(text, _STRIKES)))
    for _ in range(3):  # 2 hundred thousand
        text, found = _SCALED.subn(_scaled, text)
        if not found:
            break
    return _SEPARATED.sub(",", _LISTED.sub(r" \1 ", text))


def connected(text: str) -> str:
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


def numbers_apart(text: str) -> str:
    """Turn numbers separated only by a space into a list: ``2\\ 3`` is 2,3, neither a number nor a sum."""
    return _APART.sub(",", _FAR_APART.sub(", ", text))


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
    """Return whether ``pattern`` has a match in ``answer`` that it has not in ``gold``."""
    found = {match.group() for match in pattern.finditer(answer)}
    return bool(found) and not found <= {match.group() for match in pattern.finditer(gold)}


def _worded(text: str) -> str:
    """Lower-case ``text`` and remove the commands around words."""
    return _TEXTS.sub(r" \1 ", text).lower()


def _numbers_in_words(text: str) -> int:
    worded = (words for words in _TEXTS.findall(text) if re.search("[A-Za-z]", words))
    return sum(len(_NUMBER_IN_WORDS.findall(words)) for words in worded)
