"""Parse tool calls with vLLM's parsers, in the format that a chat template teaches."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_dist.environments.episode import Call
from grpo_dist.environments.tools import CODE, CallParser

# Attributes of parsers with the token that opens a call.
_OPENINGS = ("tool_call_start_token", "tool_calls_start_token", "bot_token")


class EngineCallParser:
    """A vLLM tool parser. Raises ValueError for an unknown name or a tokenizer without its tokens."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from vllm.tool_parsers import ToolParserManager

        # An invalid call is an observation for the policy; vLLM logs a stack trace for each.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        try:
            self._kind = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            raise ValueError(
                f"`environments.call_format` = {name} is no tool parser of vLLM; use code, or one of "
                f"{', '.join(sorted(ToolParserManager.list_registered()))}"
            ) from error
        self._tokenizer = tokenizer
        self._parsers: dict[str, tuple[Any, Any]] = {}  # by the tools' schemas
        try:
            parser, _ = self._parser(())
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"`environments.call_format` = {name} does not fit the model's tokenizer ({error}); use the "
                "form that its chat template shows, or code"
            ) from error
        tokens = (getattr(parser, attribute, None) for attribute in _OPENINGS)
        self.openings = [token for token in tokens if isinstance(token, str) and token]

    def __call__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
        parser, request = self._parser(tools)
        parsed = parser.extract_tool_calls(text, request)
        if not parsed.tools_called:
            return []
        return [Call(call.function.name, call.function.arguments) for call in parsed.tool_calls]

    def _parser(self, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
        key = json.dumps(list(tools), sort_keys=True)
        if key not in self._parsers:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            request = ChatCompletionRequest(messages=[], tools=[dict(tool) for tool in tools] or None)
            self._parsers[key] = self._kind(self._tokenizer, request.tools), request
        return self._parsers[key]


def call_parser(call_format: str, tokenizer: Any) -> CallParser | None:
    """Return vLLM's parser of ``call_format``; None for code blocks."""
    return None if call_format == CODE else EngineCallParser(call_format, tokenizer)


def main() -> None:
    """Print the names of vLLM's parsers, for `runs.start_checks`."""
    from vllm.tool_parsers import ToolParserManager

    print(json.dumps(sorted(ToolParserManager.list_registered())))


if __name__ == "__main__":
    main()
