"""Length rewards against numbers worked by hand, and `rewards.overlong_buffer`: equation 13 of DAPO
(arXiv:2503.14476) as a part of every total reward.
"""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from grpo_dist.config import RewardsConfig
from grpo_dist.rewards.builtin import cosine_length, overlong_punishment, relative_length, repeated_share
from grpo_dist.rewards.checks import check_rewards
from grpo_dist.rewards.scorer import Scorer
from tests.support.made_completions import completion_group

RANGES = {"correct_range": (1.0, 0.5), "wrong_range": (-1.0, 0.0), "exceed": -2.0}


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1.0), (120, -1.0)],
)
def test_overlong_punishment_is_equation_13_of_dapo(length, expected):
    """L_max 100, L_cache 20: 0 | (80 - length) / 20 | -1."""
    assert overlong_punishment(length, max_tokens=100, buffer_tokens=20) == pytest.approx(expected)


def test_a_buffer_of_one_token_penalises_only_the_limit():
    assert [overlong_punishment(n, max_tokens=10, buffer_tokens=1) for n in (9, 10)] == [0.0, -1.0]


@pytest.mark.parametrize(
    ("correct", "length", "expected"),
    [
        (1, 0, 1.0), (1, 25, 0.5 + 0.25 * (1 + math.sqrt(0.5))), (1, 50, 0.75), (1, 100, 0.5),
        (0, 0, -1.0), (0, 25, -0.5 * (1 + math.sqrt(0.5))), (0, 50, -0.5), (0, 100, 0.0),
        (1, 150, 0.5),
    ],
)  # fmt: skip
def test_cosine_length_joins_its_two_ends(correct, length, expected):
    value = cosine_length(correct, length, max_tokens=100, exceeded=False, **RANGES)
    assert value == pytest.approx(expected, abs=1e-12)


def test_cosine_length_of_truncated_and_unscored_samples():
    assert cosine_length(1.0, 100, max_tokens=100, exceeded=True, **RANGES) == -2.0
    assert cosine_length(0.0, 100, max_tokens=100, exceeded=True, **RANGES) == -2.0
    assert math.isnan(cosine_length(math.nan, 10, max_tokens=100, exceeded=False, **RANGES))


def test_relative_length_spans_the_group():
    """lambda of 10, 20, 30 is 0.5, 0, -0.5; a wrong answer gains nothing from being short."""
    assert relative_length([1, 1, 0, 0], [10, 30, 20, 10]) == [0.5, -0.5, 0.0, 0.0]
    assert relative_length([0, 1, 1], [30, 15, 10]) == [-0.5, 0.25, 0.5]


def test_relative_length_leaves_unscored_samples_unscored():
    rewards = relative_length([1, math.nan, 1], [10, 30, 20])
    assert rewards[0] == 0.5 and math.isnan(rewards[1]) and rewards[2] == 0.0


@pytest.mark.parametrize(
    ("tokens", "n", "expected"),
    [
        ([1, 2, 1, 2, 1], 2, 0.5),  # 12 21 12 21: two distinct of four
        ([1, 2, 3, 4], 2, 0.0),
        ([7, 7, 7, 7, 7], 1, 0.8),
        ([7, 7, 7, 7, 7], 4, 0.5),  # 7777 twice
        ([1, 2, 3, 1, 2, 3, 1], 3, 0.4),  # 123 231 312 123 231
        ([1, 2], 3, 0.0),
        ([], 1, 0.0),
    ],
)
def test_share_of_repeated_n_grams(tokens, n, expected):
    assert repeated_share(tokens, n=n) == pytest.approx(expected)


def test_token_ids_differ_by_all_their_bytes():
    assert repeated_share(np.array([1, 257, 65537, 16777217], np.int32), n=1) == 0.0


def test_relative_length_of_equal_lengths_is_zero():
    assert relative_length([1, 0], [7, 7]) == [0.0, 0.0]
    assert relative_length([], []) == []


def test_a_loop_tends_to_one():
    looping = np.tile(np.arange(10, dtype=np.int32), 100)
    assert repeated_share(looping, n=40) == pytest.approx(1 - 10 / 961)


# As a part of every total

MODEL = {"name": "quality", "path": "a/model"}
TEXTS, LENGTHS = ["\\boxed{4}"] * 3 + ["\\boxed{5}"] * 2, [80, 85, 100, 90, 100]


def scores(settings, pool, modelled=None, reason="length"):
    reasons = ["stop"] * 4 + [reason]
    group = completion_group(TEXTS, "4", lengths=LENGTHS, reasons=reasons)  # at most 100 tokens
    rewards = settings.select_source("")
    return Scorer(rewards.functions, pool, models=rewards.models).score(group, modelled)


@pytest.mark.parametrize("size", [{}, {"tokens": 20}])
def test_the_punishment_of_equation_13_is_added_to_the_total(pool, size):
    """L_max 100, L_cache 20: 0 up to 80 tokens, (80 - length) / 20 up to 100."""
    full = scores(RewardsConfig(overlong_buffer={"penalty": 1.0} | size), pool)
    assert full.parts["overlong"].tolist() == [0.0, -0.25, -1.0, -0.5, -1.0]
    assert full.rewards.tolist() == [1.0, 0.75, 0.0, -0.5, -1.0]
    half = scores(RewardsConfig(overlong_buffer={"penalty": 0.5} | size), pool)
    assert half.rewards.tolist() == [1.0, 0.875, 0.5, -0.25, -0.5]


def test_the_default_adds_nothing(pool):
    result = scores(RewardsConfig(), pool)
    assert list(result.parts) == ["math"] and result.rewards.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_it_is_added_to_reward_models_and_to_the_rewards_of_each_source(pool):
    settings = RewardsConfig(
        functions=(),
        models=(MODEL,),
        by_source={"words": {"functions": [{"function": "exact", "weight": 2.0}]}},
        overlong_buffer={"tokens": 40, "penalty": 2.0},
    )
    modelled = {"quality": np.full(5, 3.0, np.float32)}
    model_scores = scores(settings.variants[""], pool, modelled)
    assert model_scores.rewards.tolist() == [2.0, 1.75, 1.0, 1.5, 1.0]
    words = settings.variants["words"]
    assert words.models == () and [(f.label, f.weight) for f in words.functions] == [
        ("exact", 2.0), ("overlong", 2.0),
    ]  # fmt: skip
    assert settings.names == ["overlong", "exact", "quality"] and settings.weights["overlong"] == 2.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"overlong_buffer": {"tokens": 20}}, ["overlong_buffer", "penalty = 0", "has no effect"]),
        ({"overlong_buffer": {"tokens": 0}}, ["overlong_buffer.tokens", "greater than 0"]),
        ({"overlong_buffer": {"penalty": -1.0}}, ["overlong_buffer.penalty", "greater than or equal to 0"]),
        (
            {
                "functions": [{"function": "overlong", "kwargs": {"buffer_tokens": 5}}],
                "overlong_buffer": {"penalty": 1.0},
            },
            ["share a name", "overlong"],
        ),
        ({"functions": [], "overlong_buffer": {"penalty": 1.0}}, ["at least one reward"]),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, words):
    with pytest.raises(ValidationError) as refusal:
        RewardsConfig.model_validate(settings)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_buffer_longer_than_the_answers_is_refused():
    with pytest.raises(ValueError, match="buffer_tokens = 101 is above"):
        check_rewards(RewardsConfig(overlong_buffer={"tokens": 101, "penalty": 1.0}), max_new_tokens=100)
