"""Demonstrations of tool calls are, token by token, what an episode of a run holds."""

import numpy as np
import pytest

from grpo_dist.config import DataConfig, DataSourceConfig, EnvironmentsConfig, SFTConfig
from grpo_dist.data.demonstrations import load_demonstrations
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.builtin import calculator
from grpo_dist.environments.dialogue import Dialogue
from grpo_dist.environments.records import Observed
from grpo_dist.environments.rendering import Renderer
from grpo_dist.environments.tools import TypedTool
from grpo_dist.types import Prompt, Task, ToolCall
from tests.support.made_episodes import generated


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
        asked, given, answer = np.split(row.completion_ids, np.flatnonzero(np.diff(row.sampled)) + 1)
        action = sampled(episode, asked)
        assert renderer.text(asked.tolist()).endswith(renderer.stop(task)[0])
        (call,) = action.calls
        assert (call.name, call.arguments.strip()) == ("calculator", question.removesuffix("="))
        result = calculator(call.arguments)
        episode.observe(Observed(calls=(ToolCall("calculator", call.arguments, result, "ok", 0.0),)))
        assert tokenizer.decode(given) == f"```output\n{result}\n```\n"
        assert sampled(episode, answer).calls == ()
        rollout = episode.rollout(0, "stop")
        assert rollout.completion_ids.tolist() == row.completion_ids.tolist()
        assert rollout.sampled.tolist() == row.sampled.tolist()
        assert rollout.text == f"\\boxed{{{result}}}"


def sampled(episode, ids):
    return episode.add_action(generated(ids, -0.5))


@pytest.mark.parametrize("expression", ["347*58", "100*10", "999*99"])
def test_the_calculator_writes_a_product_as_the_demonstrations_do(expression):
    a, b = map(int, expression.split("*"))
    assert calculator(expression) == str(a * b)
