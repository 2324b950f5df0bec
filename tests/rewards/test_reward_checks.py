"""Checks before a run: columns that built-in rewards read and rows lack or have in another form; golds that
cannot be parsed.
"""

import numpy as np
import pytest

from grpo_dist.config import DataSourceConfig, RewardsConfig
from grpo_dist.data.readers import DataRow
from grpo_dist.rewards.checks import (
    column_problems,
    describe_no_answers,
    find_unreadable,
    is_no_answer,
    reward_problems,
)
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.runs.prepare import check_columns
from grpo_dist.types import Prompt

TESTS = ["assert f(1) == 2"]
CODE = {"function": "unit_tests", "kwargs": {"setup_column": "setup"}}
SERVED = {"function": "remote", "kwargs": {"url": "http://scorer", "columns": ["level", "problem"]}}


def row(source, number, **columns):
    return DataRow("1+1?", "2", source, f"{source}.jsonl:{number}", columns)


def problems(rewards, *rows):
    return list(
        column_problems(RewardsConfig.model_validate(rewards), rows, "add it to `data.train.0.columns`")
    )


def test_rows_with_the_columns_are_right():
    complete = row("a", 1, tests=TESTS, setup="", level=1)
    assert problems({"functions": [{"function": "math"}]}, row("a", 1)) == []
    assert problems({"functions": [CODE, SERVED]}, complete, complete) == []


def test_a_nested_column_is_known_by_its_last_part_which_an_argument_can_have():
    assert problems({"functions": [SERVED]}, row("a", 1, **{"extra_info.level": 1})) == []
    prompt = Prompt(
        "u", np.zeros(1, np.int32), "2", "a", "1+1?", {"meta.level": 1, "a.answer": "3", "m.1b": 2}
    )
    columns = CompletionGroup.from_rollouts(prompt, [], max_new_tokens=1).columns
    assert columns == {"problem": "1+1?", "level": 1, "meta.level": 1, "a.answer": "3", "m.1b": 2}
    with pytest.raises(ValueError, match=r"columns = a\.level and b\.level would both be `level` to rewards"):
        DataSourceConfig(path="a.jsonl", columns=("a.level", "b.level"))


def test_a_column_that_a_row_lacks_is_named_with_those_it_has():
    """Its code would not run, and every solution that needs it would be wrong."""
    (problem,) = problems({"functions": [CODE]}, row("a", 1, tests=TESTS, set_up=""))
    assert problem == (
        "reward unit_tests reads column `setup`, but a.jsonl:1 has only problem, set_up, tests: add it to "
        "`data.train.0.columns`, correct the kwargs of the reward, or give source a other rewards in "
        "`rewards.by_source`"
    )
    (problem,) = problems({"functions": [SERVED]}, row("a", 1, level=1), row("a", 2))
    assert "reward remote reads column `level`, but a.jsonl:2" in problem
    assert len(problems({"functions": [CODE]}, row("a", 1))) == 2


@pytest.mark.parametrize("source", ["", "a"])
def test_kwargs_that_a_reward_does_not_take_are_named_with_their_key(source):
    wrong = {"functions": [{"function": "exact", "kwargs": {"casefold": True}}]}
    rewards, key = (
        ({"by_source": {"a": wrong}}, "rewards.by_source.a.functions") if source
        else (wrong, "rewards.functions")
    )  # fmt: skip
    (problem,) = problems(rewards, row("a", 1))
    assert problem.startswith(f"{key} exact: unknown key kwargs.casefold")
    settings = RewardsConfig.model_validate(rewards)
    assert problem in list(reward_problems(settings, max_new_tokens=8))  # `check` says it once


def test_columns_that_the_source_has_and_rows_do_not_keep_are_listed():
    rows = [row("a", 1, level=1)]
    settings = RewardsConfig.model_validate({"functions": [CODE]})
    first, _ = column_problems(settings, rows, "add it", lambda: ["question", "answer", "Setup"])
    assert "a.jsonl:1 has only Setup, answer, question: add it" in first


def rated(prompt):
    kwargs = {"base_url": "http://scorer", "model": "m", "prompt": prompt}
    return {"functions": [{"function": "generative", "kwargs": kwargs}]}


def test_a_column_in_the_prompt_of_a_generative_reward_is_one_that_it_reads():
    """Otherwise the prompt holds its name instead of its text in every request of the run."""
    rewards = rated("Rubric: {rubric}\n{problem}\n{answer}\n{completion}")
    (issue,) = problems(rewards, row("a", 1, rubric="R"), row("a", 2, level=1))
    assert issue.startswith("reward generative reads column `rubric`, but a.jsonl:2 has only level, problem:")
    assert problems(rewards, row("a", 1, rubric="R")) == []


FORMULAS = ["\\boxed{x}", "$\\frac{a}{b}$", "$a^{n}_{i}\\sqrt[3]{x}$", "\\{a\\}", "${a}$", "$\\sqrt {x}$"]


@pytest.mark.parametrize("text", [*FORMULAS, '{"score": 1}', "{A}"])
def test_braces_of_formulas_are_no_columns(text):
    assert problems(rated(f"{text} of {{completions}}"), row("a", 1)) == []


@pytest.mark.parametrize("text", ["{problem}{rubric}{completion}", "Rubric_{rubric} {completion}"])
def test_a_column_is_found_wherever_its_name_stands(text):
    (problem,) = problems(rated(text), row("a", 1))
    assert "reads column `rubric`" in problem


def test_every_source_needs_the_columns_of_its_own_rewards():
    """Otherwise none of its completions could be scored in the whole run."""
    nowhere = DataSourceConfig(path="./absent.jsonl")
    code, other = (nowhere, [row("code", 1, tests=TESTS)]), (nowhere, [row("other", 1)])
    unit_tests = {"function": "unit_tests"}
    with pytest.raises(ValueError, match=r"other.jsonl:1 has only problem: add it to `data.eval.1.columns`"):
        check_columns(RewardsConfig(functions=(unit_tests,)), [code, other], "data.eval")
    by_source = RewardsConfig.model_validate(
        {"functions": [{"function": "math"}], "by_source": {"code": {"functions": [unit_tests]}}}
    )
    check_columns(by_source, [code, other], "data.eval")


def test_tests_of_another_form_are_named_with_their_row():
    apps = {"inputs": ["1"], "outputs": ["2"]}
    rows = row("code", 1, tests=TESTS), row("code", 2, tests=apps), row("code", 3, tests=[])
    (problem,) = problems({"functions": [{"function": "unit_tests"}]}, *rows)
    assert problem.startswith("reward unit_tests: code.jsonl:2: column tests has no tests; expected a list")


PATIENT = RewardsConfig(timeout_s=600.0)


def test_plain_numbers_count_as_parsable_without_parsing():
    assert find_unreadable(["5", "-1,200", "3.25"] * 1000, PATIENT) == ([], 3000)


@pytest.mark.slow
def test_formulas_are_parsed_and_texts_counted():
    golds = ["12", "\\frac{1}{2}", "x^2+1", "", "(1,2)"]
    assert find_unreadable(golds, PATIENT) == ([3], 5)


@pytest.mark.slow
def test_the_number_of_examined_formulas_is_limited():
    golds = ["7", *(["\\sqrt{2}"] * 1500)]
    assert find_unreadable(golds, PATIENT) == ([], 1001)


NO_ANSWERS = [
    "proof", "notfound", "see solution", "See the solution.", "N/A", "n.a.", "-", "?", "", "\\text{Proof}",
    "\\boxed{proof}", "None", "Not found", "Proof omitted.", "...",
]  # fmt: skip
ANSWERS = ["5", "-5", "\\{\\}", "no solution", "x", "Na", "odd", "\\text{Yes}", "\\emptyset", "0"]


@pytest.mark.parametrize("gold", NO_ANSWERS)
def test_placeholders_are_no_answers(gold: str) -> None:
    assert is_no_answer(gold)


@pytest.mark.parametrize("gold", ANSWERS)
def test_answers_in_words_and_signs_are_answers(gold: str) -> None:
    assert not is_no_answer(gold)


def test_golds_that_are_no_answers_are_named_by_row() -> None:
    golds = ["5", "proof", "proof", "N/A", "proof", "proof", "7"]
    rows = [(f"train.jsonl:{number}", gold) for number, gold in enumerate(golds, 1)]
    assert describe_no_answers(rows) == (
        "'proof' 4 times (train.jsonl:2, train.jsonl:3, train.jsonl:5, ...), 'N/A' once (train.jsonl:4)"
    )
    assert describe_no_answers(rows[:1]) == ""
