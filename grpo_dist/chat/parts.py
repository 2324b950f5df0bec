"""Checks that a chat template shows every part of a conversation: a template drops in silence what it has no
branch for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from grpo_dist.chat.template import render

Message = Mapping[str, Any]


class PartsCheck:
    """Renders each shape of conversation once, with a marker in place of every text."""

    def __init__(self, tokenizer: Any, *, day: date | None) -> None:
        self._tokenizer, self._day = tokenizer, day
        self._checked: set[str] = set()

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
    """Puts a marker in the place of each text of a conversation. ``parts``: what each stands for."""

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
