"""A real pretrained model learns two-digit sums from rewards alone, and not from shuffled or random rewards.
About 25 minutes a run on two idle cores, 16 GiB.

make evidence ARGS=tests/evidence/test_real_model_learns.py
"""

import pytest

from tests.evidence.learning_runs import train
from tests.support.smollm2 import real_model

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7 * 3600)]

CONFIG = "configs/smollm2_sums.yaml"
TRAINED, TRANSFER = "eval/sums2/pass@1", "eval/sums3/pass@1"
LORA = ["policy.lora={rank: 32, alpha: 64}", "policy.optimizer.lr=2.0e-4"]
# `math` still grades, for the accuracy; only the random reward counts.
RANDOM = ["rewards.functions=[{function: random}, {function: math, weight: 0}]"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_digit_sums_reach_90_percent_and_three_digit_sums_gain_with_them(seed):
    real_model()
    lines, _ = train(CONFIG, f"seed={seed}")
    before, after = lines[0], lines[-1]
    assert before[TRAINED] < 0.35 and after[TRAINED] >= 0.9
    assert after[TRANSFER] > before[TRANSFER] + 3 * before[f"{TRANSFER}_stderr"]


def test_adapters_alone_reach_80_percent():
    real_model()
    lines, _ = train(CONFIG, *LORA)
    assert lines[-1][TRAINED] >= 0.8


@pytest.mark.parametrize("control", [["rewards.shuffle=true"], RANDOM], ids=["shuffled", "random"])
def test_rewards_that_ignore_the_answer_teach_nothing(control):
    """Any reward helps some models (arXiv:2506.10947). Here the accuracy must stay within its interval."""
    real_model()
    lines, _ = train(CONFIG, *control)
    assert lines[-1][TRAINED] <= lines[0][TRAINED] + 3 * lines[0][f"{TRAINED}_stderr"]
