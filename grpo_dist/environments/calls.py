"""Finds tool calls in the text of an action, in the form of the chat template or as code blocks.

chat form   <tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>   and others
code form   ```calculator        the action ends here, and the result follows in the same message:
            3*4
            ```
            ```output
            12
            ```
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grpo_dist.environments.records import Action, Call

CODE = "code"
# The last newline belongs to the action: without it a closing fence could still become an opening one.
CODE_STOP = "\n```\n"
_FENCE = "```"
_OTHER_NAMES = {"py": "python", "python3": "python", "Python": "python"}

# What a chat template that shows tools mentions -> the parser of vLLM; the first that fits decides.
_MENTIONS = (
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)  # fmt: skip
# What opens a call in each format. An action with it that holds no call is malformed.
_OPENINGS = {
    "qwen3_xml": ("<tool_call>", "<function="),
    "qwen3_coder": ("<tool_call>", "<function="),
    "hermes": ("<tool_call>",),
    "qwen3_json": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁call▁begin｜>",),
    "deepseek_v31": ("<｜tool▁call▁begin｜>",),
    "llama3_json": ("<|python_tag|>", '{"name":', '{"type": "function"'),
    "llama4_json": ("<|python_tag|>", '{"name":', '{"type": "function"'),
}

# Tokens without which vLLM's parser does not start.
_NEEDED = {
    "llama3_json": ("<|python_tag|>",),
    "llama4_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
}
_REASON = 200  # characters of a parser's error that the policy reads
# Formats whose parsers return a call that was cut, without the argument in which it was.
_CLOSED = {"qwen3_xml": ("<function=", "</function>"), "qwen3_coder": ("<function=", "</function>")}


class CallParser(Protocol):
    """A tool parser of the engine. Not in this package, which does not know vLLM."""

    @property
    def openings(self) -> Sequence[str]:
        """Texts that open a call, if the parser states them."""
        ...

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Call]:
        """Return the calls in ``text``; none where it cannot be read."""


def resolve_format(call_format: str, chat_template: str | None) -> str:
    """Return the format of calls: `environments.call_format`, or where that is `auto` the chat template's.

    ``chat_template``: None for plain text. For a template without tools the format is code blocks.
    """
    if call_format != "auto":
        return call_format
    template = chat_template or ""
    return next((name for mark, name in _MENTIONS if mark in template and "tools" in template), CODE)


def is_known(call_format: str) -> bool:
    """Return whether this package parses ``call_format`` itself; other names are parsers of vLLM."""
    return call_format in ("auto", CODE) or call_format in _OPENINGS


def missing_tokens(call_format: str, vocabulary: Mapping[str, int]) -> str:
    """Return a token that the parser of ``call_format`` needs and the tokenizer lacks; "": there is none."""
    return next((token for token in _NEEDED.get(call_format, ()) if token not in vocabulary), "")


def read_chat(
    text: str, call_format: str, parser: CallParser, tools: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Call, ...], str]:
    """Return the calls in an action's answer, and why they cannot be read ("": they can)."""
    try:
        calls = tuple(parser(text, tools))
    except Exception as error:  # text of the policy must not end the run; the samples show the reason
        why = f"{type(error).__name__}: {error}"[:_REASON]
        return (), f"the call cannot be read ({why}); write it as valid {_form(call_format)}"
    opening, closing = _CLOSED.get(call_format, ("", ""))
    if text.count(opening) > text.count(closing):
        return (), f"the call after {opening} is not closed; end it with {closing}"
    if calls:
        return calls, ""
    for opening in (*_OPENINGS.get(call_format, ()), *parser.openings):
        if opening in text:
            return (), f"the call after {opening} cannot be read; write it as valid {_form(call_format)}"
    return (), ""


def read_code(text: str, names: Sequence[str], *, ended: bool) -> Action:
    """Read an action of the code form.

    Args:
        names: of tools; a block in the language of that name calls it.
        ended: the policy ended its message, so that nothing is executed: a block in it is part of the answer.
    """
    language, body, start, closed = None, "", 0, False
    position = 0
    for line in text.splitlines(keepends=True):
        fence = line.strip()
        if language is None and fence.startswith(_FENCE) and "`" not in fence[3:]:
            language, start, closed = fence[3:].strip(), position + len(line), False
        elif language is not None and fence == _FENCE:
            body, closed = text[start:position], True
            name, language = _OTHER_NAMES.get(language, language), None
        elif fence:
            closed = False
        position += len(line)
    if ended:
        if language is not None and _OTHER_NAMES.get(language, language) in names:
            return Action(text, malformed=f"the {language} block is not closed; end it with a line of ```")
        return Action(text)
    if closed and name in names:
        return Action(text, (Call(name, body, raw=True),))
    # The stop string also matches a fence that closes a block in another language, or opens one without.
    return Action(text, unfinished=bool(re.search(r"\n```\s*\Z", text)))


def _form(call_format: str) -> str:
    return "JSON with name and arguments" if "xml" not in call_format else "XML with function and parameters"
