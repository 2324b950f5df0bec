"""`grpo-dist score` with real grader processes, and agreement of graders."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_dist.cli import main
from grpo_dist.observe.samples import write_groups
from grpo_dist.tools.evaluate.completions import Columns, read_completions
from grpo_dist.tools.evaluate.score import agreement, disagreements
from grpo_dist.types import Thought
from tests.support.made_episodes import episodes

NAN = float("nan")
COUNT_CALLS = "def calls(completion, turns):\n    return sum(len(t['calls']) for t in turns)\n"
EPISODE_REWARDS = ("--reward", "math", "--reward", "environment", "--reward", "mine:calls", "code_paths=[.]")
ROWS = [
    {"problem": "1+1", "answer": 2, "completion": "so \\boxed{2}", "right": True},
    {"problem": "1+2", "answer": "3", "completion": "\\boxed{\\frac{6}{2}}", "right": True},
    {"problem": "2+2", "answer": 4.0, "completion": "\\boxed{5}", "right": False},
    {"problem": "2+3", "answer": "5", "completion": "no idea", "right": False},
    {"problem": "3+3", "answer": "6", "completion": "it is 6 of 7", "right": True},
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("c.jsonl", ROWS)
    return tmp_path


def write(name, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).write_text("".join(line + "\n" for line in lines))


def lines(name):
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def refusal(capsys, *arguments):
    """Return the single line of the refusal; asserts exit code 2 and no output file."""
    before = list_files()
    assert main(["score", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and list_files() == before
    return error


def list_files():
    """List the files, apart from what Python compiles of rewards."""
    return sorted(path for path in Path().iterdir() if path.name != "__pycache__")


# Files


def test_every_row_is_returned_with_the_verdict_of_the_math_grader(here, capsys):
    assert main(["score", "c.jsonl"]) == 0
    rows = lines("c.scored.jsonl")
    assert [{k: v for k, v in row.items() if k != "score"} for row in rows] == ROWS
    assert [row["score"]["reward"] for row in rows] == [1, 1, 0, 0, 0]
    assert [row["score"]["outcome"] for row in rows] == ["correct", "correct", "wrong", "no_answer", "wrong"]
    assert all(row["score"]["parts"] == {"math": row["score"]["reward"]} for row in rows)
    out = capsys.readouterr().out
    assert "math outcomes: correct 2, wrong 2, no_answer 1" in out and "scores: c.scored.jsonl" in out
    assert "5 completions in" in out and "slowest: c.jsonl:" in out and "40.0 [" in out
    assert "graders:" not in out  # there is only one


@pytest.mark.slow
def test_earlier_scores_are_replaced_and_a_directory_is_not(here, capsys, monkeypatch):
    for _ in range(2):
        assert main(["score", "c.jsonl"]) == 0
    assert len(lines("c.scored.jsonl")) == len(ROWS)
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("home").mkdir()
    assert main(["score", "c.jsonl", "--output=~/s.jsonl"]) == 0
    assert len(lines("home/s.jsonl")) == len(ROWS)
    Path("sub").mkdir()
    assert "--output sub is a directory" in refusal(capsys, "c.jsonl", "--output", "sub")
    os.mkfifo("fifo")
    assert "fifo: a device, FIFO or socket" in refusal(capsys, "c.jsonl", "--output", "fifo")
    message = refusal(capsys, "c.jsonl", "--output", "c.jsonl/x.jsonl")
    assert "--output c.jsonl/x.jsonl cannot be written" in message


@pytest.mark.slow
def test_each_of_several_completions_has_a_row_and_the_table_is_that_of_an_evaluation(here, capsys):
    texts = ["\\boxed{2}", "\\boxed{3}", "\\boxed{2.0}"]
    write("c.jsonl", [{"answer": "2", "completions": texts, "finish_reason": ["stop", "length", "stop"]}])
    assert main(["score", "c.jsonl", "--output", "sub/out.jsonl"]) == 0
    rows = lines("sub/out.jsonl")
    assert [(r["completion"], r["finish_reason"], r["score"]["outcome"]) for r in rows] == [
        (texts[0], "stop", "correct"), (texts[1], "length", "wrong"), (texts[2], "stop", "correct")
    ]  # fmt: skip
    out = capsys.readouterr().out
    assert "66.7 [" in out and "cons@3" in out and "100.0 [" in out and "33%" in out


@pytest.mark.slow
def test_graders_are_compared_with_a_label_and_disagreements_are_marked(here, capsys):
    arguments = ["--reward", "math", "--reward", "exact", "--label", "right"]
    assert main(["score", "c.jsonl", *arguments]) == 0
    out = capsys.readouterr().out
    flags = [row["score"].get("graders_disagree", False) for row in lines("c.scored.jsonl")]
    assert flags == [False, True, False, False, True]
    assert "c.jsonl:2: math 1, exact 0, right 1; answer '3'" in out
    assert "c.jsonl:5: math 0, exact 0, right 1" in out
    assert "disagreements: 2, with `graders_disagree` in c.scored.jsonl" in out
    assert "80.00%" in out  # math against the label: both 2, only the label 1, neither 2


@pytest.mark.slow
def test_custom_rewards_get_the_reference_answer_as_text_as_in_a_run(here):
    Path("mine.py").write_text("def same(completion, answer):\n    return answer.strip() in completion\n")
    options = ["--reward", "mine:same", "code_paths=[.]"]
    assert main(["score", "c.jsonl", *options]) == 0  # the file has 2 and 4.0, not "2" and "4"
    assert [row["score"]["reward"] for row in lines("c.scored.jsonl")] == [1, 0, 0, 0, 1]
    write("d.jsonl", [{"gold": "7", "answer": "8", "completion": "it is 7"}])  # `answer`: somebody's guess
    assert main(["score", "d.jsonl", "--answer-column", "gold", *options]) == 0
    assert [row["score"]["reward"] for row in lines("d.scored.jsonl")] == [1]


@pytest.mark.slow
def test_episodes_are_scored_by_their_last_action_their_turns_and_their_rewards(here):
    Path("mine.py").write_text(COUNT_CALLS)
    call = {"name": "calculator", "arguments": "3*4", "result": "12", "outcome": "ok", "seconds": 0.0}
    turns = [
        {"action": "```calculator\n3*4\n```", "observation": "12", "calls": [call], "reward": 0.25},
        {"action": "\\boxed{12}", "reward": 0.5},
    ]
    two = [turns, [{"action": "\\boxed{7}"}]]
    write("d.jsonl", [{"answer": "12", "turns": turns}, {"answer": "12", "turns": two}])
    assert main(["score", "d.jsonl", *EPISODE_REWARDS]) == 0
    rows = lines("d.scored.jsonl")
    assert [row["completion"] for row in rows] == ["\\boxed{12}", "\\boxed{12}", "\\boxed{7}"]
    parts = {"math": 1, "environment": 0.75, "mine:calls": 1}
    assert [row["score"]["parts"] for row in rows] == [
        parts, parts, {"math": 0, "environment": None, "mine:calls": 0}
    ]  # fmt: skip


@pytest.mark.slow
def test_samples_of_a_run_or_an_evaluation_are_scored_as_they_were_written(here, capsys):
    Path("mine.py").write_text(COUNT_CALLS)
    group = episodes()
    write_groups(Path("step_000001.parquet"), [group])
    assert main(["score", "step_000001.parquet", *EPISODE_REWARDS]) == 0
    rows = lines("step_000001.scored.jsonl")
    parts = {name: [row["score"]["parts"][name] for row in rows] for name in rows[0]["score"]["parts"]}
    assert parts["math"] == group.rewards.tolist()
    assert parts["mine:calls"] == [1, 0, 0, 1] and parts["environment"] == [None, None, 1.0, None]
    assert rows[2]["turns"][0]["observation"] == "lower"
    assert main(["score", "step_000001.scored.jsonl", *EPISODE_REWARDS]) == 0
    again = lines("step_000001.scored.scored.jsonl")
    assert [row["score"]["parts"] for row in again] == [row["score"]["parts"] for row in rows]
    Path("broken.parquet").write_text("no table")
    assert "broken.parquet: cannot be read as a table of samples" in refusal(capsys, "broken.parquet")


def test_the_thought_before_an_action_is_read_from_samples_of_a_run(here):
    group = episodes()
    first, *others = group.rollouts
    first = replace(first, turns=(first.turns[0], replace(first.turns[1], thought="opens")))
    write_groups(Path("step_000001.parquet"), [replace(group, rollouts=(first, *others))])
    (samples,) = read_completions(Path("step_000001.parquet"), Columns())
    assert [rollout.turns[-1].thought for rollout in samples.rollouts] == ["opens", None, None, None]
    write("d.jsonl", [{"answer": "12", "turns": [{"action": "12", "thought": "I guess"}]}])
    (samples,) = read_completions(Path("d.jsonl"), Columns())
    assert samples.rollouts[0].turns[0].thought is None


@pytest.mark.slow
def test_samples_that_were_all_cut_off_in_the_thought_of_their_prompt_have_no_answer(here):
    """The graders would find a box in the thought. Tables of earlier versions do not have the thought."""
    group = episodes()
    rollouts = [replace(r, text="\\boxed{12} ...", finish_reason="length", turns=()) for r in group.rollouts]
    tags = Thought("<THINK>", "</THINK>", "opens")
    cut_off = replace(group, rollouts=tuple(rollouts), prompt=replace(group.prompt, thought=tags))
    write_groups(Path("t.parquet"), [cut_off])
    assert main(["score", "t.parquet"]) == 0
    assert {row["score"]["outcome"] for row in lines("t.scored.jsonl")} == {"no_answer"}
    assert main(["score", "t.scored.jsonl"]) == 0
    assert {row["score"]["outcome"] for row in lines("t.scored.scored.jsonl")} == {"no_answer"}
    write_table(
        "old.parquet",
        ("p", "sums", "1+1", "2", 0, "1+1</think>\\boxed{2}", "stop"),
        ("q", "sums", "1+2", "3", 0, "\\boxed{3} ...", "length"),
        ("r", "words", "1+2", "3", 0, "\\boxed{3} ...", "length"),
    )
    assert main(["score", "old.parquet"]) == 0
    outcomes = [row["score"]["outcome"] for row in lines("old.scored.jsonl")]
    assert outcomes == ["correct", "no_answer", "correct"]


def test_columns_that_were_added_to_a_table_of_samples_are_read(here):
    row = {"uid": "p", "problem": "1+1", "answer": "2", "sample": 0, "completion": "a", "final": "b"}
    pq.write_table(pa.Table.from_pylist([row | {"gold": "3", "right": True, "tokens": [1, 2]}]), "t.parquet")
    (item,) = read_completions(Path("t.parquet"), Columns("final", "gold", "right"))
    assert (item.rollouts[0].text, item.prompt.answer, item.labels) == ("b", "3", (1.0,))
    assert "tokens" not in item.rows[0]


def write_table(name, *rows):
    columns = ("uid", "source", "problem", "answer", "sample", "completion", "finish_reason")
    pq.write_table(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows]), name)


@pytest.mark.slow
def test_samples_of_one_prompt_are_scored_together_wherever_their_rows_are(here):
    """A reward that compares the samples of a group sees all of them, in the order of the samples."""
    Path("mine.py").write_text(
        "def among(completions):\n    return [sorted(completions).index(c) for c in completions]\n"
        "def cut(completion, finish_reason, group):\n"
        "    return (finish_reason == 'length') + 10 * len(group)\n"
    )
    write_table(
        "t.parquet",
        ("p", "sums", "1+1", "2", 1, "b", "length"),
        ("q", "sums", "1+2", "3", 0, "x", "stop"),
        ("p", "sums", "1+1", "2", 0, "c", "stop"),
        ("p", "sums", "1+1", "2", 2, "a", "stop"),
    )
    names = ["--reward", "mine:among", "--reward", "mine:cut", "code_paths=[.]"]
    assert main(["score", "t.parquet", *names]) == 0
    rows = lines("t.scored.jsonl")
    assert [row["completion"] for row in rows] == ["c", "b", "a", "x"]
    parts = [tuple(row["score"]["parts"].values()) for row in rows]
    assert parts == [(2, 30), (1, 31), (0, 30), (0, 10)]


def test_messages_about_a_table_name_the_row(here, capsys):
    """The rows of a prompt need not be adjacent."""
    rows = [("p", "sums", "1+1", "2", 0, "b", "stop"), ("q", "sums", "1+2", "3", 0, "x", "stop")]
    write_table("t.parquet", *rows, ("p", "sums", "1+1", "2", 1, None, "stop"))
    assert "t.parquet:3: `completion` holds a null" in refusal(capsys, "t.parquet")


@pytest.mark.slow
def test_a_sample_that_the_engines_gave_up_is_unscored(here):
    """The tables of an evaluation have it with an empty text, which would count as wrong."""
    lost = ("p", "sums", "1+1", "2", 1, "", "error")
    write_table("t.parquet", ("p", "sums", "1+1", "2", 0, "\\boxed{2}", "stop"), lost)
    assert main(["score", "t.parquet", "--reward", "math"]) == 0
    scores = [row["score"] for row in lines("t.scored.jsonl")]
    assert [(score["reward"], score["outcome"]) for score in scores] == [(1, "correct"), (None, "error")]


@pytest.mark.slow
def test_a_table_that_lacks_the_columns_of_a_reward_is_refused(here, capsys):
    """Tables of samples lack other columns of the data; every sample would be wrong or unscored."""
    write_table("t.parquet", ("p", "code", "write f", "-", 0, "def f(): pass", "stop"))
    error = refusal(capsys, "t.parquet", "--reward", "unit_tests")
    assert "reward unit_tests reads column `tests`, but t.parquet:1 has only answer, problem" in error
    assert "score a JSON Lines file that has it" in error and "give source code other rewards" in error
    Path("mine.py").write_text("def easy(completion, level, most=3):\n    return level < most\n")
    options = ("--reward", "mine:easy", "code_paths=[.]")
    assert "reward mine:easy reads column `level`, but t.parquet:1" in refusal(capsys, "t.parquet", *options)
    assert "but c.jsonl:1 has only answer, problem, right: add it to the file" in refusal(
        capsys, "c.jsonl", *options
    )
    write("c.jsonl", [row | {"level": 2} for row in ROWS])
    assert main(["score", "c.jsonl", *options]) == 0


@pytest.mark.slow
def test_weights_gates_and_columns_are_those_of_a_configuration(here):
    """The total is exact for a weight that is not a power of two."""
    Path("mine.py").write_text("def bonus(completion, problem, right):\n    return 0.5 if right else -0.5\n")
    Path("lr=1e-6").mkdir()  # an existing path with "=" is no override
    Path("lr=1e-6/config.yaml").write_text(
        "model: {path: 'demo:tiny'}\ndata: {train: [{path: 'demo:add3'}]}\n"
        "code_paths: [.]\nrewards: {functions: [{function: math}, "
        "{function: 'mine:bonus', name: bonus, weight: 2.0, gate: math}]}\n"
        "tracking: {sinks: [{function: 'my:sink', kwargs: {api_key: '***'}}]}\n"  # recorded, and not read
    )
    assert main(["score", "c.jsonl", "lr=1e-6/config.yaml", "rewards.functions[1].weight=0.2"]) == 0
    assert [row["score"]["reward"] for row in lines("c.scored.jsonl")] == [1.1, 1.1, 0, 0, 0]


@pytest.mark.slow
def test_unscored_rows_are_null_with_a_reason(here, capsys):
    Path("mine.py").write_text(
        "import time\ndef picky(completion):\n"
        "    if 'idea' in completion:\n        raise KeyError('no idea')\n"
        "    if 'of' in completion:\n        time.sleep(60)\n    return 1\n"
    )
    arguments = ["--reward", "mine:picky", "code_paths=[.]", "rewards.timeout_s=3"]
    assert main(["score", "c.jsonl", *arguments]) == 0
    assert [row["score"]["reward"] for row in lines("c.scored.jsonl")] == [1, 1, 1, None, None]
    out = capsys.readouterr().out
    assert "unscored: mine:picky: 2, e.g. c.jsonl:4, c.jsonl:5" in out
    assert "1 times: KeyError: 'no idea'" in out and "1 times: no result within 3 s" in out
    assert out.split("slowest: ")[1].startswith("c.jsonl:5 3")  # 3 s are 3,0.. ms


@pytest.mark.parametrize(("row", "words"), [
    ('{"completion": ', ["c.jsonl:6", "not valid JSON"]),
    ('["a"]', ["c.jsonl:6", "a JSON list"]),
    ({"answer": "1"}, ["c.jsonl:6", "one of `completion` and `completions`"]),
    ({"answer": "1", "completion": "x", "completions": ["x"]}, ["c.jsonl:6", "one of `completion`"]),
    ({"answer": "1", "completion": 3}, ["c.jsonl:6", "`completion` holds a int"]),
    ({"answer": "1", "completions": ["x", None]}, ["c.jsonl:6", "`completions` holds a null"]),
    ({"answer": "1", "completions": []}, ["c.jsonl:6", "empty list"]),
    ({"completion": "x"}, ["c.jsonl:6", "no column `answer`", "--answer-column"]),
    ({"completion": "x", "answer": [1]}, ["c.jsonl:6", "`answer` is a list"]),
    ({"completion": "x", "answer": " "}, ["c.jsonl:6", "`answer` is empty"]),
    ({"completion": "x", "answer": "1", "problem": 7}, ["c.jsonl:6", "`problem` is a int"]),
    ({"completion": "x", "answer": "1", "finish_reason": ["stop", "stop"]},
     ["c.jsonl:6", "`finish_reason` has 2 values for 1 completions"]),
    ({"answer": "1", "turns": "none"}, ["c.jsonl:6", "`turns` is no list of turns"]),
    ({"answer": "1", "turns": [{"said": "x"}]}, ["c.jsonl:6", "expected objects with `action`"]),
    ({"answer": "1", "turns": [{"action": "x", "reward": "y"}]}, ["c.jsonl:6", "the reward 'y'"]),
    ({"answer": "1", "completions": ["a", "b"], "turns": [{"action": "x"}]},
     ["c.jsonl:6", "`turns` has 1 values for 2 completions"]),
])  # fmt: skip
def test_rows_that_cannot_be_scored_are_named(here, capsys, row, words):
    write("c.jsonl", [*ROWS, row])
    message = refusal(capsys, "c.jsonl")
    assert all(word in message for word in words), message


def test_invalid_labels_are_named(here, capsys):
    write("c.jsonl", [*ROWS, {**ROWS[0], "right": "yes"}])
    assert "c.jsonl:6: `right` holds 'yes'" in refusal(capsys, "c.jsonl", "--label", "right")
    assert "c.jsonl:1: no column `rihgt`" in refusal(capsys, "c.jsonl", "--label", "rihgt")


def test_invalid_commands_are_refused(here, capsys):
    assert "nothing.jsonl: no such file" in refusal(capsys, "nothing.jsonl")
    assert "is the file of completions" in refusal(capsys, "c.jsonl", "--output", "c.jsonl")
    assert "'maths'" in refusal(capsys, "c.jsonl", "--reward", "maths")
    assert "both give rewards" in refusal(capsys, "c.jsonl", "x.yaml", "--reward", "math")
    assert "at most one configuration" in refusal(capsys, "c.jsonl", "x.yaml", "y.yaml")
    write("empty.jsonl", [])
    assert "empty.jsonl: no rows" in refusal(capsys, "empty.jsonl")


@pytest.mark.slow
def test_reward_models_are_not_run_and_no_reward_may_depend_on_them(here, capsys):
    text = "model: {path: 'demo:tiny'}\ndata: {train: [{path: 'demo:add3'}]}\n"
    Path("config.yaml").write_text(text + "rewards: {models: [{name: quality, path: /models/q}]}\n")
    assert main(["score", "c.jsonl", "config.yaml"]) == 0
    assert "warning: reward models are not run (quality)" in capsys.readouterr().out
    gated = "rewards.functions=[{function: math, gate: quality}]"
    assert "math: its gate quality is a reward model" in refusal(capsys, "c.jsonl", "config.yaml", gated)
    alone = "rewards.functions=[]"
    assert "reward models (quality) are not run" in refusal(capsys, "c.jsonl", "config.yaml", alone)


@pytest.mark.slow
def test_people_and_the_math_grader_agree_on_gsm8k(shared_data, here, capsys):
    """Model solutions labelled right or wrong by their authors."""
    path = str(shared_data / "gsm8k_graded_solutions.jsonl")
    assert main(["score", path, "--completion-column", "solution", "--label", "is_correct"]) == 0
    assert "disagreements: 0," in capsys.readouterr().out


# Agreement


def test_the_agreement_of_two_graders_by_hand():
    first = np.array([1] * 25 + [0] * 25 + [NAN, 1], float)
    second = np.array([1] * 20 + [0] * 5 + [1] * 10 + [0] * 15 + [1, NAN], float)
    assert agreement(first, second) == ([20, 5, 10, 15], 2, 0.7)
    assert math.isnan(agreement(np.array([NAN]), np.array([1.0]))[2])


def test_a_disagreement_needs_one_right_and_one_wrong_verdict():
    verdicts = {"a": [1, 1, NAN, 0, NAN], "b": [1, 0, 1, 0, 0], "c": [1, 1, 0, 0, NAN]}
    graders = {name: np.array(flags) for name, flags in verdicts.items()}
    assert disagreements(graders).tolist() == [False, True, True, False, False]


BY_SOURCE = """
model: {path: 'demo:tiny'}
data:
  train:
    - {path: 'demo:add3', name: sums}
    - {path: 'demo:add3', name: words}
    - {path: 'demo:add3', name: essays}
rewards:
  functions: [{function: math, weight: 2}]
  models: [{name: judged, path: x}]
  by_source:
    words: {functions: [{function: exact, weight: 3}]}
    essays: {models: [judged]}
"""


@pytest.mark.slow
def test_each_row_gets_the_rewards_of_its_source(here, capsys):
    """A source that `by_source` lacks has the common rewards; a reward of another source is not unscored."""
    Path("config.yaml").write_text(BY_SOURCE)
    rows = [
        {"answer": "2", "completion": "\\boxed{2}", "source": "sums"},
        {"answer": "yes", "completion": "\\boxed{yes}", "source": "words"},
        {"answer": "yes", "completion": "\\boxed{no}", "source": "words"},
        {"answer": "2", "completion": "\\boxed{3}", "source": "another"},
    ]
    write("c.jsonl", rows)
    assert main(["score", "c.jsonl", "config.yaml"]) == 0
    scores = [row["score"] for row in lines("c.scored.jsonl")]
    assert [score["reward"] for score in scores] == [2, 3, 0, 0]
    assert [list(score["parts"]) for score in scores] == [["math"], ["exact"], ["exact"], ["math"]]
    printed = capsys.readouterr().out
    assert "total of words" in printed and "total of another" in printed and "unscored:" not in printed
