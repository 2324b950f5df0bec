"""The tokens that end a sample. The expected ends come from the model cards."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from grpo_dist.chat.ends import SampleEnds, sample_ends
from grpo_dist.config import SFTConfig
from grpo_dist.demo.tokenizer import character_tokenizer
from tests.support.chat_templates import templated_tokenizer, trl_templates
from tests.support.made_groups import load_pairs

# The token that ends an answer of the template's model.
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "cohere2": "<|END_OF_TURN_TOKEN|>",  # after <|END_RESPONSE|>
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>",
    "gemma": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "glm4moe": "<|user|>",  # the turn has no end token
    "gptoss": "<|return|>",
    "idefics3": "<end_of_utterance>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_2": "<|eot_id|>",
    "nemotron_3_nano": "<|im_end|>",
    "phi3": "<|end|>",  # the template ends a conversation with EOS after it
    "phi3_5": "<|end|>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("name", ENDS)
def test_a_sample_ends_where_the_template_ends_an_answer(name):
    tokenizer = templated_tokenizer(trl_templates()[name], "<|endoftext|>", "<s>")
    ends = sample_ends(tokenizer, templated=True)
    assert ends.learned is not None and tokenizer.convert_ids_to_tokens(ends.learned) == ENDS[name]
    assert ends.ids == {ends.learned, tokenizer.eos_token_id}
    assert (repr(ENDS[name]) in ends.note) == (ENDS[name] != tokenizer.eos_token)


def test_every_shipped_template_ends_an_answer_with_a_token():
    for name, template in trl_templates().items():
        ends = sample_ends(templated_tokenizer(template, "<|endoftext|>", "<s>"), templated=True)
        assert ends.learned is not None and not ends.text, name


def test_a_sample_also_ends_where_tokenizer_and_generation_config_say(tmp_path):
    templated_tokenizer(CHATML, "<|endoftext|>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 5}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sample_ends(tokenizer, templated=True).ids == {end, tokenizer.eos_token_id, 7, 8}
    plain = sample_ends(tokenizer, templated=False)
    assert plain.ids == {tokenizer.eos_token_id, 7, 8} and plain.learned == tokenizer.eos_token_id
    (tmp_path / "generation_config.json").unlink()  # an engine then reads the model's configuration
    assert sample_ends(tokenizer, templated=False).ids == {tokenizer.eos_token_id, 5}


def test_no_note_where_the_template_ends_with_a_known_end():
    ends = sample_ends(templated_tokenizer(CHATML, "<|im_end|>"), templated=True)
    assert not ends.note and len(ends.ids) == 1


def test_an_end_of_several_tokens_is_refused_unless_a_stop_text_ends_samples():
    """ChatML on a tokenizer that lacks its tokens."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHATML
    ends = sample_ends(tokenizer, templated=True)
    with pytest.raises(
        ValueError, match=r"ends an answer with '<\|im_end\|>'.*no single token.*sampling\.stop"
    ):
        ends.check([])
    with pytest.raises(ValueError, match=r"no single token.*as one token$"):
        ends.check()  # a text ends no message of an episode
    ends.check(["<|im_end|>"])


def test_a_model_whose_samples_never_end_is_refused():
    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    ends = sample_ends(tokenizer, templated=False)
    assert ends == SampleEnds(frozenset(), None)
    with pytest.raises(ValueError, match=r"no token ends a sample: .*no EOS token.*`sampling\.stop`"):
        ends.check([])
    ends.check(["\n"])


def test_a_template_without_answers_leaves_the_other_ends():
    tokenizer = templated_tokenizer("{{ messages[0].content }}<|end|>", "<|end|>")
    assert sample_ends(tokenizer, templated=True).ids == {tokenizer.eos_token_id}


def test_ended_completions_lose_their_end_alone():
    ends = SampleEnds(frozenset({1, 2}), 1)
    assert ends.ended(np.array([5, 2])) and not ends.ended([2, 5]) and not ends.ended([])
    assert ends.strip([2, 2]) == [2] and ends.strip([5]) == [5]


def test_demonstrations_end_with_the_templates_end_and_plain_ones_with_eos(tmp_path):
    tokenizer, messages = templated_tokenizer(CHATML, "<|endoftext|>"), []
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "completion": "a<|im_end|>"},  # the file has the end already
        {"prompt": "q", "completion": "a", "chat_template": "none"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"prompt": "q", "completion": "a<|im_end|>b"},
    ]
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = load_pairs(SFTConfig(model="demo:tiny", data=str(path)), tokenizer, say=messages.append)
    assert [tokenizer.decode(pair.completion) for pair in pairs] == [
        "a<|im_end|>", "a<|im_end|>", "a<|endoftext|>", "a<|im_end|>", "a<|im_end|>b<|im_end|>",
    ]  # fmt: skip
    assert all(all(pair.sampled) for pair in pairs)
    assert len(messages) == 1 and "1 of 5 rows continue after a token that ends a sample, e.g." in messages[0]
    assert "sft.jsonl:5" in messages[0]


def test_an_end_of_turns_that_is_an_added_token_but_not_special_ends_a_sample():
    """The template ends a conversation with EOS, which the model never writes after the end of its turn."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = sample_ends(tokenizer, templated=True)
    assert ends.learned == end and ends.ids == {end, tokenizer.eos_token_id}
