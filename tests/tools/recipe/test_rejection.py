"""Rejection sampling: selection, balanced counts, and identical tokens in supervised training."""

import json
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from grpo_dist.config import Config, SFTConfig
from grpo_dist.data.prompts import PromptFormat, build_prompts
from grpo_dist.data.readers import DataRow
from grpo_dist.tools.recipe.rejection import Selection
from grpo_dist.types import Group, Prompt, Rollout
from tests.support.made_groups import load_pairs

END = 1  # the demo tokenizer's end token


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


def config(rejection=(), **data) -> Config:
    data = {"train": [{"path": "demo:add3", "name": "made"}], **data}
    base = {"model": {"path": "demo:tiny"}, "data": data, "rejection": dict(rejection)}
    return Config.model_validate(base)


SHOTS = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
CHAT = (
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "1+1="},
)


def prompts(tokenizer, data, *problems, turns=()) -> list[Prompt]:
    rows = [DataRow(problem, "1", "made", f"made:{i}", {}, turns) for i, problem in enumerate(problems)]
    prompt_format = PromptFormat.from_config(data, data.train[0])
    return build_prompts(rows, tokenizer, prompt_format, max_prompt_tokens=200).prompts


def group(tokenizer, prompt, *samples) -> Group:
    """``samples``: (text, reward) or (text, reward, finish reason)."""
    assert tokenizer.eos_token_id == END
    rollouts, rewards = [], []
    for i, (text, reward, *finish) in enumerate(samples):
        reason = finish[0] if finish else "stop"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [END] * (reason == "stop")
        array = np.array(ids, np.int32)
        plain = prompt.prefill + tokenizer.decode(ids, skip_special_tokens=True)
        rollouts.append(
            Rollout(prompt.uid, i, array, np.zeros(len(ids), np.float32), reason, plain, np.zeros_like(array))
        )
        rewards.append(reward)
    return Group(prompt, tuple(rollouts), np.array(rewards, np.float32), {}, ("",) * len(rollouts))


def select(tokenizer, groups, **rejection):
    chosen = config(rejection)
    selection = Selection(chosen.rejection, chosen.data, tokenizer)
    return selection.take(groups), selection.report.summary()


def one_prompt(tokenizer, *samples):
    return [group(tokenizer, prompts(tokenizer, config().data, "p")[0], *samples)]


def completions(records):
    return [record["completion"] for record in records]


def test_the_shortest_right_answer_of_a_prompt_is_kept_and_every_other_sample_accounted_for(tokenizer):
    groups = one_prompt(
        tokenizer, ("long right", 1.0), ("wrong", 0.0), ("right", 1.0), ("right", 1.0),
        ("cut", 1.0, "length"), ("?", np.nan), ("a<|user|>b", 1.0), ("", 1.0),
    )  # fmt: skip
    records, report = select(tokenizer, groups)
    assert completions(records) == ["right"]
    assert report["dropped"] == {
        "unscored": 1, "below_min_reward": 1, "truncated": 1, "stop_text": 0, "other_prompt": 0,
        "hidden_tokens": 1, "no_text": 1, "duplicate": 1, "too_easy": 0, "enough": 1,
    }  # fmt: skip
    assert report["samples"] == 8 == report["kept"] + sum(report["dropped"].values())
    assert report["pass_rate"] == pytest.approx(6 / 7)
    assert report["length_tokens"] == len("right") + 1 and report["respelled"] == 0


def test_a_sample_with_tokens_unknown_to_the_tokenizer_is_dropped(tokenizer):
    """The demo's model has 272 tokens, its tokenizer 267."""
    [original] = one_prompt(tokenizer, ("right", 1.0))
    [rollout] = original.rollouts
    ids = np.insert(rollout.completion_ids, 2, 270)
    hidden = replace(original, rollouts=(replace(rollout, completion_ids=ids),))
    records, report = select(tokenizer, [hidden])
    assert records == [] and report["dropped"]["hidden_tokens"] == 1


def test_an_answer_to_the_words_of_an_agent_is_none_to_its_row(tokenizer):
    (whole,) = one_prompt(tokenizer, ("12", 1.0))
    (rollout,) = whole.rollouts
    with_context = replace(rollout, context_ids=np.array([5, 6], np.int32))
    records, report = select(tokenizer, [replace(whole, rollouts=(with_context,))])
    assert not records and report["dropped"]["other_prompt"] == 1


def test_an_answer_that_a_stop_text_ended_is_dropped(tokenizer):
    """A demonstration ends with EOS, but the policy sampled none there."""
    (whole,) = one_prompt(tokenizer, ("12", 1.0))
    (rollout,) = whole.rollouts
    stopped = replace(rollout, completion_ids=rollout.completion_ids[:-1])
    records, report = select(tokenizer, [replace(whole, rollouts=(stopped,))])
    assert not records and report["dropped"]["stop_text"] == 1
    assert completions(select(tokenizer, [whole])[0]) == ["12"]


def test_several_answers_of_a_prompt_may_be_kept_the_shortest(tokenizer):
    samples = [(f"{'x' * n}", 1.0) for n in (5, 3, 4, 2)]
    groups = one_prompt(tokenizer, *samples)
    assert completions(select(tokenizer, groups, keep_per_prompt=2)[0]) == ["xx", "xxx"]


def test_prompts_that_are_too_easy_are_dropped_on_request(tokenizer):
    easy, hard = prompts(tokenizer, config().data, "easy", "hard")
    groups = [
        group(tokenizer, easy, ("a", 1.0), ("b", 1.0), ("c", np.nan)),
        group(tokenizer, hard, ("d", 1.0), ("e", 0.0)),
    ]
    records, report = select(tokenizer, groups, max_pass_rate=0.9)
    assert completions(records) == ["d"] and records[0]["pass_rate"] == 0.5
    assert report["dropped"]["too_easy"] == 2 and report["prompts_kept"] == 1
    assert completions(select(tokenizer, groups)[0]) == ["a", "d"]


def test_a_duplicate_problem_does_not_duplicate_an_answer(tokenizer):
    twice = prompts(tokenizer, config().data, "same", "same")
    assert twice[0].uid != twice[1].uid
    records, report = select(tokenizer, [group(tokenizer, p, ("right", 1.0)) for p in twice])
    assert completions(records) == ["right"] and report["dropped"]["duplicate"] == 1


def test_unscored_samples_do_not_enter_the_pass_rate(tokenizer):
    records, report = select(tokenizer, one_prompt(tokenizer, ("a", np.nan)))
    assert records == [] and report["pass_rate"] is None and report["length_tokens"] is None


@pytest.mark.parametrize("data", [
    {},
    {"instruction": "Think first."},
    {"system_prompt": "You add.", "instruction": "Think first."},
    {"chat_template": "none", "system_prompt": "You add.", "instruction": "Think first."},
    {"template": "{problem} <|end|>?", "few_shot": SHOTS, "prefill": "<think>\n"},
    {"few_shot": SHOTS, "system_prompt": "You add.", "prefill": "So ", "prefill_as": "completion"},
    {"chat_template": "none", "template": "Q: {problem}", "few_shot": SHOTS, "prefill": "A:"},
    {"train": [{"path": "demo:add3", "name": "made", "instruction": "", "prefill": "<think>"}]},
])  # fmt: skip
@pytest.mark.parametrize("turns", [(), CHAT])
def test_supervised_training_gets_the_policys_own_prompt_and_completion_tokens(
    tokenizer, tmp_path, data, turns
):
    settings = config(**data)
    prompt = prompts(tokenizer, settings.data, "1+1=", turns=turns)[0]
    source = group(tokenizer, prompt, ("<think>é</think>\\boxed{2}", 1.0))
    selection = Selection(settings.rejection, settings.data, tokenizer)
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in selection.take([source])))
    sft = SFTConfig.model_validate({"model": "demo:tiny", "data": str(path)})
    [pair] = load_pairs(sft, tokenizer)
    assert pair.prompt == prompt.token_ids.tolist() and all(pair.sampled)
    assert pair.completion == source.rollouts[0].completion_ids.tolist()


def test_a_reward_equal_to_the_requested_minimum_is_kept(tokenizer):
    """0.8 + 0.1 as a reward is the float32 nearest to 0.9, which is below 0.9."""
    reward = np.float32(0.8 + 0.1)
    assert float(reward) < 0.9
    records, report = select(tokenizer, one_prompt(tokenizer, ("right", reward)), min_reward=0.9)
    assert completions(records) == ["right"] and report["pass_rate"] == 1.0


@pytest.mark.parametrize("turns", [(), CHAT])
@pytest.mark.parametrize("keys", [
    {"system_prompt": "Think between <|user|> and <|end|>."},
    {"instruction": "End with <|end|>."},
    {"system_prompt": "Be brief."},
])  # fmt: skip
def test_special_tokens_of_the_configuration_are_tokens_in_demonstrations_too_and_those_of_a_row_are_text(
    tokenizer, tmp_path, keys, turns
):
    settings = config(**keys).data
    if turns:
        turns = ({"role": "user", "content": "2+<|end|>="}, *turns[1:])
    [prompt] = prompts(tokenizer, settings, "1+1=<|end|>", turns=turns)
    plain = {key: text.replace("<|", "").replace("|>", "") for key, text in keys.items()}
    [without] = prompts(tokenizer, config(**plain).data, "1+1=<|end|>", turns=turns)
    total, in_row = prompt.token_ids.tolist().count(END), without.token_ids.tolist().count(END)
    assert total - in_row == str(keys).count("<|end|>")  # whatever shape a row has
    record = Selection(config().rejection, settings, tokenizer).take(
        [group(tokenizer, prompt, ("2", 1), ("3", 0))]
    )
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in record))
    [pair] = load_pairs(SFTConfig(model="demo:tiny", data=str(path)), tokenizer)
    assert pair.prompt == prompt.token_ids.tolist()
