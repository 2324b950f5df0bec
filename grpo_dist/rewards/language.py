"""Measures how much of a completion is written in the wanted scripts. Formulas do not count."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Literal, get_args

from grpo_dist.rewards.markup import words_of_formula, words_of_prose

Script = Literal[
    "latin", "cyrillic", "greek", "han", "hiragana", "katakana", "hangul", "arabic", "hebrew", "devanagari",
    "bengali", "tamil", "telugu", "thai", "georgian", "armenian",
]  # fmt: skip
SCRIPTS: tuple[str, ...] = get_args(Script)

_OPENS = re.compile(r"\$\$?|\\[(\[]|\\begin\{(\w+\*?)\}")
_IN_LINE = re.compile(r"\$[^$\n]*\$")
_ONE_WORD = re.compile(r"(?:\$\$?|\\[(\[])\s*([A-Za-z]{2,})\s*(?:\$\$?|\\[)\]])")
_ENDS = re.compile(r"\\end\{\w+\*?\}")
_LETTER_IS_WORD = frozenset({"han", "hiragana", "katakana", "thai"})  # written without spaces between words
_VARIABLES = frozenset({"latin", "greek"})  # whose single letters are variables in any language


def script_share(text: str, scripts: Collection[str]) -> float:
    """Return the share of words of ``text`` that are written in one of ``scripts``, in [0, 1].

    The language consistency reward of DeepSeek-R1 (arXiv:2501.12948, section 2.3.2): words of the target
    language / all words. A word is a run of letters of one script, or one letter in scripts without spaces.
    Formulas, LaTeX commands, tags, links and single Latin or Greek letters (variables) do not count, but
    natural language inside them does (`markup`). Words spelled letter by letter, and those of the first two
    links, do not count. A text without words scores 1.

        "the answer ответ is $x$", {"latin"}  ->  3 of 4 words = 0.75
        "ответ $the answer$", {"cyrillic"}    ->  1 of 3 words
    """
    prose, formulas = _prose_and_formulas(text)
    words = list(_words(" ".join([words_of_prose(prose), *map(words_of_formula, formulas)])))
    return sum(script in scripts for script in words) / len(words) if words else 1.0


def _prose_and_formulas(text: str) -> tuple[str, list[str]]:
    """Split ``text`` into prose, with a space for each formula, and the formulas.

    Neighbouring formulas of one word each are one: ``$the$ $sum$`` -> ``the sum``.

    A formula is $$ $$, $ $ on one line, \\( \\), \\[ \\] or \\begin{name} \\end{name}. Linear in the length
    of the text for any input: a thousand openings without an end cost no thousand searches to the end.
    """
    last = {close: text.rfind(close) for close in ("$$", "\\)", "\\]")}
    last |= {match.group(): match.start() for match in _ENDS.finditer(text)}
    plain: list[str] = []
    formulas: list[list[str]] = []
    done, at, was_word = 0, 0, False
    while match := _OPENS.search(text, at):
        end = _end_of_formula(text, match, last)
        if end is None:
            at = match.start() + 1
        else:
            plain.append(text[done : match.start()])
            word = _ONE_WORD.fullmatch(text, match.start(), end)
            if word and was_word and not plain[-1].strip():
                formulas[-1].append(word[1])
            else:
                formulas.append([word[1] if word else text[match.start() : end]])
            done, at, was_word = end, end, word is not None
    return " ".join([*plain, text[done:]]), [" ".join(words) for words in formulas]


def _end_of_formula(text: str, opening: re.Match[str], last: Mapping[str, int]) -> int | None:
    """Return the end of the formula that begins with ``opening``; None if it is not closed.

    ``last`` holds the last position of each closing mark in ``text``.
    """
    mark, begin = opening.group(), opening.end()
    close = {"$": "", "$$": "$$", "\\(": "\\)", "\\[": "\\]"}.get(mark, f"\\end{{{opening[1]}}}")
    if close and last.get(close, -1) >= begin:
        return text.index(close, begin) + len(close)
    in_line = _IN_LINE.match(text, opening.start())
    return in_line.end() if in_line else None


def _words(text: str) -> Iterator[str]:
    """Yield the script of every word, in order."""
    current, letters = "", 0
    for char in text + " ":
        # A combining mark belongs to the preceding letter.
        script = current if unicodedata.category(char).startswith("M") else _script(char)
        if script != current or script in _LETTER_IS_WORD:
            if current and not (letters == 1 and current in _VARIABLES):
                yield current
            current, letters = script, 0
        letters += 1


@lru_cache(maxsize=65536)
def _script(char: str) -> str:
    """Return the script of a letter, "" for other characters.

    A script not in `SCRIPTS` keeps its Unicode name.
    """
    if not char.isalpha():
        return ""
    first = unicodedata.name(char, "unknown").split()[0].lower()
    return {"cjk": "han", "ideographic": "han", "halfwidth": "katakana", "fullwidth": "latin"}.get(
        first, first
    )
