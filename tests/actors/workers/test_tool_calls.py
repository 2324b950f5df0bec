"""Guarantees: vLLM's parsers read the calls of real chat templates; calls they cannot read cause no crash."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from actors.workers.tool_calls import EngineCallParser, call_parser
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.builtin import calculator
from grpo_dist.environments.tools import TypedTool, read_chat

_TOOLS = (TypedTool(calculator).schema,)


def _tokenizer(*tokens: str) -> Any:
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    return tokenizer


_CALL = '{"name": "calculator", "arguments": {"expression": "1+1"}}'
_XML = (
    "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call>"
)

_GLM = "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1+1</arg_value>\n</tool_call>"


@pytest.mark.parametrize(("name", "tokens", "text"), [
    ("hermes", ("<tool_call>", "</tool_call>"), f"I compute.\n<tool_call>\n{_CALL}\n</tool_call>"),
    ("llama3_json", ("<|python_tag|>",), _CALL.replace("arguments", "parameters")),
    ("qwen3_xml", ("<tool_call>", "</tool_call>"), _XML),
    ("glm45", ("<tool_call>", "</tool_call>"), _GLM),
])  # fmt: skip
def test_a_call_is_read_and_a_cut_one_is_malformed(name: str, tokens: tuple[str, ...], text: str) -> None:
    parser = call_parser(name, _tokenizer(*tokens))
    assert parser is not None
    (call,), malformed = read_chat(text, name, parser, _TOOLS)
    assert call.name == "calculator" and not malformed and not call.raw
    assert TypedTool(calculator).arguments(call) == {"expression": "1+1"}
    calls, malformed = read_chat(text[: text.index("1+1")], name, parser, _TOOLS)
    assert not calls and malformed
    assert read_chat("The answer is \\boxed{2}.", name, parser, _TOOLS) == ((), "")
    assert read_chat(text, name, parser, _TOOLS)[0] == (call,), "the parser keeps state from an earlier text"


@pytest.mark.parametrize(("name", "tokens", "text"), [
    ("hermes", ("<tool_call>", "</tool_call>"), f"<tool_call>\n{_CALL}\n</tool_call>"),
    ("llama3_json", ("<|python_tag|>",), _CALL.replace("arguments", "parameters")),
])  # fmt: skip
def test_half_of_a_surrogate_pair_in_a_call_is_replaced(
    name: str, tokens: tuple[str, ...], text: str
) -> None:
    half = text.replace("1+1", "\\ud800").replace("calculator", "\\udfff")
    (call,) = EngineCallParser(name, _tokenizer(*tokens))(half, _TOOLS)
    assert call.name == "\ufffd" and json.loads(call.arguments) == {"expression": "\ufffd"}


def test_unknown_formats_and_tokenizers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"call_format` = nothing is no tool parser of vLLM.*hermes"):
        EngineCallParser("nothing", _tokenizer())
    with pytest.raises(ValueError, match="does not fit the model's tokenizer"):
        EngineCallParser("llama3_json", _tokenizer())
