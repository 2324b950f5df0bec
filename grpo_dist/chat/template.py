"""Renders conversations with a tokenizer's chat template, and encodes text.

Text of data is text: control tokens that stand in it are broken by a space before it is rendered.

`PartsCheck` finds parts of a conversation that a template silently drops, because it has no branch for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from functools import lru_cache
from typing import Any, NamedTuple

from jinja2 import TemplateError

_CLOCK = "strftime_now"  # the function with which templates write the date
_MARK = "0content0"
_FEW = 50  # control tokens

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
    to_message, clock = _form(tokenizer, tools, day)
    return tokenizer.apply_chat_template(
        list(map(to_message, messages)),
        tokenize=False,
        add_generation_prompt=open_turn,
        **clock,
        **template_kwargs,
        **arguments,
    )


def render_all(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    template_kwargs: Mapping[str, Any],
    *,
    day: date | None,
) -> list[str]:
    """Render conversations as `render` does, in one call."""
    if not is_of_library(tokenizer):  # it may take one conversation alone
        return [render(tokenizer, messages, template_kwargs, day=day) for messages in conversations]
    to_message, clock = _form(tokenizer, template_kwargs.get("tools"), day)
    return list(
        tokenizer.apply_chat_template(
            [list(map(to_message, messages)) for messages in conversations],
            tokenize=False,
            add_generation_prompt=True,
            **clock,
            **template_kwargs,
        )
    )


def is_of_library(tokenizer: Any) -> bool:
    """Return whether ``tokenizer`` is one of `transformers`, not of a model's own code."""
    return type(tokenizer).__module__.startswith("transformers.")


def _form(
    tokenizer: Any, tools: Any, day: date | None
) -> tuple[Callable[[Mapping[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Return what makes a message as the template takes it, and the arguments for its date."""
    source = tokenizer.get_chat_template(tools=tools)
    return (
        _make_parts if _takes_parts(tokenizer, source) else dict,
        {_CLOCK: _clock(day)} if _CLOCK in source else {},
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


def _make_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else {}
    return {**message, **parts}


class ControlTokens:
    """The special tokens of a tokenizer, as they would be written in a text."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        self.ids = frozenset({*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)})
        names = {str(t) for t in added.values() if t.special} | set(map(str, tokenizer.all_special_tokens))
        longest_first = sorted((name for name in names if len(name) > 1), key=len, reverse=True)
        self._names = longest_first
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def find(self, text: str) -> list[str]:
        """Return the control tokens that stand in ``text``."""
        return self._pattern.findall(text)

    def any_in(self, text: str) -> bool:
        """Return whether there are any in a long ``text``: few are looked for one by one, which is faster."""
        if len(self._names) > _FEW:
            return self._pattern.search(text) is not None
        return any(name in text for name in self._names)

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


def encode_all(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the ids of each text, as `encode` does; `tokenizers` encodes them in threads."""
    arguments = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    return list(tokenizer(list(texts), **arguments)["input_ids"]) if texts else []


def encode_prompts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the ids of plain prompts: what the tokenizer puts in front of a text, unless it begins with
    that, and the text. What it puts behind one, such as EOS, would end the text before the answer.
    """
    front = added_ids(tokenizer)[0]
    return [ids if ids[: len(front)] == front else [*front, *ids] for ids in encode_all(texts, tokenizer)]


def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts in front of a text, and behind it."""
    plain, whole = encode("1", tokenizer), list(tokenizer("1")["input_ids"])
    begin = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:begin], whole[begin + len(plain) :]


Message = Mapping[str, Any]


class PartsCheck:
    """Renders each shape of conversation once, with a marker in place of every text."""

    def __init__(self, tokenizer: Any, *, day: date | None) -> None:
        self._tokenizer, self._day = tokenizer, day
        self._checked: set[str] = set()

    @property
    def passed(self) -> int:
        """Return how many shapes the template shows whole."""
        return len(self._checked)

    def dropped(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any], *, open_turn: bool = True
    ) -> str:
        """Return which part of ``messages``, or of the tools in ``template_kwargs``, the template drops, in
        words; "": none, or that shape has been checked.

        Raises those of `template.REJECTED` as `render`.
        """
        shape = json.dumps([_shape(messages), template_kwargs, open_turn], sort_keys=True, default=str)
        if shape in self._checked:
            return ""
        markers = _Markers()
        marked = [markers.message(message, number) for number, message in enumerate(messages)]
        arguments = dict(template_kwargs)
        if tools := arguments.get("tools"):
            arguments["tools"] = [markers.tool(tool, number) for number, tool in enumerate(tools)]
        text = render(self._tokenizer, marked, arguments, day=self._day, open_turn=open_turn)
        lacking = [part for mark, part in markers.parts.items() if mark not in text]
        if not lacking:
            self._checked.add(shape)
            return ""
        # A template may decide by what a text says, so that the row itself has the last word.
        whole = render(self._tokenizer, messages, template_kwargs, day=self._day, open_turn=open_turn)
        return next((part.words for part in lacking if part.text in text or part.text not in whole), "")


def _shape(messages: Sequence[Message]) -> Any:
    return [
        [message["role"], type(message.get("content")).__name__, len(message.get("tool_calls") or ())]
        for message in messages
    ]


class _Part(NamedTuple):
    """A part of a conversation: what it is, and what it says; "": a name, by which no template decides."""

    words: str
    text: str = ""


class _Markers:
    """Replaces each text of a conversation by a marker. ``parts``: what each stands for."""

    def __init__(self) -> None:
        self.parts: dict[str, _Part] = {}

    def message(self, message: Message, number: int) -> Message:
        """Return ``message`` with markers at the begin and the end of each text."""
        role, marked = message["role"], dict(message)
        what = {"system": "the system prompt", "tool": f"the tool's result, message {number}"}.get(
            role, f"the {role} message {number}"
        )
        content = message.get("content")
        if isinstance(content, str) and content:
            marked["content"] = self._around(content, f"m{number}", what)
        elif isinstance(content, list):
            marked["content"] = [
                {**part, "text": self._around(part["text"], f"m{number}p{index}", f"{what}, part {index}")}
                if isinstance(part, Mapping) and part.get("text")
                else part
                for index, part in enumerate(content)
            ]
        if calls := message.get("tool_calls"):
            marked["tool_calls"] = [
                self._function(call, f"m{number}c{index}", f"the tool call {index} of message {number}")
                for index, call in enumerate(calls)
            ]
        return marked

    def tool(self, tool: Any, number: int) -> Any:
        """Return ``tool``, of `tools`, with a marker as its name."""
        return self._function(tool, f"t{number}", f"the tool {number} (`tools`)")

    def _around(self, text: str, name: str, what: str) -> str:
        begin, end = f"0{name}begin0", f"0{name}end0"
        lines = text.strip().splitlines() or [""]
        self.parts[begin] = _Part(what, lines[0].strip())
        self.parts[end] = _Part(f"the end of {what}", lines[-1].strip())
        return f"{begin}\n{end}"

    def _function(self, tool: Any, name: str, what: str) -> Any:
        """Return a tool, or the call of one, in either of the forms that are common."""
        if not isinstance(tool, Mapping):
            return tool
        if isinstance(tool.get("function"), Mapping):
            return {**tool, "function": self._function(tool["function"], name, what)}
        if not isinstance(tool.get("name"), str):
            return tool
        mark = f"{name}name"
        self.parts[mark] = _Part(what)
        return {**tool, "name": mark}
