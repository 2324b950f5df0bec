"""Episodes that rejection sampling keeps: supervised training gets their tokens, and which were sampled."""

import json

import numpy as np
import pytest

from grpo_dist.config import Config, SFTConfig
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.environments.builtin import calculator
from grpo_dist.environments.dialogue import Dialogue, Renderer
from grpo_dist.environments.episode import Call, Observed
from grpo_dist.environments.tools import TypedTool
from grpo_dist.tools.recipe.rejection import Selection
from grpo_dist.types import Group, Prompt, Task, ToolCall
from tests.support.made_episodes import generated
from tests.support.made_groups import load_pairs

# Shows the tools, and their results as messages, like the templates of Qwen and Llama.
WITH_TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = {
    "code": "```calculator\n12*34\n```\n",
    "hermes": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>',
}


class _Parser:
    openings = ("<tool_call>",)

    def __call__(self, text, tools):
        return [Call("calculator", '{"expression": "12*34"}')] if "<tool_call>" in text else []


def config(**changes):
    base = {"model": {"path": "demo:tiny"}, "data": {"train": [{"path": "demo:products"}]}}
    return Config.model_validate(base | {"rejection": {"keep_per_prompt": 4}} | changes)


def build_renderer(form, **environments):
    tokenizer = character_tokenizer()
    if form == "hermes":
        tokenizer.chat_template = WITH_TOOLS
    settings = config(environments={"call_format": form, **environments})
    return tokenizer, Renderer(tokenizer, settings.data, settings.environments, _Parser())


def build_prompt(renderer, messages=({"role": "user", "content": "12*34="},)):
    task = Task("calculator", messages=messages, tools=(TypedTool(calculator).schema,))
    ids = renderer.ids(renderer.prompt(task)) if messages else renderer.ids("12*34=")
    return Prompt("p", np.array(ids, np.int32), "408", "products", "12*34=", task=task)


def episode(renderer, tokenizer, form, prompt, *, answer="\\boxed{408}", end=True, sample=0):
    dialogue = Dialogue(renderer, prompt)
    for text, has_end in ((CALLS[form], form != "code"), (answer, end)):
        ids = renderer.ids(text) + [tokenizer.eos_token_id] * has_end
        dialogue.add_action(generated(ids, -0.5))
        if text == CALLS[form]:
            dialogue.observe(Observed(calls=(ToolCall("calculator", "12*34", "408", "ok", 0.0),)))
    return dialogue.rollout(sample, "stop")


def select(tokenizer, prompt, *rollouts):
    rewards = np.ones(len(rollouts), np.float32)
    chosen = config()
    selection = Selection(chosen.rejection, chosen.data, tokenizer)
    group = Group(prompt, rollouts, rewards, {}, ("",) * len(rollouts))
    return selection.take([group]), selection.report.summary()


@pytest.mark.parametrize("form", ["code", "hermes"])
def test_a_kept_episode_is_learned_token_by_token_and_its_results_are_given(tmp_path, form):
    tokenizer, renderer = build_renderer(form)
    prompt = build_prompt(renderer)
    rollout = episode(renderer, tokenizer, form, prompt)
    assert rollout.sampled is not None and not rollout.sampled.all()
    records, report = select(tokenizer, prompt, rollout)
    assert (report["kept"], report["respelled"]) == (1, 0)
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    [pair] = load_pairs(SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)}), tokenizer)
    assert ("tools" in records[0].get("template_kwargs", {})) == (form == "hermes")
    assert pair.prompt == prompt.token_ids.tolist()
    assert pair.completion == rollout.completion_ids.tolist() and pair.sampled == rollout.sampled.tolist()


def test_a_plain_prompt_stays_plain(tmp_path):
    tokenizer, renderer = build_renderer("code")
    prompt = build_prompt(renderer, messages=())
    records, _ = select(tokenizer, prompt, episode(renderer, tokenizer, "code", prompt))
    assert records[0]["prompt"] == "12*34=" and records[0]["chat_template"] == "none"


def test_episodes_without_an_end_of_their_own_and_copies_are_dropped():
    tokenizer, renderer = build_renderer("code")
    prompt = build_prompt(renderer)
    cut = episode(renderer, tokenizer, "code", prompt, end=False)
    first, copy = (episode(renderer, tokenizer, "code", prompt, sample=i) for i in (1, 2))
    records, report = select(tokenizer, prompt, cut, first, copy)
    assert [record["sample"] for record in records] == [1]
    assert report["dropped"]["truncated"] == report["dropped"]["duplicate"] == 1
