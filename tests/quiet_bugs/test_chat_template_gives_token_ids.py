"""marin#6335: `apply_chat_template` returned a `BatchEncoding`, which iterates over its keys.
The prompt's token ids came out empty, and the run continued without learning anything.

transformers 5 returns such an encoding by default: iterating gives "input_ids" and "attention_mask".
"""

import numpy as np
import pytest

from grpo_dist.data.prompts import PromptFormat, build_prompts
from grpo_dist.data.readers import DataRow
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.errors import Unhealthy
from grpo_dist.types import Group
from tests.support import fakes
from tests.support.fakes import train

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}assistant:"
MESSAGES = [{"role": "user", "content": "2+3="}]
TEXT = "user:2+3=\nassistant:"


def tokenizer(template=TEMPLATE):
    result = character_tokenizer()
    result.chat_template = template
    return result


def row(problem):
    return DataRow(problem, "5", "made", "made.jsonl:1", {})


def test_the_bug_reads_the_keys_of_the_encoding():
    encoding = tokenizer().apply_chat_template(MESSAGES, tokenize=True)
    ids = [token for token in encoding if isinstance(token, int)]
    assert list(encoding) == ["input_ids", "attention_mask"] and ids == []
    assert len(encoding["input_ids"]) == len(TEXT)


def test_a_prompt_has_the_ids_of_its_rendered_text():
    chat = tokenizer()
    expected = chat(TEXT, add_special_tokens=False)["input_ids"]
    (prompt,) = build_prompts([row("2+3=")], chat, PromptFormat(), max_prompt_tokens=99).prompts
    assert prompt.token_ids.tolist() == expected and prompt.token_ids.dtype == np.int32
    assert chat.decode(prompt.token_ids) == TEXT


def test_a_prompt_without_tokens_is_refused_with_its_row():
    with pytest.raises(ValueError, match=r"made\.jsonl:1: the prompt '2\+3=' has no tokens"):
        build_prompts([row("2+3=")], tokenizer("{{ '' }}"), PromptFormat(), max_prompt_tokens=99)


def test_a_run_that_trains_on_nothing_ends():
    """Whatever the cause: no sample is scored, so no step has a trained token."""
    world = fakes.World(jitter=False)

    async def unscored(prompt, rollouts):
        rewards = np.full(len(rollouts), np.nan, np.float32)
        return Group(prompt, rollouts, rewards, {"fake": rewards}, ("error",) * len(rollouts))

    world.score = unscored
    config = fakes.config(steps=80, health={"min_signal_groups": 0, "unscored_steps_above": 80})
    with pytest.raises(Unhealthy, match="step 51: 51 steps in a row trained on no token"):
        train(world, config, fakes.prompts(40))
