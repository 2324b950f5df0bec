"""`rewards.overlong_buffer`: equation 13 of DAPO (arXiv:2503.14476) as a part of every total reward."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from grpo_dist.config import RewardsConfig
from grpo_dist.loop.metrics import rollout_metrics
from grpo_dist.rewards.checks import check_rewards
from grpo_dist.rewards.pool import GraderPool
from grpo_dist.rewards.scorer import Scorer
from tests.support.made_completions import completion_group
from tests.support.made_groups import group_of
from tests.support.patience import HANG_S

MODEL = {"name": "quality", "path": "a/model"}
TEXTS, LENGTHS = ["\\boxed{4}"] * 3 + ["\\boxed{5}"] * 2, [80, 85, 100, 90, 100]


@pytest.fixture(scope="module")
def pool():
    with GraderPool(1, timeout_s=HANG_S) as pool:
        yield pool


def scores(settings, pool, modelled=None, reason="length"):
    reasons = ["stop"] * 4 + [reason]
    group = completion_group(TEXTS, "4", lengths=LENGTHS, reasons=reasons)  # at most 100 tokens
    chosen = settings.select_source("")
    return Scorer(chosen.functions, pool, models=chosen.models).score(group, modelled)


@pytest.mark.parametrize("size", [{}, {"tokens": 20}])
def test_the_punishment_of_equation_13_is_added_to_the_total(pool, size):
    """L_max 100, L_cache 20: 0 up to 80 tokens, (80 - length) / 20 up to 100."""
    found = scores(RewardsConfig(overlong_buffer={"penalty": 1.0} | size), pool)
    assert found.parts["overlong"].tolist() == [0.0, -0.25, -1.0, -0.5, -1.0]
    assert found.rewards.tolist() == [1.0, 0.75, 0.0, -0.5, -1.0]
    half = scores(RewardsConfig(overlong_buffer={"penalty": 0.5} | size), pool)
    assert half.rewards.tolist() == [1.0, 0.875, 0.5, -0.25, -0.5]


def test_the_default_adds_nothing(pool):
    found = scores(RewardsConfig(), pool)
    assert list(found.parts) == ["math"] and found.rewards.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_it_is_added_to_reward_models_and_to_the_rewards_of_each_source(pool):
    settings = RewardsConfig(
        functions=(),
        models=(MODEL,),
        by_source={"words": {"functions": [{"function": "exact", "weight": 2.0}]}},
        overlong_buffer={"tokens": 40, "penalty": 2.0},
    )
    modelled = {"quality": np.full(5, 3.0, np.float32)}
    of_models = scores(settings.variants[""], pool, modelled)
    assert of_models.rewards.tolist() == [2.0, 1.75, 1.0, 1.5, 1.0]
    words = settings.variants["words"]
    assert words.models == () and [(f.label, f.weight) for f in words.functions] == [
        ("exact", 2.0), ("overlong", 2.0),
    ]  # fmt: skip
    assert settings.names == ["overlong", "exact", "quality"] and settings.weights["overlong"] == 2.0


def test_the_total_without_it_is_a_metric():
    parts = {"math": np.array([1, 1], np.float32), "overlong": np.array([-0.5, 0], np.float32)}
    one = group_of([0, 1], [3, 3], parts=parts)  # 1 - 2 * 0.5 and 1
    unscored = replace(one, rewards=np.array([np.nan, 1], np.float32))
    metrics = rollout_metrics(
        [one, unscored], version=0, settings=RewardsConfig(overlong_buffer={"penalty": 2.0})
    )
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/without_overlong_mean"] == 1.0
    assert metrics["reward/overlong"] == -0.25
    assert "reward/without_overlong_mean" not in rollout_metrics([one], version=0)


@pytest.mark.parametrize(
    ("given", "words"),
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
def test_settings_without_a_meaning_are_refused(given, words):
    with pytest.raises(ValidationError) as refusal:
        RewardsConfig.model_validate(given)
    assert [word for word in words if word not in str(refusal.value)] == []


def test_a_buffer_longer_than_the_answers_is_refused():
    with pytest.raises(ValueError, match="buffer_tokens = 101 is above"):
        check_rewards(RewardsConfig(overlong_buffer={"tokens": 101, "penalty": 1.0}), max_new_tokens=100)
