"""Tools: functions with typed parameters and a docstring. Their schema, and calls with checked arguments.

A docstring describes the tool and, in a section ``Args:``, what each argument is. The policy reads both.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NotRequired, Required, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic, whose dependency it is, asks for it before Python 3.12

from grpo_dist.environments.base import Tool
from grpo_dist.environments.records import Call

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHOWN = 200  # characters of a value or of an error in a message to the policy


class BadCall(ValueError):
    """The arguments of a call do not fit its tool. The message is for the policy."""


class TypedTool:
    """A tool with its schema. Raises ValueError for a function without types or docstring."""

    def __init__(self, function: Tool) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.function = function
        if not inspect.isroutine(function):
            raise ValueError(f"tool `{self.name}` is no function; name functions with typed parameters")
        parameters = inspect.signature(function).parameters
        self._names = [name for name in parameters if name != "self"]
        self._required = [n for n in self._names if parameters[n].default is inspect.Parameter.empty]
        for name in self._names:
            if parameters[name].kind not in _NAMED:
                raise ValueError(f"tool `{self.name}`: parameter `{name}` must be one that calls can name")
        hints = get_type_hints(function, include_extras=True)
        if untyped := [name for name in self._names if name not in hints]:
            raise ValueError(f"tool `{self.name}`: parameter `{untyped[0]}` has no type; annotate it")
        description = inspect.getdoc(function)
        if not description:
            raise ValueError(f"tool `{self.name}` has no docstring; the policy reads it to know what it does")
        items = {n: _item(hints[n], parameters[n].default) for n in self._names}
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
            given = self._raw(call) if call.raw else _decoded(call.arguments)
            return dict(self._arguments.validate_python(given))
        except ValidationError as error:
            wrong = "; ".join(_complaint(item) for item in error.errors()[:5])
            raise BadCall(f"{self.name}: {wrong}. It takes: {', '.join(self._names) or 'nothing'}") from error

    def _raw(self, call: Call) -> dict[str, Any]:
        """Read the text of a code block: the only argument, or the first where the others have defaults; of
        several arguments a JSON object. Raises BadCall.
        """
        if not self._names:
            return {}
        several, given = len(self._required) > 1, None
        with suppress(BadCall):
            given = _decoded(call.arguments) if len(self._names) > 1 else None
        if given is not None and (several or (given and given.keys() <= set(self._names))):
            return given
        if several:
            form = ", ".join(f'"{name}": ...' for name in self._names)
            raise BadCall(f"{self.name}: write its arguments in the block as a JSON object: {{{form}}}")
        return {self._names[0]: call.arguments}


def typed_tools(functions: Sequence[Tool]) -> dict[str, TypedTool]:
    """Return tools by name. Raises ValueError where one has no schema, or two share a name."""
    tools: dict[str, TypedTool] = {}
    for function in functions:
        tool = TypedTool(function)
        if tool.name in tools:
            raise ValueError(f"two tools have the name `{tool.name}`; rename one")
        tools[tool.name] = tool
    return tools


def as_text(result: Any) -> str:
    """Return a tool's result as the policy reads it: text unchanged, other values as JSON if possible."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)


def _item(hint: Any, default: Any) -> Any:
    return Required[hint] if default is inspect.Parameter.empty else NotRequired[hint]


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
    found = re.findall(r"^\s+(\w+)\s*(?:\([^)]*\))?:\s*(.*(?:\n\s{8,}.*)*)", rest, re.MULTILINE)
    summary = re.split(r"\n(?:Returns|Raises):\n", summary, maxsplit=1)[0]
    return summary.strip(), {name: " ".join(text.split()) for name, text in found}


def _untitled(schema: Any) -> Any:
    """Drop the titles that pydantic adds, which are no more than the names again."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {k: _untitled(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
