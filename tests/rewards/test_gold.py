"""Counting unreadable gold answers before a run."""

import pytest

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.checks import describe_no_answers, find_unreadable, is_no_answer

SETTINGS = RewardsConfig(timeout_s=600.0)


def test_plain_numbers_count_as_parsable_without_parsing():
    assert find_unreadable(["5", "-1,200", "3.25"] * 1000, SETTINGS) == ([], 3000)


@pytest.mark.slow
def test_formulas_are_parsed_and_texts_counted():
    golds = ["12", "\\frac{1}{2}", "x^2+1", "", "(1,2)"]
    assert find_unreadable(golds, SETTINGS) == ([3], 5)


@pytest.mark.slow
def test_the_number_of_examined_formulas_is_limited():
    golds = ["7", *(["\\sqrt{2}"] * 1500)]
    assert find_unreadable(golds, SETTINGS) == ([], 1001)


NO_ANSWERS = [
    "proof", "notfound", "see solution", "See the solution.", "N/A", "n.a.", "-", "?", "", "\\text{Proof}",
    "\\boxed{proof}", "None", "Not found", "Proof omitted.", "...",
]  # fmt: skip
ANSWERS = ["5", "-5", "\\{\\}", "no solution", "x", "Na", "odd", "\\text{Yes}", "\\emptyset", "0"]


@pytest.mark.parametrize("gold", NO_ANSWERS)
def test_texts_in_the_place_of_an_answer_are_no_answers(gold: str) -> None:
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
