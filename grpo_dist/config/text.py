"""What makes text unfit for a configuration before its keys are looked at: nesting that would overflow the
stack of the YAML reader, and characters that no UTF-8 file can hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

_DEEPEST = 32  # levels of mappings and lists; this project's own tree has 6


def check_nesting(text: str) -> None:
    """Raises ValueError for YAML whose mappings and lists are nested too deep. The reader of the events needs
    no recursion; malformed YAML is left to the loader, which reports it.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > _DEEPEST:
                line = event.start_mark.line + 1 if event.start_mark else 0
                raise ValueError(f"line {line}: more than {_DEEPEST} levels deep; expected at most that many")
    except yaml.YAMLError:
        return


def check_key(key: str) -> None:
    """Raises ValueError for a dotted key of more levels than a configuration may have."""
    if key.count(".") + key.count("[") >= _DEEPEST:
        raise ValueError(f"the key has more than {_DEEPEST} levels; expected e.g. policy.optimizer.lr")


def check_characters(plain: Any) -> None:
    """``plain``: mappings, lists and values. Raises ValueError naming the first key that is no text, or whose
    value is none.
    """
    for key, character in _unfit(plain, ()):
        where = f"`{'.'.join(key)}`: " if key else ""
        raise ValueError(
            f"{where}has the character U+{ord(character):04X}, which no text has; expected UTF-8 without NUL"
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
