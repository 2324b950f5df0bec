"""R1-Zero at toy size: a real pretrained model, prompted with one worked example in tags, solves more sums
and uses the tags more often after GRPO on format and accuracy alone. Minutes on two idle cores, 16 GiB.

make evidence ARGS=tests/evidence/test_r1_zero_learns.py
"""

import numpy as np
import pytest

from tests.evidence.learning_runs import train
from tests.support.smollm2 import real_model

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7 * 3600)]

CONFIG = "configs/r1_zero_smollm2.yaml"
ACCURACY = "eval/plain_sums2/pass@1"
FORMAT = "reward/format"  # share of a step's samples: evaluations only measure accuracy
STEPS = 5  # shares are compared over this many steps at each end of the run


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_accuracy_rises_by_more_than_three_standard_errors_and_the_format_with_it(seed):
    real_model()
    lines, _ = train(CONFIG, f"seed={seed}")
    before, after = lines[0], lines[-1]
    error = np.hypot(before[f"{ACCURACY}_stderr"], after[f"{ACCURACY}_stderr"])
    assert after[ACCURACY] > before[ACCURACY] + 3 * error
    shares = [line[FORMAT] for line in lines if FORMAT in line]
    first, last = np.mean(shares[:STEPS]), np.mean(shares[-STEPS:])
    print(f"samples in the tags: {first:.1%} of the first {STEPS} steps, {last:.1%} of the last")
    assert last > first or last > 0.99


def test_shuffled_rewards_teach_no_sums():
    real_model()
    lines, _ = train(CONFIG, "rewards.shuffle=true")
    assert lines[-1][ACCURACY] <= lines[0][ACCURACY] + 3 * lines[0][f"{ACCURACY}_stderr"]
