"""Slow evidence, apart from `make test`: the demo with a calculator learns to call it, and does not from
shuffled rewards. About 10 minutes a run on two quiet cores.

make evidence ARGS=tests/evidence/test_tools_demo_learns.py
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.evidence

ROOT = Path(__file__).resolve().parents[2]
MEASURES = ("without_tools/pass@1", "with_tools/pass@1", "with_tools/tool_call_share")


def run(directory, *overrides):
    """Return the measures before and after a run of the demo, with the standard errors before it."""
    config = str(ROOT / "configs/tools_demo.yaml")
    command = [sys.executable, "-m", "grpo_dist.cli", "train", config, *overrides]
    subprocess.run(command, cwd=directory, check=True, timeout=4 * 3600)
    lines = (directory / "runs/tools-demo/metrics.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    before, after = ({name: of[f"eval/{name}"] for name in MEASURES} for of in (first, last))
    errors = {name: first[f"eval/{name}_stderr"] for name in MEASURES}
    for name in MEASURES:
        print(f"{' '.join(overrides)}: {name} {before[name]:.3f} ± {errors[name]:.3f} -> {after[name]:.3f}")
    return before, after, errors


@pytest.mark.timeout(5 * 3600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_policy_learns_to_call_and_passes_85_percent_with_the_tool_alone(tmp_path, seed):
    before, after, _ = run(tmp_path, f"seed={seed}")
    assert after["with_tools/pass@1"] > 0.85
    assert before["without_tools/pass@1"] < 0.2 and after["without_tools/pass@1"] < 0.2
    assert after["with_tools/tool_call_share"] > before["with_tools/tool_call_share"] + 0.2


@pytest.mark.timeout(5 * 3600)
def test_shuffled_rewards_do_not_teach_to_call(tmp_path):
    before, after, errors = run(tmp_path, "rewards.shuffle=true", "steps=30")
    accuracy = "with_tools/pass@1"
    assert after[accuracy] <= before[accuracy] + 3 * errors[accuracy]
