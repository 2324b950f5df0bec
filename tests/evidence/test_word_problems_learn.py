"""Slow evidence, apart from `make test`: a real pretrained model solves more real word problems after GRPO
than after its cold start. It needs the data sets (`grpo_dist.demo.word_problems`) in the directory that
WORD_PROBLEMS names, the model's package, 16 GiB and hours.

WORD_PROBLEMS=runs/word_problems_data make evidence ARGS=tests/evidence/test_word_problems_learn.py
"""

import os
from pathlib import Path

import pytest

from tests.evidence.learning_runs import ROOT, train
from tests.support.smollm2 import real_model

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(14 * 3600)]

HELD_OUT = "eval/held_out/pass@1"


@pytest.fixture(autouse=True)
def data():
    directory = ROOT / Path(os.environ.get("WORD_PROBLEMS", "runs/word_problems_data"))
    if not (directory / "gsm8k_easier.jsonl").exists():
        pytest.skip(f"no data in {directory}; make them with grpo_dist/demo/word_problems.py")
    real_model()


@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_adds_ten_points_to_the_cold_start_on_600_held_out_problems(seed):
    lines, _ = train("configs/smollm2_word_problems.yaml", f"seed={seed}")
    (before, low), (after, high) = (
        (line[HELD_OUT], line[f"{HELD_OUT}_stderr"]) for line in (lines[0], lines[-1])
    )
    assert after >= before + 0.10
    assert before + 1.96 * low < after - 1.96 * high, "the 95 % intervals meet"
