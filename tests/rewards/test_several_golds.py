"""Of several golds, a list of texts, any is right, to every reward that compares an answer with the gold."""

import math

import pytest

from grpo_dist.rewards.builtin import Exact, Numeric
from grpo_dist.rewards.group import CompletionGroup
from grpo_dist.rewards.math import gold_is_parsable, grade
from grpo_dist.rewards.text import alternatives


def group(gold, *answers):
    texts = tuple(f"It is \\boxed{{{answer}}}." for answer in answers)
    return CompletionGroup(texts, (), ("stop",) * len(texts), gold, {}, 99)


@pytest.mark.parametrize(
    ("gold", "golds"),
    [
        ('["5", "five"]', ["5", "five"]),
        ('["\\\\frac{1}{2}"]', ["\\frac{1}{2}"]),
        ("[1, 2]", ["[1, 2]"]),  # a list that is the answer
        ('["a", 1]', ['["a", 1]']),
        ('["a" and more', ['["a" and more']),
        ("", [""]),
    ],
)
def test_a_list_of_texts_has_several_golds_and_other_text_is_one(gold, golds):
    assert alternatives(gold) == golds


def test_any_gold_is_right_and_part_of_a_list_is_not():
    golds = '["\\\\frac{1}{2}", "6"]'
    found = [
        grade(f"so \\boxed{{{answer}}}", golds).outcome for answer in ("0.5", "6", "7", "\\frac{1}{2}, 6")
    ]
    assert found == ["correct", "correct", "wrong", "wrong"]
    assert grade("I do not know", golds).outcome == "no_answer"
    assert [grade(f"so \\boxed{{{answer}}}", "5, -5").outcome for answer in ("5", "5, -5")] == [
        "wrong",
        "correct",
    ]
    assert gold_is_parsable(golds) and not gold_is_parsable('["6", "?!"]')


def test_text_and_number_rewards_take_any_gold():
    several = group('["five", "5"]', "5", "Five", "6")
    assert Exact().score(several, None) == [1.0, 1.0, 0.0]
    assert Numeric().score(several, None) == [1.0, 0.0, 0.0]
    (unscorable,) = Numeric().score(group('["five", "six"]', "5"), None)
    assert math.isnan(unscorable)
