"""Chat messages of a row, in the forms that data sets have them.

[{"role": "user", "content": "1+1="}]                                       as chat templates take them
[{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]           content in parts
[{"from": "human", "value": "1+1="}]                                        ShareGPT
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.environments.base import Message

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
_EXPECTED = "expected a list of objects with `role` and `content`"


def is_conversation(value: Any) -> bool:
    """Return whether ``value`` is a list of messages, well-formed or not."""
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value)
    )


def read_messages(value: Any, column: str) -> list[Message]:
    """Return messages as a chat template takes them, without keys that are None, also in tool calls: every
    row of a table has the keys of all.

    Raises ValueError, which names the ``column``, for what is no list of messages, and for content other than
    text.
    """
    if not is_conversation(value):
        raise ValueError(f"`{column}`: {str(value)[:60]!r} is no conversation; {_EXPECTED}")
    try:
        return [_message(number, message) for number, message in enumerate(value)]
    except ValueError as error:
        raise ValueError(f"`{column}`: {error}") from error


def _message(number: int, message: Mapping[str, Any]) -> Message:
    kept = {key: item for key, item in _json(message).items() if key not in ("from", "value")}
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise ValueError(f"message {number} has the role {role!r}; {_EXPECTED}, both text")
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    calls = role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(
            f"message {number} has the content {str(content)[:60]!r}; {_EXPECTED}, both text (an assistant's "
            "message with `tool_calls` may have no `content`)"
        )
    return kept | {"role": _ROLES.get(role, role), "content": content}


def _json(value: Any) -> Any:
    """Return ``value`` in the kinds of JSON, as prompts are hashed and written, and without keys that are
    None.
    """
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_json(item) for item in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _part(number: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise ValueError(f"message {number} has a part of type {kind}; expected text alone: remove the row")
    return text
