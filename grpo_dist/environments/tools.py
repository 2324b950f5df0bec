"""Tools, and tool calls in the text of an action.

A tool is a function with typed parameters and a docstring that describes the tool and, in a section
``Args:``, its arguments. The policy reads both. Calls use the chat template's format, or are code blocks:

chat form   <tool_call>{"name": "calculator", "arguments": {"expression": "3*4"}}</tool_call>   and others
code form   ```calculator        the action ends here, and the result follows in the same message:
            3*4
            ```
            ```output
            12
            ```
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NotRequired, Protocol, Required, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic, whose dependency it is, asks for it before Python 3.12

from grpo_dist.environments.base import Tool
from grpo_dist.environments.episode import Action, Call

# Schemas and arguments


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHOWN = 200  # maximum characters of a value or an error in a message to the policy


class BadCall(ValueError):
    """The arguments of a call do not fit its tool. The message is for the policy."""


class TypedTool:
    """A tool with its schema. Raises ValueError for a function without types or docstring.

    ``is_method``: its first parameter is ``self``, the episode's environment, which the policy does not see.
    """

    def __init__(self, function: Tool) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        if not inspect.isroutine(function):
            raise ValueError(f"tool `{self.name}` is not a function; name functions with typed parameters")
        parameters = inspect.signature(function).parameters
        self.is_method = next(iter(parameters), "") == "self"
        self._names = list(parameters)[self.is_method :]
        self._required = [n for n in self._names if parameters[n].default is inspect.Parameter.empty]
        for name in self._names:
            if parameters[name].kind not in _NAMED:
                raise ValueError(f"tool `{self.name}`: parameter `{name}` must be usable as a keyword")
        hints = get_type_hints(function, include_extras=True)
        if untyped := [name for name in self._names if name not in hints]:
            raise ValueError(f"tool `{self.name}`: parameter `{untyped[0]}` has no type; annotate it")
        description = inspect.getdoc(function)
        if not description:
            raise ValueError(f"tool `{self.name}` has no docstring; the policy reads it to know what it does")
        items = {n: (Required if n in self._required else NotRequired)[hints[n]] for n in self._names}
        arguments = TypedDict(self.name, items)  # type: ignore[misc]
        arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
        try:
            self._arguments: TypeAdapter[Any] = TypeAdapter(arguments)
            schema = self._arguments.json_schema()
        except PydanticUserError as error:
            message = f"tool `{self.name}`: a parameter's type has no JSON schema ({error.message})"
            raise ValueError(message) from error
        self.schema = self._schema(schema, description)

    def _schema(self, parameters: dict[str, Any], description: str) -> dict[str, Any]:
        summary, documented = _documentation(description)
        schema = _untitled(parameters)
        schema.pop("additionalProperties", None)
        for name, item in schema.get("properties", {}).items():
            if name in documented:
                item["description"] = documented[name]
        schema.setdefault("properties", {})
        function = {"name": self.name, "description": summary, "parameters": schema}
        return {"type": "function", "function": function}

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the checked arguments of ``call``. Raises BadCall."""
        try:
            values = self._raw(call) if call.raw else _decoded(call.arguments)
            return dict(self._arguments.validate_python(values))
        except ValidationError as error:
            wrong = "; ".join(_complaint(item) for item in error.errors()[:5])
            raise BadCall(f"{self.name}: {wrong}. It takes: {', '.join(self._names) or 'nothing'}") from error

    def _raw(self, call: Call) -> dict[str, Any]:
        """Parse a code block: the only argument, or the first if the others have defaults; for several
        arguments a JSON object. Raises BadCall.
        """
        if not self._names:
            return {}
        several, decoded = len(self._required) > 1, None
        with suppress(BadCall):
            decoded = _decoded(call.arguments) if len(self._names) > 1 else None
        if decoded is not None and (several or (decoded and decoded.keys() <= set(self._names))):
            return decoded
        if several:
            form = ", ".join(f'"{name}": ...' for name in self._names)
            raise BadCall(f"{self.name}: write its arguments in the block as a JSON object: {{{form}}}")
        return {self._names[0]: call.arguments}


def typed_tools(functions: Sequence[Tool]) -> dict[str, TypedTool]:
    """Return tools by name. Raises ValueError if a tool has no schema or two share a name."""
    tools: dict[str, TypedTool] = {}
    for function in functions:
        tool = TypedTool(function)
        if tool.name in tools:
            raise ValueError(f"two tools have the name `{tool.name}`; rename one")
        tools[tool.name] = tool
    return tools


def as_text(result: Any) -> str:
    """Return a tool's result as text for the policy: text unchanged, other values as JSON if possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _decoded(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the arguments are not valid JSON ({error}): {text[:_SHOWN]}") from error
    if not isinstance(value, dict):
        raise BadCall(f"the arguments are a JSON {type(value).__name__}, expected an object: {text[:_SHOWN]}")
    return value


def _complaint(error: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"argument `{name}` is missing"
    if error["type"] == "extra_forbidden":
        return f"there is no argument `{name}`"
    message = error["msg"][0].lower() + error["msg"][1:]
    return f"argument `{name}` = {str(error['input'])[:_SHOWN]!r}: {message}"


def _documentation(docstring: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into what the tool does and its described arguments (a section ``Args:``)."""
    summary, _, rest = docstring.partition("\nArgs:\n")
    rest = re.split(r"\n(?=\S)", rest, maxsplit=1)[0]
    sections = re.findall(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*(?:\n\s{8,}.*)*)", rest, re.MULTILINE)
    summary = re.split(r"\n(?:Returns|Raises):\n", summary, maxsplit=1)[0]
    return summary.strip(), {name: " ".join(text.split()) for name, text in sections}


def _untitled(schema: Any) -> Any:
    """Drop the titles that pydantic adds, which only repeat the names."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _untitled(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}


# Calls in text


CODE = "code"
# The last newline belongs to the action: without it a closing fence could still become an opening one.
CODE_STOP = "\n```\n"
_FENCE = "```"
_OTHER_NAMES = {"py": "python", "python3": "python", "Python": "python"}

# Text in a chat template with tools -> vLLM's parser; the first match decides.
_MENTIONS = (
    ("<function=", "qwen3_xml"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)  # fmt: skip
# Text that opens a call in each format. An action that has it without a call is malformed.
_OPENINGS = {
    "qwen3_xml": ("<tool_call>", "<function="),
    "qwen3_coder": ("<tool_call>", "<function="),
    "glm45": ("<tool_call>",),
    "glm47": ("<tool_call>",),
    "hermes": ("<tool_call>",),
    "qwen3_json": ("<tool_call>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁call▁begin｜>",),
    "deepseek_v31": ("<｜tool▁call▁begin｜>",),
    "llama3_json": ("<|python_tag|>", '{"name":', '{"type": "function"'),
    "llama4_json": ("<|python_tag|>", '{"name":', '{"type": "function"'),
}

# Tokens that vLLM's parser requires.
_NEEDED = {
    "llama3_json": ("<|python_tag|>",),
    "llama4_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
}
_CALL_REASON = 200  # maximum characters of a parser's error shown to the policy
# Formats whose parsers return a truncated call, without the truncated argument.
_CLOSED = dict.fromkeys(("qwen3_xml", "qwen3_coder"), ("<function=", "</function>"))
_CLOSED |= dict.fromkeys(("glm45", "glm47"), ("<tool_call>", "</tool_call>"))


class CallParser(Protocol):
    """A tool parser of the engine. Implemented elsewhere: this package does not import vLLM."""

    @property
    def openings(self) -> Sequence[str]:
        """Texts that open a call, if the parser declares them."""
        ...

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[Call]:
        """Return the calls in ``text``; none if it cannot be parsed."""


def resolve_format(call_format: str, chat_template: str | None) -> str:
    """Return the call format: `environments.call_format`, or for `auto` the chat template's.

    ``chat_template``: None for plain text. A template without tools uses code blocks.
    """
    if call_format != "auto":
        return call_format
    template = chat_template or ""
    return next((name for mark, name in _MENTIONS if mark in template and "tools" in template), CODE)


def openings_of(call_format: str) -> tuple[str, ...]:
    """Return the texts that open a call of ``call_format``; () for unknown formats."""
    return _OPENINGS.get(call_format, ())


def is_known(call_format: str) -> bool:
    """Return whether this package parses ``call_format`` itself; other names are parsers of vLLM."""
    return call_format in ("auto", CODE) or call_format in _OPENINGS


def missing_tokens(call_format: str, vocabulary: Mapping[str, int]) -> str:
    """Return a token that the parser of ``call_format`` needs and the tokenizer lacks; "" for none."""
    return next((token for token in _NEEDED.get(call_format, ()) if token not in vocabulary), "")


def read_chat(
    text: str, call_format: str, parser: CallParser, tools: Sequence[Mapping[str, Any]]
) -> tuple[tuple[Call, ...], str]:
    """Return the calls in an action's answer, and why they cannot be parsed ("": they can)."""
    try:
        calls = tuple(parser(text, tools))
    except Exception as error:  # the policy's text must not end the run; the samples show the reason
        why = f"{type(error).__name__}: {error}"[:_CALL_REASON]
        return (), f"the call cannot be read ({why}); write it as valid {_form(call_format)}"
    opening, closing = _CLOSED.get(call_format, ("", ""))
    if text.count(opening) > text.count(closing):
        return (), f"the call after {opening} is not closed; end it with {closing}"
    if calls:
        return calls, ""
    for opening in (*openings_of(call_format), *parser.openings):
        if opening in text:
            return (), f"the call after {opening} cannot be read; write it as valid {_form(call_format)}"
    return (), ""


def read_code(text: str, names: Sequence[str], *, ended: bool) -> Action:
    """Parse an action in the code format.

    Args:
        names: tool names; a block whose language is a tool's name calls it.
        ended: the policy ended its message, so nothing runs: a block in it is part of the answer.
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
    # The stop string also matches a fence that closes a block of another language, or opens one without.
    return Action(text, unfinished=bool(re.search(r"\n```\s*\Z", text)))


def _form(call_format: str) -> str:
    if call_format.startswith("glm"):
        return "XML with the name, and an arg_key and an arg_value for each argument"
    return "JSON with name and arguments" if "xml" not in call_format else "XML with function and parameters"
