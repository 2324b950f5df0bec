"""The weight of the entropy bonus from update to update, and across a checkpoint."""

import math

import pytest

from grpo_dist.config.algorithm import AdaptiveEntropyConfig, EntropyConfig
from grpo_dist.policy.preparation import EntropyBonus

ADAPTIVE = AdaptiveEntropyConfig(coef=0.02, target=1.0, delta=0.01, high=0.05)


def observed(bonus, *entropies):
    return [bonus.observe({"policy/entropy": e}).get("policy/entropy_coef") for e in entropies]


def test_a_constant_bonus_keeps_its_weight():
    bonus = EntropyBonus(EntropyConfig(coef=0.3))
    assert observed(bonus, 0.1) == [None] and bonus.weight == 0.3 and bonus.state() == {}


def test_an_adaptive_bonus_follows_the_documented_example():
    bonus = EntropyBonus(AdaptiveEntropyConfig(coef=0.01, target=0.2, delta=0.005))
    entropies, coefs = (0.15, 0.15, 0.25, 0.18, 0.18), [bonus.state()["entropy_bonus"][0]]
    applied = []
    for entropy in entropies:
        applied += observed(bonus, entropy)
        coefs.append(bonus.state()["entropy_bonus"][0])
    assert coefs[:-1] == pytest.approx([0.01, 0.015, 0.02, 0.015, 0.02])
    assert applied == pytest.approx([0, 0.015, 0.02, 0, 0.02])


@pytest.mark.parametrize(
    ("start", "entropy", "coef"), [(0.0, 9.0, 0.0), (0.999, 0.0, 1.0), (0.5, math.nan, 0.5)]
)
def test_the_coefficient_stays_within_its_bounds_and_a_nan_does_not_move_it(start, entropy, coef):
    bonus = EntropyBonus(AdaptiveEntropyConfig(coef=start, target=0.2, delta=0.005))
    observed(bonus, entropy)
    assert bonus.state()["entropy_bonus"][0] == coef


def test_a_loaded_bonus_continues_like_the_saved_one():
    entropies = (0.5, 0.5, 2.0, math.nan, 0.5, 0.5)
    whole, first = EntropyBonus(ADAPTIVE), EntropyBonus(ADAPTIVE)
    expected = observed(whole, *entropies)
    assert expected == pytest.approx([0, 0.03, 0.04, 0, 0, 0.04])
    assert observed(first, *entropies[:2]) == expected[:2]
    again = EntropyBonus(ADAPTIVE)
    again.restore({"updates": 2} | first.state())
    assert observed(again, *entropies[2:]) == expected[2:]


def test_a_checkpoint_without_a_bonus_restarts_it():
    bonus = EntropyBonus(ADAPTIVE)
    bonus.restore({"updates": 7})
    assert observed(bonus, 0.5, 0.5) == pytest.approx([0, 0.03])


def test_an_update_without_trained_tokens_moves_no_weight():
    """It has no entropy: 0 would be below every target."""
    bonus, same = EntropyBonus(ADAPTIVE), EntropyBonus(ADAPTIVE)
    assert observed(bonus, 0.5) == observed(same, 0.5)
    bonus.observe({"loss/total": 0.0})
    assert bonus.state() == same.state()
