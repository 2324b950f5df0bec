"""The metrics of a step are means over the updates that had something to train on."""

from grpo_dist.health.bounds import SKIPPED
from grpo_dist.policy.trainer import _of_step

ONE = {"policy/entropy": 2.0, "policy/ratio_max": 1.5, "mismatch/kl": 0.4, SKIPPED: 1.0}
TWO = {"policy/entropy": 4.0, "policy/ratio_max": 1.2, "mismatch/kl": 0.8, SKIPPED: 0.0}
NONE = {"policy/entropy": 0.0, "policy/ratio_max": 1.0, "mismatch/kl": 0.0, SKIPPED: 0.0}


def test_an_update_without_tokens_takes_part_in_no_mean():
    found = _of_step([NONE, ONE, TWO], [False, True, True], unmoved=3)
    assert (found["policy/entropy"], found["policy/ratio_max"], found[SKIPPED]) == (3.0, 1.5, 1.0)
    assert found["mismatch/kl"] == (0.4 + 0.8) / 2


def test_a_step_without_any_token_has_the_metrics_of_its_updates():
    assert _of_step([NONE, NONE], [False, False], unmoved=1)["policy/entropy"] == 0.0


def test_the_mismatch_is_of_the_updates_before_anything_moved():
    assert _of_step([ONE, TWO], [True, True], unmoved=1)["mismatch/kl"] == 0.4
