"""Renders conversations with a tokenizer's chat template, and encodes text.

Text of data is text: control tokens that stand in it are broken by a space before it is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

_CLOCK = "strftime_now"  # the function with which templates write the date
_MARK = "0content0"

# What a template raises for messages or arguments that it does not take.
REJECTED = (TemplateError, TypeError, ValueError)


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    *,
    day: date | None,
    open_turn: bool = True,
    **arguments: Any,
) -> str:
    """Render a conversation with the tokenizer's chat template.

    Args:
        template_kwargs, arguments: of the template; none may stand in both.
        day: what the template writes as today's date; None: today.
        open_turn: up to where the model's answer begins.

    Raises those of REJECTED for messages or arguments that the template does not take.
    """
    tools = arguments.get("tools", template_kwargs.get("tools"))
    source = tokenizer.get_chat_template(tools=tools)
    clock = {_CLOCK: _clock(day)} if _CLOCK in source else {}
    if _takes_parts(tokenizer, source):
        messages = [_in_parts(message) for message in messages]
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=open_turn,
        **clock,
        **template_kwargs,
        **arguments,
    )


def writes_date(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template writes today's date, in any of its variants."""
    return _CLOCK in str(getattr(tokenizer, "chat_template", None) or "")


def _clock(day: date | None) -> Callable[[str], str]:
    return datetime.combine(day or date.today(), time()).strftime


@lru_cache(maxsize=16)
def _takes_parts(tokenizer: Any, source: str) -> bool:
    """Return whether the template ``source`` shows content as a list of parts, and drops text."""

    def shows(content: Any) -> bool:
        message = {"role": "user", "content": content}
        try:
            return _MARK in tokenizer.apply_chat_template(
                [message], chat_template=source, tokenize=False, add_generation_prompt=True
            )
        except REJECTED:
            return False

    return not shows(_MARK) and shows([{"type": "text", "text": _MARK}])


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


class ControlTokens:
    """The special tokens of a tokenizer, as they would be written in a text."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.ids = frozenset({*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)})
        names = {str(t) for t in added.values() if t.special} | set(map(str, tokenizer.all_special_tokens))
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: str) -> list[str]:
        """Return the control tokens that stand in ``text``."""
        return self._pattern.findall(text)

    def as_text(self, content: Any) -> Any:
        """Break the control tokens in all text of ``content`` with a space: "<|end|>" -> "< |end|>".

        ``content``: text, a message, or a list of either.
        """
        if isinstance(content, str):
            return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", content)
        if isinstance(content, Mapping):
            return {name: self.as_text(value) for name, value in content.items()}
        return [self.as_text(part) for part in content] if isinstance(content, list | tuple) else content


def encode(text: str, tokenizer: Any) -> list[int]:
    """Return the ids of ``text`` alone; control tokens in it are read as such."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_prompt(text: str, tokenizer: Any) -> list[int]:
    """Return the ids of a plain prompt: what the tokenizer puts in front of a text, unless ``text`` begins
    with it, and ``text``. What it puts behind one, such as EOS, would end the text before the answer.
    """
    ids, front = encode(text, tokenizer), added_ids(tokenizer)[0]
    return ids if ids[: len(front)] == front else [*front, *ids]


def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts in front of a text, and behind it."""
    plain, whole = encode("1", tokenizer), list(tokenizer("1")["input_ids"])
    begin = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:begin], whole[begin + len(plain) :]
