"""Balanced braces of LaTeX, and commands with their arguments."""

from __future__ import annotations

import re

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:(?P<opening>\{)|(?P<command>\\(?:[A-Za-z]+|.))|\d[\d.]*|[^\s{}])", re.DOTALL)


def matching_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to that of its closing brace."""
    pairs, waiting = {}, []
    for match in _BRACES.finditer(text):
        if match.group() == "{":
            waiting.append(match.start())
        elif match.group() == "}" and waiting:
            pairs[waiting.pop()] = match.start()
    return pairs


def without_commands(text: str, commands: re.Pattern[str], replacement: str = " ") -> str:
    """Replace each match of ``commands`` and the arguments behind it.

    A match takes one argument, or as many as its group ``two`` matches: two. An argument is a pair of braces,
    however deep, or a token without braces: a number, a character, or a command with its own arguments. A
    command without an argument stays.

        \\cancel{\\frac{1}{2}} 3 -> 3      \\cancel 5 -> ""      \\cancelto{0}{x} -> ""
    """
    if not commands.search(text):
        return text
    closed = matching_braces(text)
    kept, done = [], 0
    for match in commands.finditer(text):
        if match.start() < done:
            continue
        end: int | None = match.end()
        for _ in range(2 if match.groupdict().get("two") else 1):
            end = _end_of_argument(text, end, closed) if end is not None else None
        if end is not None:
            kept += [text[done : match.start()], replacement]
            done = end
    return "".join([*kept, text[done:]])


_SYMBOL = r"[A-Za-z]|\\(?:circ|prime|top|pi|infty|alpha|beta|gamma|theta|lambda|mu|phi|omega)(?![A-Za-z])"
_BARE = re.compile(  # the argument of an index, an exponent or a root
    rf"\\text[a-z]*\s*\{{[^{{}}]*\}}|(\\log\s*_)\s*(\d)|([\^_])\s*(\d+(?:\.\d+)?|{_SYMBOL})"
    r"|(\\sqrt(?:\s*\[[^\[\]]*\])?)\s*(\d+|(?<=[\s\]])[A-Za-z])"
)
_CHOOSE = re.compile(r"\{([^{}]*)\\choose(?![A-Za-z])\s*([^{}]*)\}")
_TWO_PARTS = re.compile(r"\\(?:[dtc]?frac|[dt]?binom)(?![A-Za-z])\s*")
_PART = re.compile(rf"\s*(\d|{_SYMBOL})")


def with_braces(text: str) -> str:
    """Put braces around the arguments of indices, exponents, roots and fractions that have none.

        x_i^2 -> x_{i}^{2}     \\log_2 8 -> \\log_{2} 8     \\frac1{23} -> \\frac{1}{23}

    An exponent, an index or a root takes a whole number (x^10 is meant as x^{10}); a fraction and the base of
    a logarithm take one digit.
    """
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
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


def without_outer_braces(text: str) -> str:
    """Remove braces around the whole: ``{(2,3)}`` -> ``(2,3)``."""
    begin, end = 0, len(text)
    if text.startswith("{"):
        closed = matching_braces(text)
        while begin < end and closed.get(begin) == end - 1:
            begin, end = begin + 1, end - 1
    return text[begin:end].strip()


def _end_of_argument(text: str, begin: int, closed: dict[int, int]) -> int | None:
    """Return the end of the argument that begins at or behind ``begin``; None without one."""
    token = _TOKEN.match(text, begin)
    if token is None:
        return None
    if token["opening"]:
        end = closed.get(token.end() - 1)
        return None if end is None else end + 1
    position = token.end()
    while token["command"] and text.startswith("{", position) and position in closed:
        position = closed[position] + 1
    return position
