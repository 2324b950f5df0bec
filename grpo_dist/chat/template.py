"""Reads tokenizers, renders conversations with their chat templates, and encodes text.

Data is text: control tokens in it are broken by a space before it is rendered.

`PartsCheck` finds parts of a conversation that a template silently drops, because it has no branch for them.

`writes_text_as_it_is` finds templates that write message texts verbatim, with the same around every text:

{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}    writes every text
{{ message['content'].split('</think>')[-1] }}                          writes what depends on the text
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CLOCK = "strftime_now"  # the function with which templates write the date
_MARK = "0content0"
_FEW = 50  # control tokens

# What a template raises for messages or arguments that it rejects.
REJECTED = (TemplateError, TypeError, ValueError)


def read_tokenizer(model: str | Path, **options: Any) -> Any:
    """Read a model's tokenizer as the engine does, from its Hugging Face files. ``options``: arguments of
    `from_pretrained`.

    Beside a tekken.json, transformers prefers the tokenizer of mistral_common, which has no chat template.
    """
    from transformers import AutoTokenizer  # slow to import

    return AutoTokenizer.from_pretrained(model, mistral_format=False, **options)


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
        template_kwargs, arguments: of the template; no name may be in both.
        day: what the template writes as today's date; None: today.
        open_turn: end where the model's answer begins.

    Raises an error of REJECTED for messages or arguments that the template rejects.
    """
    tools = arguments.get("tools", template_kwargs.get("tools"))
    to_message, clock = _message_format(tokenizer, tools, day)
    settings = {"tokenize": False, "add_generation_prompt": open_turn, **clock}
    chat = list(map(to_message, messages))
    try:
        return tokenizer.apply_chat_template(chat, **settings, **template_kwargs, **arguments)
    except TypeError:  # DeepSeek's templates take the arguments of a tool call as JSON text alone
        as_text = [convert_arguments(message, _dump_arguments) for message in chat]
        if as_text == chat:
            raise
        return tokenizer.apply_chat_template(as_text, **settings, **template_kwargs, **arguments)


def render_all(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    template_kwargs: Mapping[str, Any],
    *,
    day: date | None,
) -> list[str]:
    """Render conversations as `render` does, in one call."""
    if not is_of_library(tokenizer):  # it may take only one conversation
        return [render(tokenizer, messages, template_kwargs, day=day) for messages in conversations]
    to_message, clock = _message_format(tokenizer, template_kwargs.get("tools"), day)
    return list(
        tokenizer.apply_chat_template(
            [list(map(to_message, messages)) for messages in conversations],
            tokenize=False,
            add_generation_prompt=True,
            **clock,
            **template_kwargs,
        )
    )


def convert_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return ``message`` with the arguments of its tool calls as ``convert`` returns them."""

    def converted(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if "function" in call:
            return {**call, "function": converted(call["function"])}
        return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(converted, calls))} if isinstance(calls, list) else {**message}


def parse_arguments(arguments: Any) -> Any:
    """Return the object in JSON text, as OpenAI has arguments, because templates serialise them; other values
    unchanged.
    """
    try:
        value = json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _dump_arguments(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def is_of_library(tokenizer: Any) -> bool:
    """Return whether ``tokenizer`` is a class of `transformers`, not of a model's remote code."""
    return type(tokenizer).__module__.startswith("transformers.")


def _message_format(
    tokenizer: Any, tools: Any, day: date | None
) -> tuple[Callable[[Mapping[str, Any]], dict[str, Any]], dict[str, Any]]:
    """Return a function that converts messages for the template, and the argument for its date."""
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
        """Return the control tokens in ``text``."""
        return self._pattern.findall(text)

    def any_in(self, text: str) -> bool:
        """Return whether a long ``text`` has any; a few names are searched one by one, which is faster."""
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
            return {self.as_text(name): self.as_text(value) for name, value in content.items()}
        return [self.as_text(part) for part in content] if isinstance(content, list | tuple) else content


def encode(text: str, tokenizer: Any) -> list[int]:
    """Return the ids of ``text`` without BOS or EOS; control tokens in it keep their meaning."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_all(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the ids of each text, as `encode` does; `tokenizers` encodes them in threads."""
    arguments = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
    return list(tokenizer(list(texts), **arguments)["input_ids"]) if texts else []


def encode_prompts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Return the ids of plain prompts, with the tokenizer's prefix where a text does not begin with it. Its
    suffix, such as EOS, is left out: it would end the text before the answer.
    """
    front = added_ids(tokenizer)[0]
    return [ids if ids[: len(front)] == front else [*front, *ids] for ids in encode_all(texts, tokenizer)]


def added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer adds before a text, and after it."""
    plain, whole = encode("1", tokenizer), list(tokenizer("1")["input_ids"])
    begin = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
    return whole[:begin], whole[begin + len(plain) :]


Message = Mapping[str, Any]


class PartsCheck:
    """Renders each shape of conversation once, with a marker for every text."""

    def __init__(self, tokenizer: Any, *, day: date | None) -> None:
        self._tokenizer, self._day = tokenizer, day
        self._checked: set[str] = set()

    @property
    def passed(self) -> int:
        """Return how many shapes the template renders completely."""
        return len(self._checked)

    def dropped(
        self, messages: Sequence[Message], template_kwargs: Mapping[str, Any], *, open_turn: bool = True
    ) -> str:
        """Describe a part of ``messages``, or of the tools in ``template_kwargs``, that the template drops;
        "": it drops none, the shape has been checked, or the template rejects it, and so the row.
        """
        shape = json.dumps([_shape(messages), template_kwargs, open_turn], sort_keys=True, default=str)
        if shape in self._checked:
            return ""
        markers = _Markers()
        marked = [markers.message(message, number) for number, message in enumerate(messages)]
        arguments = dict(template_kwargs)
        if tools := arguments.get("tools"):
            arguments["tools"] = [markers.tool(tool, number) for number, tool in enumerate(tools)]
        try:
            text = render(self._tokenizer, marked, arguments, day=self._day, open_turn=open_turn)
            lacking = [part for mark, part in markers.parts.items() if mark not in text]
            if not lacking:
                self._checked.add(shape)
                return ""
            # A template may depend on what a text says, so the row itself decides.
            whole = render(self._tokenizer, messages, template_kwargs, day=self._day, open_turn=open_turn)
        except REJECTED:
            return ""
        return next((part.words for part in lacking if part.text in text or part.text not in whole), "")


def _shape(messages: Sequence[Message]) -> Any:
    return [
        [message["role"], type(message.get("content")).__name__, len(message.get("tool_calls") or ())]
        for message in messages
    ]


class _Part(NamedTuple):
    """A part of a conversation: its description and text; "" for a name, which no template depends on."""

    words: str
    text: str = ""


class _Markers:
    """Replaces each text of a conversation by a marker. ``parts``: the part of each marker."""

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


# Templates that write every text


_CONTENT = "content"
_PLAIN_KEYS = ("role", "name", "tool_calls", "tool_call_id")  # keys of a message besides its text
_COUNTS = ("length", "count")  # filters that reveal no text
_KINDS = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence")  # tests, too
_NEIGHBOURS = ("previtem", "nextitem")  # other messages that a loop sees
# Statements that may read written text again.
_CAPTURES = (
    nodes.AssignBlock, nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.Include, nodes.Import,
    nodes.FromImport, nodes.Extends, nodes.Block, nodes.EvalContextModifier,
)  # fmt: skip


@lru_cache(maxsize=16)
def writes_text_as_it_is(template: str) -> bool:
    """Return whether ``template`` only writes the text of messages, or its `trim`."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError:
        return False
    every = [tree, *tree.find_all(nodes.Node)]
    parents = {child: node for node in every for child in node.iter_child_nodes()}
    names = _names_of_messages(tree)
    holders = [node for node in tree.find_all(nodes.Name) if node.name in names and node.ctx == "load"]
    if any(isinstance(node, _CAPTURES) or _key(node) in _NEIGHBOURS for node in every):
        return False
    return all(_is_only_written(node, parents) for node in holders)


def _names_of_messages(tree: nodes.Template) -> set[str]:
    """Return the variables that may hold messages."""
    names, before = {"messages"}, 0
    while len(names) > before:
        before = len(names)
        pairs: list[tuple[nodes.Node, nodes.Node]]
        pairs = [(node.target, node.node) for node in tree.find_all(nodes.Assign)]
        pairs += [(node.target, node.iter) for node in tree.find_all(nodes.For)]
        for target, value in pairs:
            if names & set(_names(value)):
                names |= set(_names(target))
    return names


def _names(node: nodes.Node) -> Iterator[str]:
    for each in [node, *node.find_all((nodes.Name, nodes.NSRef))]:
        if isinstance(each, nodes.Name | nodes.NSRef):
            yield each.name


def _key(node: nodes.Node) -> Any:
    """Return the attribute, or the constant item, that ``node`` reads; None: it reads none."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) else None


def _is_only_written(node: nodes.Node, parents: Mapping[nodes.Node, nodes.Node]) -> bool:
    """Return whether the texts of ``node``, which holds messages, are only written."""
    parent = parents[node]
    if isinstance(parent, nodes.Assign):
        return True
    if isinstance(parent, nodes.For):
        return parent.iter is node
    if isinstance(parent, nodes.Filter | nodes.Test):
        return parent.node is node and parent.name in (
            _COUNTS if isinstance(parent, nodes.Filter) else _KINDS
        )
    if not isinstance(parent, nodes.Getattr | nodes.Getitem) or parent.node is not node:
        return False
    key = _key(parent)
    if key == _CONTENT:
        return _is_output(parent, parents)
    return key in _PLAIN_KEYS or (_is_index(parent) and _is_only_written(parent, parents))


def _is_index(node: nodes.Node) -> bool:
    """Return whether ``node`` reads one message of a list, or a part of the list."""
    if not isinstance(node, nodes.Getitem):
        return False
    if isinstance(node.arg, nodes.Slice):
        return True
    return isinstance(_key(node), int) or (
        isinstance(node.arg, nodes.Add | nodes.Sub | nodes.Getattr) and set(_names(node.arg)) == {"loop"}
    )


def _is_output(text: nodes.Node, parents: Mapping[nodes.Node, nodes.Node]) -> bool:
    parent = parents[text]
    if isinstance(parent, nodes.Filter) and parent.name == "trim" and not parent.args and not parent.kwargs:
        parent = parents[parent]
    while isinstance(parent, nodes.Add | nodes.Concat):
        parent = parents[parent]
    return isinstance(parent, nodes.Output)
