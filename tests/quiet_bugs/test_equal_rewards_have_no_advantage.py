"""verl#4597 and verl#4598, "fix adv numerical error when all reward is the same": the mean of eight rewards
of 0.2 is not 0.2 in float32, and the rounding error divided by an equally small deviation is an advantage.

miles#701 is the same bug in the filter of dynamic sampling, NeMo-RL#4161 in the deviation: in groups that
split 7 to 1 the one had an advantage of thousands, because E[x^2] - E[x]^2 is rounded as well.
"""

import numpy as np
import pytest
import torch

from grpo_dist.algorithms.advantages import ADVANTAGES, grpo, rloo
from grpo_dist.batch.credit_assignment import sample_advantages
from grpo_dist.types import has_signal
from tests.support.losses import credit
from tests.support.made_groups import group_of

VALUES = [0.1, 0.2, 0.3, 0.7, 0.35, 1 / 3]
ONE_GROUP = torch.zeros(8, dtype=torch.long)
RELATIVE = ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "pass_at_k"]


def mean_in_float32(values):
    total = np.float32(0)
    for value in values:
        total += value
    return total / np.float32(len(values))


def test_the_bug_makes_advantages_of_rounding():
    """(r - mean) / (deviation + 1e-6), all in float32."""
    rewards = np.full(8, 0.7, np.float32)
    apart = rewards - mean_in_float32(rewards)
    deviation = np.sqrt((apart**2).sum() / 7)
    assert apart.any() and (apart / (deviation + 1e-6))[0] == pytest.approx(0.056, abs=1e-3)


def test_the_bug_divides_by_the_rounding_of_a_deviation():
    """Seven rewards of 0.35 and a 0: the deviation of the others is 0 plus 1.5e-4 of rounding."""
    others = np.full(7, 0.35, np.float32)
    residue = np.sqrt(mean_in_float32(others**2) - mean_in_float32(others) ** 2)
    assert residue == pytest.approx(1.5e-4, rel=0.01)
    assert -0.35 / residue < -2000


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("estimator", RELATIVE)
def test_equal_rewards_give_exact_zeros(estimator, value):
    for size in (2, 3, 7, 8, 64):
        group = group_of([value] * size, [3] * size)
        (advantages,) = sample_advantages([group], credit(estimator, k=2))
        assert not advantages.any()
        assert not has_signal(group.rewards)


@pytest.mark.parametrize("value", VALUES)
def test_one_other_reward_has_the_advantage_of_its_definition(value):
    rewards = torch.full((8,), value)
    rewards[3] = 0.0
    exact = rewards.double().numpy()
    expected = (exact - exact.mean()) / (exact.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(grpo(rewards, ONE_GROUP), expected, rtol=1e-6)
    assert float(rloo(rewards, ONE_GROUP)[3]) == pytest.approx(-float(rewards[0]), rel=1e-6)


def test_the_estimators_here_exist():
    assert set(RELATIVE) <= set(ADVANTAGES)
