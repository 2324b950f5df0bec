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
