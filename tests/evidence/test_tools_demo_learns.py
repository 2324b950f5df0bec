"""The demo with a calculator learns to call it, and not from shuffled rewards. About 10 minutes a run on two
idle cores.

make evidence ARGS=tests/evidence/test_tools_demo_learns.py
"""

import pytest

from tests.evidence.learning_runs import train

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(7 * 3600)]

WITHOUT, WITH = "eval/without_tools/pass@1", "eval/with_tools/pass@1"
CALLS = "eval/with_tools/tool_call_share"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_policy_learns_to_call_and_passes_85_percent_with_the_tool_alone(seed):
    lines, _ = train("configs/tools_demo.yaml", f"seed={seed}")
    before, after = lines[0], lines[-1]
    assert after[WITH] > 0.85
    assert before[WITHOUT] < 0.2 and after[WITHOUT] < 0.2
    assert after[CALLS] > before[CALLS] + 0.2


def test_shuffled_rewards_do_not_teach_to_call():
    lines, _ = train("configs/tools_demo.yaml", "rewards.shuffle=true", "steps=30")
    assert lines[-1][WITH] <= lines[0][WITH] + 3 * lines[0][f"{WITH}_stderr"]
