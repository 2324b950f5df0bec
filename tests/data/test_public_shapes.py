"""Rows in the shape of public data sets are read by settings alone. The rows are made up here; each case says
which sets have its shape.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.config import DataSourceConfig
from grpo_dist.data.readers import read

PARTS = [{"type": "text", "text": "What is 2+3?"}]
USER = [{"role": "user", "content": "What is 2+3?"}]
SHARED = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "What is 2+3?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]
VERL = {"data_source": "math", "ability": "math", "reward_model": {"ground_truth": "5", "style": "rule"}}
VERL_COLUMNS = {"problem_column": "prompt", "answer_column": "reward_model.ground_truth"}

# A row, the settings of its source, and what is read in place of the problem "What is 2+3?" and the gold 5.
SHAPES = {
    # DAPO-Math-17k, verl's GSM8K, GURU-92k: `index` is text in one and a number in the other
    "verl": (
        VERL | {"prompt": USER, "extra_info": {"index": "9c1", "split": "train"}},
        VERL_COLUMNS | {"columns": ("extra_info.index", "extra_info")},
        {"columns": {"extra_info.index": "9c1", "extra_info": {"index": "9c1", "split": "train"}}},
    ),
    # Eurus-2-RL-Data, AM-Thinking-v1-RL-Dataset: a system prompt in each row
    "eurus": (VERL | {"prompt": SYSTEM}, VERL_COLUMNS, {"messages": tuple(SYSTEM)}),
    # Skywork-OR1-RL-Data: the gold is a list in text; a name of a nested column has dots
    "skywork": (
        {
            "prompt": USER,
            "reward_model": {"ground_truth": '["5"]', "style": "rule"},
            "extra_info": {"index": 3, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-1.5B": 7}},
        },
        VERL_COLUMNS | {"columns": ("extra_info.model_difficulty.DeepSeek-R1-Distill-Qwen-1.5B",)},
        {"columns": {"extra_info.model_difficulty.DeepSeek-R1-Distill-Qwen-1.5B": 7}},
    ),
    # verl's documentation, Search-R1: the gold is a list
    "list_of_one": ({"prompt": USER, "reward_model": {"ground_truth": ["5"]}}, VERL_COLUMNS, {}),
    # AReaL-boba, Dolci-RL: several golds, of which any is right
    "several_golds": (
        {"prompt": "What is 2+3?", "solutions": ["5", "five", "5"]},
        {"problem_column": "prompt", "answer_column": "solutions"},
        {"answer": '["5", "five"]'},
    ),
    # OlympiadBench: all of several golds
    "all_golds": (
        {"question": "What is 2+3?", "final_answer": ["5", "-5"]},
        {"problem_column": "question", "answer_column": "final_answer", "multiple_answers": "all"},
        {"answer": "5, -5"},
    ),
    # DeepScaleR-Preview, POLARIS-53K, Big-Math-RL-Verified, MATH-500, AIME sets
    "plain": (
        {"problem": "What is 2+3?", "answer": "5", "domain": ["a", "b"], "llama8b_solve_rate": 0.5},
        {"columns": ("domain", "llama8b_solve_rate")},
        {"columns": {"domain": ["a", "b"], "llama8b_solve_rate": 0.5}},
    ),
    # Maxwell-Jia/AIME_2024: the answer is a number
    "aime": (
        {"ID": "2024-I-1", "Problem": "What is 2+3?", "Solution": "...", "Answer": 5},
        {"problem_column": "Problem", "answer_column": "Answer"},
        {},
    ),
    # OpenR1-Math-220k, NuminaMath-1.5: the messages end with an answer, which the policy writes itself
    "openr1": (
        {"problem": "?", "answer": "5", "messages": [*USER, {"role": "assistant", "content": "It is 5."}]},
        {"problem_column": "messages"},
        {"left_out": "It is 5."},
    ),
    # NuminaMath-TIR, MATH-lighteval: the gold is a solution with a box
    "boxed": (
        {"problem": "What is 2+3?", "solution": "It is $\\boxed{5}$.", "level": "Level 1"},
        {"answer_column": "solution"},
        {"answer": "It is $\\boxed{5}$."},
    ),
    # GSM8K `main`
    "gsm8k": (
        {"question": "What is 2+3?", "answer": "2+3=<<2+3=5>>5\n#### 5"},
        {"problem_column": "question", "answer_pattern": "#### (.+)"},
        {},
    ),
    # open-r1/DAPO-Math-17k-Processed
    "open_r1_dapo": (
        {"prompt": "What is 2+3?", "solution": "5", "source_prompt": USER, "reward_model": {"style": "r"}},
        {"problem_column": "prompt", "answer_column": "solution"},
        {},
    ),
    # DeepMath-103K
    "deepmath": (
        {"question": "What is 2+3?", "final_answer": "5", "difficulty": 3.0, "r1_solution_1": "..."},
        {"problem_column": "question", "answer_column": "final_answer", "columns": ("difficulty",)},
        {"columns": {"difficulty": 3.0}},
    ),
    # OpenMathReasoning
    "open_math_reasoning": (
        {"problem": "What is 2+3?", "expected_answer": "5", "pass_rate_72b_tir": "n/a"},
        {"answer_column": "expected_answer"},
        {},
    ),
    # SYNTHETIC-1, SYNTHETIC-2, INTELLECT-2: the gold is in an object stored as text
    "synthetic": (
        {"prompt": "What is 2+3?", "verification_info": '{"ground_truth": "5"}', "task_type": "math"},
        {"problem_column": "prompt", "answer_column": "verification_info.ground_truth"},
        {},
    ),
    # Countdown-Tasks-3to4: numbers alone
    "countdown": (
        {"target": 5, "nums": [2, 3]},
        {"problem_template": "Make {target} of {nums}.", "answer_column": "target", "columns": ("nums",)},
        {"problem": "Make 5 of [2, 3].", "columns": {"nums": [2, 3]}},
    ),
    # the RLVR mixtures of tulu 3
    "tulu": (
        {"messages": USER, "ground_truth": "5", "dataset": "gsm8k", "constraint": None},
        {"problem_column": "messages", "answer_column": "ground_truth", "columns": ("dataset",)},
        {"columns": {"dataset": "gsm8k"}},
    ),
    # TRL: a conversation with earlier turns
    "trl": (
        {
            "prompt": [*SYSTEM, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"}],
            "solution": "5",
        },
        {"problem_column": "prompt", "answer_column": "solution"},
        {
            "problem": "Sure?",
            "messages": (
                *SYSTEM, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Sure?"},
            ),
        },
    ),
    # ms-swift: messages with content in parts, or `query`
    "swift": (
        {"messages": [{"role": "user", "content": PARTS}], "solution": "5"},
        {"problem_column": "messages", "answer_column": "solution"},
        {},
    ),
    "swift_query": (
        {"query": "What is 2+3?", "solution": "5"},
        {"problem_column": "query", "answer_column": "solution"},
        {},
    ),
    "swift_history": (
        {"system": "Be brief.", "query": "What is 2+3?", "history": [["1+1?", "2"]], "solution": "5"},
        {
            "problem_column": "query",
            "answer_column": "solution",
            "system_column": "system",
            "history_column": "history",
        },
        {
            "messages": (
                SYSTEM[0], {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *USER,
            )
        },
    ),
    # Llama-Nemotron-Post-Training-Dataset: messages of the user, and a system prompt
    "nemotron": (
        {"input": USER, "system_prompt": "Be brief.", "output": "5"},
        {"problem_column": "input", "answer_column": "output", "system_column": "system_prompt"},
        {"messages": tuple(SYSTEM)},
    ),
    # slime
    "slime": ({"prompt": USER, "label": "5"}, {"problem_column": "prompt", "answer_column": "label"}, {}),
    # messages as JSON in text, as in CSV and Parquet without nested columns
    "json_in_text": (
        {"prompt": json.dumps(SYSTEM), "label": "5"},
        {"problem_column": "prompt", "answer_column": "label"},
        {"messages": tuple(SYSTEM)},
    ),
    # nested columns that pandas wrote to CSV, where text has either quote
    "python_in_text": (
        {"prompt": str(SYSTEM), "reward_model": str({"ground_truth": "5", "style": "it's"})},
        VERL_COLUMNS,
        {"messages": tuple(SYSTEM)},
    ),
    # ShareGPT
    "sharegpt": (
        {"conversations": SHARED, "a": 5},
        {"problem_column": "conversations", "answer_column": "a"},
        {"messages": tuple(SYSTEM)},
    ),
    # Open-Reasoner-Zero's 57k: a row is a list
    "orz": (
        [{"from": "human", "value": "What is 2+3?"}, {"from": "assistant", "ground_truth": {"value": "5"}}],
        {"problem_column": "0.value", "answer_column": "1.ground_truth.value"},
        {},
    ),
    # a gold in the last message
    "last_message": (
        {"messages": [*USER, {"role": "assistant", "content": "\\boxed{5}"}]},
        {"problem_column": "messages.0.content", "answer_column": "messages.-1.content"},
        {"answer": "\\boxed{5}"},
    ),
}  # fmt: skip


def _write(path, row):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row, row]), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps([row, row]))
    else:
        path.write_text(f"{json.dumps(row)}\n" * 2)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        (name, ending)
        for name, (row, *_) in SHAPES.items()
        for ending in ("jsonl", "json", "parquet")
        if ending != "parquet" or isinstance(row, dict)  # a table has no rows that are lists
    ],
)
def test_a_public_shape_is_read_by_settings_alone(tmp_path, name, ending):
    row, settings, expected = SHAPES[name]
    path = tmp_path / f"set.{ending}"
    _write(path, row)
    first, second = read(DataSourceConfig(path=str(path), **settings))
    default = {"problem": "What is 2+3?", "answer": "5", "messages": (), "columns": {}, "left_out": ""}
    whole = default | expected
    assert {key: getattr(first, key) for key in whole} == whole
    assert (first.location, second.location) == (f"{path}:1", f"{path}:2")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"problem_column": "prompt"},
         ["no column `answer`", "reward_model.ground_truth", "prompt.0.content"]),
        (VERL_COLUMNS | {"answer_column": "ground_truth"}, ["did you mean `reward_model.ground_truth`?"]),
        (VERL_COLUMNS | {"answer_column": "reward_model.gold"}, ["no column `reward_model.gold`"]),
        (VERL_COLUMNS | {"answer_column": "prompt.3.content"}, ["no column `prompt.3.content`"]),
        (VERL_COLUMNS | {"answer_column": "reward_model"},
         ["is a dict", "(data_source, ", "reward_model.style)"]),
        (VERL_COLUMNS | {"problem_column": "nums"}, ["`nums` is a list ([2, 3])", "`problem_template`"]),
        (VERL_COLUMNS | {"columns": ("index",)}, ["did you mean `extra_info.index`?", "Set `columns`"]),
        ({"problem_template": "{x}?", "answer_column": "data_source"},
         ["no column `x`", "Set `problem_template` of"]),
        (VERL_COLUMNS | {"system_column": "system"}, ["no column `system`", "Set `system_column` of"]),
        (VERL_COLUMNS | {"history_column": "nums"}, ["`nums` is '[2, 3]'; expected a list of pairs"]),
        (VERL_COLUMNS | {"problem_column": "images"}, ["`images`: message 0 has a part of type image"]),
        (VERL_COLUMNS | {"problem_column": "answers"}, ["`answers` has no user message"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_missing_column_or_one_of_another_kind_is_answered_with_the_columns_there_are(
    tmp_path, ending, settings, words
):
    row = {
        "data_source": "math", "prompt": USER, "nums": [2, 3], "extra_info": {"index": 3},
        "images": [{"role": "user", "content": [{"type": "image", "text": None}]}],
        "answers": [{"role": "assistant", "content": "5"}],
        "reward_model": {"ground_truth": "5", "style": "rule"},
    }  # fmt: skip
    path = tmp_path / f"set.{ending}"
    _write(path, row)
    with pytest.raises(ValueError) as refusal:
        read(DataSourceConfig(path=str(path), **settings))
    message = str(refusal.value)
    assert message.startswith(f"{path}:1: ") and "\n" not in message
    for word in words:
        assert word in message


def test_column_names_of_a_table_may_have_dots_and_messages_name_all_its_columns(tmp_path):
    path = tmp_path / "set.parquet"
    row = {"problem": "1+1=", "gold": {"value": "3"}, "gold.value": "2", "level": {"a.b": 1}, "unread": "x"}
    pq.write_table(pa.Table.from_pylist([row]), path)
    source = {"path": str(path), "columns": ("level.a.b",)}
    (parsed,) = read(DataSourceConfig(**source, answer_column="gold.value"))
    assert (parsed.answer, parsed.columns) == ("2", {"level.a.b": 1})
    with pytest.raises(ValueError, match=r"no column `gold\.text`.* The row has: .*, unread\. Set"):
        read(DataSourceConfig(**source, answer_column="gold.text"))


def test_a_row_without_a_nested_object_has_an_empty_answer(tmp_path):
    path = tmp_path / "set.parquet"
    rows = [VERL | {"prompt": USER}, {"prompt": USER, "reward_model": None}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ValueError, match=r"set\.parquet:2: `reward_model\.ground_truth` is empty"):
        read(DataSourceConfig(path=str(path), **VERL_COLUMNS))


def test_a_row_has_one_system_prompt(tmp_path):
    path = tmp_path / "set.jsonl"
    row = {"prompt": USER, "system": "", "history": None, "answer": "5"}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'prompt': SYSTEM, 'system': 'Add.'})}\n")
    settings = {"problem_column": "prompt", "system_column": "system", "history_column": "history"}
    (first,) = read(DataSourceConfig(path=str(path), max_rows=1, **settings))
    assert (first.problem, first.messages) == ("What is 2+3?", ())
    with pytest.raises(ValueError, match=r"set\.jsonl:2: `prompt` has a system prompt or earlier turns"):
        read(DataSourceConfig(path=str(path), **settings))
