"""Words and signs around a value: scales, lists, ranges and relations that the grader's parser overlooks."""

import pytest

from grpo_dist.rewards.math import grade


def graded(answer: str, gold: str) -> str:
    return grade(f"So the answer is $\\boxed{{{answer}}}$.", gold).outcome


SCALES = {
    "5\\text{ quadrillion}": "5000000000000000",
    "5\\text{ quintillion}": "5000000000000000000",
    "5\\text{ gross}": "720",
    "5\\text{ score}": "100",
    "5\\text{ bil}": "5000000000",
    "5\\text{ mill.}": "5000000",
    "5\\text{ thou}": "5000",
    "5\\text{ millions}": "5000000",
    "5 thousands": "5000",
    "5\\text{ per thousand}": "0.005",
    "5\\text{ ppm}": "0.000005",
    "5‰": "0.005",
    "5\\permil": "0.005",
}


@pytest.mark.parametrize("answer", SCALES)
def test_a_scale_is_part_of_the_value(answer: str) -> None:
    assert [graded(answer, gold) for gold in ("5", SCALES[answer])] == ["wrong", "correct"]


def test_per_mille_is_a_share() -> None:
    golds = ("500", "0.5", "\\frac{1}{2}", "500‰")
    assert [graded("500‰", gold) for gold in golds] == ["wrong", "correct", "correct", "correct"]
    assert grade("The answer is 500‰.", "500").outcome == "wrong"


LISTS = [
    "3\\text{ or four}",
    "3\\text{ and four}",
    "3\\text{, four}",
    "3\\text{ apples, or four}",
    "3\\text{ out of four}",
    "3\\text{ four}",
    "3\\text{ to four}",
    "3\\text{ to one}",
    "3\\text{ or x}",
    "3\\text{ and up}",
    "3\\text{ / 4}",
    "3\\text{ - 4}",
    "3\\text{ 4}",
    "3\\text{ +- 1}",
    "3\\text{ plus}",
    "3\\text{ minus one}",
    "3^+",
    "3^{+}",
    "3+",
    "3\\,+",
    "3-",
    "3\\ldots",
    "3...",
    "3, \\dots",
]
RELATIONS = [
    "\\gtrapprox", "\\lessapprox", "\\succcurlyeq", "\\preccurlyeq", "\\gtreqless", "\\eqslantless", "\\ggg",
    "\\lnsim", "\\gvertneqq", "\\gtrdot", "&gt;", "⩾", "≮", "≳",
]  # fmt: skip


@pytest.mark.parametrize("answer", [*LISTS, *(f"{relation} 3" for relation in RELATIONS)])
def test_a_list_a_range_and_a_relation_are_not_their_first_number(answer: str) -> None:
    assert graded(answer, "3") == "wrong"


@pytest.mark.parametrize("sentence", ["3 to four", "$\\gtrapprox 3$", "$\\succcurlyeq 3$"])
def test_a_range_and_a_relation_without_a_box_are_not_their_first_number(sentence: str) -> None:
    assert grade(f"The answer is {sentence}.", "3").outcome != "correct"


SO = [  # (gold, what is in the box)
    ("3", "3\\text{ two-digit numbers}"),
    ("5", "\\text{The answer is 5 for two reasons}"),
    ("5", "5\\text{ canteens}"),
    ("3", "3\\text{ red and blue balls}"),
    ("3", "3\\text{ units}^2"),
    ("3", "x_{\\text{two}} = 3"),
    ("1024", "2^{10}\\text{ = 1024}"),
    ("\\frac{1}{3}", "0.333\\ldots"),
    ("1, 2, 3, \\ldots", "1,2,3,\\ldots"),
    ("3.14159", "3.14159\\ldots"),
    ("0^+", "0^+"),
    ("1, 2", "1\\text{ and }2"),
    ("1, 2", "1$ and $2"),
    ("x=1, y=2", "x=1\\text{ and }y=2"),
    ("300", "300\\text{ M}"),
    ("x \\succeq 3", "x \\succeq 3"),
]


@pytest.mark.parametrize(("gold", "answer"), SO)
def test_words_and_signs_that_keep_the_value_do_not_count(gold: str, answer: str) -> None:
    assert graded(answer, gold) == "correct"
