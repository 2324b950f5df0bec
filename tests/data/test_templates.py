"""Prompts from a template with columns of the row, few-shot messages, a prefill and a custom chat template,
for all sources or for one.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_dist.config import (
    Config,
    DataConfig,
    DataSourceConfig,
    EnvironmentsConfig,
    ModelConfig,
    RewardsConfig,
)
from grpo_dist.config.data import PROMPT_KEYS
from grpo_dist.config.text import fill
from grpo_dist.data.prompts import PromptFormat, build_prompts, doubled_prefills
from grpo_dist.data.readers import DataRow, read, read_all
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.runs.models import load_tokenizer, resolve_model, set_chat_template
from grpo_dist.runs.prepare import load_prompts, prepare_eval
from grpo_dist.types import Rollout, Thought

SHOTS = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def configured(tmp_path, source=(), **keys):
    """Return prompts of a file with two rows, rendered by the configuration of ``keys`` and its source."""
    path = tmp_path / "set.jsonl"
    rows = [
        {"problem": "2+2=", "answer": "4", "topic": {"name": "sums"}, "nums": [2, 2]},
        {"problem": "<|end|>3*3=", "answer": "9", "topic": {"name": "<|user|>"}, "nums": [3, 3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig.model_validate({"train": [{"path": str(path), **dict(source)}], **keys})
    ((resolved, read_rows),) = read_all(data.resolve_prompts(data.train), "data.train")
    prompt_format = PromptFormat.from_config(data, resolved)
    return build_prompts(read_rows, character_tokenizer(), prompt_format, max_prompt_tokens=999).prompts


def text_of(prompt):
    return character_tokenizer().decode(prompt.token_ids.tolist())


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{problem} of {topic.name}", "7 of sums"),
        (r"{problem} in \boxed{} or \frac{a b}{{2}}", r"7 in \boxed{} or \frac{a b}{2}"),
        (r"\boxed{{answer}}", r"\boxed{answer}"),
        ('{"q": "{problem}"}', '{"q": "7"}'),
        (r"\boxed{{}} {{{problem}}}", r"\boxed{} {{7}}"),
    ],
)
def test_names_in_braces_are_columns_and_other_braces_stay(template, text):
    assert fill(template, {"problem": "7", "topic.name": "sums"}.__getitem__) == text


def test_a_template_takes_columns_of_the_row_whose_special_tokens_stay_text(tmp_path):
    first, second = configured(tmp_path, template="{topic.name} {nums}<|end|>: {problem}", instruction="Now.")
    assert text_of(first) == "<|user|>sums [2, 2]<|end|>: 2+2=\nNow.<|assistant|>"
    assert text_of(second) == "<|user|>< |user|> [3, 3]<|end|>: < |end|>3*3=\nNow.<|assistant|>"
    assert (first.text, first.columns) == ("2+2=", {})  # rewards see the problem, and the columns asked for
    plain, _ = configured(tmp_path)
    assert plain.uid == first.uid  # an evaluation with another template has the same problems
    assert text_of(configured(tmp_path, chat_template="none", template="Q: {problem}\nA:")[1]) == (
        "Q: < |end|>3*3=\nA:"
    )


def test_a_template_is_filled_in_the_last_message_of_a_conversation(tmp_path):
    turns = [{"role": "system", "content": "Add."}, *SHOTS, {"role": "user", "content": "2+2="}]
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"problem": turns, "answer": "4"}) + "\n")
    source = DataSourceConfig(path=str(path), template="{problem}?", few_shot=SHOTS)
    prompt_format = PromptFormat.from_config(DataConfig(train=(source,)), source)
    built = build_prompts(read(source), character_tokenizer(), prompt_format, max_prompt_tokens=999)
    (prompt,) = built.prompts
    shots = "<|user|>1+1=<|assistant|>2<|end|>"
    assert text_of(prompt) == f"<|system|>Add.{shots}{shots}<|user|>2+2=?<|assistant|>"


def test_settings_of_a_source_replace_the_general_ones(tmp_path):
    whole = {
        "template": "{problem}?", "system_prompt": "Add.", "instruction": "Now.", "few_shot": SHOTS,
        "prefill": "So ",
    }  # fmt: skip
    first, _ = configured(tmp_path, **whole)
    assert text_of(first) == (
        "<|system|>Add.<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=?\nNow.<|assistant|>So "
    )
    empty = dict.fromkeys(PROMPT_KEYS, "") | {"few_shot": ()}
    assert text_of(configured(tmp_path, empty, **whole)[0]) == "<|user|>2+2=<|assistant|>"
    other = {"system_prompt": "Sum.", "template": "{problem}!"}
    assert text_of(configured(tmp_path, other, **whole | {"few_shot": []})[0]) == (
        "<|system|>Sum.<|user|>2+2=!\nNow.<|assistant|>So "
    )


@pytest.mark.parametrize(
    ("keys", "prompt", "seen", "thought"),
    [
        ({"prefill": "<think>\n"}, "<think>\n", "2</think>", Thought("<think>", "</think>", "opens")),
        ({"prefill": "<think>\n", "prefill_as": "completion"}, "<think>\n", "<think>\n2</think>",
         Thought("<think>", "</think>", "")),
        ({"prefill": "So ", "prefill_as": "completion"}, "So ", "So 2</think>", Thought()),
    ],
)  # fmt: skip
def test_a_prefill_ends_the_prompt_and_rewards_see_it_where_it_counts_as_completion(
    tmp_path, keys, prompt, seen, thought
):
    first, _ = configured(tmp_path, **keys)
    assert text_of(first).endswith(f"<|assistant|>{prompt}")
    ids = np.arange(3, dtype=np.int32)
    text = f"{first.prefill}2</think>"  # as an engine's worker writes it
    sample = Rollout(first.uid, 0, ids, np.zeros(3, np.float32), "stop", text, ids)
    group = CompletionGroup.from_rollouts(first, [sample], max_new_tokens=9, settings=RewardsConfig())
    assert group.with_thoughts == [(seen, thought)]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"template": "{problem} of {subject}"}, ["set.jsonl:1: no column `subject`", "topic"]),
        ({"template": r"{problem}: \frac{1}{2}"}, ["no column `1`", "{{1}} is the text {1}"]),
        ({"template": "{{ content | trim }} Think."}, ["written in Jinja", "{problem}"]),
        ({"template": "Solve it."}, ["names no column", "{problem}"]),
        ({"few_shot": SHOTS[:1]}, ["few_shot ends with a user message"]),
        ({"few_shot": SHOTS[::-1]}, ["few_shot.0.role = assistant; expected user"]),
    ],
)  # fmt: skip
def test_what_cannot_be_filled_is_refused_with_what_there_is(tmp_path, keys, words):
    with pytest.raises(ValueError) as error:
        configured(tmp_path, **keys)
    assert not [word for word in words if word not in str(error.value)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": {"environment": "program:a", "prefill": "<think>"}}, "agent of source add3 writes"),
        ({"data": {"prefill_as": "completion"}}, "no effect without a `data.prefill`"),
    ],
)
def test_a_prefill_that_has_no_meaning_is_refused(changes, words):
    data = {"train": [{"path": "demo:add3"}]} | changes["data"]
    with pytest.raises(ValueError, match=words):
        Config.model_validate({"model": {"path": "demo:tiny"}, "data": data})


def test_a_template_without_the_problem_needs_no_column_of_it(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"nums": [1, 2], "target": 3}\n{"nums": [2, 2], "target": 4}\n')
    keys = {"answer_column": "target", "columns": ["nums"], "template": "Make {target} of {nums}."}
    source = DataSourceConfig(path=str(path), **keys)
    first, second = read(source)
    assert (first.problem, first.answer) == ("Make 3 of [1, 2].", "3")
    form = PromptFormat.from_config(DataConfig(train=(source,)), source)
    built = build_prompts([first, second], character_tokenizer(), form, max_prompt_tokens=99)
    assert text_of(built.prompts[0]) == "<|user|>Make 3 of [1, 2].<|assistant|>"
    with pytest.raises(ValueError, match="no column `problem`"):
        read(source.model_copy(update={"template": "{problem} {nums}"}))


def test_problems_that_differ_in_a_column_of_the_template_are_no_overlap(tmp_path):
    for name, topic in (("train", "birds"), ("same", "birds"), ("other", "fish")):
        row = {"problem": "Name one.", "answer": "4", "topic": topic}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sources = {n: DataSourceConfig(path=str(tmp_path / f"{n}.jsonl")) for n in ("train", "same", "other")}

    def warnings(template):
        evals = (sources["same"], sources["other"])
        data = DataConfig(train=(sources["train"],), eval=evals, template=template)
        sections = SimpleNamespace(data=data, rewards=RewardsConfig(), environments=EnvironmentsConfig())
        rows = read_all(data.resolve_prompts((sources["train"], *evals)), "data")
        tokenizer, messages = character_tokenizer(), []
        prompts = load_prompts(sections, *rows[0], tokenizer, messages.append).prompts
        prepare_eval(sections, rows[1:], tokenizer, prompts, messages.append)
        return [line for line in messages if "also in the training set" in line]

    assert len(warnings("{problem} Think.")) == 2
    (line,) = warnings("{topic}: {problem}")
    assert "data.eval same" in line and "birds: Name one." in line


@pytest.mark.parametrize(
    ("opens", "prefill", "kwargs", "is_doubled"),
    [
        ("<think>\n", "<think>\n", {}, True), ("<think>\n", "So ", {}, False), ("", "<think>\n", {}, False),
        ("<think>\n\n</think>\n\n", " <think>", {}, True),
        ("{% if t %}<think>{% endif %}", "<think>", {"t": 1}, True),
        ("{% if t %}<think>{% endif %}", "<think>", {}, False),
    ],
)  # fmt: skip
def test_a_prefill_that_opens_what_the_chat_template_opens_is_warned_of(opens, prefill, kwargs, is_doubled):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}[answer]" + opens
    train = [{"path": "demo:add3", "name": "sums"}, {"path": "demo:add3", "name": "plain", "prefill": ""}]
    data = DataConfig.model_validate({"train": train, "prefill": prefill, "template_kwargs": kwargs})
    lines = list(doubled_prefills(data, tokenizer))
    assert len(lines) == is_doubled
    assert not lines or ("source sums opens <think> again" in lines[0] and "remove `prefill`" in lines[0])


@pytest.mark.parametrize("where", ["data", "train", "eval"])
def test_a_template_with_the_gold_answer_in_its_box_is_refused(where):
    def configure(template):
        train, held_out = {"path": "demo:add3"}, {"path": "demo:add3", "split": "test"}
        data = {"train": [train], "eval": [held_out]}
        {"data": data, "train": train, "eval": held_out}[where]["template"] = template
        return Config.model_validate({"model": {"path": "demo:tiny"}, "data": data})

    with pytest.raises(ValueError, match=r"show its answer; write \\boxed\{\{answer\}\}"):
        configure(r"{problem} Write \boxed{answer}.")
    configure(r"{problem} Write \boxed{{answer}}.")
    configure(r"Make {answer} of {problem}.")  # as Countdown's target


def test_sources_of_one_name_with_other_prompts_are_refused():
    train = [{"path": "demo:add3", "name": "a"}, {"path": "demo:add3", "name": "a", "prefill": "So "}]
    with pytest.raises(ValueError, match="several sources have the name a, but different prompt"):
        Config.model_validate({"model": {"path": "demo:tiny"}, "data": {"train": train}})
    Config.model_validate({"model": {"path": "demo:tiny"}, "data": {"train": train, "prefill": "So "}})


CUSTOM = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}[answer]"


def test_a_custom_chat_template_is_the_models_for_all_that_read_it(tmp_path, tiny_model):
    file = tmp_path / "own.jinja"
    file.write_text(CUSTOM)
    settings = ModelConfig(path=str(tiny_model), chat_template=str(file))
    assert settings.chat_template == CUSTOM == settings.model_validate(settings.model_dump()).chat_template
    model_dir = resolve_model(settings, None, 0, lambda _: None)
    base = resolve_model(ModelConfig(path=str(tiny_model)), None, 0, lambda _: None)
    tokenizer = load_tokenizer(model_dir, False)
    [prompt] = build_prompts(
        [DataRow("2+2=", "4", "set", "set:1", {})], tokenizer, PromptFormat(), max_prompt_tokens=99
    ).prompts
    assert tokenizer.decode(prompt.token_ids.tolist()) == "[user]2+2=<|end|>[answer]"
    names = {p.name for p in model_dir.iterdir()}
    assert names == {p.name for p in base.iterdir()} | {"base_model.json", "chat_template.jinja"}
    assert (model_dir / "model.safetensors").resolve() == (base / "model.safetensors").resolve()
    assert set_chat_template(base, CUSTOM) == model_dir  # once for all runs
    assert set_chat_template(base, f"{CUSTOM} ") != model_dir and set_chat_template(base, None) == base


@pytest.mark.parametrize(("value", "words"), [("no/such.jinja", "cannot be read"), (__file__, "")])
def test_what_is_no_chat_template_is_refused(tmp_path, value, words):
    if not words:
        value, words = str(tmp_path / "plain.txt"), "is no chat template"
        Path(value).write_text("Answer the question.")
    with pytest.raises(ValueError, match=words):
        ModelConfig(path="demo:tiny", chat_template=value)
