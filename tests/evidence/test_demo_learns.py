"""Slow evidence, apart from `make test`: whole demo runs that must learn, and one that must not. About half
an hour.

make evidence
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.evidence

ROOT = Path(__file__).resolve().parents[2]


def demo(directory, *overrides):
    """Return pass@1 on the held-out problems before and after a demo run, and the run's metrics by step."""
    command = [sys.executable, "-m", "grpo_dist.cli", "train", str(ROOT / "configs/demo.yaml"), *overrides]
    subprocess.run(command, cwd=directory, check=True, timeout=4 * 3600)
    lines = [json.loads(line) for line in (directory / "runs/demo/metrics.jsonl").read_text().splitlines()]
    return lines[0]["eval/add3/pass@1"], lines[-1]["eval/add3/pass@1"], lines


@pytest.mark.timeout(5 * 3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_demo_gains_25_points_and_passes_85_percent(tmp_path, seed):
    before, after, lines = demo(tmp_path, f"seed={seed}")
    print(f"seed {seed}: {before:.3f} -> {after:.3f}")
    assert after - before >= 0.25 and after > 0.85
    assert lines[1]["mismatch/logprob_diff_mean"] < 1e-5


@pytest.mark.timeout(5 * 3600)
def test_shuffled_rewards_teach_nothing(tmp_path):
    before, after, lines = demo(tmp_path, "rewards.shuffle=true", "steps=30")
    print(f"shuffled rewards: {before:.3f} -> {after:.3f}")
    assert after <= before + 3 * lines[0]["eval/add3/pass@1_stderr"]


@pytest.mark.timeout(5 * 3600)
def test_one_step_of_staleness_learns_as_well(tmp_path):
    before, after, lines = demo(tmp_path, "max_staleness=1")
    print(f"max_staleness=1: {before:.3f} -> {after:.3f}")
    assert max(line.get("rollout/staleness_max", 0) for line in lines) == 1
    assert after - before >= 0.25 and after > 0.85
