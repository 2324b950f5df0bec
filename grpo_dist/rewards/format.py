"""Checks the think/answer format of a completion. Detects degenerate text."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter

from grpo_dist.rewards.text import boxes, remove_commands
from grpo_dist.types import NO_THOUGHT, Thought

# Text without visible output: spaces, breaks, and commands whose argument may be empty.
_BLANK_TEX = re.compile(
    r"\\(?:q?quad|enspace|enskip|space|thinspace|medspace|thickspace|neg(?:thin|med|thick)space|hfill|null|strut|relax"
    r"|left\.|right\.|newline|linebreak|par|(?:small|med|big)skip|displaystyle|textstyle)(?![A-Za-z])"
    r"|\\(?:[,;:!>/ \\]|$)|\\(?:kern|hskip)\s*-?[\d.]+\s*(?:pt|em|ex|mu|cm)"
    r"|\\(?:text\w*|math(?:rm|bf|it|sf|tt|bb|cal)|operatorname|mbox|hbox|boxed|fbox|bf|rm|it|emph|sqrt|[cdt]?frac"
    r"|(?:under|over)(?:line|brace)|(?:wide)?(?:hat|tilde)|bar|vec|boldsymbol|bm)(?=\s*\{)|~|\$"
    r"|&(?:nbsp|e[mn]sp|thinsp|zwn?j|shy|#160|#xa0|#8203|#x200b);|</?(?:br|p|b|i|u|em|strong|span|div)\s*/?>",
)
_HIDDEN = re.compile(r"\\(?:[hv]space\*?|[hv]?phantom|(?P<two>rule(?:\s*\[[^\[\]]*\])?))(?![A-Za-z])")
# Invisible letters and symbols: Hangul fillers, the Braille blank.
_BLANK = frozenset("\u115f\u1160\u3164\uffa0\u2800")
_INVISIBLE = frozenset({"Cf", "Cc", "Zs", "Zl", "Zp", "Mn", "Me"})  # a combining mark alone is invisible
_MAY_BE_BLANK = re.compile(r"[\\~$&<]")
_ANSWER_TAGS = ("<answer>", "</answer>")


def think_answer_format(
    completion: str, *, thought: Thought = NO_THOUGHT, answer_tags: tuple[str, str] = _ANSWER_TAGS
) -> float:
    """Return 1.0 for exactly one thought in its tags, at the start, followed by an answer; else 0.0.

    An answer is one ``<answer>...</answer>`` and nothing else, or text with ``\\boxed{...}``. Thought and
    answer must have visible content.

        <think>2+2</think>\\boxed{4}              1.0
        <think>2+2</think><answer>4</answer>      1.0
        \\boxed{4}                                0.0    no thought
        <think>2+2 \\boxed{4}                     0.0    never closed
        <think></think>\\boxed{4}                 0.0    empty thought
        <think>2+2</think>\\boxed{\\text{ }}      0.0    empty answer

    If the prompt opens the thought (``thought.prompt``), the completion continues it:
    ``2+2</think>\\boxed{4}`` is 1.0. If the prompt holds an empty thought, only the answer is expected.
    """
    tags = (thought.opening, thought.closing)
    rest = completion
    if thought.prompt != "closes":
        if not thought.prompt:
            before, _, rest = completion.partition(thought.opening)
            if shows(before):
                return 0.0
        inside, closed, rest = rest.partition(thought.closing)
        if not closed or not shows(inside) or any(tag in inside for tag in tags):
            return 0.0
    if any(tag in rest for tag in tags):
        return 0.0
    return float(_is_answer(rest, *answer_tags))


def shows(text: str) -> bool:
    """Return whether ``text`` has visible content.

    White space, zero-width characters, ``\\,``, ``\\text{}``, ``\\phantom{5}``, ``<br>`` and empty braces are
    invisible.
    """
    if _MAY_BE_BLANK.search(text):
        text = _BLANK_TEX.sub("", remove_commands(text, _HIDDEN, ""))
    braces = 0
    for char in text:
        if char in "{}":  # unbalanced braces are visible
            braces += 1 if char == "{" else -1
        elif char not in _BLANK and unicodedata.category(char) not in _INVISIBLE:
            return True
    return braces != 0


def _is_answer(text: str, opening: str, closing: str) -> bool:
    tags = text.count(opening) + text.count(closing)
    if not tags:
        return any(shows(box) for box in boxes(text))
    before, _, opened = text.partition(opening)
    answer, closed, after = opened.partition(closing)
    alone = tags == 2 and bool(closed) and not before.strip() and not after.strip()
    return alone and shows(answer)


_TAIL = 2048  # characters: loops occur at the end, and the beginning may be fine
_SHORTEST = 256  # bytes: shorter text may repeat itself legitimately ("1, 1, 1, 1")
# Compressed size as a share of the length. Among 100,000 real texts, only loops are below; the next has 0.13.
_COMPRESSED = 0.1
_UNREADABLE = 0.1  # share of the characters
# Control characters, surrogates, private use, unassigned.
_NOT_TEXT = {"Cc", "Cs", "Co", "Cn"}
_WHITESPACE = frozenset("\n\r\t")


def is_degenerate(text: str) -> bool:
    """Return whether ``text`` ends in a loop, or more than a tenth of it is unreadable.

    A loop compresses well under zlib. Bytes that are not UTF-8 count as unreadable.
    """
    return _unreadable(text) or _loops(text[-_TAIL:])


def _unreadable(text: str) -> bool:
    if text.isascii() and text.isprintable():
        return False
    # One pass over the text: it may contain very many distinct characters.
    bad = sum(n for c, n in Counter(text).items() if c not in _WHITESPACE and _is_no_text(c))
    return bad > _UNREADABLE * len(text)


def _is_no_text(character: str) -> bool:
    return character == "\N{REPLACEMENT CHARACTER}" or unicodedata.category(character) in _NOT_TEXT


def _loops(text: str) -> bool:
    raw = text.encode(errors="replace")
    return len(raw) >= _SHORTEST and len(zlib.compress(raw, 6)) < _COMPRESSED * len(raw)
