"""The option that a text without a box states as its answer: "The answer is (B)." -> "B".

Strict: a text that hedges, negates, asks or takes back states nothing. A right answer in words that are not
known here counts as none, which costs a reward; a wrong one that counted would teach.
"""

from __future__ import annotations

import re
import unicodedata

_LONGEST = 20_000  # last characters that are searched
_OPEN, _CLOSE = r"[\s*_`$(\[{\"'“]|\\\(|\\text(?:bf)?\{|\\mathrm\{", r"[)\]}*_`$\"'”]|\\\)"
_DECLARED = re.compile(
    r"\b(?:answer|option|choice)\b[*_`\s]*(?:is|:|=|would\s+be|must\s+be|should\s+be)(?=\W)[*_`\s:]*"
    rf"(?P<stated>(?:(?:option|choice|letter)\s+)?(?P<open>(?:{_OPEN}){{0,6}})(?P<letter>[A-Z])(?![\w'’^])"
    rf"(?P<close>(?:{_CLOSE}){{0,6}}))?",
    re.IGNORECASE,
)
_BEFORE = re.compile(  # of the same sentence: it is not claimed, or not that it is right
    r"\b(?:if|whether|suppose|assum\w+|unless|except|not|never|nor|doubt|wrong|incorrect|false|unlikely|cannot"
    r"|least|worst|who|which\s+says|claims?|think\s+that\s+the)\b|n['’]t\b",
    re.IGNORECASE,
)
_ANOTHER = re.compile(
    r"\W*(?:(?:or|and|nor|to|through|but|if|unless)\b|[/&+=<>^-]\s*\w|,\s*\W?[A-Za-z]\b(?!\s\w))"
)
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|sorry|correction|instead|i\s+mean|just\s+kidding|maybe|perhaps|wrong|incorrect)\b"
    r"|\bfalse\b|\bno,|\bnot\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_REASON = re.compile(r"\s*(?:[.!;:,。\n]|\(|[–—]|-\s|(?:because|since|as|for|due|by)\b)")
_LOOKS_BACK = 200  # characters of a sentence before its answer
_LOOKS_AHEAD = 80  # characters in which an answer may be taken back


def stated_choice(text: str) -> str | None:
    """Return the upper-case letter that ``text`` last states as its answer; None if it states none.

        "A is wrong. The answer is (B), since ..."   "B"
        "The answer is B or C."                      None
        "The answer is not B."                       None

    The last sentence of the form decides, also if it states no letter: it may take back an earlier one.
    """
    text = unicodedata.normalize("NFKC", text[-_LONGEST:])
    last = max(_DECLARED.finditer(text), key=re.Match.start, default=None)
    if last is None or last["letter"] is None:
        return None
    before, rest = text[max(0, last.start() - _LOOKS_BACK) : last.start()], text[last.end() :]
    if _BEFORE.search(re.split(r"[.!?\n]", before)[-1]):
        return None
    if _ANOTHER.match(rest) or _TAKEN_BACK.search(rest[:_LOOKS_AHEAD]):
        return None
    marked = bool(last["close"]) or "(" in last["open"]
    if not _ends(rest, marked):
        return None
    letter = last["letter"]
    if letter.islower() and not marked and (letter in "ai" or rest.strip() not in ("", ".")):
        return None  # an article, a variable
    return letter.upper()


def _ends(rest: str, marked: bool) -> bool:
    """Return whether the answer is complete before ``rest``. A ``marked`` letter may be followed by what the
    option says: "(B) 5 cm".
    """
    if not rest.strip() or _REASON.match(rest):
        return True
    return marked and re.match(r"\s+(?!(?:is|was|are)\b)", rest) is not None
