"""Guarantee: a reward that fails or prefers wrong answers is detected before an engine starts."""

from contextlib import suppress
from dataclasses import replace

import pytest

from grpo_dist.data.readers import DataRow
from grpo_dist.errors import Refused
from grpo_dist.runs.trials import CheckSkipped, Start, check_reward
from tests.support import fakes
from tests.support.reward_code import code_directory
from tests.support.tiers import slow_after

CODE = """
import math, numpy

def raises(completion, answer):
    return 1 / 0

def returns_text(completion):
    return "0.5"

def returns_a_list(completion):
    return [1.0]

def returns_none(completion):
    return None

def returns_nan(completions):
    return [math.nan for _ in completions]

def too_long(completions):
    return [0.0] * 7

def equal(completion):
    return 0.5

def inverted(completion):
    return "987654321" in completion

def solution(completion, answer):
    return completion == f"<SOLUTION>{answer}</SOLUTION>"

def countdown(completion):
    value = eval(completion.split("<answer>")[1].split("</answer>")[0])
    return float(value == 1)

def of_topic(completion, topic):
    return float(topic in completion)

def right(completion, answer):
    return numpy.bool_("{" + answer + "}" in completion)
"""
code = code_directory(trial_rewards=CODE)


def run_trial(code, function, trial=None, columns=None, **more):
    """Return the report of the check, and its warnings."""
    functions = [{"function": f"trial_rewards:{function}"}]
    rewards = {"functions": functions, "trial": trial} | more
    rows = [DataRow("1 + 0 = ?", "1", "sums", "sums.jsonl:1", columns or {})]
    start = Start(fakes.config(code_paths=[code], rewards=rewards), lambda message: None)
    start.rows = ([(start.config.data.train[0], rows)], [])
    return check_reward(start), start.warnings


@pytest.mark.parametrize(
    ("function", "words"),
    slow_after(
        [
            ("raises", r"ZeroDivisionError: division by zero \(.*/trial_rewards\.py:5 in raises\)"),
            ("returns_text", "returned the text '0.5'; expected a finite number, or None"),
            ("returns_a_list", "returned a list; expected a finite number, or None"),
            ("too_long", "returned 7 numbers; expected 2"),
        ],
        2,
    ),
)
def test_a_reward_that_fails_on_every_form_of_an_answer_is_refused_with_the_reason(code, function, words):
    with pytest.raises(Refused, match=words):
        run_trial(code, function)


@pytest.mark.parametrize("function", ["returns_none", "returns_nan"])
def test_none_and_nan_are_no_scores_which_is_a_warning_and_with_a_trial_a_problem(code, function):
    _, (warning,) = run_trial(code, function)
    assert f"was not scored: reward trial_rewards:{function}: it returned None or NaN" in warning
    assert "rewards.trial" in warning and not warning.endswith("; ")
    with pytest.raises(Refused, match=f"not scored: reward trial_rewards:{function}: it returned None"):
        run_trial(code, function, {"right": "1", "wrong": "2"})


@pytest.mark.parametrize("function", slow_after(["equal", "inverted", "solution"], 1))
def test_usual_answers_that_a_users_reward_does_not_know_are_a_warning(code, function):
    """A correct reward may require an unusual answer format."""
    report, (warning,) = run_trial(code, function)
    assert "a right answer in its usual forms got no more than a wrong one" in warning
    assert "| right, " in report and "| wrong, " in report


def test_a_reward_that_raises_on_a_usual_form_is_a_warning_where_another_form_is_scored(code):
    report, (warning,) = run_trial(code, "countdown")
    assert "| right, 1 in all: " in report and "<answer>1</answer>" in report
    assert "IndexError: list index out of range" in warning and "trial_rewards.py" in warning


def test_with_a_right_and_a_wrong_completion_the_trial_is_decisive(code):
    trial = {"right": "<SOLUTION>{answer}</SOLUTION>", "wrong": "<SOLUTION>no</SOLUTION>"}
    report, warnings = run_trial(code, "solution", trial)
    assert not warnings and "| right, 1 in all: '<SOLUTION>1</SOLUTION>'" in report
    with pytest.raises(Refused, match="the right answer must score higher"):
        run_trial(code, "solution", {"right": trial["wrong"], "wrong": trial["right"]})
    honest = {"right": "<answer>(1+2)/3</answer>", "wrong": "<answer>(1+2)*3</answer>"}
    assert run_trial(code, "countdown", honest)[1] == []
    with pytest.raises(Refused, match="IndexError: list index out of range"):
        run_trial(code, "countdown", {"right": "1", "wrong": "2"})


def test_each_source_has_a_trial_of_its_own(code):
    """The trial of `rewards` does not apply to a source with its own rewards."""
    rewards = {"functions": [{"function": "trial_rewards:right"}]}
    source_rewards = {"functions": [{"function": "trial_rewards:solution"}]}
    rewards |= {"trial": {"right": "1", "wrong": "2"}, "by_source": {"add3": source_rewards}}
    assert fakes.config(code_paths=[code], rewards=rewards).rewards.select_source("other").trial.right == "1"
    assert fakes.config(rewards=rewards).rewards.select_source("add3").trial is None


def test_a_column_that_no_row_has_is_named_with_the_row(code):
    with pytest.raises(Refused, match=r"trial_rewards:of_topic reads column `topic`, but sums\.jsonl:1"):
        run_trial(code, "of_topic")
    assert run_trial(code, "of_topic", {"right": "1 sum", "wrong": "2"}, {"topic": "sum"})[1] == []


def test_truth_values_of_numpy_are_scores(code):
    report, warnings = run_trial(code, "right")
    assert not warnings and "trial_rewards:right 1 and 0" in report


def test_a_built_in_reward_that_prefers_wrong_answers_is_refused(code):
    with pytest.raises(Refused, match="the right answer must score higher"):
        run_trial(code, "right", functions=[{"function": "exact", "weight": -1.0}])


def test_a_built_in_reward_without_a_weight_decides_nothing(code):
    """As in benchmarks, which measure only the time of graders."""
    functions = [{"function": "parity"}, {"function": "math", "weight": 0}]
    report, warnings = run_trial(code, "right", functions=functions)
    assert not warnings and "no reward here looks at whether an answer is right" in report


SYSTEM = ({"role": "system", "content": "Use \\boxed{}."}, {"role": "user", "content": "1 + 0 = ?"})


@pytest.mark.parametrize(
    ("row", "rewards", "warned"),
    slow_after(
        [
            ({}, {}, False),
            ({"problem": "1 + 0 = ? Use \\boxed{}."}, {}, True),
            ({"messages": SYSTEM}, {}, True),
            ({"messages": SYSTEM}, {"require_box": True}, False),
            ({"messages": SYSTEM}, {"require_box": False}, False),
            ({"messages": SYSTEM}, {"functions": [{"function": "exact"}]}, False),
            ({"messages": SYSTEM}, {"by_source": {"add3": {"functions": [{"function": "exact"}]}}}, False),
        ],
        2,
    ),
)
def test_rows_that_ask_for_a_box_which_nothing_requires_are_a_warning(row, rewards, warned):
    """In any training source: the derived default does not read the rows."""
    start = Start(fakes.config(rewards={"functions": [{"function": "math"}]} | rewards), lambda message: None)
    sources = [
        DataRow("2 + 0 = ?", "2", "sums", "sums.jsonl:1", {}),
        replace(DataRow("1 + 0 = ?", "1", "add3", "chats.jsonl:1", {}), **row),
    ]
    start.rows = ([(start.config.data.train[0], [source]) for source in sources], [])
    with suppress(CheckSkipped):  # the trial per source needs prompts
        check_reward(start)
    words = "the first problem of add3 asks for \\boxed{}, but a number in babble may be right, too"
    assert [words in text for text in start.warnings] == [True] * warned
