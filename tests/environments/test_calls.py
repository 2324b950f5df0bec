"""Guarantees: code blocks are read as calls, arguments are checked, the calculator is exact and bounded."""

from typing import Literal

import numpy as np
import pytest

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, SFTConfig
from grpo_dist.data.demonstrations import load_demonstrations
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.builtin import calculator
from grpo_dist.environments.dialogue import Dialogue, Renderer
from grpo_dist.environments.episode import Call, Observed
from grpo_dist.environments.tools import BadCall, TypedTool, read_chat, read_code, resolve_format, typed_tools
from grpo_dist.types import Prompt, Task, ToolCall
from tests.support.chat_templates import real_tokenizer
from tests.support.made_episodes import generated

_NAMES = ["python", "calculator"]


@pytest.mark.parametrize(("text", "call"), [
    ("```python\nprint(1)\n```\n", ("python", "print(1)\n")),
    ("I compute.\n```py\nx = 1\nx\n```", ("python", "x = 1\nx\n")),
    ("```text\na\n```\nthen\n```calculator\n1+1\n```\n", ("calculator", "1+1\n")),
    ("```python\nfirst\n```\n```python\nsecond\n```\n", ("python", "second\n")),
    ("``` python \n1\n```\n", ("python", "1\n")),
    ("```python\n```\n", ("python", "")),
])  # fmt: skip
def test_the_code_block_at_the_end_is_a_call(text: str, call: tuple[str, str]) -> None:
    assert read_code(text, _NAMES, ended=False).calls == (Call(*call, raw=True),)


@pytest.mark.parametrize(
    "text", ["", "no code", "```python\n1\n```\nand so on", "`python` ```x```", "```python"]
)
def test_other_text_has_no_call(text: str) -> None:
    action = read_code(text, _NAMES, ended=False)
    assert action.calls == () and not action.malformed and not action.unfinished


@pytest.mark.parametrize("text", ["So\n```\n", "```text\n1\n```\n", "So\n```\n12*34\n```\n"])
def test_a_fence_at_which_sampling_stops_without_a_call_ends_no_action(text: str) -> None:
    action = read_code(text, _NAMES, ended=False)
    assert action.unfinished and action.calls == ()
    assert not read_code(text, _NAMES, ended=True).unfinished


def test_a_message_that_ended_runs_no_code() -> None:
    action = read_code("```python\n1\n```\n", _NAMES, ended=True)
    assert action.calls == () and not action.malformed


def test_a_code_block_that_is_never_closed_is_malformed() -> None:
    assert "not closed" in read_code("```python\nprint(1)", _NAMES, ended=True).malformed
    assert not read_code("```text\nprint(1)", _NAMES, ended=True).malformed


class _Nothing:
    openings = ("<special>",)

    def __call__(self, text: str, tools: object) -> list[Call]:
        return [Call("f", "{}")] if "OK" in text else []


@pytest.mark.parametrize(("call_format", "text", "malformed"), [
    ("hermes", "<tool_call>{", True), ("hermes", "<tool_call>OK", False), ("hermes", "an answer", False),
    ("llama3_json", '{"name": "f", ', True), ("llama3_json", "\\boxed{5}", False),
    ("qwen3_xml", "<function=f><parameter=x>OK", True),
    ("qwen3_xml", "<function=f><parameter=x>OK</parameter></function>", False),
    ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>OK", True),
    ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>OK</arg_value>\n</tool_call>", False),
    ("another", "<special>", True),
])  # fmt: skip
def test_an_opening_without_a_call_is_malformed(call_format: str, text: str, malformed: bool) -> None:
    calls, reason = read_chat(text, call_format, _Nothing(), ())
    assert bool(reason) == malformed
    assert not (calls and reason)


class _Raising:
    openings = ()

    def __call__(self, text: str, tools: object) -> list[Call]:
        raise KeyError("name" + 1000 * "e")


def test_a_parser_that_raises_makes_the_call_malformed() -> None:
    calls, reason = read_chat("<tool_call>{}</tool_call>", "hermes", _Raising(), ())
    assert not calls and "KeyError: 'name" in reason and "valid JSON" in reason and len(reason) < 300


_HALF = "\ud800"  # half of a surrogate pair


def test_no_record_of_an_episode_holds_half_of_a_surrogate_pair() -> None:
    call = Call(f"f{_HALF}", f'{{"x": "{_HALF}é"}}')
    assert (call.name, call.arguments) == ("f\ufffd", '{"x": "\ufffdé"}')
    tool_call = ToolCall(f"f{_HALF}", _HALF, f"a{_HALF}b", "ok", 0.0)
    messages = ({"role": "user", "content": [{"text": _HALF}]}, {"role": "tool", "content": f"😀{_HALF}"})
    observed = Observed(messages, (tool_call,), failed=f"KeyError: {_HALF}")
    assert observed.calls == (ToolCall("f\ufffd", "\ufffd", "a\ufffdb", "ok", 0.0),)
    assert observed.failed == "KeyError: \ufffd"
    assert observed.observation == (
        {"role": "user", "content": [{"text": "\ufffd"}]}, {"role": "tool", "content": "😀\ufffd"}
    )  # fmt: skip


@pytest.mark.parametrize(("name", "call_format"), [
    ("qwen2.5", "hermes"), ("qwen3", "hermes"), ("llama3.1", "llama3_json"), ("llama3", "code"),
    ("smollm2", "code"), ("deepseek-r1-distill", "code"), ("glm4.5", "glm45"),
])  # fmt: skip
def test_auto_takes_the_form_that_the_chat_template_shows(name: str, call_format: str) -> None:
    assert resolve_format("auto", real_tokenizer(name).chat_template) == call_format


def test_a_named_form_wins_and_plain_text_has_code_blocks() -> None:
    assert resolve_format("hermes", None) == "hermes"
    assert resolve_format("auto", None) == "code"


def _weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> str:
    """Forecast the weather.

    It is a guess.

    Args:
        city: name of
            the city
        days (int): how far ahead

    Returns:
        the forecast
    """
    return f"{city} {days} {unit}"


def test_the_schema_comes_from_types_and_docstring() -> None:
    assert TypedTool(_weather).schema == {
        "type": "function",
        "function": {
            "name": "_weather",
            "description": "Forecast the weather.\n\nIt is a guess.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "name of the city"},
                    "days": {"type": "integer", "description": "how far ahead"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city"],
            },
        },
    }


@pytest.mark.parametrize(("arguments", "words"), [
    ('{"city": "Ulm"', ["not valid JSON", "Ulm"]), ('["Ulm"]', ["JSON list", "expected an object"]),
    ("3", ["JSON int"]), ("{}", ["_weather", "`city` is missing", "It takes: city, days, unit"]),
    ('{"city": "Ulm", "hours": 3}', ["no argument `hours`"]),
    ('{"city": "Ulm", "days": "many"}', ["`days` = 'many'", "valid integer"]),
    ('{"city": "Ulm", "unit": "K"}', ["`unit` = 'K'", "'C' or 'F'"]),
    ('{"city": null}', ["`city`", "valid string"]), ("[" * 100_000, ["not valid JSON"]),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_in_words(arguments: str, words: list[str]) -> None:
    with pytest.raises(BadCall) as error:
        TypedTool(_weather).arguments(Call("_weather", arguments))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value)) < 600


def test_arguments_that_fit_are_converted() -> None:
    tool = TypedTool(_weather)
    assert tool.arguments(Call("_weather", '{"city": "Ulm", "days": 2}')) == {"city": "Ulm", "days": 2}
    assert tool.arguments(Call("_weather", "Ulm", raw=True)) == {"city": "Ulm"}


def _middle(low: int, high: int, rounding: Literal["down", "up"] = "down") -> int:
    """Return the middle."""
    return (low + high + (rounding == "up")) // 2


@pytest.mark.parametrize(("tool", "block", "arguments"), [
    (_middle, '{"low": 1, "high": 4}\n', {"low": 1, "high": 4}),
    (_middle, '{\n "low": "1", "high": 4,\n "rounding": "up"\n}', {"low": 1, "high": 4, "rounding": "up"}),
    (_weather, '{"city": "Ulm", "days": 2}\n', {"city": "Ulm", "days": 2}),
    (_weather, '{"name": "Ulm"}\n', {"city": '{"name": "Ulm"}\n'}),
    (_weather, "{}", {"city": "{}"}),
    (calculator, '{"expression": "1+1"}', {"expression": '{"expression": "1+1"}'}),
])  # fmt: skip
def test_a_code_block_holds_the_only_argument_or_all_of_several(tool, block: str, arguments: dict) -> None:
    assert TypedTool(tool).arguments(Call("t", block, raw=True)) == arguments


@pytest.mark.parametrize(("block", "words"), [
    ("1 4", ["_middle: write its arguments in the block as a JSON object: {", '"low": ..., "high": ...']),
    ("[1, 4]", ["as a JSON object"]),
    ('{"low": 1}', ["`high` is missing"]),
    ('{"low": 1, "high": 4, "by": 2}', ["no argument `by`"]),
    ("{}", ["`low` is missing; argument `high` is missing"]),
])  # fmt: skip
def test_a_code_block_without_all_arguments_is_refused_in_words(block: str, words: list[str]) -> None:
    with pytest.raises(BadCall) as error:
        TypedTool(_middle).arguments(Call("_middle", block, raw=True))
    assert all(word in str(error.value) for word in words), str(error.value)


def _untyped(x) -> str:  # type: ignore[no-untyped-def]
    """Do it."""
    return x


def _undocumented(x: int) -> int:
    return x


def _variadic(*x: int) -> int:
    """Do it."""
    return sum(x)


@pytest.mark.parametrize(("functions", "words"), [
    ([_untyped], "parameter `x` has no type"),
    ([_undocumented], "no docstring"),
    ([_variadic], "`x` must be usable as a keyword"),
    ([calculator, calculator], "two tools have the name `calculator`"),
])  # fmt: skip
def test_a_tool_without_a_schema_is_refused(functions: list, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        typed_tools(functions)


@pytest.mark.parametrize(("expression", "result"), [
    ("347*58", "20126"), ("1/3", "1/3 (about 0.333333333333)"), ("0.1+0.2", "0.3"), ("-1/8", "-0.125"),
    ("-7//2", "-4"), ("-7 % 3", "2"), ("2**100", "1267650600228229401496703205376"), ("2^10", "1024"),
    ("3×4", "12"), ("2**-2", "0.25"), ("sqrt(16)/4", "1"), ("sqrt(2)", "1.41421356237"), ("sqrt(1/4)", "0.5"),
    ("round(2/3, 2)", "0.67"), ("floor(-0.5)", "-1"), ("max(1, 2.5, 1/3)", "2.5"), ("gcd(12, 18)", "6"),
    ("factorial(20)", "2432902008176640000"), ("comb(10, 3)", "120"), ("1e3", "1000"), ("0x10", "16"),
    ("1_000", "1000"), ("1**10000000000", "1"), ("0**5", "0"),
])  # fmt: skip
def test_the_calculator_is_exact(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(("expression", "words"), [
    ("9**9**9", "too large"), ("factorial(10**6)", "between 0 and 1000"), ("10**5999*10**5999", "too large"),
    ("1e999999", "too large"), ("2**0.5**1e9", "too large"), ("1/0", "division by zero"),
    ("0**-1", "division by zero"), ("(-8)**(1/3)", "real"), ("sqrt(-1)", "real"),
    ("__import__('os').system('true')", "cannot be computed"), ("().__class__", "cannot be computed"),
    ("[1]*10**9", "cannot be computed"), ("'a'*3", "cannot be computed"), ("True", "cannot be computed"),
    ("lambda: 1", "cannot be computed"), ("x", "cannot be computed"), ("abs()", "does not take 0"),
    ("round(1, 10**9)", "at most 100"), ("max(*[1])", "plain numbers"),
    ("1 +", "not an arithmetic expression"), ("(" * 900, "not an arithmetic expression"),
    ("1" * 2000, "2000 characters"), ("-" * 999 + "1", "not an arithmetic expression"),
    ("10**400 + 0.5 * pi", "too large"), ("a, b", "cannot be computed"),
])  # fmt: skip
def test_the_calculator_refuses_in_words(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calculator(expression)


def test_a_demonstrated_call_has_the_tokens_and_the_mask_of_an_episode():
    tokenizer = character_tokenizer()
    sft = {"model": "demo:micro", "data": [{"path": "demo:products", "examples": 12}]}
    rows = load_demonstrations(SFTConfig.model_validate(sft), tokenizer)
    data = DataConfig(train=(DataSourceConfig(path="demo:products"),))
    renderer = Renderer(tokenizer, data, EnvironmentsConfig(call_format="code"))
    for row in rows:
        question = tokenizer.decode(row.token_ids).removeprefix("<|user|>").removesuffix("<|assistant|>")
        messages = ({"role": "user", "content": question},)
        task = Task("calculator", messages=messages, tools=(TypedTool(calculator).schema,))
        assert renderer.ids(renderer.prompt(task)) == row.token_ids.tolist()
        episode = Dialogue(renderer, Prompt("p", row.token_ids, "", "products", question, task=task))
        call_ids, result_ids, answer_ids = np.split(
            row.completion_ids, np.flatnonzero(np.diff(row.sampled)) + 1
        )
        action = add_action(episode, call_ids)
        assert renderer.text(call_ids.tolist()).endswith(renderer.stop(task)[0])
        (call,) = action.calls
        assert (call.name, call.arguments.strip()) == ("calculator", question.removesuffix("="))
        result = calculator(call.arguments)
        episode.observe(Observed(calls=(ToolCall("calculator", call.arguments, result, "ok", 0.0),)))
        assert tokenizer.decode(result_ids) == f"```output\n{result}\n```\n"
        assert add_action(episode, answer_ids).calls == ()
        rollout = episode.rollout(0, "stop")
        assert rollout.completion_ids.tolist() == row.completion_ids.tolist()
        assert rollout.sampled.tolist() == row.sampled.tolist()
        assert rollout.text == f"\\boxed{{{result}}}"


def add_action(episode, ids):
    return episode.add_action(generated(ids, -0.5))
