"""The option that a text without a box states as its answer: "The answer is (B)." -> "B".

Strict: a text that hedges, negates, asks or takes back states nothing. A missed right answer only costs a
reward, but an accepted wrong answer would be reinforced.
"""

from __future__ import annotations

import re
import unicodedata

_LONGEST = 20_000  # last characters that are searched
_OPEN, _CLOSE = r"[\s*_`$(\[{\"'“]|\\\(|\\text(?:bf)?\{|\\mathrm\{", r"[)\]}*_`$\"'”]|\\\)"
_SURELY = r"(?:therefore|thus|hence|then|clearly|indeed|definitely|obviously|simply|certainly)"
_DECLARED = re.compile(
    r"\b(?:answer|option|choice)\b[*_`\s]*(?:[:=]|(?:is|would\s+be|must\s+be|should\s+be|has\s+to\s+be)(?=\W))"
    rf"(?:\s*,?\s*{_SURELY}\b,?)?[*_`\s:]*"
    rf"(?P<stated>(?:(?:option|choice|letter)\s+)?(?P<open>(?:{_OPEN}){{0,6}})(?P<letter>[A-Z])(?![\w'’^])"
    rf"(?P<close>(?:{_CLOSE}){{0,6}}))?",
    re.IGNORECASE,
)
_REVERSED = re.compile(  # "(B) is the correct answer"
    rf"(?<![\w'’^\\])(?P<open>(?:{_OPEN}){{0,6}})(?P<letter>[A-Z])(?![\w'’^])(?P<close>(?:{_CLOSE}){{0,6}})"
    rf"\s+is,?\s+(?:{_SURELY},?\s+)?the\s+(?:only\s+)?(?:correct|right|best)\s+(?:answer|option|choice)\b"
)
_BEFORE = re.compile(  # in the same clause: no claim, or not a claim of correctness
    r"\b(?:if|whether|unless|except|not|never|nor|wrong|incorrect|false|unlikely|cannot|least|worst)\b|n['’]t\b",
    re.IGNORECASE,
)
_ADVERB = r"(?:also|already|clearly|explicitly|now|once|only|further|just)"
_NOBODY = (  # subjects that are not another person
    r"(?:problem|question|text|statement|exercise|task|condition|definition|theorem|passage|hint|it|which|we|as"
    rf"|{_ADVERB})"
)
_SUPPOSED = re.compile(  # in the same sentence: another person's claim, or an assumption
    r"\b(?:suppos\w+|assum\w+|imagin\w+|doubt\w*|who|claim\w*|thinks?"
    r"|conclude\s+that\s+the|would\s+(?:have|mean|imply))\b"
    rf"|\b(?!{_NOBODY}\b)\w+\s+(?:{_ADVERB}\s+)?(?:says?|said|thought|believe[sd]?|argue[sd]?)\b"
    r"|\bif\b.*\bwere\b",
    re.IGNORECASE,
)
_REASONED = re.compile(  # what precedes gives reasons, and does not restrict the conclusion
    r".*[,;:–—]\s*(?:and\s+)?(?:so|therefore|thus|hence|consequently|which\s+means|this\s+means)\b"
    r"|[^A-Za-z]*(?:(?:so|and|but)\W+)?(?:since|because|as|given)\b(?:(?!\b(?:if|unless|whether)\b).)*,",
    re.IGNORECASE | re.DOTALL,
)
_WITH_ANOTHER = re.compile(r"(?:\b(?:or|and|nor|neither|either|both|than)|[/&+,=<>-])\s*$", re.IGNORECASE)
_ANOTHER = re.compile(
    r"\W*(?:(?:or|and|nor|to|through|but|if|unless)\b|[/&+=<>^-]\s*\w|,\s*\W?[A-Za-z]\b(?!\s\w))"
)
_RESTRICTED = re.compile(r"[\s*_,(]*(?:only\s+)?(?:if|when|unless)\b")  # "(B) is the correct answer only if"
_TAKEN_BACK = re.compile(
    r"\b(?:wait|actually|sorry|correction|instead|i\s+mean|just\s+kidding|maybe|perhaps|wrong|incorrect)\b"
    r"|\bfalse\b|\bno,|\bnot\b|n['’]t\b|\?",
    re.IGNORECASE,
)
_REASON = re.compile(r"\s*(?:[.!;:,。\n]|\(|[–—]|-\s|(?:because|since|as|for|due|by)\b)")
_LOOKS_BACK = 200  # characters of a sentence before its answer
_LOOKS_AHEAD = 80  # characters in which an answer may be taken back
_WRAPPED = re.compile(r"\s*\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_GAP = r"(?:\s|\\[,;:! ]|~|\\q?quad(?![A-Za-z]))"
_MARKED = re.compile(  # (B) 5   B) 5   B. 5   Option B: 5
    r"\s*(?:(?:[Oo]ption\s+|[Cc]hoice\s+)?\(\s*(?P<bracketed>[A-J])\s*\)|(?P<closed>[A-J])\)"
    rf"|(?P<stopped>[A-J])[.:](?={_GAP})|(?:[Oo]ption|[Cc]hoice)\s+(?P<named>[A-J])(?![\w'’])[.:]?)"
    rf"(?P<gap>{_GAP}*)(?P<text>.*)",
    re.DOTALL,
)
_COMPUTED = re.compile(
    r"[\^_+*/=<>,;&!']|-(?!\s*[\d\\])|\\(?:cdot|times|cup|cap|leq?|geq?|neq?|pm|in)(?![A-Za-z])"
)
_BETWEEN = r"(?:\\(?:text(?:bf|it|rm)?|mathrm|mathbf|mbox)(?![A-Za-z])|\W)*"
_ANOTHER_OPTION = re.compile(
    r"\(\s*[A-J]\s*\)|(?<![\w\\])[A-J](?:\)|[.:]\s)|\A\W*[A-J]\W*\Z|\?"
    # "and" and "not" after the letter or before another letter; elsewhere they are words of the option.
    rf"|\A{_BETWEEN}(?:or|and|nor|(?:(?:is|are|was|were|does|do|did)\s+)?not|[a-z]+n['’]t)\b"
    rf"|\b(?:or|and|nor|not)\b{_BETWEEN}(?:(?:maybe|perhaps|possibly|also|even|option|choice)\b{_BETWEEN})*"
    r"[A-J](?![\w'’])"
)


def marked_option(answer: str) -> tuple[str, str] | None:
    """Split an answer that begins with the mark of an option into its letter and its text.

        \\textbf{(D)}\\ 557   ("D", "557")       \\text{B. 5}   ("B", "5")       \\text{Option B}   ("B", "")
        \\text{(B) It does not change}   ("B", "It does not change")       (C)\\ (3,5)   ("C", "(3,5)")
        (A) + 1, (A)(3,5), (A) or (B), (A) not   None

    None for an answer without a mark, and where another option or a formula of the letter follows.
    """
    match = _MARKED.fullmatch(_WRAPPED.sub(r"\1 ", answer, count=1) if _WRAPPED.match(answer) else answer)
    if match is None:
        return None
    text = match["text"].strip()
    adjoins = not match["gap"] and text.startswith(("-", "(", "|"))  # a difference or a product
    if adjoins or _COMPUTED.match(text) or _ANOTHER_OPTION.search(text):
        return None
    return next(filter(None, match.group("bracketed", "closed", "stopped", "named"))), text


def stated_choice(text: str) -> str | None:
    """Return the upper-case letter that ``text`` last states as its answer; None if it states none.

        "A is wrong. The answer is (B), since ..."   "B"
        "The answer is B or C."                      None
        "The answer is not B."                       None
        "If x = 2, y = 1, so the answer is (B)."     "B"
        "(B) is the correct answer."                 "B"

    The last statement decides, even without a letter: it may take back an earlier one.
    """
    text = unicodedata.normalize("NFKC", text[-_LONGEST:])
    last = _last_statement(text)
    if last is None or last["letter"] is None:
        return None
    before, rest = text[max(0, last.start() - _LOOKS_BACK) : last.start()], text[last.end() :]
    sentence = re.split(r"[.!?\n]", before)[-1]
    clause = sentence[reason.end() :] if (reason := _REASONED.match(sentence)) else sentence
    if _SUPPOSED.search(sentence) or _BEFORE.search(clause):
        return None
    if last.re is _REVERSED and (_WITH_ANOTHER.search(before) or _RESTRICTED.match(rest)):
        return None
    if _ANOTHER.match(rest) or _TAKEN_BACK.search(rest[:_LOOKS_AHEAD]):
        return None
    marked = bool(last["close"]) or "(" in last["open"]
    if last.re is _REVERSED:
        return last["letter"].upper() if marked or last["letter"] not in "AI" else None
    if not _ends(rest, marked):
        return None
    letter = last["letter"]
    if letter.islower() and not marked and (letter in "ai" or rest.strip() not in ("", ".")):
        return None  # an article, a variable
    return letter.upper()


def _last_statement(text: str) -> re.Match[str] | None:
    """Return the last match of `_DECLARED` or `_REVERSED`, whichever ends last."""
    declared = max(_DECLARED.finditer(text), key=re.Match.start, default=None)
    reversed_ = max(_REVERSED.finditer(text), key=re.Match.start, default=None)
    # "answer" may end one match and begin the other: "B is the correct answer: 5 cm".
    if declared and reversed_:
        return declared if declared.start() >= reversed_.end() else reversed_
    return declared or reversed_


def _ends(rest: str, marked: bool) -> bool:
    """Return whether the answer is complete before ``rest``. The text of the option may follow a ``marked``
    letter: "(B) 5 cm".
    """
    if not rest.strip() or _REASON.match(rest):
        return True
    return marked and re.match(r"\s+(?!(?:is|was|are)\b)", rest) is not None
