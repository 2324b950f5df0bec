"""The registry of estimators says of each what its function does."""

import pytest
import torch

from grpo_dist.algorithms.advantages import ADVANTAGES
from grpo_dist.algorithms.estimators import ESTIMATORS, OWN, Estimator, estimator_of
from tests.support.numbers_by_hand import tensor

OTHER_REWARDS = {"baselines", "parts"}  # inputs that are rewards, but not the total


def advantages(name, rewards):
    """Of one group, in which the other rewards of all samples differ."""
    size = len(rewards)
    known = {
        "std": "group", "eps": 1e-6, "k": 2, "lengths": torch.arange(1, size + 1), "weights": tensor(1.0),
        "baselines": torch.full((size,), 0.25), "parts": torch.arange(size, dtype=torch.float32)[None],
    }  # fmt: skip
    inputs = {key: known[key] for key in ESTIMATORS[name].inputs}
    return ADVANTAGES[name](rewards, torch.zeros(size, dtype=torch.long), **inputs)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_entry_says_what_its_estimator_learns_from(name):
    entry = ESTIMATORS[name]
    assert bool(advantages(name, tensor(1, 1, 1, 1)).any()) == entry.learns_from_equal_rewards
    assert bool(advantages(name, tensor(1)).any()) == (not entry.needs_group)
    assert bool(OTHER_REWARDS & set(entry.inputs)) == (entry.other_rewards is not None)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_entry_says_which_rewards_its_estimator_takes(name):
    def takes_a_half() -> bool:
        try:
            advantages(name, tensor(1, 0.5, 0, 0))
        except ValueError:
            return False
        return True

    assert takes_a_half() == (not ESTIMATORS[name].only_right_and_wrong)


def test_of_an_own_estimator_nothing_is_known():
    assert estimator_of("mine:median") == estimator_of("median_of_a_package") == OWN
    assert Estimator(needs_group=False, learns_from_equal_rewards=True) == OWN
    assert not OWN.learns_from_one_sample  # its total rewards are all that is seen
    alone = {name for name, entry in ESTIMATORS.items() if entry.learns_from_one_sample}
    assert alone == {"remax", "process"}
