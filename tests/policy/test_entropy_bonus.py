"""The weight of the entropy bonus from update to update, and across a checkpoint."""

import math

import pytest

from grpo_dist.algorithms.entropy_control import EntropyControl
from grpo_dist.policy.entropy_bonus import EntropyBonus
from grpo_dist.policy.loss_settings import LossSettings

STEERED = LossSettings(entropy_coef=0.02, entropy_control=EntropyControl(1.0, 0.01, 0.0, 0.05))


def observed(bonus, *entropies):
    return [bonus.observe({"policy/entropy": e}).get("policy/entropy_coef") for e in entropies]


def test_a_bonus_without_a_target_is_that_of_the_settings():
    bonus = EntropyBonus(LossSettings(entropy_coef=0.3))
    assert bonus.weight is None and observed(bonus, 0.1) == [None] and bonus.state() == {}


def test_a_loaded_bonus_continues_as_the_saved_one():
    entropies = (0.5, 0.5, 2.0, math.nan, 0.5, 0.5)
    whole, first = EntropyBonus(STEERED), EntropyBonus(STEERED)
    expected = observed(whole, *entropies)
    assert expected == pytest.approx([0, 0.03, 0.04, 0, 0, 0.04])
    assert observed(first, *entropies[:2]) == expected[:2]
    again = EntropyBonus(STEERED)
    again.restore({"updates": 2} | first.state())
    assert observed(again, *entropies[2:]) == expected[2:]


def test_a_checkpoint_without_a_bonus_restarts_it():
    bonus = EntropyBonus(STEERED)
    bonus.restore({"updates": 7})
    assert observed(bonus, 0.5, 0.5) == pytest.approx([0, 0.03])


def test_an_update_without_trained_tokens_moves_no_weight():
    """It has no entropy: 0 would be below every target."""
    bonus, same = EntropyBonus(STEERED), EntropyBonus(STEERED)
    assert observed(bonus, 0.5) == observed(same, 0.5)
    bonus.observe({"loss/total": 0.0})
    assert bonus.state() == same.state()
