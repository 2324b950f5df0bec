"""Checks a configuration's text before its keys are read: nesting that overflows the YAML reader's stack,
characters invalid in UTF-8 files, text that YAML drops, numbers that YAML reads in another base. Also escapes
``${``, and fills templates with {names}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

# A column in a template, or text in doubled braces, which becomes text in single braces.
_PLACE = re.compile(r"\{\{(?P<text>[^{}]*)\}\}(?!\})|\{(?P<name>\w+(?:\.[\w-]+)*)\}")

_DEEPEST = 32  # levels of mappings and lists; this project's tree has 6
_STARTS = (
    yaml.FlowMappingStartToken, yaml.FlowSequenceStartToken, yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
)  # fmt: skip
_ENDS = (yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken, yaml.BlockEndToken)

# Plain words that YAML 1.1 (OmegaConf) reads as numbers in another base.
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")

_INTERPOLATION = re.compile(r"(\\*)\$\{")
_ESCAPED = re.compile(r"((?:\\\\)*)\\\$\{")


def escaped(plain: Any) -> Any:
    r"""Escape the texts in plain mappings and lists so that OmegaConf reads them unchanged: ${x} -> \${x},
    \${x} -> \\\${x}
    """
    return _changed(plain, lambda text: _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", text))


def unescaped(plain: Any) -> Any:
    """Undo `escaped` in plain mappings and lists that were read from YAML without OmegaConf."""
    return _changed(plain, lambda text: _ESCAPED.sub(lambda match: match[1][::2] + "${", text))


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _changed(inner, change) for key, inner in value.items()}
    return [_changed(inner, change) for inner in value] if isinstance(value, list) else value


def fill(template: str, value: Callable[[str], str]) -> str:
    """Return ``template`` with each {name} replaced by ``value`` of the name, and {{text}} by {text}. Other
    braces stay.

    "{problem} Write \\boxed{} or \\boxed{{x}}." -> "1+1=? Write \\boxed{} or \\boxed{x}."
    """

    def filled(place: re.Match[str]) -> str:
        name = place["name"]
        return f"{{{place['text']}}}" if name is None else value(name)

    return _PLACE.sub(filled, template)


def names_in(template: str) -> list[str]:
    """Return the names that `fill` replaces in ``template``, each once."""
    return list(dict.fromkeys(place["name"] for place in _PLACE.finditer(template) if place["name"]))


def check_yaml(text: str, *, single_value: bool = False) -> None:
    """Raise ValueError for YAML that would overflow the loader or be misread: mappings and lists nested too
    deep; a plain word that is a number in base 8 or 60 (``steps=010`` would be 8 steps, ``1:30`` 90); in a
    ``single_value`` a comment, which would be dropped (``#### (.+)`` is null). Scanning needs no recursion.
    The loader reports malformed YAML.
    """
    depth = end = 0
    try:
        for token in yaml.scan(text, Loader=yaml.SafeLoader):
            line = token.start_mark.line + 1
            depth += isinstance(token, _STARTS) - isinstance(token, _ENDS)
            if depth > _DEEPEST:
                raise ValueError(f"line {line}: more than {_DEEPEST} levels deep; expected at most that many")
            # Between tokens there is nothing but white space and comments.
            if single_value and "#" in text[end : token.start_mark.index]:
                raise ValueError(
                    "a # at the beginning or after a space begins a comment in YAML and would be dropped; "
                    "put the text in quotes that the shell leaves, e.g. \"data.instruction='# Answer'\""
                )
            end = token.end_mark.index
            word = token.value if isinstance(token, yaml.ScalarToken) and token.plain else ""
            octal = _OCTAL.fullmatch(word) and int(word, 8) != int(word)
            value = yaml.safe_load(word) if octal or _SEXAGESIMAL.fullmatch(word) else ""
            if not isinstance(value, str):  # 09:30 is text
                raise ValueError(
                    f"line {line}: YAML reads {word} as {value}; write the number that is meant, or put a "
                    f"text in quotes: '{word}'"
                )
    except yaml.YAMLError:
        return


def check_key(key: str) -> None:
    """Raise ValueError for a dotted key with more levels than a configuration may have."""
    if key.count(".") + key.count("[") >= _DEEPEST:
        raise ValueError(f"the key has more than {_DEEPEST} levels; expected e.g. policy.optimizer.lr")


def check_characters(plain: Any) -> None:
    """Raise ValueError naming the first key with a character invalid in text, in the key or its value.
    ``plain``: mappings, lists and values.
    """
    for key, character in _unfit(plain, ()):
        where = f"`{'.'.join(key)}`: " if key else ""
        raise ValueError(
            f"{where}has the character U+{ord(character):04X}, which is invalid in text; expected "
            "UTF-8 without NUL"
        )


def _unfit(value: Any, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield from ((place, c) for c in value if c == "\0" or "\ud800" <= c <= "\udfff")
    elif isinstance(value, dict):
        for key, inner in value.items():
            name = str(key).encode("utf-8", "backslashreplace").decode()
            yield from _unfit(key, (*place, name))
            yield from _unfit(inner, (*place, name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _unfit(inner, (*place, str(number)))
