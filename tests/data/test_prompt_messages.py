"""A row's messages are the prompt: the model, and all that is made of a prompt, see its system prompt and
earlier turns.
"""

import json
import pickle
from datetime import datetime
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.config import (
    DataConfig,
    DataSourceConfig,
    DistillationConfig,
    EnvironmentsConfig,
    RewardsConfig,
)
from grpo_dist.data.prompts import PromptFormat, build_prompts
from grpo_dist.data.readers import DataRow, read
from grpo_dist.data.tasks import source_tasks
from grpo_dist.demo.tokenizer import character_tokenizer
from grpo_dist.runs.prepare import load_prompts
from grpo_dist.runs.prepare_teachers import add_teacher_prompts

TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2="},
]
WITH_TURNS = "<|system|>Add.<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=\nNow.<|assistant|>"


def rows(path, *conversations):
    path.write_text("".join(json.dumps({"prompt": turns, "answer": "4"}) + "\n" for turns in conversations))
    return read(DataSourceConfig(path=str(path), problem_column="prompt"))


def prompts(data_rows, **settings):
    form = PromptFormat(**{"system_prompt": "Be brief.", "instruction": "Now."} | settings)
    return build_prompts(data_rows, character_tokenizer(), form, max_prompt_tokens=999).prompts


def text_of(prompt):
    return character_tokenizer().decode(prompt.token_ids.tolist())


def test_the_model_reads_system_prompt_and_earlier_turns_of_each_row(tmp_path):
    data_rows = rows(tmp_path / "set.jsonl", TURNS, TURNS[1:], TURNS[3:])
    first, second, third = prompts(data_rows)
    assert text_of(first) == WITH_TURNS  # the row's system prompt replaces the configured one
    assert text_of(second) == WITH_TURNS.replace("Add.", "Be brief.")
    assert text_of(third) == "<|system|>Be brief.<|user|>2+2=\nNow.<|assistant|>"
    assert [prompt.text for prompt in (first, second, third)] == ["2+2="] * 3
    plain, *_ = prompts(data_rows, use_chat_template=False)
    assert text_of(plain) == "Add.\n1+1=\n2\n2+2=\nNow."


def test_a_conversation_of_the_problem_alone_is_the_plain_problem(tmp_path):
    (alone,) = prompts(rows(tmp_path / "set.jsonl", TURNS[3:]))
    (plain,) = prompts([DataRow("2+2=", "4", "set", "set.jsonl:1", {})])
    assert (alone.uid, text_of(alone), alone.messages) == (plain.uid, text_of(plain), ())


def test_conversations_that_differ_in_an_earlier_turn_have_other_uids(tmp_path):
    other = [{"role": "system", "content": "Subtract."}, *TURNS[1:]]
    first, second, again = prompts(rows(tmp_path / "set.jsonl", TURNS, other, TURNS))
    assert len({first.uid, second.uid, again.uid}) == 3 and again.uid == f"{first.uid}-2"


def test_a_conversation_is_the_same_from_a_table_which_has_dates_and_the_keys_of_all_rows(tmp_path):
    """WildChat's messages have a time; a table gives each call the arguments of all, as null."""
    calls = [{"function": {"name": name, "arguments": {key: 1}}} for name, key in (("f", "a"), ("g", "b"))]
    turns = [
        [
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "time": time},
        ]
        for call, time in zip(calls, (datetime(2024, 5, 6, 7, 8), None), strict=True)
    ]
    path = tmp_path / "set.parquet"
    pq.write_table(pa.Table.from_pylist([{"problem": one, "answer": "2"} for one in turns]), path)
    first, second = read(DataSourceConfig(path=str(path)))
    assert second.messages == rows(tmp_path / "set.jsonl", turns[1])[0].messages
    assert json.loads(json.dumps(first.messages[1:])) == [
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
        {"role": "tool", "content": "2", "time": "2024-05-06 07:08:00"},
    ]


def test_uids_of_plain_rows_stay_as_they_were():
    """Checkpoints name prompts by their uids."""
    (prompt,) = prompts([DataRow("1+1=", "2", "set", "set.jsonl:1", {})])
    assert prompt.uid == "set-15c4b21b841ff37f"


def test_messages_travel_with_the_prompt(tmp_path):
    (prompt,) = prompts(rows(tmp_path / "set.jsonl", TURNS))
    sent = pickle.loads(pickle.dumps(prompt))
    assert sent.messages == prompt.messages == tuple(TURNS)
    assert np.array_equal(sent.token_ids, prompt.token_ids)


def test_a_teacher_reads_the_row_s_turns_with_its_own_question(tmp_path):
    data = DataConfig(train=(DataSourceConfig(path="set.jsonl"),), instruction="Now.")
    teachers = [{"name": "self", "model": "reference", "prompt": "{problem} It is {answer}."}]
    distillation = DistillationConfig.model_validate({"teachers": teachers})
    student = prompts(rows(tmp_path / "set.jsonl", TURNS))
    (prompt,) = add_teacher_prompts(distillation, data, student, character_tokenizer())
    read_by_teacher = character_tokenizer().decode(prompt.teacher_ids["self"].tolist())
    assert read_by_teacher == WITH_TURNS.replace("2+2=", "2+2= It is 4.")


def test_an_answer_at_the_end_of_the_messages_is_left_out_and_named(tmp_path):
    data_rows = rows(tmp_path / "set.jsonl", [*TURNS, {"role": "assistant", "content": "It is 4."}], TURNS)
    source = DataSourceConfig(path=str(tmp_path / "set.jsonl"))
    data = DataConfig(train=(source,), instruction="Now.")
    sections = SimpleNamespace(data=data, rewards=RewardsConfig(), environments=EnvironmentsConfig())
    notes = []
    built = load_prompts(sections, source, data_rows, character_tokenizer(), notes.append)
    assert [text_of(prompt) for prompt in built.prompts] == [WITH_TURNS] * 2
    assert notes == [
        "set: 1 of 2 rows end with the assistant's message, which is left out: the policy writes it; e.g. "
        f"{data_rows[0].location}: 'It is 4.'"
    ]


def test_several_answers_are_named_with_the_rule_for_them(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"problem": "p", "answer": ["5", "five"]}\n{"problem": "q", "answer": ["6"]}\n')
    notes, data = [], DataConfig(train=(DataSourceConfig(path=str(path)),))
    for rule in ("any", "all"):
        source = DataSourceConfig(path=str(path), multiple_answers=rule)
        sections = SimpleNamespace(data=data, rewards=RewardsConfig(), environments=EnvironmentsConfig())
        load_prompts(sections, source, read(source), character_tokenizer(), notes.append)
    about = [text for text in notes if "several answers" in text]
    assert about == [
        f'set: 1 of 2 rows have several answers, of which any is right, e.g. {path}:1: ["5", "five"]; set '
        "`multiple_answers` of the source to all where they are the answer together"
    ]


CODE = '''
from grpo_dist.environments.base import Environment, Step


class Plain(Environment):
    """Asks the problem as it is."""

    def step(self, action):
        return Step(done=True)


class Riddle(Plain):
    """Asks in its own words."""

    def start(self, problem):
        return f"Riddle: {problem.text}"
'''


@pytest.mark.slow
def test_an_environment_asks_the_row_s_messages_or_refuses_to_drop_them(tmp_path):
    (tmp_path / "riddles.py").write_text(CODE)
    environments, tokenizer = EnvironmentsConfig(code_paths=(str(tmp_path),)), character_tokenizer()
    data_rows = rows(tmp_path / "set.jsonl", TURNS)
    source = DataSourceConfig(path=str(tmp_path / "set.jsonl"), problem_column="prompt")
    data = DataConfig(train=(source,), environment="riddles:Plain", instruction="Now.")
    tasks = source_tasks(data, environments, source, data_rows, tokenizer)
    form = PromptFormat.from_config(data)
    (prompt,) = build_prompts(data_rows, tokenizer, form, max_prompt_tokens=999, tasks=tasks).prompts
    assert text_of(prompt) == WITH_TURNS
    assert [message["content"] for message in prompt.task.messages] == ["Add.", "1+1=", "2", "2+2=\nNow."]
    riddle = data.model_copy(update={"environment": "riddles:Riddle"})
    with pytest.raises(ValueError, match=r"set\.jsonl:1: environment riddles:Riddle .* prompt\.-1\.content"):
        source_tasks(riddle, environments, source, data_rows, tokenizer)
