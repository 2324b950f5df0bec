"""Thoughts in tags: detected in the rendered prompt, and respected by every reward."""

from dataclasses import replace

import pytest

from grpo_dist.config import RewardsConfig
from grpo_dist.data.prompts import PromptFormat, build_prompts, detect_thought, is_kept
from grpo_dist.data.readers import DataRow
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.scorer import Scorer
from grpo_dist.rewards.thought import infer_thoughts, resolve_thought, strip_unclosed_thought
from grpo_dist.types import Prompt, Rollout, Thought
from tests.support.made_completions import completion_group, spec

OPENS = Thought(prompt="opens")
# The ends of the generation prompts of chat templates as published.
R1 = "<｜begin▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜><think>\n"
QWQ = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
QWEN3_SILENT = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
V3_1_SILENT = "<｜begin▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜></think>"
X_R1 = "The reasoning is in <THINK> </THINK> tags. User: 2+2? Assistant: Let me solve it.\n<THINK>"


@pytest.mark.parametrize(
    ("prompt", "template", "thought"),
    [
        (R1, "", OPENS), (QWQ, "", OPENS), (QWEN3_SILENT, "", Thought(prompt="closes")),
        (V3_1_SILENT, "", Thought(prompt="closes")), (X_R1, "", Thought("<THINK>", "</THINK>", "opens")),
        ("Show it in <reasoning> tags. 2+2?", "", Thought("<reasoning>", "</reasoning>")),
        ("2+2?", "{% if '[THINK]' in m %}", Thought("[THINK]", "[/THINK]")),
        ("What does <think> do?\n2+2?", "", Thought()), ("2+2?", "", Thought()),
    ],
)  # fmt: skip
def test_tags_and_whether_the_prompt_opens_them_are_read_from_its_text(prompt, template, thought):
    assert detect_thought(prompt, template) == thought


def build_prompt(ending: str, *, use_chat_template: bool = True, **settings) -> Prompt:
    tokenizer = character_tokenizer()
    head, mark, tail = tokenizer.chat_template.partition("<|assistant|>")
    tokenizer.chat_template = head + mark + ending + tail
    rows = [DataRow("2+2?", "4", "made", "made:1", {})]
    prompt_format = PromptFormat(use_chat_template=use_chat_template, **settings)
    return build_prompts(rows, tokenizer, prompt_format, max_prompt_tokens=200).prompts[0]


def test_a_prompt_knows_the_thought_that_its_chat_template_opens():
    assert build_prompt("").thought == Thought()
    assert build_prompt("<think>").thought == OPENS
    assert build_prompt("<think></think>").thought == Thought(prompt="closes")
    assert build_prompt("", instruction="Think first. <THINK>", use_chat_template=False).thought == Thought(
        "<THINK>", "</THINK>", "opens"
    )


@pytest.mark.parametrize(("end", "prompt"), [("<T>\n", "opens"), ("<T></T>", "closes"), ("", "")])
def test_tags_of_the_configuration_are_found_at_the_end_of_a_prompt(end, prompt):
    assert build_prompt(end, thought_tags=("<T>", "</T>")).thought.prompt == prompt
    assert build_prompt("", prefill=end, thought_tags=("<T>", "</T>")).thought.prompt == prompt
    assert build_prompt(end).thought == Thought()
    assert build_prompt("<think>", thought_tags=("<T>", "</T>")).thought == Thought("<T>", "</T>", "opens")


@pytest.mark.parametrize(
    ("end", "prefill", "thought"),
    [
        ("<think>\n", "Okay, ", OPENS), ("", "<think>\nOkay, ", OPENS), ("", "Okay, ", Thought()),
        ("<think>\n", "2+2</think>So ", Thought(prompt="closes")),
        ("<think></think>", "So ", Thought(prompt="closes")),
        ("", "<THINK>\nOkay, ", Thought("<THINK>", "</THINK>", "opens")),
    ],
)  # fmt: skip
def test_words_of_a_prefill_continue_the_thought_before_them(end, prefill, thought):
    assert build_prompt(end, prefill=prefill).thought == thought
    scored = build_prompt(end, prefill=prefill, scored_prefill=prefill).thought
    assert scored == replace(thought, prompt=build_prompt(end).thought.prompt)


def test_a_closing_tag_that_decoding_drops_opens_nothing():
    class Loses:
        def __call__(self, text, **_):
            return {"input_ids": [1]}

        def decode(self, ids, **_):
            return ""

    assert is_kept("</think>", character_tokenizer()) and not is_kept("</think>", Loses())


@pytest.mark.parametrize("order", [1, -1])
def test_each_prompt_of_text_has_the_thought_that_it_closes_itself(order):
    rows = [DataRow(problem, "2", "set", "set:1", {}) for problem in ("1+1=", "1+1=</think>")][::order]
    built = build_prompts(
        rows, character_tokenizer(), PromptFormat(use_chat_template=False), max_prompt_tokens=99
    )
    assert [prompt.thought.prompt for prompt in built.prompts] == ["", "closes"][::order]


def test_settings_override_the_prompt():
    detected = Thought("<THINK>", "</THINK>", "opens")
    assert resolve_thought(detected, RewardsConfig()) == detected
    assert resolve_thought(detected, RewardsConfig(thought_tags=("[[", "]]"))) == Thought("[[", "]]", "opens")
    with pytest.raises(ValueError, match="thought_tags"):
        RewardsConfig(thought_tags=("<think>", "<think>"))


@pytest.mark.parametrize(
    ("completion", "thought", "outside"),
    [
        ("a \\boxed{4}", OPENS, ""),
        ("a</think>\\boxed{4}", OPENS, "a</think>\\boxed{4}"),
        ("a</think>b<think>c", OPENS, "a</think>b"),
        ("a<think>b", Thought(), "a"),
        ("<think>a<think>b</think>c", Thought(), "<think>a<think>b</think>c"),
        ("a[[b", Thought("[[", "]]"), "a"),
    ],
)
def test_an_unclosed_thought_is_cut_off(completion, thought, outside):
    assert strip_unclosed_thought(completion, thought) == outside


@pytest.mark.parametrize(
    ("groups", "opened"),
    [
        ([["a \\boxed{4}", "b</think>4"]], [True]),
        ([["<think>a</think>4", "a"]], [False]),
        ([["a</think>4", "b</think>4"], ["c \\boxed{4} ...", "d ..."]], [True, True]),  # "...": cut off
        ([["a of `</think>`", "b"], ["c", "d ..."]], [True, False]),
        ([["a ..."]], [False]),
    ],
)
def test_completions_of_unknown_prompts_show_that_these_opened_their_thought(groups, opened):
    rollouts = [
        [
            Rollout.without_tokens("", 0, text=text, finish_reason="length" if "..." in text else "stop")
            for text in group
        ]
        for group in groups
    ]
    expected = [OPENS if is_open else Thought() for is_open in opened]
    assert infer_thoughts(rollouts, RewardsConfig()) == expected


GROUP = ("2+2</think>\\boxed{4}", "2+2 \\boxed{4}", "<think>2+2</think>\\boxed{4}")


def test_every_reward_respects_a_thought_opened_by_the_prompt():
    specs = [spec(name, name) for name in ("math", "exact", "numeric", "format")]
    with GraderPool(1, timeout_s=60.0) as pool:
        scorer = Scorer(specs, pool)
        group = completion_group(GROUP, "4")
        closed = scorer.score(group)
        opened = scorer.score(replace(group, thoughts=(OPENS,) * 3))
    assert {name: part.tolist() for name, part in opened.parts.items()} == {
        "math": [1.0, 0.0, 1.0],
        "exact": [1.0, 0.0, 1.0],
        "numeric": [1.0, 0.0, 1.0],
        "format": [1.0, 0.0, 0.0],
    }
    assert opened.outcomes == ["correct", "no_answer", "correct"]
    assert closed.parts["format"].tolist() == [0.0, 0.0, 1.0]
