"""Whole demo runs that must learn, and a negative control. About half an hour.

make evidence ARGS=tests/evidence/test_demo_learns.py
"""

import pytest

from tests.evidence.learning_runs import train

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7 * 3600)]

ACCURACY = "eval/add3/pass@1"


@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_gains_25_points_and_passes_85_percent(seed):
    lines, _ = train("configs/demo.yaml", f"seed={seed}")
    assert lines[-1][ACCURACY] - lines[0][ACCURACY] >= 0.25 and lines[-1][ACCURACY] > 0.85
    assert lines[1]["mismatch/logprob_diff_mean"] < 1e-5


def test_shuffled_rewards_teach_nothing():
    lines, _ = train("configs/demo.yaml", "rewards.shuffle=true", "steps=30")
    assert lines[-1][ACCURACY] <= lines[0][ACCURACY] + 3 * lines[0][f"{ACCURACY}_stderr"]


def test_one_step_of_staleness_learns_as_well():
    lines, _ = train("configs/demo.yaml", "max_staleness=1")
    assert max(line.get("rollout/staleness_max", 0) for line in lines) == 1
    assert lines[-1][ACCURACY] - lines[0][ACCURACY] >= 0.25 and lines[-1][ACCURACY] > 0.85
