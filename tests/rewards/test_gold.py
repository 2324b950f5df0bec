"""Counting unreadable gold answers before a run."""

import pytest

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.gold import count_unreadable

SETTINGS = RewardsConfig(timeout_s=600.0)


def test_plain_numbers_count_as_parsable_without_parsing():
    assert count_unreadable(["5", "-1,200", "3.25"] * 1000, SETTINGS) == (0, 3000)


@pytest.mark.slow
def test_formulas_are_parsed_and_texts_counted():
    golds = ["12", "\\frac{1}{2}", "x^2+1", "", "(1,2)"]
    assert count_unreadable(golds, SETTINGS) == (1, 5)


@pytest.mark.slow
def test_the_number_of_examined_formulas_is_limited():
    golds = ["7", *(["\\sqrt{2}"] * 1500)]
    assert count_unreadable(golds, SETTINGS) == (0, 1001)
