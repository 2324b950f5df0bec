"""A real pretrained model, trained on easy problems of reasoning-gym, solves more of them, and more of the
harder ones that it was not trained on. Minutes on two idle cores, 16 GiB, with `pip install reasoning-gym`.

make evidence ARGS=tests/evidence/test_reasoning_gym_curves.py
"""

import numpy as np
import pytest

from tests.evidence.learning_runs import train
from tests.support.smollm2 import real_model

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7 * 3600)]

SETS = ("as_trained", "digits_3", "terms_3", "terms_4")  # in rising order of difficulty


def test_easy_problems_are_learned_and_longer_numbers_with_them():
    pytest.importorskip("reasoning_gym")
    real_model()
    lines, _ = train("configs/reasoning_gym_smollm2.yaml", "seed=0")
    curves = {
        name: [
            (line[f"eval/{name}/pass@1"], line[f"eval/{name}/pass@1_stderr"])
            for line in lines
            if f"eval/{name}/pass@1" in line
        ]
        for name in SETS
    }
    for name, curve in curves.items():
        print(name, *(f"{mean:.1%} ± {error:.1%}" for mean, error in curve))
    for name in ("as_trained", "digits_3"):
        (before, low), (after, high) = curves[name][0], curves[name][-1]
        assert after > before + 3 * np.hypot(low, high), name
